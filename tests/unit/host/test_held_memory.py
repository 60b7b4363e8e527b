"""The memory that a deployment's workers hold is measured, and is part of what the next worker gets a share of."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.channel.keys import load_transfer_key, make_keys
from diptych.config.options import Config
from diptych.errors import ConfigError
from kvcache.tiers.tier_checks import HOST_PREFIX, TierRequest, check_host_memory, deployment_id
from services.host import held_memory as held_memory_module
from services.host import model_probe
from services.host.held_memory import WORKER_OF, held_memory, reused_memory
from services.host.model_probe import ProbeRequest, probe_model, probe_request
from tests.unit.kvcache.tiers.stored_chunks import open_store

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


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Host memory in which an own worker's folder, another deployment's, and one that nobody uses hold 1, 2, 4 MiB."""
    monkeypatch.setattr(held_memory_module, "HOST_BASE", tmp_path)
    for name, size in (("own", 1), ("other", 2), ("left", 4)):
        open_store(tmp_path / f"{HOST_PREFIX}{name}").close()
        (tmp_path / f"{HOST_PREFIX}{name}" / "chunks" / "ab").write_bytes(b"x" * (size * MIB))
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").write_bytes(b"x" * (8 * MIB))
    return tmp_path


def test_what_host_memory_has_already_of_the_deployment_or_of_nobody_is_reused(shared: Path) -> None:
    proc, tiers = shared / "proc", TierRequest(64 * MIB)
    make_process(proc, os.getpid(), "n@a")
    with contextlib.ExitStack() as stack:
        for name in ("own", "other"):
            stack.callback(open_store(shared / f"{HOST_PREFIX}{name}").close)
        assert reused_memory(tiers, "n@a", proc) >> 20 == 7, "both are used by a worker of this deployment"
        assert reused_memory(tiers, "n@b", proc) >> 20 == reused_memory(tiers, "", proc) >> 20 == 4
        assert reused_memory(TierRequest(64 * MIB, deployment="own"), "", proc) >> 20 == 5
    assert reused_memory(tiers, "", proc) >> 20 == 7 and reused_memory(None, "n@a", proc) == 0


def test_a_worker_that_starts_again_finds_room_for_the_tier_that_is_full(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 7 MiB that are stored are not free, and need not be."""
    monkeypatch.setattr(model_probe, "available_memory", lambda: 512 * MIB)
    shares = []
    for bound in (7, 512 + 7, 512 + 8):
        question = ProbeRequest("tiny", None, 128, 16 * MIB, num_workers=1, tiers=TierRequest(bound * MIB))
        shares.append(model_probe._memory_share(question) // MIB)
        if bound == 7:
            assert probe_model(question).kv_bytes
    assert shares == [512, 0, -1]
    check_host_memory(512 * MIB, 505 * MIB, 7 * MIB, shared)
    with pytest.raises(ConfigError, match="larger than the memory that is free"):
        check_host_memory(513 * MIB, 505 * MIB, 7 * MIB, shared)
    free = type("Stat", (), {"f_bavail": 5, "f_frsize": MIB})()
    monkeypatch.setattr("kvcache.tiers.tier_checks.os.statvfs", lambda _: free)
    check_host_memory(12 * MIB, 505 * MIB, 7 * MIB, shared)
    with pytest.raises(ConfigError, match="larger than what is free in"):
        check_host_memory(13 * MIB, 505 * MIB, 7 * MIB, shared)


def test_tiers_are_asked_for_by_the_name_of_the_deployment(tmp_path: Path) -> None:
    plain, settings = (
        Config(model="tiny"),
        Config(model="tiny", kv_host_bytes=64 * MIB, keys_dir=tmp_path / "keys"),
    )
    assert probe_request(plain, 1).tiers is None
    assert probe_request(settings, 1).tiers == TierRequest(64 * MIB)
    make_keys(tmp_path / "keys")
    name = deployment_id(load_transfer_key(tmp_path / "keys"))
    assert probe_request(settings, 1).tiers == TierRequest(64 * MIB, deployment=name)
