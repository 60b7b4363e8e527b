"""The rule `fastgen`: which tokens each KV head keeps (Ge et al. 2024, "Model Tells You What to Discard").

A head has one of five policies, from the cheapest to the most expensive. Each keeps what the one before it keeps, and
one part more: special tokens; punctuation; tokens with frequent attention; a window of local tokens; everything. The
policy is the first whose recovered mass reaches a threshold. The mass of a row of the prompt is the attention that
falls on kept columns; that of a policy is the mean over all rows. The paper's equation 1 leaves the norm open. With the
mean total variation distance of a row it says exactly this, since a softmax over kept columns alone differs from the
whole one by the mass that is lost.

The paper (sections 3 and 4) says little about three things, and this module decides them:

- Frequent tokens are the top share of *all* tokens behind the boundary so far, chosen among those that no other part
  of the policy keeps. A share of the whole length would keep everything behind a late boundary.
- The score of a token is the mean, not the sum, of the attention of queries that could see it. A sum would always drop
  new tokens first.
- The window is a share of the prompt behind the boundary and slides, with each row of the prompt and with the answer.
  Tokens that leave it become candidates for frequent ones.

A policy is pooled over the query heads of a KV head. `kvcache/eviction/kept_rows.py` says where kept rows lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Part = Literal["special", "punct", "frequent", "local"]

# Bits of a token's kind.
SPECIAL_KIND = 1
PUNCT_KIND = 2
# The first positions of a sequence count as special: attention sinks are there.
FIRST_TOKENS = 4
# Prompts of at most this many tokens keep everything: they would not free a frame.
SHORT_PROMPT_TOKENS = 16
# The policy that keeps everything. Policy p below it keeps parts 0 to p of the rule's order.
FULL = 4
# The heads of a layer have competed (`kvcache.eviction.ada`).
COMPETED = 5
# Rows were judged by what they are (`kvcache.eviction.zap`).
PREDICTED = LAST_POLICY = 6
# Equation 2 of the paper, and another order of its Table 5.
PAPER_ORDER: tuple[Part, ...] = ("special", "punct", "frequent", "local")
FREQUENT_FIRST_ORDER: tuple[Part, ...] = ("special", "frequent", "local", "punct")


@dataclass(frozen=True, slots=True)
class KeepRule:
    """The order of the policies' parts and the two shares of the paper (r_l and r_f, section 5.1).

    Both orders are the paper's: `PAPER_ORDER`, the default, and `FREQUENT_FIRST_ORDER`.

    Args:
        order: all four parts, `special` first.
        local_share: window / tokens of the prompt behind the boundary.
        frequent_share: frequent tokens / all tokens behind the boundary so far.

    Raises:
        ValueError: the order lacks a part, or a share is not between 0 and 1.
    """

    order: tuple[Part, ...] = PAPER_ORDER
    local_share: float = 0.3
    frequent_share: float = 0.3

    def __post_init__(self) -> None:
        if self.order[:1] != ("special",) or sorted(self.order) != sorted(PAPER_ORDER):
            raise ValueError(f"an order has {', '.join(PAPER_ORDER)}, special first, not {self.order}")
        if not (0 <= self.local_share <= 1 and 0 <= self.frequent_share <= 1):
            raise ValueError(f"shares are between 0 and 1, not {self.local_share} and {self.frequent_share}")

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The names of policies 0 to 4: the part that each adds to the one before it."""
        return (self.order[0], *(f"+{part}" for part in self.order[1:]), "full")

    def policy_parts(self, policy: int) -> tuple[Part, ...]:
        """The parts that a policy keeps; a full one, all of them.

        Raises:
            ValueError: there is no such policy.
        """
        if not 0 <= policy <= FULL:
            raise ValueError(f"policies are 0 to {FULL}, not {policy}")
        return self.order[: policy + 1]

    def window_tokens(self, prompt_tokens: int, boundary: int) -> int:
        """The length of the window of a prompt of so many tokens, of which those before `boundary` always stay."""
        return _share_of(max(0, prompt_tokens - boundary), self.local_share)

    def num_frequent(self, length: int, boundary: int) -> int:
        """How many frequent tokens a head keeps at most behind `boundary`, once there are `length` tokens."""
        return _share_of(max(0, length - boundary), self.frequent_share)


def name_policy(policy: int, rule: KeepRule) -> str:
    """The name under which a policy is counted."""
    return {COMPETED: "ada", PREDICTED: "zap"}.get(policy) or rule.policy_names[policy]


def choose_policies(masses: NDArray[Any], threshold: float, prompt_tokens: int) -> NDArray[np.uint8]:
    """The cheapest policy of each head whose recovered mass is at least `threshold` (equation 1, algorithm 1).

    Args:
        masses: recovered mass of policies 0 to 3, [..., 4]. One that is NaN never suffices.
        threshold: 1 or more makes every head full.
        prompt_tokens: a prompt of at most `SHORT_PROMPT_TOKENS` makes every head full.

    Returns:
        Policies, of the shape of `masses` without its last axis.

    Raises:
        ValueError: `masses` has not four policies.
    """
    if masses.shape[-1:] != (FULL,):
        raise ValueError(f"recovered masses of {FULL} policies are needed, not of shape {masses.shape}")
    whole = threshold >= 1 or prompt_tokens <= SHORT_PROMPT_TOKENS
    enough = np.zeros(masses.shape, np.bool_) if whole else masses.astype(np.float64) >= threshold
    chosen: NDArray[np.uint8] = np.where(enough.any(axis=-1), enough.argmax(axis=-1), FULL).astype(np.uint8)
    return chosen


