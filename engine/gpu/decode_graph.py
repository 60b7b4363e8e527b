"""Decode steps of fixed sizes that are replayed: as CUDA graphs, or emulated.

Inputs and outputs of a graph keep their addresses. All graphs write their logits into one buffer, so that the memory of
many graphs is that of the largest: whoever needs the logits of a step copies them before the next one.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.gpu.batch import StepSizes, view_step
from engine.gpu.decoder import GpuDecoder
from engine.gpu.kernels import PagedGpuAttention


class StepGraph(Protocol):
    """A decode step of fixed sizes."""

    def replay(self, ints: torch.Tensor) -> torch.Tensor:
        """Run the step in host memory `ints`; returns the logits, which the next replay of any graph overwrites."""


class DecodeGraph:
    """One captured CUDA graph.

    Args:
        decoder: the model.
        attention: over the pool.
        sizes: of the step.
        logits: [at least sizes.wanted, vocab] float32, into which the logits are written.
        pool: the memory pool of an earlier graph, which this one shares; None: its own.
    """

    def __init__(
        self, decoder: GpuDecoder, attention: PagedGpuAttention, sizes: StepSizes, logits: torch.Tensor, pool: Any
    ) -> None:  # fmt: skip
        self._logits = logits[: sizes.wanted]
        self._ints = torch.zeros(sizes.numbers, dtype=torch.int32, device=decoder.device)
        step = view_step(self._ints, sizes)
        # Padding slots, so that capturing the graph writes no KV.
        step.slots.fill_(-1)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # Compiles the kernels and lets cuBLAS choose its algorithms, which cannot be captured.
            decoder.forward(step, attention)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # In the usual mode, "global", a thread that asks for the end of a copy meanwhile would make the capture fail.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits.copy_(decoder.forward(step, attention))

    @property
    def pool(self) -> Any:
        """The memory pool of the graph."""
        return self._graph.pool()

    def replay(self, ints: torch.Tensor) -> torch.Tensor:
        """See `StepGraph.replay`."""
        self._ints.copy_(ints, non_blocking=True)
        self._graph.replay()
        return self._logits


class EmulatedGraph:
    """The same on the emulated device: the step is computed anew, from and into memory at fixed addresses."""

    pool = None

    def __init__(
        self, decoder: GpuDecoder, attention: PagedGpuAttention, sizes: StepSizes, logits: torch.Tensor, pool: Any
    ) -> None:  # fmt: skip
        self._decoder, self._attention = decoder, attention
        self._logits = logits[: sizes.wanted]
        self._ints = torch.zeros(sizes.numbers, dtype=torch.int32)
        self._step = view_step(self._ints, sizes)

    def replay(self, ints: torch.Tensor) -> torch.Tensor:
        """See `StepGraph.replay`."""
        self._ints.copy_(ints)
        return self._logits.copy_(self._decoder.forward(self._step, self._attention))
