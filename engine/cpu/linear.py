"""Matrix products of the decoder: every row is the same to the last bit however many rows are computed together.

The kernel is in `engine.cpu.matmul`. Weights are packed once; weights that fit into 16 bits without loss are kept in 16
bits. A product only looks at packed memory, so the memory may be its own, or a file that several processes map
(`engine.cpu.weights`). `tests/engine/cpu/test_decoder_exact.py` tests the exactness on the machine it runs
on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.errors import ModelError
from engine.batching.batch import MIN_ROWS
from engine.cpu.matmul import HALVES, PANEL_OUTPUTS, multiply_panels, pack_panels, panel_items, tile_rows

NARROW_DTYPES = {"bfloat16": torch.bfloat16} | ({"float16": torch.float16} if HALVES else {})
# Matrix products with fewer weights use one thread, since they end before a second thread has started.
MIN_THREADED_WEIGHTS = 1 << 17
# The range of a group, which is at most twice this, over 15 steps must be a float16, and so must its minimum.
MAX_INT4_WEIGHT = 65000.0


def narrowest_dtype(weight: torch.Tensor) -> str:
    """The narrowest type that the kernel supports and that holds every element of a float32 tensor without loss."""
    for kind, dtype in NARROW_DTYPES.items():
        if torch.equal(weight.to(dtype).to(torch.float32), weight):
            return kind
    return "float32"


@cache
def _thread_pool(number: int) -> ThreadPoolExecutor:
    """The shared pool for products with `number` additional threads."""
    return ThreadPoolExecutor(number, "product")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [outputs, inputs] and its bias in the form that the kernel takes, whoever owns the memory."""

    # A key of `engine.cpu.matmul.PACKED`.
    kind: str
    outputs: int
    inputs: int
    panels: NDArray[np.generic]
    # [outputs, rounded up to whole panels]
    bias: NDArray[np.float32]

    @classmethod
    def pack(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, kind: str | None = None
    ) -> PackedMatrix:
        """Pack a float32 weight; the given tensors can be dropped.

        `kind` "int4" packs it with a loss; None without one, in the fewest bits.

        Raises:
            ModelError: float16 scales cannot hold the weights, or the processor cannot convert float16.
        """
        outputs, inputs = weight.shape
        kind = kind or narrowest_dtype(weight)
        width = padded_outputs(outputs)
        padded = np.zeros((width, inputs), np.float32)
        padded[:outputs] = weight.numpy()
        panels = padded.reshape(-1, PANEL_OUTPUTS, inputs).transpose(0, 2, 1)
        added = np.zeros(width, np.float32)
        if bias is not None:
            added[:outputs] = bias.numpy()
        if kind == "int4":
            _check_int4(weight)
        return cls(kind, outputs, inputs, pack_panels(panels, kind), added)


def _check_int4(weight: torch.Tensor) -> None:
    """Check that a weight can be held in 4 bits on this processor. Raises ModelError."""
    if not HALVES:
        why = "scales are float16, which this processor cannot convert"
        raise ModelError("weights cannot have 4 bits here", why, "use the weights as they are")
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not largest <= MAX_INT4_WEIGHT:
        why = f"the largest one is {largest:g}, and scales are float16"
        raise ModelError("the weights cannot be held in 4 bits", why, "use the weights as they are")


def padded_outputs(outputs: int) -> int:
    """The outputs of a packed matrix, the zeros of its last panel included."""
    return -(-outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS


class PackedLinear:
    """The product x @ weight.T + bias in float32, over packed memory.

    It uses the number of threads that torch has when it is created (`torch.set_num_threads`), each for some outputs.
    """

    def __init__(self, matrix: PackedMatrix) -> None:
        self.outputs, self.inputs, self.kind = matrix.outputs, matrix.inputs, matrix.kind
        self.weight, self.bias = matrix.panels, matrix.bias
        self.kernel_sizes = panel_items(self.kind, self.inputs), tile_rows(self.kind)
        threads = torch.get_num_threads() if self.outputs * self.inputs >= MIN_THREADED_WEIGHTS else 1
        share = -(-len(self.bias) // PANEL_OUTPUTS // threads) * PANEL_OUTPUTS
        self._parts = [(begin, min(begin + share, self.outputs)) for begin in range(0, self.outputs, share)]

    @classmethod
    def pack(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, kind: str | None = None
    ) -> PackedLinear:
        """The product with a float32 weight, packed into memory of its own; raises as `PackedMatrix.pack`."""
        return cls(PackedMatrix.pack(weight, bias, kind))

    @property
    def has_one_thread(self) -> bool:
        """Whether the thread that calls computes all outputs."""
        return len(self._parts) == 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, inputs], contiguous with at least `MIN_ROWS` rows, to [rows, outputs]."""
        rows, depth = x.shape
        assert rows >= MIN_ROWS and depth == self.inputs, f"{list(x.shape)} does not fit {self.inputs} inputs"
        out = np.empty((rows, self.outputs), np.float32)
        flat = x.numpy().reshape(-1), depth, self.weight, *self.kernel_sizes, self.bias
        mine, *others = self._parts
        waiting = [
            _thread_pool(len(others)).submit(multiply_panels, *flat, *part, self.outputs, out.reshape(-1))
            for part in others
        ]
        multiply_panels(*flat, *mine, self.outputs, out.reshape(-1))
        for part in waiting:
            part.result()
        return torch.from_numpy(out)
