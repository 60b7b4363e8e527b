"""Prepared files: the same bits as private weights, one copy for all processes, made anew when they are not whole."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.ranks.tensor_parallel import RankPlacement
from engine.cpu.weights import prepared_folder
from engine.cpu.weights.decoder_weights import SectionReader
from engine.cpu.weights.prepared_file import BLOCK_BYTES, map_sections, read_index
from engine.cpu.weights.prepared_folder import PreparedFolder
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.step_work import StepWork
from kvcache.pool import KvPool
from tests.support.factories import make_folder, make_oracle, save_model

TOKENS = [5, 9, 200, 31, 7]
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}


def load_runner(model: Path, prepared: Path | None) -> tuple[CpuModelRunner, KvPool]:
    files = Checkpoint.resolve(str(model))
    pool = KvPool(files.layout(), 2)
    return CpuModelRunner.load(files, pool, 64, prepared=prepared), pool


def compute_logits(model: Path, prepared: Path | None) -> torch.Tensor:
    return run_step(*load_runner(model, prepared))


def run_step(runner: CpuModelRunner, pool: KvPool) -> torch.Tensor:
    (logits,) = runner.run([StepWork(TOKENS, 0, pool.take_slabs(1, "a"), "all")])
    return logits


def packed_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("weights/*.packed"))


def be_worker(model: str, folder: str) -> None:
    """A worker's life: load, compute, tell what it computed, and what of the file is in memory when asked."""
    runner, pool = load_runner(Path(model), Path(folder))
    print(json.dumps(run_step(runner, pool).tolist()), flush=True)
    sys.stdin.readline()
    print(json.dumps(mapped_kib(".packed")), flush=True)
    sys.stdin.readline()


