"""Which time it is, for what cannot be undone: pure, both clocks come in as numbers.

A wall clock may jump: a bad clock at boot, a wrong time server, a machine that slept. Files are removed and batches
expire by the settled time, which follows a jump only after the wall clock has stood there for an hour of monotonic
time. Until then it goes on from where it was. What was settled is kept on disk, so a restart is no way around.
"""

from __future__ import annotations

# How far the wall clock may be from where it should be without a jump.
TOLERANCE_S = 900.0
# Seconds of monotonic time for which a jump must stand.
STAND_S = 3600.0


class SettledClock:
    """The settled time, in Unix seconds."""

    def __init__(self, settled_s: float | None = None) -> None:
        """`settled_s` was settled last, by an earlier process. None: the wall clock is trusted."""
        self.settled_s = settled_s
        self._read_s: float | None = None
        # The wall clock is ahead of the monotonic clock by so much since the jump, which was seen at a time of the
        # monotonic clock.
        self._jump: tuple[float, float] | None = None

    def read(self, wall_s: float, monotonic_s: float) -> float:
        """The settled time now."""
        if self.settled_s is None:
            self.settled_s = wall_s
        passed_s = 0.0 if self._read_s is None else monotonic_s - self._read_s
        expected_s, self._read_s = self.settled_s + passed_s, monotonic_s
        if abs(wall_s - expected_s) <= TOLERANCE_S:
            self._jump, self.settled_s = None, wall_s
            return wall_s
        ahead_s = wall_s - monotonic_s
        if self._jump is None or abs(ahead_s - self._jump[0]) > TOLERANCE_S:
            self._jump = ahead_s, monotonic_s
        has_stood = monotonic_s - self._jump[1] >= STAND_S
        self.settled_s = wall_s if has_stood else expected_s
        if has_stood:
            self._jump = None
        return self.settled_s

    def stamp(self, wall_s: float, monotonic_s: float) -> float:
        """The time for what is made now: the later one of the two, so that nothing ends before its time."""
        return max(wall_s, self.read(wall_s, monotonic_s))
