"""Row-wise operations of the decoder on a GPU, one kernel launch each (the counterpart of `engine.cpu.rowwise`)."""

from __future__ import annotations

import torch

from engine.gpu.launch import next_power_of_two
from engine.gpu.triton_kernel import ROWS_PER_PROGRAM, tl, triton_kernel


@triton_kernel
def _add_norm(  # type: ignore[no-untyped-def]
    x, delta, weight, out, count, width, eps, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (rows): x += delta in float32; out = RMSNorm(x) * weight."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (n < count) & (i < width)
    at = n * width + i
    row = tl.load(x + at, mask=inside, other=0.0) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, row, mask=inside)
    share = 1.0 / tl.sqrt(tl.sum(row * row, 1) / width + eps)
    tl.store(out + at, row * share[:, None] * tl.load(weight + i, mask=i < width, other=0.0), mask=inside)


@triton_kernel
def _gate(x, out, count, width, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (rows, columns): out = silu(x[:, :width]) * x[:, width:]."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (n < count) & (i < width)
    left = tl.load(x + n * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + n * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n * width + i, left / (1.0 + tl.exp(-left)) * right, mask=inside)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to the residual stream `x` [rows, hidden] float32 in place, and return its RMSNorm.

    delta: [rows, hidden]; weight: [hidden] float32. Returns [rows, hidden] in delta's type.
    """
    rows, width = x.shape
    out = torch.empty_like(delta)
    warps = 8 if width > 2048 else 4
    _add_norm[(-(-rows // ROWS_PER_PROGRAM),)](
        x,
        delta,
        weight,
        out,
        rows,
        width,
        eps,
        BLOCK_N=ROWS_PER_PROGRAM,
        BLOCK=next_power_of_two(width),
        num_warps=warps,
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(left half of the columns) * right half. x: [rows, 2 * width]; returns [rows, width]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    block = min(1024, next_power_of_two(width))
    _gate[(-(-rows // ROWS_PER_PROGRAM), -(-width // block))](
        x, out, rows, width, BLOCK_N=ROWS_PER_PROGRAM, BLOCK=block
    )
    return out
