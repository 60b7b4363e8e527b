"""Decides which workers have missed their heartbeats.

A worker that was silent for `QUIET_AFTER_S` gets no new requests, and one that was silent for `lost_s` is lost. The
gateway checks this at every tick of its clock (`Fleet.check_silence`). The worker's side is `diptych.channel.link`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A worker that is silent for this many seconds gets no new requests, since its host may be paused.
QUIET_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class SilentWorkers:
    """The names of the workers that are quiet, and of those that are lost.

    `overslept`: this check came after a long pause, and says nothing about who is lost.
    """

    quiet: frozenset[str]
    lost: frozenset[str]
    overslept: bool = False


class LivenessMonitor:
    """Judges the silence of workers by the time of their last message, in seconds of a monotonic clock.

    After a long pause between two checks (a stopped process, a blocked event loop), the first check finds no worker
    lost: heartbeats that arrived during the pause are handled before the next check.
    """

    def __init__(self, lost_s: float) -> None:
        self.lost_s = lost_s
        self._checked_s: float | None = None
        self._overslept = False

    def check(self, seen_s: Mapping[str, float], now_s: float) -> SilentWorkers:
        """Which workers are silent at `now_s`. `seen_s` is when each worker's last message came."""
        pause_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        self._overslept = pause_s > self.lost_s / 2 and not self._overslept
        knows_quiet = pause_s <= QUIET_AFTER_S / 2
        return SilentWorkers(
            quiet=_silent_for(QUIET_AFTER_S, seen_s, now_s) if knows_quiet else frozenset(),
            lost=frozenset() if self._overslept else _silent_for(self.lost_s, seen_s, now_s),
            overslept=self._overslept,
        )


def _silent_for(seconds: float, seen_s: Mapping[str, float], now_s: float) -> frozenset[str]:
    return frozenset(name for name, at_s in seen_s.items() if now_s - at_s > seconds)
