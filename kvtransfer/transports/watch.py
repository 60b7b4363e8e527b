"""Does a read that nobody tells about get on? By the memory that it writes to.

NIXL says of a read whether it is complete, not how far it has come; over a slow link even a small one takes minutes. So
words in the target are set to a number of this process before the read is posted, one in every `APART_BYTES`; each of
them that holds something else later was reached. Bytes may come in any order.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from diptych.errors import TransferError

APART_BYTES = 4096
TOKEN = np.uint64(secrets.randbits(64))
WORD_BYTES = 8
PATIENCE = 6  # times the usual gap between two signs of life
LOOKS = 8  # in the time after which a read that stands still is given up

Segment = tuple[int, int, int]  # address there, address here, bytes


class Tripwire:
    """Words in the targets of `segments`, set before these are read; segments shorter than a word have none."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._words = [_words(here, size) for _, here, size in segments if size >= WORD_BYTES]
        for words in self._words:
            words[:] = TOKEN

    def reached(self) -> int:
        """How many of them were written over."""
        return sum(int(np.count_nonzero(words != TOKEN)) for words in self._words)


def _words(here: int, size: int) -> NDArray[np.uint64]:
    """The last word of every `APART_BYTES` of that memory, counted from its end; at least the very last one."""
    count = max(1, size // APART_BYTES)
    first = here + size - WORD_BYTES - (count - 1) * APART_BYTES
    memory = (ctypes.c_uint8 * (here + size - first)).from_address(first)
    return np.ndarray((count,), np.uint64, memoryview(memory), strides=(APART_BYTES,))


class Pulse:
    """When something last came over a connection, for whichever of its reads."""

    def __init__(self) -> None:
        self.beat_s = float("-inf")


class Watch:
    """Gives a read up when it stands still for `stall_s()`, or for several times as long as it usually does.

    Reads over one connection come one after the other: while any of them gets on, the others only wait for their turn.
    """

    def __init__(self, stall_s: Callable[[], float], now_s: float, pulse: Pulse | None = None) -> None:
        self._pulse = pulse or Pulse()
        self._stall_s, self._moved_s, self._looked_s = stall_s, now_s, now_s
        self._gap_s = 0.0  # between two signs of life, fading mean
        self._reached = 0

    def moved(self, now_s: float) -> None:
        """Something is complete."""
        self._gap_s += (now_s - self._moved_s - self._gap_s) / 4
        self._moved_s, self._reached = now_s, 0
        self._pulse.beat_s = now_s

    def due(self, now_s: float) -> bool:
        """Is it time to look at the memory?"""
        return now_s - max(self._moved_s, self._looked_s) >= self._stall_s() / LOOKS

    def look(self, reached: int, now_s: float) -> None:
        """So many words were reached of what is under way. Raises TransferError if it has stood still for too long."""
        self._looked_s = now_s
        if reached > self._reached:
            self.moved(now_s)
            self._reached = reached
            return
        still_s = now_s - max(self._moved_s, self._pulse.beat_s)
        if still_s > max(self._stall_s(), PATIENCE * self._gap_s):
            raise TransferError("a KV transfer stalled", f"nothing arrived for {still_s:.1f} s")
