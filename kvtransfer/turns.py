"""Work that is done in small turns: one thread does many pieces of it side by side, and none waits for another.

A piece of work is a generator. It never blocks: it yields for how many seconds it may be left alone at most, `AT_ONCE`
if it can go on, `UNTIL_STIRRED` if only news from outside can get it on. What it returns is its result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
Turns = Generator[float, None, T]

AT_ONCE = 0.0
UNTIL_STIRRED = math.inf
LONGEST_S = 1e-3  # between two looks of a caller that nobody can stir


class Pulling(Protocol):
    """What a transport's decode side does in turns. See `transports.shm.Puller` for what each method promises."""

    def linking(self, worker: str, incarnation: str, endpoint: bytes) -> Turns[None]: ...
    def pulling(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> Turns[list[bytes]]: ...
    def measuring(self, worker: str) -> Turns[tuple[float, float]]: ...


def finish(turns: Turns[T], rest: Callable[[float], object] = time.sleep) -> T:
    """Do all of it on the calling thread, resting when it may be left alone."""
    try:
        while True:
            if pause_s := next(turns):
                rest(min(pause_s, LONGEST_S))
    except StopIteration as end:
        result: T = end.value
        return result
