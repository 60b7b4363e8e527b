"""Numbers of bytes as text: for readers, and as the value of a setting."""

from __future__ import annotations

import math

MIB, GIB = 1 << 20, 1 << 30


def show_bytes(num_bytes: float) -> str:
    """A size for readers, in MiB or GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def size_setting(num_bytes: float) -> str:
    """The value of a setting that allows at least `num_bytes`, in whole MiB (`diptych.config.values.byte_size`)."""
    return f"{math.ceil(num_bytes / MIB)}MiB"
