"""Row-wise pieces of the decoder as CPU kernels: each output row depends on its input row alone, to the last bit.

torch's elementwise kernels treat the tail of a tensor with other instructions than its body, so an element's last bit
can depend on the size of the batch; these do not, and fusing them saves most of the passes over memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.jit import LOG2_E, exp2, jit


@jit
def add_norm(x: Any, delta: Any, weight: Any, eps: float, out: Any) -> None:
    """x += delta; out = RMSNorm(x) * weight. All [rows, hidden] float32 but weight, [hidden]."""
    width = x.shape[1]
    for n in range(x.shape[0]):
        row, change, normed = x[n], delta[n], out[n]
        squares = np.float32(0)
        for i in range(width):
            row[i] += change[i]
            squares += row[i] * row[i]
        share = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            normed[i] = row[i] * share * weight[i]


@jit
def gate(x: Any, out: Any) -> None:
    """out = silu(x[:, :width]) * x[:, width:]. x is [rows, 2 * width] float32, out [rows, width]."""
    width = out.shape[1]
    for n in range(x.shape[0]):
        left, right, product = x[n, :width], x[n, width:], out[n]
        for i in range(width):
            product[i] = left[i] / (np.float32(1) + exp2(-left[i] * LOG2_E)) * right[i]
