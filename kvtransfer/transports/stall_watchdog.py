"""Finds reads that have stalled, by checking the memory that they write to.

NIXL reports whether a read is complete, not how far it is, and over a slow link even a small read takes minutes. So
before a read is posted, one word in every `WORD_SPACING_BYTES` of its target is set to a random number. A word that
later has another value was overwritten by the read. Bytes may arrive in any order.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from diptych.errors import TransferError

WORD_SPACING_BYTES = 4096
UNWRITTEN_WORD = np.uint64(secrets.randbits(64))
WORD_BYTES = 8
# A read has stalled when nothing arrived for this many times the usual gap between two signs of progress.
MAX_GAP_RATIO = 6
# Number of checks within the time after which a transfer counts as stalled.
CHECKS_PER_STALL = 8

# (source address, own address, number of bytes).
ReadSegment = tuple[int, int, int]


class WrittenWords:
    """Marked words in the targets of `segments`, to be set before the read; segments shorter than a word have none."""

    def __init__(self, segments: Sequence[ReadSegment]) -> None:
        self._words = [_watched_words(here, size) for _, here, size in segments if size >= WORD_BYTES]
        for words in self._words:
            words[:] = UNWRITTEN_WORD

    def count_reached(self) -> int:
        """How many of the marked words were overwritten."""
        return sum(int(np.count_nonzero(words != UNWRITTEN_WORD)) for words in self._words)


def _watched_words(here: int, size: int) -> NDArray[np.uint64]:
    """The last word of every `WORD_SPACING_BYTES` of the target, counted from its end; at least its very last word."""
    count = max(1, size // WORD_SPACING_BYTES)
    first = here + size - WORD_BYTES - (count - 1) * WORD_SPACING_BYTES
    memory = (ctypes.c_uint8 * (here + size - first)).from_address(first)
    return np.ndarray((count,), np.uint64, memoryview(memory), strides=(WORD_SPACING_BYTES,))


class ConnectionPulse:
    """When the last byte came over a connection, from any of its reads (clock seconds), and how often bytes come.

    Reads over one connection are served one after the other: while any of them progresses, the others only wait. So
    all of them have the patience of the connection.
    """

    def __init__(self) -> None:
        self.beat_s = float("-inf")
        # Usual seconds between two signs of progress. A gap counts by its length: of many words that one packet brings,
        # only the first says how long the packet took.
        self.gap_s = 0.0
        self._num_reads = 0

    @contextmanager
    def watch_read(self, stall_s: Callable[[], float], now_s: float) -> Iterator[StallWatchdog]:
        """A watchdog for a read that begins now. After the last read in flight the usual gap is forgotten."""
        self._num_reads += 1
        try:
            yield StallWatchdog(stall_s, now_s, self)
        finally:
            self._num_reads -= 1
            if not self._num_reads:
                self.gap_s = 0.0

    def record_beat(self, gap_s: float, stall_s: float, now_s: float) -> None:
        """Bytes came after `gap_s` seconds without any."""
        self.gap_s += (gap_s - self.gap_s) * gap_s / (gap_s + stall_s)
        self.beat_s = now_s


class StallWatchdog:
    """Gives a read up when nothing arrives over its connection for `stall_s()` seconds, and for several usual gaps."""

    def __init__(self, stall_s: Callable[[], float], now_s: float, pulse: ConnectionPulse) -> None:
        self._pulse, self._stall_s = pulse, stall_s
        self._began_s, self._looked_s = now_s, now_s
        self._reached = 0

    def record_progress(self, now_s: float) -> None:
        """A read is complete, or more of it has arrived."""
        self._pulse.record_beat(self._still_s(now_s), self._stall_s(), now_s)
        self._looked_s, self._reached = now_s, 0

    def is_check_due(self, now_s: float) -> bool:
        """Whether it is time for `check_progress`."""
        return now_s - self._looked_s >= self._stall_s() / CHECKS_PER_STALL

    def check_progress(self, reached: int, now_s: float) -> None:
        """Record that `reached` marked words of the reads in flight were overwritten.

        Raises TransferError if nothing has arrived for too long.
        """
        self._looked_s = now_s
        if reached > self._reached:
            self.record_progress(now_s)
            self._reached = reached
            return
        still_s = self._still_s(now_s)
        if still_s > max(self._stall_s(), MAX_GAP_RATIO * self._pulse.gap_s):
            raise TransferError("a KV transfer stalled", f"nothing arrived for {still_s:.1f} s")

    def _still_s(self, now_s: float) -> float:
        """Seconds without a byte while this read waited for some."""
        return now_s - max(self._began_s, self._pulse.beat_s)
