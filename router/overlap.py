"""Whether KV is moved while it is computed (pure): worth it when moving takes longer than the talk it costs.

To pull ahead takes a few messages more. What the talk of a hand-off costs is measured: the time from an Offer to its
Pulled, less what the decode worker says it spent on moving; canaries see to it that there is always a fresh figure.
Shorter transfers than that go in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_HOP_S = 1e-3  # assumed before one was measured
FADE = 0.9  # weight of the past in the measured cost, per hand-off
WORK = ("reserve", "transfer", "verify")  # what a decode worker does between its ticket and `Pulled`


class Hop:
    """What the messages of a hand-off cost in seconds: a fading mean."""

    def __init__(self, seconds: float = FIRST_HOP_S) -> None:
        self.seconds = seconds

    def heard(self, whole_s: float, parts: Mapping[str, float]) -> None:
        """A hand-off in one piece took `whole_s` from its Offer to its Pulled, of which `parts` were work."""
        work_s = sum(parts.get(part, 0.0) for part in WORK)
        self.seconds = FADE * self.seconds + (1 - FADE) * max(0.0, whole_s - work_s)