def mapped_kib(ending: str) -> dict[str, int]:
    """What this process has of the files with that ending in memory, by the fields of `/proc/self/smaps`."""
    found: dict[str, int] = {}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            ours = line.endswith(ending)
        elif ours and rest.strip().endswith("kB"):
            found[name[:-1]] = found.get(name[:-1], 0) + int(rest.split()[0])
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_weights_compute_the_same_bits(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    changes = {"tie_word_embeddings": True} if family == "qwen2" else {}
    model = save_model(tmp_path / "model", make_oracle(family, **changes), dtype)
    private = compute_logits(model, None)
    made, mapped = compute_logits(model, tmp_path), compute_logits(model, tmp_path)
    assert torch.equal(private, made)
    assert torch.equal(private, mapped)
    (file,) = packed_files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    with file.open("rb") as opened:
        index = read_index(opened.fileno(), file.stem)
    assert list(index.sections) == ["first", "layer.0", "layer.1", "last"]
    assert all(one.at % BLOCK_BYTES == 0 for one in index.sections.values())


def test_every_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = Checkpoint.resolve(str(make_folder(tmp_path / "model")))
    source = PreparedFolder(tmp_path, files.packing_identity())
    with WeightReader(files.weights) as weights:
        for rank, shard in enumerate(files.split(2, 2)):
            reader = SectionReader(files.config, weights, RankPlacement(rank, 2, 2), shard)
            source.load_weights(reader)
            (file,) = [one for one in packed_files(tmp_path) if one.stem == source._key(reader)]
            found = map_sections(file, file.stem)
            for name, section in reader.read_sections():
                for title, array in section.arrays.items():
                    np.testing.assert_array_equal(array, found[name].arrays[title])
                for title, matrix in section.matrices.items():
                    np.testing.assert_array_equal(matrix.panels, found[name].matrices[title].panels)
                    np.testing.assert_array_equal(matrix.bias, found[name].matrices[title].bias)
    assert len(packed_files(tmp_path)) == 4


def test_processes_that_begin_together_make_one_copy_and_share_it(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", make_oracle("llama", **WIDE), torch.bfloat16)
    expected = compute_logits(model, None)
    command = [sys.executable, "-m", "tests.engine.cpu.test_prepared_weights", str(model), str(tmp_path)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert torch.equal(torch.tensor(json.loads(worker.stdout.readline())), expected)
        (file,) = packed_files(tmp_path)
        assert list(tmp_path.glob("weights/*.fresh")) == []
        for worker in workers:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            held = json.loads(worker.stdout.readline())
            # It has mapped nearly all of the file, none of it is its own, and it counts for a third.
            assert held["Rss"] << 10 >= 0.9 * file.stat().st_size
            assert held["Private_Dirty"] == held["Private_Clean"] == 0
            assert held["Pss"] <= 0.4 * held["Rss"]
    finally:
        for worker in workers:
            worker.communicate("\n\n")


def test_packing_tells_how_far_it_is(tmp_path: Path) -> None:
    files, steps = Checkpoint.resolve(str(make_folder(tmp_path / "model"))), list[tuple[int, int]]()
    for prepared in (None, tmp_path, tmp_path):
        CpuModelRunner.load(
            files, KvPool(files.layout(), 2), 64, prepared=prepared, packed=lambda *step: steps.append(step)
        )
    # Packed into memory, then into a file, which is there the third time. The last step is what comes after it.
    assert steps == 2 * [(1, 5), (2, 5), (3, 5), (4, 5)]


class PackingProcess:
    """Another process that packs the weights behind `lock`: a section takes as long as a wait may take at most."""

    def __init__(self, lock: Path, sections: int) -> None:
        self.now_s, self.sections, self.done = 1000.0, sections, 0
        lock.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Time passes: another section is packed, or the process ends, or it hangs."""
        self.now_s += 0.9 * prepared_folder.MAX_WAIT_S
        self.done += 1
        if self.done <= self.sections:
            os.pwrite(self.file, b"%d\n" % self.done, 0)

    def time(self) -> float:
        return time.time()


def test_a_process_waits_for_another_as_long_as_that_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, steps = Checkpoint.resolve(str(make_folder(tmp_path / "model"))), list[tuple[int, int]]()
    source = PreparedFolder(tmp_path, files.packing_identity())
    with WeightReader(files.weights) as weights:
        reader = SectionReader(files.config, weights, packed=lambda *step: steps.append(step))
        lock = tmp_path / "weights" / f"{source._key(reader)}.lock"
        other = PackingProcess(lock, 3)
        monkeypatch.setattr(prepared_folder, "time", other)
        with pytest.raises(OSError, match="another process has been packing them"):
            source.prepare_file(reader)
        # It waited while the other one packed three sections, and then once more as long as it may.
        assert steps == [(1, 5), (2, 5), (3, 5)]
        os.close(other.file)
        source.prepare_file(reader)
        assert steps[3:] == [(1, 5), (2, 5), (3, 5), (4, 5)]
        # What one that was killed has left says nothing about the next one.
        packed_files(tmp_path)[0].unlink()
        lock.write_bytes(b"1234\n")
        source.prepare_file(reader)
        assert lock.read_bytes() == b"4\n"


def test_a_file_that_is_not_whole_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_folder(tmp_path / "model")
    expected = compute_logits(model, tmp_path)
    (file,) = packed_files(tmp_path)
    whole = file.read_bytes()
    other = make_folder(tmp_path / "other", seed=1)
    compute_logits(other, tmp_path)
    (foreign,) = [one.read_bytes() for one in packed_files(tmp_path) if one != file]
    spoiled = bytearray(whole)
    spoiled[-1] ^= 1
    for content in (whole[:-1], whole[:5000], b"", b"x" * len(whole), bytes(spoiled), foreign):
        file.write_bytes(content)
        caplog.clear()
        assert torch.equal(compute_logits(model, tmp_path), expected)
        assert "is made anew" in caplog.text
        assert file.read_bytes() == whole


def test_changed_weights_are_packed_again(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    before = compute_logits(model, tmp_path)
    save_model(model, make_oracle(seed=1))
    after = compute_logits(model, tmp_path)
    assert not torch.equal(before, after)
    assert torch.equal(after, compute_logits(model, None))
    assert len(packed_files(tmp_path)) == 2


def test_without_a_writable_place_weights_stay_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_folder(tmp_path / "model")
    expected = compute_logits(model, None)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file is no folder")
    assert torch.equal(compute_logits(model, blocked), expected)
    assert "not shared" in caplog.text
    caplog.clear()
    monkeypatch.setattr(prepared_folder, "MIN_FREE_SHARE", 1.1)
    assert torch.equal(compute_logits(model, tmp_path), expected)
    assert "of the disk is free" in caplog.text
    assert packed_files(tmp_path) == list(tmp_path.glob("weights/*.fresh")) == []


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_folder(tmp_path / "model")
    expected = compute_logits(model, None)

    def fail(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "fsync", fail)
    assert torch.equal(compute_logits(model, tmp_path), expected)
    assert packed_files(tmp_path) == list(tmp_path.glob("weights/*.fresh")) == []


def test_what_a_killed_writer_left_is_removed_before_the_next_one_writes(tmp_path: Path) -> None:
    """Else each kill while a model is packed takes its whole size of the disk."""
    model, other = (make_folder(tmp_path / str(seed), seed=seed) for seed in range(2))
    compute_logits(model, tmp_path)
    (file,) = packed_files(tmp_path)
    file.unlink()
    left = file.with_name(f"{file.stem}.0123.fresh")
    left.write_bytes(b"x" * 10_000)
    compute_logits(other, tmp_path)
    assert left.exists(), "another process may be writing it"
    compute_logits(model, tmp_path)
    assert file.exists() and list(tmp_path.glob("weights/*.fresh")) == []


def test_files_that_nobody_opened_for_long_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [make_folder(tmp_path / str(seed), seed=seed) for seed in range(4)]
    for age, model in enumerate(models[:3]):
        known = set(packed_files(tmp_path))
        compute_logits(model, tmp_path)
        (file,) = set(packed_files(tmp_path)) - known
        then = time.time() - age * 20 * 86400
        os.utime(file, (then, then))
    compute_logits(models[1], tmp_path)  # used: it counts as new
    monkeypatch.setattr(prepared_folder, "MAX_FILES", 2)
    kept = packed_files(tmp_path)
    compute_logits(models[3], tmp_path)
    assert len(set(packed_files(tmp_path)) & set(kept)) == 1
    assert len(packed_files(tmp_path)) == 2


if __name__ == "__main__":
    be_worker(*sys.argv[1:])
