"""How many bytes per number a matrix takes in memory, given its stored type. Imports neither torch nor kernels."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
# The supported weight types, in safetensors' notation.
READABLE_DTYPES = ("F32", "F16", "BF16")


@cache
def has_float16_conversion() -> bool:
    """Whether this processor has an instruction from float16 to float32; equals `engine.cpu.matmul.HALVES`."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return "f16c" in flags.split()


def matrix_bytes(stored: str | None) -> int:
    """Bytes per number of a matrix in memory: two if it is stored in 16 bits and the kernels support it, else four.

    Args:
        stored: the stored type in safetensors' notation; None if unknown.
    """
    return 2 if stored == "BF16" or (stored == "F16" and has_float16_conversion()) else 4
