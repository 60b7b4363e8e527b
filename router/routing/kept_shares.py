"""How much of its KV a sequence that evicts is expected to keep, and the room that it then needs (pure).

The share is measured: it is the mean of recent sequences of the same KV class and threshold, and 1 before the first
one. As soon as a sequence's own share is known, that one counts (`router.requests.request_state`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from diptych.chunks import CHUNK_TOKENS
from diptych.kept_report import KeptReport

# Weight of the past in a measured share, applied at each sequence.
SHARE_DECAY = 0.8
# Room beside its tokens for a request that may drop KV: a slab for the tokens since the last decision, and one for the
# map of what its heads kept.
DROPPING_TOKENS = 2 * CHUNK_TOKENS

# A KV class, and a threshold of eviction.
ShareKey = tuple[str, float]


class KeptShares:
    """The shares of their rows behind the boundary that recent sequences kept, by KV class and threshold."""

    def __init__(self) -> None:
        self._means: dict[ShareKey, float] = {}

    @property
    def measured(self) -> Mapping[ShareKey, float]:
        """What was measured so far."""
        return self._means

    def record_share(self, kv_class: str, threshold: float, report: KeptReport) -> None:
        """A sequence has decided what it keeps of its prompt."""
        if report.all_rows:
            before, share = self.expected_share(kv_class, threshold), report.kept_share
            self._means[kv_class, threshold] = SHARE_DECAY * before + (1 - SHARE_DECAY) * share

    def expected_share(self, kv_class: str, threshold: float) -> float:
        """The share that a sequence is expected to keep, in [0, 1]."""
        return self._means.get((kv_class, threshold), 1.0)


def kept_tokens(tokens: int, boundary: int, share: float) -> int:
    """How many of `tokens` the KV of a sequence is worth that keeps `share` of what lies behind `boundary`."""
    whole = min(tokens, boundary)
    return whole + math.ceil(share * (tokens - whole))


def kept_room_tokens(tokens: int, boundary: int, share: float, held_tokens: int = 0) -> int:
    """Tokens of room, in whole chunks, of a sequence of `tokens` that keeps `share` of what lies behind `boundary`.

    Beside what is kept there is the room that every sequence that evicts needs. It is never less than `held_tokens`,
    which it has. The chunk that its last tokens are in counts whole, so that the room grows with chunks.
    """
    kept = _whole_chunks(kept_tokens(_whole_chunks(tokens), boundary, share))
    return max(kept + DROPPING_TOKENS, held_tokens)


def held_tokens(report: KeptReport, boundary: int) -> int:
    """Tokens of room, in whole chunks, that a sequence holds after the decision that `report` is of, at least."""
    heads = sum(report.policies.values())
    tokens = boundary + (report.all_rows // heads if heads else 0)
    return max(0, _whole_chunks(tokens) - report.freed_slabs * CHUNK_TOKENS)


def _whole_chunks(tokens: int) -> int:
    """`tokens`, rounded up to whole chunks."""
    return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS
