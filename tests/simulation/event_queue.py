"""Virtual time: what happens next, in an order that only the seed decides."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, order=True)
class ScheduledEvent:
    """Something that is to happen at `at_s`; `kind` is what it counts as. Once `cancelled` it does not."""

    at_s: float
    number: int
    what: Callable[[], None] = field(compare=False)
    kind: str = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class VirtualEventQueue:
    """Everything that is still to happen. Events of the same moment happen in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 100.0  # not 0: nothing may depend on where a clock begins
        self.counts: Counter[str] = Counter()
        self._heap: list[ScheduledEvent] = []
        self._number = 0

    @property
    def steps(self) -> int:
        """Events that have happened."""
        return self.counts.total()

    def schedule_at(self, at_s: float, what: Callable[[], None], kind: str) -> ScheduledEvent:
        """Let `what` happen at `at_s`, or now if that is past."""
        self._number += 1
        entry = ScheduledEvent(max(at_s, self.now_s), self._number, what, kind)
        heapq.heappush(self._heap, entry)
        return entry

    def schedule_after(self, delay_s: float, what: Callable[[], None], kind: str) -> ScheduledEvent:
        return self.schedule_at(self.now_s + delay_s, what, kind)

    def run_next(self) -> str:
        """Let the next event happen; returns its kind, "" if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry.cancelled:
                continue
            self.now_s = entry.at_s
            self.counts[entry.kind] += 1
            entry.what()
            return entry.kind
        return ""
