"""Implements the virtual time of the exact simulator: a queue of calls, ordered by the time at which they happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

# At equal times messages come before steps, so that a step sees every message that has arrived by then.
ORDER_MESSAGE, ORDER_STEP = (
    0,
    1,
)


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
