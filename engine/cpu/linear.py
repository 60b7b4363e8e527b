"""Matrix products of the decoder: every row is the same to the last bit however many rows are computed together.

The kernel is in `engine.cpu.matmul`. Weights are packed once, when they are loaded; weights that fit into 16 bits
without loss are kept in 16 bits. `tests/engine/cpu/test_decoder_exact.py` tests the exactness on the machine it runs
on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cpu.matmul import HALVES, PACKED_VIEWS, PANEL_OUTPUTS, multiply_panels, pack_panels

MIN_ROWS = 1
NARROW_DTYPES = {"bfloat16": torch.bfloat16} | ({"float16": torch.float16} if HALVES else {})
# Matrix products with fewer weights use one thread, since they end before a second thread has started.
MIN_THREADED_WEIGHTS = 1 << 17


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


class PackedLinear:
    """The product x @ weight.T + bias in float32. The weight is repacked, so the given tensor can be dropped.

    It uses the number of threads that torch has when it is created (`torch.set_num_threads`), each for some outputs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.kind = narrowest_dtype(weight)
        width = -(-self.outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS
        padded = np.zeros((width, self.inputs), np.float32)
        padded[: self.outputs] = weight.numpy()
        panels = padded.reshape(-1, PANEL_OUTPUTS, self.inputs).transpose(0, 2, 1)
        self.weight: NDArray[np.generic] = pack_panels(panels, self.kind)
        self.bias = np.zeros(width, np.float32)
        if bias is not None:
            self.bias[: self.outputs] = bias.numpy()
        threads = torch.get_num_threads() if weight.numel() >= MIN_THREADED_WEIGHTS else 1
        share = -(-width // PANEL_OUTPUTS // threads) * PANEL_OUTPUTS
        self._parts = [(begin, min(begin + share, self.outputs)) for begin in range(0, self.outputs, share)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, inputs], contiguous with at least `MIN_ROWS` rows, to [rows, outputs]."""
        rows, depth = x.shape
        assert rows >= MIN_ROWS and depth == self.inputs, f"{list(x.shape)} does not fit {self.inputs} inputs"
        out = np.empty((rows, self.outputs), np.float32)
        flat = x.numpy().reshape(-1), depth, self.weight, PACKED_VIEWS[self.kind], self.bias
        mine, *others = self._parts
        waiting = [
            _thread_pool(len(others)).submit(multiply_panels, *flat, *part, self.outputs, out.reshape(-1))
            for part in others
        ]
        multiply_panels(*flat, *mine, self.outputs, out.reshape(-1))
        for part in waiting:
            part.result()
        return torch.from_numpy(out)
