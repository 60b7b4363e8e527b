"""Virtual time: what happens next, and when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

NEWS, TURN = 0, 1  # at one moment, whatever arrives does so before anybody looks at what has arrived


class Agenda:
    """Calls in order of their moment; within a moment news first, then in the order in which they were put down."""

    def __init__(self) -> None:
        self.now_s = float("-inf")
        self._due: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, at_s: float, call: Callable[..., None], *told: Any, order: int = NEWS) -> None:
        """Call `call(*told)` at `at_s`. Raises ValueError for a moment that has gone by."""
        if at_s < self.now_s:
            raise ValueError(f"it is {self.now_s} s already, not {at_s} s")
        self._count += 1
        heapq.heappush(self._due, (at_s, order, self._count, call, told))

    def run(self) -> None:
        """Let everything happen."""
        due, pop = self._due, heapq.heappop
        while due:
            self.now_s, _, _, call, told = pop(due)
            call(*told)
