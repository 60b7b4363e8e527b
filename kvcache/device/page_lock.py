"""Page-locks memory of this process in place, so that a device copies to and from it without the host's help.

The memory is that of a transfer buffer, which other processes map. It is locked in pieces: one call for many gigabytes
takes seconds, and nothing could be reported meanwhile. A piece ends where a page and a slab end, since no copy may
cross from one piece into another.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from contextlib import suppress

import torch

# Most bytes of a piece, unless slabs and pages have no smaller common multiple.
PIECE_BYTES = 256 << 20

# Called with how many of how many bytes are locked.
OnLocked = Callable[[int, int], None]


def report_nothing(locked: int, total: int) -> None:
    """An `OnLocked` for callers that do not want to know."""


class PageLock:
    """`slabs`, uint8 `[slabs, slab_bytes]` in host memory that begins with a page, page-locked for `device`.

    `on_locked` is called after each piece.

    Raises:
        OSError: the system does not allow it; nothing is locked.
    """

    def __init__(self, slabs: torch.Tensor, device: torch.device, on_locked: OnLocked) -> None:
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._device, self._locked = device, list[int]()
        total, begin = slabs.numel(), slabs.data_ptr()
        piece = piece_bytes(slabs.shape[1])
        for start in range(0, total, piece):
            size = min(piece, total - start)
            status = self._cudart.cudaHostRegister(begin + start, size, 0)
            if int(status) != 0:
                why = str(self._cudart.cudaGetErrorString(status))
                self._forget_error()
                self.unlock_pages()
                raise OSError(f"{why}, after {start} of {total} bytes")
            self._locked.append(begin + start)
            on_locked(start + size, total)

    def unlock_pages(self) -> None:
        """The pages are ordinary ones again. No copy may run any more. Idempotent."""
        while self._locked:
            self._cudart.cudaHostUnregister(self._locked.pop())

    def _forget_error(self) -> None:
        """CUDA keeps the error of a call until something is launched, whose launch then seems to have failed."""
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(0)


def piece_bytes(slab_bytes: int) -> int:
    """Bytes of a piece: whole slabs and whole pages, at most `PIECE_BYTES` if that is possible."""
    unit = math.lcm(mmap.PAGESIZE, slab_bytes)
    return max(1, PIECE_BYTES // unit) * unit
