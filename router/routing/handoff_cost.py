"""Decides whether KV is pulled while it is computed: worth it if the transfer takes longer than the extra messages
(pure).

Pipelined pulling takes a few more messages. Their cost is estimated from measured hand-offs: the time from an Offer to
its Pulled, less the time that the decode worker reports for the transfer itself. Canary requests keep the estimate
fresh. KV with a shorter transfer than this cost is pulled in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping

# Seconds that a hand-off is assumed to cost until one was measured.
INITIAL_COST_S = 1e-3
# Weight of the past in the estimate, applied at each hand-off.
COST_DECAY = 0.9
# Phases that a decode worker reports as work between its ticket and `Pulled`.
WORK_PARTS = ("reserve", "transfer", "verify")


class HandoffCost:
    """Estimated cost of a hand-off's messages, in seconds: a mean in which older hand-offs count less."""

    def __init__(self, seconds: float = INITIAL_COST_S) -> None:
        self.seconds = seconds

    def record_handoff(self, whole_s: float, parts: Mapping[str, float]) -> None:
        """A hand-off in one piece took `whole_s` from Offer to Pulled; `parts` are the seconds of its phases of
        work.
        """
        work_s = sum(parts.get(part, 0.0) for part in WORK_PARTS)
        self.seconds = COST_DECAY * self.seconds + (1 - COST_DECAY) * max(0.0, whole_s - work_s)
