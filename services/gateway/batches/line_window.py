"""How many lines may be in flight, by whether requests over HTTP meet their SLOs.

    misses too often ─▶ half as many lines, at once ─▶ ... ─▶ none
        └─ no such misses for a while ─▶ more, step by step ─▶ all

Workers keep lines within the time that the SLOs leave, as far as a worker can see: it knows neither what other programs
do on its machine, nor what lines cost the gateway. So the window also goes by the outcome (additive increase,
multiplicative decrease, as TCP has it). Without SLOs nothing is counted, and it never shrinks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from services.gateway.outcomes import EndedSequence, Outcome, OutcomeSink

# Requests that ended in so many seconds are counted together.
RECENT_S = 10.0
# Lines may use this share of the misses that the SLOs allow, at least `MIN_MISSES` of them.
MISS_SHARE, MIN_MISSES = 0.5, 2
# Below this share of all lines there is none.
MIN_SHARE = 1 / 64
# For so many seconds after a cut no other one is made: requests that end together were late together.
CUT_PAUSE_S = 1.0
# How much of the share is added per second, and how long after a cut at the earliest. Each further cut doubles that
# time, until the share was whole again.
GROW_PER_S = 1 / 16
HOLD_S, MAX_HOLD_S = 2.0, 60.0


class LineWindowSink(OutcomeSink):
    """Tells `record` whether requests over HTTP met their SLOs.

    Refusals, and failures before a request became sequences, are left out, since lines have no part in them.
    """

    def __init__(self, record: Callable[[bool], object]) -> None:
        self._record = record

    def on_ended(self, ended: EndedSequence) -> None:
        """Pass on whether a sequence met its SLOs, if it counts."""
        if ended.is_counted and ended.record is not None and not ended.is_refused:
            self._record(ended.checked.outcome is Outcome.MET)


class LineWindow:
    """The share of all lines that may be in flight, from 0 to 1. `cuts` counts how often it was halved."""

    def __init__(self, attainment: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`attainment` is the share of requests that are to meet their SLOs; `clock` gives seconds."""
        self._most_missed = MISS_SHARE * (1 - attainment)
        self._clock = clock
        self.cuts = 0
        # The share at the time `_known_s`, from which it grows.
        self._share, self._known_s = 1.0, clock()
        self._hold_s, self._cut_s = HOLD_S, float("-inf")
        # When requests ended, and whether they met their SLOs; and how many of these did not.
        self._ended: deque[tuple[float, bool]] = deque()
        self._num_missed = 0

    @property
    def share(self) -> float:
        """The share of all lines that may be in flight now."""
        grown = self._share + GROW_PER_S * max(0.0, self._clock() - self._known_s)
        return min(1.0, grown)

    def num_lines(self, all_lines: int) -> int:
        """How many of `all_lines` may be in flight now."""
        share = self.share
        return 0 if share < MIN_SHARE else max(1, int(share * all_lines))

    def record_outcome(self, met: bool, used: float = 1.0) -> bool:
        """A request over HTTP ended, and `met` its SLOs or did not; returns whether the share was cut for it.

        `used` is the share of all lines that are in flight: where these are few, half of them is left.
        """
        now_s, ended = self._clock(), self._ended
        if self.share == 0.0 or now_s < self._cut_s + CUT_PAUSE_S:
            # No line ran beside it, or those that were taken back since. Lines come back when their time has come.
            return False
        ended.append((now_s, met))
        self._num_missed += not met
        while ended[0][0] < now_s - RECENT_S:
            self._num_missed -= not ended.popleft()[1]
        missed = self._num_missed
        if met or missed < MIN_MISSES or missed <= self._most_missed * len(ended) + 1e-9:
            return False
        self._cut(now_s, used)
        return True

    def _cut(self, now_s: float, used: float) -> None:
        """Halve what is used of the share. What was counted so far is not held against the smaller one."""
        share = self.share
        self._hold_s = HOLD_S if share >= 1.0 else min(MAX_HOLD_S, 2 * self._hold_s)
        half = min(share, used) / 2
        self._share = half if half >= MIN_SHARE else 0.0
        self._cut_s, self._known_s = now_s, now_s + self._hold_s
        self._ended.clear()
        self._num_missed = 0
        self.cuts += 1
