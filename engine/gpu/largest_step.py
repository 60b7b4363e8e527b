"""Measures what the largest steps take of a device beside the weights, before the pool is made.

The steps run over a pool of one slab and write no KV. They come in the order in which a worker begins, so that graphs
keep their memory while prompts and the drawing of tokens take turns. `engine.model.device_step` reckons the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.request import SamplingParams
from engine.gpu.model_runner import GpuModelRunner
from engine.gpu.sampler import DeviceSampler
from engine.model.device_step import pad_rows
from engine.sampling.sampler import SamplerRow
from engine.step_work import StepWork


class MemoryMeter(Protocol):
    """Says how much of a device's memory this process holds."""

    def held_bytes(self) -> int:
        """What is held now, without what is only kept to be used again, which is given back."""

    def restart_peak(self) -> None:
        """The peak is what is held now."""

    def peak_bytes(self) -> int:
        """The most that was held at a time since then."""


class CudaMeter:
    """What torch has taken of a GPU for tensors, those of graphs included, in the blocks in which it takes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held_bytes(self) -> int:
        """See `MemoryMeter.held_bytes`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def restart_peak(self) -> None:
        """See `MemoryMeter.restart_peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """See `MemoryMeter.peak_bytes`."""
        return torch.cuda.max_memory_reserved(self._device)


def measure_needs(
    open_runner: Callable[[], GpuModelRunner],
    sampler: DeviceSampler,
    meter: MemoryMeter,
    *,
    tokens: int,
    rows: int,
) -> tuple[int, int]:
    """Bytes of what is there already, which are the weights, and of the largest steps beside it.

    Args:
        open_runner: makes a runner over a pool of one slab, whose bytes count as the step's.
        sampler: draws a token for each row.
        meter: of the runner's device.
        tokens: most tokens of a step.
        rows: most sequences of a step; at most `tokens`.
    """
    held = meter.held_bytes()
    meter.restart_peak()
    _run_largest(open_runner(), sampler, tokens, rows)
    peak = meter.peak_bytes()
    meter.held_bytes()
    return held, peak - held


def _run_largest(runner: GpuModelRunner, sampler: DeviceSampler, tokens: int, rows: int) -> None:
    """Capture the largest graphs, run the largest step with prompts, and draw a token for each of its rows."""
    runner.warm([pad_rows(rows)])
    longest = runner.max_model_len
    prompts = min(rows, -(-tokens // longest))
    works = [StepWork([0], 0, [0], "last")] * (rows - prompts)
    left = tokens - len(works)
    for _ in range(prompts):
        count = min(left, longest)
        # The chunks before a prompt are read, and expanded if they are coded.
        start = (longest - count) // CHUNK_TOKENS * CHUNK_TOKENS if runner.layout.codec else 0
        works.append(StepWork([0] * count, start, [0] * runner.layout.num_chunks(start + count), "last"))
        left -= count
    logits = runner.rehearse(works)
    # Of all requests these take the most memory to draw for.
    asked = SamplingParams(1, 0, top_p=0.9)
    drawn = [SamplerRow([0], [], asked, runner.vocab_size, None) for _ in works]
    sampler.sample(list(torch.split(logits, 1)), drawn)
