"""How Triton kernels are declared: compiled for a CUDA device, or run by Triton's interpreter where there is none.

Files with kernels take `tl`, Triton's language, from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

# Triton reads this variable whenever a kernel is declared, its own kernels included: set before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "ROWS_PER_PROGRAM", "UNSPECIALIZED", "tl", "triton_kernel"]

INTERPRETED = not isinstance(tl.max, triton.JITFunction)
if bool(triton.knobs.runtime.interpret) != INTERPRETED:
    raise ImportError("TRITON_INTERPRET was changed after triton was imported: set it before, or not at all")

# Rows per program of a row-wise kernel. The interpreter is faster with few programs.
ROWS_PER_PROGRAM = 32 if INTERPRETED else 1

# Arguments that change from step to step: specialising on their divisibility would recompile kernels again and again.
UNSPECIALIZED = ["count", "line_stride", "splits", "most", "window", "shared", "row_tiles"]


def triton_kernel(function: Callable[..., Any]) -> Any:
    """`function` as a Triton kernel, to be indexed with a grid; compiled for the GPU, or interpreted without one."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in UNSPECIALIZED if name in names])
