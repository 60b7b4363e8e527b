"""The whole decoder on a device's code path, in Triton's interpreter, against transformers and the CPU's runner."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "engine.gpu.attention",
    reason="triton is not installed (it has wheels for Linux only)",
    exc_type=ImportError,
)

from engine.batching.batch import pack_batch
from engine.cpu.model_runner import CpuModelRunner
from engine.gpu import model_runner
from engine.gpu.batch import fill_step, view_step
from engine.gpu.decoder import GpuDecoder
from engine.gpu.model_runner import load_kernels
from engine.gpu.triton_kernel import INTERPRETED
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from tests.support.factories import make_oracle, save_model

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled here: tests/gpu runs them")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen3-tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def open_device(path: Path, num_slabs: int = 12, dtype: str = "float32") -> model_runner.GpuModelRunner:
    files = Checkpoint.resolve(str(path))
    with WeightReader(files.weights) as weights:
        runner = model_runner.GpuModelRunner.load(
            files.config, weights, num_slabs, files.config.context, "cpu", dtype
        )
    runner.data.fill_(float("nan"))  # whatever is read before it was written shows
    return runner


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    oracle = make_oracle(family, **changes)
    runner = open_device(save_model(tmp_path, oracle))
    tokens = random_tokens(150)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    cuts = [0, 1, 64, 147, 148, 149, 150]  # single tokens, a prefix, chunks across pages
    found = [
        runner.run([StepWork(tokens[start:end], start, [7, 3, 9], "all")])[0]
        for start, end in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=3e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("device"), make_oracle("llama"))


def steps() -> list[list[StepWork]]:
    """Four sequences, two of which begin with the same two chunks and one with its first; they join and leave."""
    prompt = random_tokens(140)
    return [
        [StepWork(prompt[:130], 0, [0, 1, 2], "last"), StepWork(prompt[:20], 0, [3], "last")],
        [
            StepWork([5], 130, [0, 1, 2], "last"),
            StepWork([6, 7, 8], 128, [0, 1, 4], "last"),
            StepWork([9], 20, [3], "last"),
        ],
        [
            StepWork([7], 131, [0, 1, 2], "last"),
            StepWork([8], 131, [0, 1, 4], "last"),
            StepWork([4], 21, [3], "last"),
        ],
        [
            StepWork([9], 132, [0, 1, 2], "last"),
            StepWork([2], 132, [0, 1, 4], "last"),
            StepWork([1], 22, [3], "last"),
        ],
        [
            StepWork([3], 133, [0, 1, 2], "last"),
            StepWork([6], 64, [0, 5], "last"),
            StepWork([3], 133, [0, 1, 4], "none"),
        ],
    ]


def test_steps_equal_those_of_the_cpu(folder: Path) -> None:
    device, files = open_device(folder), Checkpoint.resolve(str(folder))
    pool = KvPool(files.layout(), 12)
    cpu = CpuModelRunner.load(files, pool, files.config.context)
    guessed = []
    for works in steps():
        for found, expected in zip(device.run(works), cpu.run(works), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
        guessed.append(device.guessed)
    # A step is packed while the one before runs: but the second brought a newcomer, the last another order.
    assert guessed == [0, 0, 1, 2, 2]
    for slab, tokens in [(0, 64), (1, 64), (2, 6), (3, 23), (4, 6), (5, 1)]:
        written = device.data[slab, :, :, :, :tokens]
        torch.testing.assert_close(written, pool.data[slab, :, :, :, :tokens], rtol=1e-4, atol=3e-5)
        assert torch.isnan(device.data[slab, :, :, :, tokens:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(folder: Path, dtype: str) -> None:
    exact, half = open_device(folder), open_device(folder, dtype=dtype)
    for works in steps()[:2]:
        for found, expected in zip(half.run(works), exact.run(works), strict=True):
            assert (found - expected).norm() <= 0.03 * expected.norm()


def test_padding_changes_nothing(folder: Path) -> None:
    """What a graph replays: a step padded in rows and shared items, its table as wide as the longest sequence."""
    device, padded = open_device(folder), open_device(folder)
    for works in steps()[:3]:
        plain = device.run(works)
        if any(len(work.tokens) > 1 for work in works):
            padded.run(works)
            continue
        batch = pack_batch(works)
        shared, tiles = padded._attention.cut_batch(batch)
        sizes = padded._padded_sizes(len(batch.tokens), len(shared.items))
        assert sizes.rows > len(works) and sizes.items > len(shared.items) > 0
        ints = torch.empty(sizes.numbers, dtype=torch.int32)
        fill_step(ints.numpy(), sizes, batch, shared, tiles)
        step = view_step(ints, sizes)
        assert all(
            getattr(step, field.name).data_ptr() % 16 == ints.data_ptr() % 16 for field in fields(step)
        )
        with torch.no_grad():
            logits = padded._decoder.forward(step, padded._attention)
        torch.testing.assert_close(logits[: len(works)], torch.cat(plain))
    torch.testing.assert_close(device.data, padded.data, equal_nan=True)


def test_what_cannot_run_is_refused_before_anything_runs(folder: Path) -> None:
    device = open_device(folder)
    for bad in (
        StepWork([5], 512, [0] * 9, "last"),
        StepWork([5], 64, [0], "last"),
        StepWork([300], 0, [0], "last"),
    ):
        with pytest.raises(ValueError):
            device.run([StepWork([5, 6], 0, [7], "last"), bad])
    assert torch.isnan(device.data).all() and device.run([]) == []


def test_warm_leaves_the_pool_as_it_was(folder: Path) -> None:
    device = open_device(folder)
    device.data.fill_(7.0)
    device.warm()
    assert (device.data == 7).all()


def test_a_pool_of_another_layout_is_refused(folder: Path) -> None:
    files = Checkpoint.resolve(str(folder))
    with WeightReader(files.weights) as weights:
        decoder = GpuDecoder(files.config, weights, 64, torch.device("cpu"), torch.float32, load_kernels())
    layout = files.layout("float16")
    with pytest.raises(ValueError, match="does not fit"):
        model_runner.GpuModelRunner(
            decoder, layout, torch.zeros(1, *layout.chunk_shape, dtype=torch.float16), 64
        )
    other = KvLayout(3, 2, 12, "float32")
    with pytest.raises(ValueError, match="does not fit"):
        model_runner.GpuModelRunner(decoder, other, torch.zeros(1, *files.layout().chunk_shape), 64)
