"""The deadlines of an engine's sequences, the earliest first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from engine.sequence import Sequence


class Deadlines:
    """A heap of (deadline, sequence key). Some of these sequences may be gone already."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, seq: Sequence) -> None:
        """Watch the deadline of a sequence, if it has one."""
        if seq.deadline_s < float("inf"):
            heappush(self._heap, (seq.deadline_s, seq.key))

    def find_earliest(self, find: Callable[[str], Sequence | None]) -> float | None:
        """The earliest deadline of the sequences that `find` still knows by their keys; None if there is none."""
        while self._heap:
            deadline_s, key = self._heap[0]
            seq = find(key)
            if seq is not None and seq.deadline_s == deadline_s:
                return deadline_s
            heappop(self._heap)
        return None

    def prune(self, find: Callable[[str], Sequence | None], count: int) -> None:
        """Forget those that `find` does not know any more, when the heap is far larger than the `count` it knows."""
        if len(self._heap) > 2 * count + 64:
            self._heap = [item for item in self._heap if find(item[1]) is not None]
            heapify(self._heap)
