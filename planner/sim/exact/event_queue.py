"""Implements the virtual time of the exact simulator: a queue of calls, ordered by the time at which they happen."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# At equal times messages come before steps, so that a step sees every message that has arrived by then.
ORDER_MESSAGE, ORDER_STEP = (
    0,
    1,
)


# Number of new objects between two garbage collections while a simulation runs.
GC_THRESHOLD = 50_000


class EventQueue:
    """Calls in order of time; at equal times by `order` (messages first), then in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = float("-inf")
        self._due: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, at_s: float, call: Callable[..., None], *args: Any, order: int = ORDER_MESSAGE) -> None:
        """Calls `call(*args)` at `at_s`. Raises ValueError if that time has passed."""
        if at_s < self.now_s:
            raise ValueError(f"virtual time is {self.now_s} s already, too late for a call at {at_s} s")
        self._count += 1
        heapq.heappush(self._due, (at_s, order, self._count, call, args))

    def run(self) -> None:
        """Runs all events, and those that they schedule, until none is left."""
        due, pop = self._due, heapq.heappop
        while due:
            self.now_s, _, _, call, args = pop(due)
            call(*args)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Runs garbage collection less often: simulations make no reference cycles, and looking for them is slow.

    The setting holds for the whole process, so simulations must not run at the same time in one process.
    """
    usual = gc.get_threshold()
    gc.set_threshold(max(GC_THRESHOLD, usual[0]) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
