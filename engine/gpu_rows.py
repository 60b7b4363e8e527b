"""Row-wise pieces of the decoder on a GPU, one launch each: what `engine.model.rows` is on the CPU."""

from __future__ import annotations

import torch
import triton.language as tl

from engine.attention.triton import AT_ONCE, kernel, power


@kernel
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


@kernel
def _gate(x, out, count, width, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (rows, columns): out = silu(x[:, :width]) * x[:, width:]."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (n < count) & (i < width)
    left = tl.load(x + n * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + n * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n * width + i, left / (1.0 + tl.exp(-left)) * right, mask=inside)


def add_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `delta` to the residual stream `x` [rows, hidden] float32, in place, and returns its RMSNorm.

    delta: [rows, hidden]; weight: [hidden] float32. Returns [rows, hidden] of delta's type.
    """
    rows, width = x.shape
    out = torch.empty_like(delta)
    warps = 8 if width > 2048 else 4
    _add_norm[(-(-rows // AT_ONCE),)](
        x, delta, weight, out, rows, width, eps, BLOCK_N=AT_ONCE, BLOCK=power(width), num_warps=warps
    )
    return out


def gate(x: torch.Tensor) -> torch.Tensor:
    """silu(left half) * right half of the columns. x: [rows, 2 * width]; returns [rows, width]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    block = min(1024, power(width))
    _gate[(-(-rows // AT_ONCE), -(-width // block))](x, out, rows, width, BLOCK_N=AT_ONCE, BLOCK=block)
    return out
