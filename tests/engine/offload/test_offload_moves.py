"""What a block moves and takes, counted; caps, disks that fail, and sequences that come and go."""

from __future__ import annotations

import errno
import json
import random
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError, size_setting
from engine.cpu.offload.disk_file import PIECE_BYTES, DirectFile, DiskRate, allocate_memory
from engine.cpu.offload.loading import prepare_weights
from engine.cpu.offload.weight_stream import WeightStream
from engine.cpu.weights.prepared_file import read_index
from engine.model.checkpoint import Checkpoint
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import DISK_BLOCK, round_up
from engine.sequence import Sequence
from tests.engine.offload.offload_runs import BlockRun, ask, gather, run_resident
from tests.support.factories import make_folder

LAYERS, STEPS, LENGTH = 4, 7, 70
POLICY = BlockPolicy(
    rows=2, batches=3, prompt_tokens=80, output_tokens=16, weights_in_memory=0.5, kv_in_memory=0.5
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.resolve(str(make_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


def equal_requests(count: int) -> list[Sequence]:
    """Requests of one length, all of which have `STEPS` tokens of answer."""
    return [ask(i, LENGTH, temperature=0.0, max_tokens=STEPS, stop_token_ids=()) for i in range(count)]


def layer_sizes(run: BlockRun) -> list[int]:
    sections = run.runner.tiers.weights.index.sections
    return [sections[f"layer.{one}"].num_bytes for one in range(LAYERS)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_weights_are_read_once_per_step_and_layer(
    share: float, overlap: bool, model: Checkpoint, prepared: Path
) -> None:
    policy = replace(POLICY, weights_in_memory=share, overlap=overlap)
    run = BlockRun(model, policy, prepared)
    run.run(equal_requests(policy.sequences))
    run.runner.close()
    streamed = sum(size for i, size in enumerate(layer_sizes(run)) if i not in policy.resident_layers(LAYERS))
    assert streamed == pytest.approx((1 - share) * sum(layer_sizes(run)))
    assert run.runner.steps == STEPS
    # n x (1 - share resident) x model, whatever the number of batches is.
    assert run.runner.tiers.weights.file.bytes_read == STEPS * streamed


def test_row_by_row_reads_them_for_each_batch(model: Checkpoint, prepared: Path) -> None:
    policy = replace(POLICY, batches=1)
    run = BlockRun(model, policy, prepared)
    run.run(equal_requests(POLICY.sequences))
    run.runner.close()
    streamed = sum(size for i, size in enumerate(layer_sizes(run)) if i not in policy.resident_layers(LAYERS))
    assert run.runner.tiers.weights.file.bytes_read == POLICY.batches * STEPS * streamed


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_kv_moves_in_whole_chunks(share: float, model: Checkpoint, prepared: Path) -> None:
    policy = replace(POLICY, kv_in_memory=share)
    run = BlockRun(model, policy, prepared)
    run.run(equal_requests(policy.sequences))
    kv = run.runner.tiers.kv
    assert kv._disk is not None
    moved = kv._disk.file.bytes_read, kv._disk.file.bytes_written
    run.runner.close()
    chunk = round_up(run.runner.layout.layer_bytes)
    pairs = LAYERS * policy.batches - len(policy.kv_pairs_in_memory(LAYERS))
    # A step reads the chunks of all tokens before it, and writes those that it adds to.
    read = sum(-(-(LENGTH + i) // CHUNK_TOKENS) for i in range(STEPS - 1))
    written = -(-LENGTH // CHUNK_TOKENS) + STEPS - 1
    assert moved == (pairs * policy.rows * read * chunk, pairs * policy.rows * written * chunk)


def test_a_step_goes_on_after_others_ended_or_came(model: Checkpoint, prepared: Path) -> None:
    """Sequences that are aborted in the middle of a step, and others that come then, change no other answer."""
    policy = replace(POLICY, rows=2, batches=2, weights_in_memory=0.0, kv_in_memory=0.0, hidden_in_memory=0.0)
    requests = [ask(i, 20 + 9 * i, max_tokens=5 + i) for i in range(9)]
    expected = run_resident(model, [ask(i, 20 + 9 * i, max_tokens=5 + i) for i in range(9)])
    run = BlockRun(model, policy, prepared)
    for seq in requests[:5]:
        run.engine.add(seq, 0.0)
    draw = random.Random(0)
    for _ in range(11):
        run.step()
    (gone,) = run.engine.abort("r1", 1)
    assert gone.key == "r1#1"
    assert run.engine.abort("r1", 1) in ([], [gone])
    for seq in requests[5:]:
        for _ in range(draw.randrange(9)):
            run.step()
        run.engine.add(seq, 0.0)
    found = run.settle()
    run.runner.close()
    assert {name: one[0] for name, one in found.items() if name != "r1"} == {
        name: one[0] for name, one in expected.items() if name != "r1"
    }


def test_a_late_sequence_fails_alone(model: Checkpoint, prepared: Path) -> None:
    run = BlockRun(model, POLICY, prepared)
    late, other = ask(1, 20, max_tokens=8), ask(2, 20, max_tokens=8)
    late.deadline_s = 12.0
    for seq in (late, other):
        run.engine.add(seq, 0.0)
    while run.engine.has_work:
        run.step()
    run.runner.close()
    (failed,) = run.failures()
    assert (failed.request, failed.code) == ("r1", "deadline_exceeded")
    found = gather([one for one in run.outputs if one.message.request == "r2"])
    assert len(found["r2"][0]) == 8


class FailingFile(DirectFile):
    """A disk that fails at some of its reads."""

    fails = 0

    def read_into(self, memory: memoryview, at: int) -> None:
        """Fail, or read."""
        if self.fails:
            self.fails -= 1
            raise OSError(errno.EIO, "the disk failed")
        super().read_into(memory, at)


class CountingRate(DiskRate):
    """A rate that notes before each piece how many moves there were."""

    def __init__(self) -> None:
        super().__init__(1e12)
        self.file: DirectFile | None = None
        self.seen: list[int] = []

    def reserve(self, num_bytes: int) -> float:
        """Note, and let it move."""
        assert self.file is not None
        self.seen.append(self.file.num_moves)
        return super().reserve(num_bytes)


def test_a_unit_on_a_slow_disk_progresses_while_it_reads_and_writes(
    model: Checkpoint, prepared: Path, tmp_path: Path
) -> None:
    """By that the watchdog sees that the thread is alive, though it does not come round."""
    rate = CountingRate()
    rate.file = file = DirectFile.create_scratch(tmp_path, 3 * PIECE_BYTES, rate)
    memory = allocate_memory(3 * PIECE_BYTES)
    file.write_from(memory, 0)
    file.read_into(memory, 0)
    file.close()
    assert rate.seen == [0, 1, 2, 3, 4, 5]
    policy = replace(POLICY, weights_in_memory=0.0, kv_in_memory=0.0, hidden_in_memory=0.0)
    run = BlockRun(model, policy, prepared)
    tiers, before = run.runner.tiers, run.runner.progress
    run.run(equal_requests(2))
    run.runner.close()
    moves = [one.num_moves for one in (tiers.weights.file, tiers.kv, tiers.hidden)]
    assert min(moves) > 0 and run.runner.progress - before >= sum(moves)


def test_page_faults_of_the_thread_that_looks_are_no_progress(
    model: Checkpoint, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short it has some each time, and a thread that hangs would never be found."""
    run = BlockRun(model, POLICY, prepared)
    faults = {resource.RUSAGE_SELF: 10, resource.RUSAGE_THREAD: 3}
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_majflt=faults[who]))
    before = run.runner.progress
    faults[resource.RUSAGE_SELF] += 1
    faults[resource.RUSAGE_THREAD] += 1
    assert run.runner.progress == before
    faults[resource.RUSAGE_SELF] += 1
    assert run.runner.progress > before, "another thread reads a mapped page"
    run.runner.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["weights", "kv"])
def test_a_disk_that_fails_once_costs_no_line(
    where: str, overlap: bool, model: Checkpoint, prepared: Path
) -> None:
    policy = replace(POLICY, weights_in_memory=0.25, kv_in_memory=0.25, overlap=overlap)
    expected = run_resident(model, equal_requests(4))
    run = BlockRun(model, policy, prepared)
    kv = run.runner.tiers.kv
    assert kv._disk is not None
    file = run.runner.tiers.weights.file if where == "weights" else kv._disk.file
    file.__class__ = FailingFile
    assert isinstance(file, FailingFile)
    for seq in equal_requests(4):
        run.engine.add(seq, 0.0)
    for _ in range(20):
        run.step()
    file.fails = 1
    found = run.settle()
    assert run.engine.failed_steps == 1
    assert {name: one[0] for name, one in found.items()} == {name: one[0] for name, one in expected.items()}
    # A disk that stays broken: every line fails, with the reason, and the block is empty.
    run.outputs.clear()
    file.fails = 10**6
    for seq in equal_requests(4):
        seq.id, seq.key = f"again-{seq.id}", f"again-{seq.id}#1"
        run.engine.add(seq, 0.0)
    while run.engine.has_work:
        run.step()
    run.runner.close()
    assert sorted(one.request for one in run.failures()) == [f"again-r{i}" for i in range(4)]
    assert all("the disk failed" in one.message for one in run.failures())
    assert not len(run.schedule)


def test_caps_that_are_too_small_are_refused_with_the_least(model: Checkpoint, prepared: Path) -> None:
    run = BlockRun(model, POLICY, prepared)
    run.runner.close()
    needs = run.runner.needs
    BlockRun(
        model, POLICY, prepared, memory_bytes=needs.memory_bytes, disk_bytes=needs.disk_bytes
    ).runner.close()
    for name, size in (("memory", needs.memory_bytes), ("disk", needs.disk_bytes)):
        with pytest.raises(ConfigError, match="bulk work does not fit") as caught:
            BlockRun(model, POLICY, prepared, **{f"{name}_bytes": size - 1})
        assert f"--bulk-{name}-bytes {size_setting(size)}" in caught.value.fix
        assert "the least for this model, one sequence at a time, is" in caught.value.why
        assert len(caught.value.lines()) <= 6


def test_a_prepared_file_that_is_cut_is_made_anew(model: Checkpoint, tmp_path: Path) -> None:
    expected = run_resident(model, equal_requests(2))
    for size in (None, 5000, 0):
        for path in tmp_path.glob("weights/*.packed"):
            path.write_bytes(path.read_bytes()[:size])
        run = BlockRun(model, replace(POLICY, weights_in_memory=0.0), tmp_path)
        found = run.run(equal_requests(2))
        run.runner.close()
        assert {name: one[0] for name, one in found.items()} == {
            name: one[0] for name, one in expected.items()
        }
        (path,) = tmp_path.glob("weights/*.packed")
        with path.open("rb") as file:
            assert read_index(file.fileno(), path.stem).sections
    # Nothing of KV or activations is left.
    assert {one.suffix for one in tmp_path.rglob("*") if one.is_file()} == {".packed", ".lock"}


# ---- memory


def random_case(seed: int) -> dict[str, object]:
    """A random policy, and the lengths of its requests."""
    draw = random.Random(seed)
    return {
        "rows": draw.choice((2, 4, 8)),
        "batches": draw.choice((1, 2, 4)),
        "prompt_tokens": draw.choice((100, 200)),
        "output_tokens": draw.choice((8, 28)),
        "weights_in_memory": draw.choice((0.0, 0.3, 0.7)),
        "kv_in_memory": draw.choice((0.0, 0.5, 1.0)),
        "hidden_in_memory": draw.choice((0.0, 1.0)),
        "kv_codec": draw.choice(("", "", "int4")),
        "overlap": draw.random() < 0.7,
        "step_tokens": draw.choice((64, 256)),
    }


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """54 MB of layers, so that the memory of a process says something."""
    return make_folder(
        tmp_path_factory.mktemp("large"), hidden_size=512, intermediate_size=1536, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=1024,
    )  # fmt: skip


CASES = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(100)]


@pytest.mark.parametrize("seed", CASES)
def test_the_process_takes_no_more_memory_than_predicted(
    seed: int, large_model: Path, prepared: Path
) -> None:
    case = json.dumps(random_case(seed))
    command = [
        sys.executable,
        "-m",
        "tests.engine.offload.offload_memory",
        str(large_model),
        str(prepared),
        case,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == 0
    assert found["peak_bytes"] <= 1.05 * found["memory_bytes"]
    assert found["disk_used_bytes"] <= found["disk_bytes"] + DISK_BLOCK


def test_weights_that_stay_are_read_at_the_start(model: Checkpoint, prepared: Path) -> None:
    """And not in the first step, whose lines would wait for the disk."""
    path = prepare_weights(model, "exact", prepared)
    stream = WeightStream(path, model.config, frozenset(range(model.config.layers)))
    found, here = dict[str, int](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            here = line.endswith(str(path))
        elif here and name in ("Size", "Rss"):
            found[name] = found.get(name, 0) + int(rest.split()[0])
    assert found["Size"] > 0 and found["Rss"] == found["Size"]
    stream.close()
