"""The compiled kernels against the plain reference, in every type, and graphs against single launches."""

from __future__ import annotations

from pathlib import Path

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
from engine.gpu.attention import GpuAttention
from engine.gpu.launch import LaunchTuning
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from tests.support import reference_attention
from tests.support.factories import make_oracle, save_model

pytestmark = pytest.mark.gpu

CLOSE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}  # relative to the largest value
LENGTHS = [1, 63, 64, 65, 1000, 4096, 129, 129]


class KernelBench:
    """Random KV on the device, one copy of it on the CPU; the last two sequences begin with the same two chunks."""

    def __init__(self, device: torch.device, width: int, group: int, dtype: str) -> None:
        torch.manual_seed(0)
        self.layout = KvLayout(1, 2, width, dtype)
        self.heads, kind = 2 * group, getattr(torch, dtype)
        order = torch.randperm(sum(map(self.layout.num_chunks, LENGTHS))).tolist()
        self.slabs = [[order.pop() for _ in range(self.layout.num_chunks(length))] for length in LENGTHS]
        self.slabs[-1][:2] = self.slabs[-2][:2]
        count = max(max(row) for row in self.slabs) + 1
        self.data = torch.randn(count, *self.layout.chunk_shape).to(kind)
        tuning = LaunchTuning.of(device)
        self.pages = GpuAttention(
            self.layout, self.data.to(device), self.heads, LaunchTuning(tuning.programs, saving_bytes=0)
        )
        self.qkv = torch.randn(len(LENGTHS), (self.heads + 4) * width).to(kind)
        self.width, self.device = width, device

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        error = (found.cpu().double().view(expected.shape) - expected).abs().max() / expected.abs().max()
        assert error <= CLOSE[self.layout.dtype]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("window", [0, 100])
def test_decode(device: torch.device, width: int, group: int, dtype: str, window: int) -> None:
    bench = KernelBench(device, width, group, dtype)
    works = [StepWork([0], length - 1, row, "none") for length, row in zip(LENGTHS, bench.slabs, strict=True)]
    step = bench.pages.load(pack_batch(works))
    assert len(step.items)
    out = torch.full((len(LENGTHS), bench.heads * width), float("nan"), device=device).to(bench.data.dtype)
    bench.pages.decode(0, bench.qkv.to(device), step, window, out)
    for n, length in enumerate(LENGTHS):
        keys, values = reference_attention.gather_pages(bench.data, 0, bench.slabs[n], length)
        q = bench.qkv[n, : bench.heads * width].view(1, bench.heads, width)
        bench.check(out[n], reference_attention.attend_reference(q, keys, values, window)[0])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize(("start", "count"), [(0, 65), (63, 2), (65, 130), (3000, 1000)])
@pytest.mark.parametrize("window", [0, 100])
def test_prefill(device: torch.device, width: int, dtype: str, start: int, count: int, window: int) -> None:
    bench = KernelBench(device, width, 4, dtype)
    step = bench.pages.load(pack_batch([StepWork([0] * count, start, bench.slabs[5], "none")]))
    qkv = torch.randn(count, (bench.heads + 4) * width).to(bench.data.dtype)
    out = torch.empty(count, bench.heads * width, dtype=qkv.dtype, device=device)
    bench.pages.prefill(0, qkv.to(device), step, window, out)
    keys, values = reference_attention.gather_pages(bench.data, 0, bench.slabs[5], start + count)
    q = qkv[:, : bench.heads * width].view(count, bench.heads, width)
    bench.check(out, reference_attention.attend_reference(q, keys, values, window))


def test_the_whole_decoder_equals_that_of_the_cpu(device: torch.device, tmp_path: Path) -> None:
    """Prefills, mixed steps, and decode steps, which replay graphs: twice, so that captured ones are used again."""
    files = Checkpoint.resolve(str(save_model(tmp_path, make_oracle("llama"))))
    pool = KvPool(files.layout(), 12)
    cpu = CpuModelRunner.load(files, pool, files.config.context)
    with WeightReader(files.weights) as weights:
        ours = model_runner.GpuModelRunner.load(
            files.config, weights, 12, files.config.context, str(device), "float32"
        )
    ours.warm([2])
    prompt = torch.randint(3, 300, (140,)).tolist()
    steps = [[StepWork(prompt[:130], 0, [0, 1, 2], "last"), StepWork(prompt[:20], 0, [3], "last")]]
    steps += [
        [StepWork([5], 130 + n, [0, 1, 2], "last"), StepWork([6], 20 + n, [3], "last")] for n in range(4)
    ]
    steps += [
        [StepWork([7], 134 + n, [0, 1, 2], "last"), StepWork([8], 128 + n, [0, 1, 4], "last")]
        for n in range(4)
    ]
    for works in steps:
        for found, expected in zip(ours.run(works), cpu.run(works), strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=2e-3, atol=2e-4)
    assert ours.guessed >= 6
