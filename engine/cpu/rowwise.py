"""Row-wise operations of the decoder as CPU kernels: each output row depends only on its input row, to the last bit.

torch's elementwise kernels use other instructions for the tail of a tensor than for its body, so the last bit of an
element can depend on the size of the batch. These kernels do not, and fusing the operations saves most of the passes
over memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import LOG2_E, exp2, jit


@jit
def add_rms_norm(x: Any, delta: Any, weight: Any, eps: float, out: Any) -> None:
    """x += delta; out = RMSNorm(x) * weight. weight is [hidden], the others are [rows, hidden]; all float32."""
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
def silu_and_mul(x: Any, out: Any) -> None:
    """out = silu(x[:, :width]) * x[:, width:]. x is [rows, 2 * width] float32, out [rows, width]."""
    width = out.shape[1]
    for n in range(x.shape[0]):
        left, right, product = x[n, :width], x[n, width:], out[n]
        for i in range(width):
            product[i] = left[i] / (np.float32(1) + exp2(-left[i] * LOG2_E)) * right[i]
