"""Does the thread that computes still come round? Asked from the thread that beats, which ends a process that hangs.

Time is counted in looks, none of which counts for more than `LOOK_S`: a process that was stopped as a whole (SIGSTOP, a
machine that slept) has not hung, and goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from diptych.errors import DiptychError

# A round is told of when it takes longer than `STUCK_S` and than `UNUSUAL` times the longest before it, and ends the
# process when it takes longer than `LIMIT_S` and than `HOPELESS` times that. A first long prompt may take its time.
STUCK_S, UNUSUAL = 20.0, 4.0
LIMIT_S, HOPELESS = 120.0, 20.0
LOOK_S = 1.0


class Pulse:
    """`turn` is called by the thread that computes, `look` by another; `fatal` is told why the process ends."""

    def __init__(
        self,
        fatal: Callable[[DiptychError], object],
        name: str,
        *,
        stuck_s: float = STUCK_S,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fatal, self._name, self._clock = fatal, name, clock
        self._stuck_s, self._limit_s = stuck_s, limit_s
        self._turns, self._began_s, self._longest_s = 0, clock(), 0.0
        self._seen, self._looked_s, self._still_s = -1, clock(), 0.0

    def turn(self) -> None:
        """A round begins."""
        now_s = self._clock()
        self._longest_s = max(self._longest_s, now_s - self._began_s)
        self._began_s = now_s
        self._turns += 1

    def look(self) -> float:
        """For how many seconds no round has begun, if that is unusually long; else 0."""
        now_s, turns = self._clock(), self._turns
        if turns != self._seen:
            self._seen, self._still_s = turns, 0.0
        else:
            self._still_s += min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        if self._still_s > max(self._limit_s, HOPELESS * self._longest_s):
            what, why = (
                f"{self._name} hangs",
                f"its engine has not come round for {self._still_s:.0f} s of its own time",
            )
            self._fatal(DiptychError(what, why, "it is started again by its supervisor"))
        return self._still_s if self._still_s > max(self._stuck_s, UNUSUAL * self._longest_s) else 0.0
