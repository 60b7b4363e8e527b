"""The runner of a device with coded pages, in Triton's interpreter, against the CPU's runner over the same codec."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip(
    "engine.gpu.attention",
    reason="triton is not installed (it has wheels for Linux only)",
    exc_type=ImportError,
)

from diptych.errors import ConfigError
from engine.batching.batch import pack_batch
from engine.cpu.model_runner import CpuModelRunner
from engine.gpu.batch import fill_step, view_step
from engine.gpu.coded.attention import CodedGpuAttention
from engine.gpu.coded.memory import coded_memory_bytes
from engine.gpu.model_runner import GpuModelRunner
from engine.gpu.triton_kernel import INTERPRETED
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.step_work import StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.pool import KvPool
from tests.engine.cpu.coded_runs import CONTEXT, SHAPE, calibrate, complete, rows_that_differ
from tests.support.factories import make_folder

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled here: tests/gpu runs them")

SLABS = 8
PROMPT = torch.randint(3, 300, (70,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.resolve(str(make_folder(tmp_path_factory.mktemp("coded"), "llama", **SHAPE)))


@pytest.fixture(scope="module")
def calibration(model: Checkpoint) -> Calibration:
    return calibrate(model)


def open_device(
    model: Checkpoint, calibration: Calibration, name: str, sink_slots: int = 16
) -> GpuModelRunner:
    with WeightReader(model.weights) as weights:
        runner = GpuModelRunner.load(
            model.config, weights, SLABS, CONTEXT, "cpu", "float32", codec=str(complete(name, calibration)),
            calibration=calibration, sink_slots=sink_slots,
        )  # fmt: skip
    runner.data.fill_(255)  # whatever is read before it was written shows
    return runner


def steps() -> list[list[StepWork]]:
    """Prompts in pieces, decodes of which two share a chunk, and sequences with several first tokens."""
    first = PROMPT[0]
    return [
        [StepWork(PROMPT[:66], 0, [0, 1], "last")],
        [StepWork([5], 66, [0, 1], "last", first), StepWork([6, 7], 64, [0, 4], "last", first),
         StepWork([9], 0, [3], "last")],
        [StepWork([7], 67, [0, 1], "last", first), StepWork([8], 66, [0, 4], "last", first),
         StepWork([4], 1, [3], "last", 9)],
        [StepWork([3], 0, [5], "last"), StepWork([7], 68, [0, 1], "last", first)],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["nuq4-1%", "tq4"])
def test_steps_equal_those_of_the_cpu(model: Checkpoint, calibration: Calibration, name: str) -> None:
    device = open_device(model, calibration, name)
    pool = KvPool(replace(model.layout(), codec=str(complete(name, calibration))), SLABS)
    cpu = CpuModelRunner.load(model, pool, CONTEXT, calibration)
    pool.data[:] = 255
    found, expected, guessed = [], [], []
    for works in steps():
        found += device.run(works)
        expected += cpu.run(works)
        guessed.append(device.guessed)
    # Numbers on the edge of a code may move to the next one, since sums round otherwise.
    assert rows_that_differ(torch.cat(found), torch.cat(expected)) <= 0.1
    assert guessed == [0, 0, 1, 1]
    same = (device.data.numpy() == pool.data.numpy()).mean()
    assert same >= 0.995
    assert (device.data[6:] == 255).all()


def test_sinks_are_those_of_the_cpu_and_make_room_for_each_other(
    model: Checkpoint, calibration: Calibration
) -> None:
    """Two places for three first tokens: one that was given away is computed again, and has the same numbers."""
    small, large = (open_device(model, calibration, "nuq4-1%", slots) for slots in (2, 16))
    prompts = [[StepWork([token], 0, [slab], "last")] for slab, token in enumerate((11, 12, 13))]
    decodes = [[StepWork([5], 1, [slab], "last", token)] for slab, token in enumerate((11, 12))]
    for step in prompts + decodes:
        assert torch.equal(small.run(step)[0], large.run(step)[0])
    with pytest.raises(ValueError, match="3 first tokens"):
        small.run([work for step in prompts for work in step])


def test_padding_changes_nothing(model: Checkpoint, calibration: Calibration) -> None:
    """What a graph replays: a step padded in rows and shared items."""
    device = open_device(model, calibration, "nuq4-1%")
    for works in steps()[:2]:
        device.run(works)
    works = steps()[2]
    plain, stored = device.run(works), device.data.clone()
    batch = pack_batch(works, device._plan_sinks(works).slots)
    shared, tiles = device._attention.cut_batch(batch)
    sizes = replace(
        device._padded_sizes(len(batch.tokens), len(shared.items)), items=len(shared.items) + 1, chunks=3
    )
    ints = torch.empty(sizes.numbers, dtype=torch.int32)
    fill_step(ints.numpy(), sizes, batch, shared, tiles)
    with torch.no_grad():
        logits = device._decoder.forward(view_step(ints, sizes), device._attention)
    torch.testing.assert_close(logits[: len(works)], torch.cat(plain))
    assert torch.equal(device.data, stored)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_that_are_not_finite_fail_their_step_alone(
    model: Checkpoint, calibration: Calibration
) -> None:
    device = open_device(model, calibration, "tq4")
    weight = device._decoder.layers[0].qkv.weight
    kept = weight.clone()
    weight[-1] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        device.run([StepWork([5, 6], 0, [7], "last")])
    weight.copy_(kept)
    assert torch.isfinite(device.run([StepWork([5, 6], 0, [7], "last")])[0]).all()


def test_warm_leaves_the_pool_as_it_was(model: Checkpoint, calibration: Calibration) -> None:
    device = open_device(model, calibration, "nuq3-1%")
    device.data.fill_(7)
    device.warm()
    assert (device.data == 7).all()


def test_what_does_not_fit_is_refused(model: Checkpoint, calibration: Calibration) -> None:
    device = open_device(model, calibration, "tq4")
    with pytest.raises(ValueError, match="does not fit"):
        GpuModelRunner(device._decoder, model.layout(), device.data, CONTEXT)
    with pytest.raises(ConfigError, match="raw is not available on a GPU") as caught:
        open_device(model, calibration, "raw")
    assert len(caught.value.lines()) <= 6
    other = replace(device.layout, codec=f"nuq4-1%.g32@{'0' * 16}")
    with pytest.raises(ConfigError, match="another calibration"):
        data = torch.zeros(1, other.layers, other.pages_per_layer, other.page_bytes, dtype=torch.uint8)
        GpuModelRunner(device._decoder, other, data, CONTEXT, calibration=calibration)


def test_memory_beside_the_pool_is_what_the_plan_says(model: Checkpoint, calibration: Calibration) -> None:
    device = open_device(model, calibration, "nuq4-1%")
    pages = device._attention
    assert isinstance(pages, CodedGpuAttention)
    step = pages.load(pack_batch([StepWork([0] * 130, 0, [0, 1, 2], "none")]))
    taken = pages.sinks.nbytes + sum(table.nbytes for table in pages._angles)
    taken += pages.expand_spans(0, step, 0, torch.float32).nbytes
    assert coded_memory_bytes(device.layout, CONTEXT, sink_slots=16, step_chunks=3) == taken
