"""What an attempt may drop of its KV (eviction by attention head), and when it is decided what is dropped.

    |-- boundary: whole chunks, all kept --|-- prompt, by policy --|-- answer, by policy --|-- since then: all kept --|
    0                                                              P                       P + 64 k            tokens

P is the number of the prompt's tokens. It is decided once when the prompt has its KV, and again whenever 64 more tokens
of the answer have theirs. Nothing but prompt, answer and `KeepSpec` counts for what is kept, so an attempt that reads
the delivered tokens again decides as the attempt before.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from diptych.chunks import CHUNK_TOKENS

# The last rows of a prompt, or of a block of its answer, by whose attention heads judge what they keep.
PROFILE_ROWS = 64
# Slabs that a sequence that evicts may need beside those of its tokens: one for the tokens since the last decision (the
# ring), and one for the map of what its heads kept.
RING_AND_MAP = 2
RING_AND_MAP_TOKENS = RING_AND_MAP * CHUNK_TOKENS
# Most slabs of a segment (`kvcache.eviction.kept_segments`). With one, heads that keep more than four rows of nine
# would fill it with a single chunk. A segment has more chunks than slabs, or it would save nothing.
SEGMENT_SLABS = 2
# Rules that say which tokens a head keeps, see docs/eviction.md. `zap` needs weights, whose digest may follow: any
# others are another rule.
ADA, FASTGEN, ZAP = KEEP_RULES = ("ada", "fastgen", "zap")
RULE_PATTERN = re.compile(r"ada|fastgen|zap(@[0-9a-f]{16})?")


def is_keep_rule(name: str) -> bool:
    """Whether this is the name of a rule."""
    return RULE_PATTERN.fullmatch(name) is not None


def follows_rule(asked: str, rule: str) -> bool:
    """Whether a worker that has `rule` can follow the one that is asked for: `zap` without a digest takes any
    weights.
    """
    return asked == rule or (asked == ZAP and rule.startswith(ZAP))


class KeepSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How much of its attention an attempt keeps, by which rule, and from which position on tokens may be dropped.

    `threshold` (T in FastGen, Ge et al. 2024, section 3) is the share of the attention over the prompt that must be
    recovered: more than 0, at most 1. With 1 nothing is dropped. Positions below `boundary`, a number of tokens in
    whole chunks, always stay. `rule` says which tokens go (`RULE_PATTERN`).

    Raises:
        ValueError: the threshold is not above 0 and at most 1, the boundary is not a number of whole chunks, or the
            rule is unknown.
    """

    threshold: float = 1.0
    boundary: int = 0
    rule: Annotated[str, msgspec.Meta(examples=[ADA])] = ADA

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"a threshold must be greater than 0 and at most 1, not {self.threshold}")
        if self.boundary < 0 or self.boundary % CHUNK_TOKENS:
            raise ValueError(
                f"a boundary is a number of chunks of {CHUNK_TOKENS} tokens, not {self.boundary} tokens"
            )
        if not is_keep_rule(self.rule):
            raise ValueError(f"a rule is {' or '.join(KEEP_RULES)}, not {self.rule[:40]!r}")

    @property
    def evicts(self) -> bool:
        """Whether anything may be dropped."""
        return self.threshold < 1

    def attachable_tokens(self, prompt_tokens: int) -> int:
        """How many leading tokens of a prompt need not be computed if they are cached, for its decision's sake.

        `fastgen` looks at all rows, `ada` at the last ones, and `zap` at none.
        """
        rows = {ADA: PROFILE_ROWS, FASTGEN: prompt_tokens}.get(self.rule, 0)
        return max(0, prompt_tokens - rows)

    def fits_rule(self, rule: str) -> bool:
        """Whether a worker that has `rule` can follow this one (`follows_rule`)."""
        return follows_rule(self.rule, rule)

    @property
    def needed_rule(self) -> str:
        """The rule that workers must have; empty if everything is kept."""
        return self.rule if self.evicts else ""

    @property
    def needs_weights(self) -> bool:
        """Whether the rule is `zap`."""
        return self.rule.startswith(ZAP)

    @property
    def can_cut(self) -> bool:
        """Whether what is kept of a chunk depends on nothing behind it: by `zap` with weights that are named."""
        return self.evicts and self.rule.startswith(f"{ZAP}@")

    @property
    def boundary_chunks(self) -> int:
        """Number of leading chunks that stay whole."""
        return self.boundary // CHUNK_TOKENS


# Everything is kept.
KEEP_ALL = KeepSpec()


def decision_tokens(prompt_tokens: int, num_tokens: int) -> int:
    """Number of tokens at the last point at which it was decided what is kept.

    `num_tokens` of a sequence have KV, of which `prompt_tokens` are its prompt's. It is 0 while the prompt is computed.
    """
    if num_tokens < prompt_tokens:
        return 0
    return num_tokens - (num_tokens - prompt_tokens) % CHUNK_TOKENS