def pick_frequent(scores: NDArray[Any], candidates: Bools, count: int) -> Bools:
    """The `count` candidates with the highest scores, or all if there are fewer.

    Args:
        scores: [n]. NaN counts as the lowest score.
        candidates: [n].

    Returns:
        [n]. Among equal scores, the first ones are picked: those of lower positions, if rows are in order.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"cannot pick {count} tokens")
    places = np.flatnonzero(candidates)
    picked = np.zeros(len(candidates), np.bool_)
    if count < len(places):
        values = np.asarray(scores, np.float64)[places]
        values = np.where(np.isnan(values), -np.inf, values)
        # The lowest score that is picked: only some of the candidates that have just this score may be picked.
        lowest = np.partition(values, len(values) - count)[len(values) - count] if count else np.inf
        above, equal = places[values > lowest], places[values == lowest]
        places = np.concatenate((above, equal[: count - len(above)]))
    picked[places] = True
    return picked


def kept_mask(
    policy: int,
    kinds: NDArray[np.uint8],
    positions: NDArray[Any],
    scores: NDArray[Any] | None,
    length: int,
    prompt_tokens: int,
    boundary: int,
    rule: KeepRule,
) -> Bools:
    """Which rows a head keeps at a decision point (the function f of algorithms 1 and 2).

    At the end of a prompt the rows are all its tokens. At a later point they are those that the head still has.

    Args:
        policy: 0 to 4.
        kinds: [n], bits of each row's token.
        positions: [n], each row's position, ascending.
        scores: [n], mean attention of the queries that could see the row; None if the policy does not ask for it.
        length: tokens that have KV, those that were dropped included.
        prompt_tokens: tokens of the prompt.
        boundary: positions below it are always kept.
        rule: the order of parts, and the shares.

    Returns:
        [n].

    Raises:
        ValueError: there is no such policy, scores are missing, or the arrays have different lengths.
    """
    if policy == FULL:
        return np.ones(len(positions), np.bool_)
    kept = mask_without_window(policy, kinds, positions, scores, length, prompt_tokens, boundary, rule)
    if "local" in rule.policy_parts(policy):
        kept |= positions >= length - rule.window_tokens(prompt_tokens, boundary)
    return kept


def select_visible(positions: NDArray[Any], length: int, window: int) -> Bools:
    """Which rows the token at position `length`, or one behind it, can see in a layer with this sliding window.

    The others may be dropped without loss, whatever a head's policy is.

    Args:
        positions: [n], each row's position, below `length`.
        length: tokens that have KV.
        window: tokens that a row sees, itself included; 0: all.

    Returns:
        [n].
    """
    return positions > length - window if window else np.ones(len(positions), np.bool_)


def mask_without_window(
    policy: int,
    kinds: NDArray[np.uint8],
    positions: NDArray[Any],
    scores: NDArray[Any] | None,
    length: int,
    prompt_tokens: int,
    boundary: int,
    rule: KeepRule,
) -> Bools:
    """Which rows a policy below `FULL` keeps for another reason than the window.

    A profile needs this: its window slides with each row, and all else is the same for all rows. Arguments and result
    are those of `kept_mask`. Rows in the window at `length` are no candidates for frequent ones.

    Raises:
        ValueError: there is no such policy, scores are missing, or the arrays have different lengths.
    """
    if scores is not None and len(scores) != len(positions):
        raise ValueError(f"{len(positions)} rows have {len(scores)} scores")
    kept, candidates = split_rows(policy, kinds, positions, length, prompt_tokens, boundary, rule)
    if "frequent" in rule.policy_parts(policy):
        if scores is None:
            raise ValueError(f"policy {policy} keeps frequent tokens, and needs scores")
        kept |= pick_frequent(scores, candidates, rule.num_frequent(length, boundary))
    return kept


def split_rows(
    policy: int,
    kinds: NDArray[np.uint8],
    positions: NDArray[Any],
    length: int,
    prompt_tokens: int,
    boundary: int,
    rule: KeepRule,
) -> tuple[Bools, Bools]:
    """What of `mask_without_window` is known without scores, and so is the same for all heads with these rows.

    Returns:
        The rows that are kept whatever their scores, and the candidates for frequent ones, [n] each. A policy without
        frequent tokens has no candidates.

    Raises:
        ValueError: there is no such policy, or the arrays have different lengths.
    """
    parts = rule.policy_parts(policy)
    if len(kinds) != len(positions):
        raise ValueError(f"{len(positions)} rows have {len(kinds)} kinds")
    kept: Bools = (positions < max(boundary, FIRST_TOKENS)) | ((kinds & SPECIAL_KIND) != 0)
    if "punct" in parts:
        kept |= (kinds & PUNCT_KIND) != 0
    window = rule.window_tokens(prompt_tokens, boundary) if "local" in parts else 0
    candidates: Bools = ~kept & (positions < length - window) & ("frequent" in parts)
    return kept, candidates


def _share_of(tokens: int, share: float) -> int:
    """The floor of a share of `tokens`; the product's rounding error makes it no smaller."""
    return math.floor(tokens * share + 1e-9)
