"""How much of its KV a sequence that evicts is expected to keep, and the room that it then needs (pure).

The share is measured: it is the mean of recent sequences of the same KV class, threshold and rule, and 1 before the
first one. As soon as a sequence's own share is known, that one counts (`router.requests.request_state`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_report import KeptReport
from diptych.eviction_spec import RING_AND_MAP_TOKENS, SEGMENT_SLABS, KeepSpec

# Weight of the past in a measured share, applied at each sequence.
SHARE_DECAY = 0.8

# Digits of a threshold that count: requests may give any number, and such that are close keep about the same.
THRESHOLD_DIGITS = 2
# Most shares that are remembered, and how many of the latest ones are told.
MAX_SHARES, MAX_SHOWN_SHARES = 256, 16

# A KV class, a threshold of eviction, rounded, and a rule.
ShareKey = tuple[str, float, str]


class KeptShares:
    """The shares of their rows behind the boundary that recent sequences kept, by KV class, threshold and rule.

    Thresholds count in steps of a hundredth. Of more than `MAX_SHARES` the one that was measured longest ago goes.
    """

    def __init__(self) -> None:
        self._means: OrderedDict[ShareKey, float] = OrderedDict()

    @property
    def latest(self) -> Sequence[tuple[ShareKey, float]]:
        """The keys that were measured last, at most `MAX_SHOWN_SHARES`, with their shares, sorted."""
        return sorted(list(self._means.items())[-MAX_SHOWN_SHARES:])

    def record_share(self, kv_class: str, keep: KeepSpec, report: KeptReport) -> None:
        """A sequence has decided what it keeps of its prompt."""
        if report.all_rows:
            before, share = self.expected_share(kv_class, keep), report.kept_share
            key = _share_key(kv_class, keep)
            self._means[key] = SHARE_DECAY * before + (1 - SHARE_DECAY) * share
            self._means.move_to_end(key)
            if len(self._means) > MAX_SHARES:
                self._means.popitem(last=False)

    def expected_share(self, kv_class: str, keep: KeepSpec) -> float:
        """The share that a sequence is expected to keep, in [0, 1]."""
        return self._means.get(_share_key(kv_class, keep), 1.0)


def _share_key(kv_class: str, keep: KeepSpec) -> ShareKey:
    return kv_class, round(keep.threshold, THRESHOLD_DIGITS), keep.rule


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
    return max(kept + RING_AND_MAP_TOKENS, held_tokens)


def segment_tokens(chunks: int, share: float) -> int:
    """Tokens of room of the whole segments of so many chunks, which keep `share` of their rows.

    Only workers know where segments end: each is taken to have as many chunks as it has room for.
    """
    length = int(SEGMENT_SLABS / share) if share else chunks
    whole = chunks // length * length if length > SEGMENT_SLABS else 0
    return int(share * whole * CHUNK_TOKENS)


def held_tokens(report: KeptReport, boundary: int) -> int:
    """Tokens of room, in whole chunks, that a sequence holds after the decision that `report` is of, at least."""
    heads = sum(report.policies.values())
    tokens = boundary + (report.all_rows // heads if heads else 0)
    return max(0, _whole_chunks(tokens) - report.freed_slabs * CHUNK_TOKENS)


def _whole_chunks(tokens: int) -> int:
    """`tokens`, rounded up to whole chunks."""
    return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS
