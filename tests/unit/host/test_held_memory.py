"""The memory that a deployment's workers hold is measured, and is part of what the next worker gets a share of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.host import model_probe
from services.host.held_memory import WORKER_OF, held_memory
from services.host.model_probe import ProbeRequest

MIB = 1 << 20
HOLD = "import sys; kept = bytearray(b'x') * (64 << 20); print('held', flush=True); sys.stdin.read()"


def test_what_processes_of_a_deployment_hold_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {WORKER_OF: f"n@{os.getpid()}"},
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"held\n"
        assert 64 * MIB <= held_memory(f"n@{os.getpid()}") <= 96 * MIB
        assert held_memory(f"other@{os.getpid()}") == held_memory("") == 0
        process.stdin.close()
    assert held_memory(f"n@{os.getpid()}") == 0


def make_process(proc: Path, pid: int, deployment: str, *rollup: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "environ").write_bytes(f"A=1\0{WORKER_OF}={deployment}\0".encode())
    (folder / "smaps_rollup").write_text("\n".join(["1000-2000 ---p 0 00:00 0 [rollup]", *rollup]) + "\n")


def test_shared_memory_counts_once_and_read_files_do_not_count(tmp_path: Path) -> None:
    for pid in (7, 8):
        make_process(
            tmp_path, pid, "n@a", "Rss: 900 kB", "Pss_Anon: 20 kB", "Pss_File: 300 kB", "Pss_Shmem: 5 kB"
        )
    make_process(tmp_path, 9, "n@ab", "Pss_Anon: 4000 kB", "Pss_Shmem: 0 kB")
    make_process(tmp_path, 10, "n@a", "Rss: 90 kB", "Anonymous: 3 kB")
    (tmp_path / "11").mkdir()
    assert held_memory("n@a", tmp_path) == (2 * 25 + 3) << 10


@pytest.mark.parametrize(
    ("free", "held", "share"),
    [(1000, 0, 250), (400, 600, 250), (700, 300, 250), (100, 900, 100)],
)
def test_a_worker_gets_the_same_share_before_and_after_the_others_have_theirs(
    monkeypatch: pytest.MonkeyPatch, free: int, held: int, share: int
) -> None:
    monkeypatch.setattr(model_probe, "available_memory", lambda: free)
    monkeypatch.setattr(model_probe, "held_memory", lambda deployment: held if deployment == "n@a" else 0)
    question = ProbeRequest("m", None, None, None, num_workers=4, deployment="n@a")
    assert model_probe._memory_share(question) == share
