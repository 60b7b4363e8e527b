"""Measures the memory that a deployment's workers hold on this machine, so that the next one gets the same share.

Workers and their ranks are found by a variable of their environment.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# The variable with which the workers of a deployment are started.
WORKER_OF = "DIPTYCH_WORKER_OF"
# Memory that cannot be reclaimed; that which several processes map counts once. Older kernels do not tell the second.
_HELD_FIELDS = (("Pss_Anon:", "Pss_Shmem:"), ("Anonymous:",))


def held_memory(deployment: str, proc: Path = Path("/proc")) -> int:
    """Bytes that this user's processes with `WORKER_OF` = `deployment` hold. Files that they only read do not count."""
    if not deployment:
        return 0
    marker = f"{WORKER_OF}={deployment}".encode()
    total = 0
    for folder in proc.glob("[0-9]*"):
        # The errors mean that it has ended, or belongs to another user.
        with suppress(OSError, ValueError):
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                total += _held_by(folder)
    return total


def _held_by(folder: Path) -> int:
    """Bytes that the process of this folder in /proc holds."""
    found = dict[str, int]()
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, amount, *_ = line.split()
        found[name] = int(amount) << 10
    fields = next((names for names in _HELD_FIELDS if names[0] in found), ())
    return sum(found.get(name, 0) for name in fields)
