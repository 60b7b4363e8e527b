"""Ends a worker whose compute thread hangs. The heartbeat thread does the checks.

Time is counted per check, at most `MAX_LOOK_S` seconds for each. So a process that was stopped as a whole (SIGSTOP, a
machine that slept) does not count as hung, and continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from diptych.errors import DiptychError

# A round of the worker's loop is reported as stuck if it takes longer than `STUCK_S` and than `STUCK_FACTOR` times
# the longest round so far. The process ends if a round takes longer than `LIMIT_S` and than `LIMIT_FACTOR` times the
# longest. The factors are for long prompts, whose rounds take long.
STUCK_S, STUCK_FACTOR = 20.0, 4.0
LIMIT_S, LIMIT_FACTOR = 120.0, 20.0
MAX_LOOK_S = 1.0


class EngineWatchdog:
    """Watches the compute thread, which calls `begin_round`; another thread calls `check_stuck`.

    `fatal` is called with the reason when the process must end. `progress` is a number that changes while a round
    progresses: one that waits for a slow disk is not stuck.
    """

    def __init__(
        self,
        fatal: Callable[[DiptychError], object],
        name: str,
        *,
        stuck_s: float = STUCK_S,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        self._progress = progress
        self._fatal, self._name, self._clock = fatal, name, clock
        self._stuck_s, self._limit_s = stuck_s, limit_s
        self._num_rounds, self._began_s, self._longest_s = 0, clock(), 0.0
        self._seen, self._looked_s, self._still_s = (-1, 0), clock(), 0.0

    def begin_round(self) -> None:
        """The compute thread starts another round of its loop."""
        now_s = self._clock()
        self._longest_s = max(self._longest_s, now_s - self._began_s)
        self._began_s = now_s
        self._num_rounds += 1

    def check_stuck(self) -> float:
        """Seconds without a new round or progress, if that is unusually long; else 0.

        Ends the process above the limit.
        """
        now_s, seen = self._clock(), (self._num_rounds, self._progress())
        if seen != self._seen:
            self._seen, self._still_s = seen, 0.0
        else:
            self._still_s += min(now_s - self._looked_s, MAX_LOOK_S)
        self._looked_s = now_s
        if self._still_s > max(self._limit_s, LIMIT_FACTOR * self._longest_s):
            what, why = (
                f"{self._name} hangs",
                f"its engine loop has made no progress for {self._still_s:.0f} s, not counting pauses of the process",
            )
            self._fatal(DiptychError(what, why, "it is started again by its supervisor"))
        return self._still_s if self._still_s > max(self._stuck_s, STUCK_FACTOR * self._longest_s) else 0.0
