"""Matrix products of the decoder, every row the same to the last bit however many rows are computed together.

The kernel is `engine.model.product`'s. Weights are packed once, at load; those that 16 bits hold without loss are kept
in 16 bits. `tests/engine/test_decoder_exact.py` holds exactness to account on the machine it runs on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.product import HALVES, ITEMS, PANEL, multiply, pack

MIN_ROWS = 1
NARROW = {"bfloat16": torch.bfloat16} | ({"float16": torch.float16} if HALVES else {})
SHARED_WEIGHTS = 1 << 17  # a product of fewer is over before a second thread has begun


def narrowest(weight: torch.Tensor) -> str:
    """The shortest type, of those the kernel reads, that holds every element of a float32 tensor without loss."""
    for kind, dtype in NARROW.items():
        if torch.equal(weight.to(dtype).to(torch.float32), weight):
            return kind
    return "float32"


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, "product")


class Linear:
    """x @ weight.T + bias for float32. The weight is repacked, so the one given can be dropped.

    Uses as many threads as torch does when this is made (`torch.set_num_threads`); each computes some of the outputs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.kind = narrowest(weight)
        width = -(-self.outputs // PANEL) * PANEL
        padded = np.zeros((width, self.inputs), np.float32)
        padded[: self.outputs] = weight.numpy()
        panels = padded.reshape(-1, PANEL, self.inputs).transpose(0, 2, 1)
        self.weight: NDArray[np.generic] = pack(panels, self.kind)
        self.bias = np.zeros(width, np.float32)
        if bias is not None:
            self.bias[: self.outputs] = bias.numpy()
        threads = torch.get_num_threads() if weight.numel() >= SHARED_WEIGHTS else 1
        share = -(-width // PANEL // threads) * PANEL
        self._parts = [(begin, min(begin + share, self.outputs)) for begin in range(0, self.outputs, share)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] to [rows, outputs]; x contiguous, at least `MIN_ROWS` rows."""
        rows, depth = x.shape
        assert rows >= MIN_ROWS and depth == self.inputs, f"{list(x.shape)} does not fit {self.inputs} inputs"
        out = np.empty((rows, self.outputs), np.float32)
        flat = x.numpy().reshape(-1), depth, self.weight, ITEMS[self.kind], self.bias
        mine, *others = self._parts
        waiting = [
            _threads(len(others)).submit(multiply, *flat, *part, self.outputs, out.reshape(-1))
            for part in others
        ]
        multiply(*flat, *mine, self.outputs, out.reshape(-1))
        for part in waiting:
            part.result()
        return torch.from_numpy(out)
