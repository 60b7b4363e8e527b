"""The profile of one KV head from its query rows, slow and obviously right: the compiled one is tested against it.

FastGen (Ge et al. 2024), section 4 and algorithm 1, with what `kvcache/eviction/policies.py` decides where the paper
is silent. It has the whole attention matrix of the rows at once, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.eviction_spec import KeepSpec
from kvcache.eviction.policies import FULL, KeepRule, choose_policies, mask_without_window

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeadProfile:
    """What the rows of a prompt say about one KV head.

    Args:
        scores: mean attention to each token, over the rows that see it, [n].
        masses: recovered mass of policies 0 to 3, the mean over rows, [4].
        policy: the cheapest one that suffices.
    """

    scores: Doubles
    masses: Doubles
    policy: int


def profile_head(
    queries: NDArray[Any],
    keys: NDArray[Any],
    kinds: NDArray[np.uint8],
    spec: KeepSpec,
    rule: KeepRule,
    scale: float | None = None,
) -> HeadProfile:
    """The profile of one KV head at the end of a prompt.

    Args:
        queries: of the rows of the prompt, or of the last R, rotated if keys are, [R, query heads of the KV head, D].
        keys: of the whole prompt, [n, D].
        kinds: bits of each token, [n].
        spec: threshold, and the boundary below which all tokens are kept.
        rule: the order of parts, and the shares.
        scale: of scores; None: 1 / √D.
    """
    attention = pool_attention(queries, keys, scale)
    scores = mean_scores(attention)
    masses = recovered_masses(attention, scores, kinds, spec.boundary, rule)
    return HeadProfile(scores, masses, int(choose_policies(masses, spec.threshold, len(keys))))


def pool_attention(queries: NDArray[Any], keys: NDArray[Any], scale: float | None = None) -> Doubles:
    """Causal attention of the last R rows, the mean over the query heads of a KV head, [R, n]."""
    rows, n = len(queries), len(keys)
    factor = keys.shape[1] ** -0.5 if scale is None else scale
    logits = np.einsum("rgd,nd->rgn", queries.astype(np.float64), keys.astype(np.float64)) * factor
    logits[~_visible(rows, n)[:, None].repeat(queries.shape[1], axis=1)] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    attention: Doubles = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=1)
    return attention


def mean_scores(attention: Doubles) -> Doubles:
    """Mean attention to each token, over the rows that see it, [n]."""
    scores: Doubles = attention.sum(axis=0) / _visible(*attention.shape).sum(axis=0)
    return scores


def recovered_masses(
    attention: Doubles, scores: Doubles, kinds: NDArray[np.uint8], boundary: int, rule: KeepRule
) -> Doubles:
    """The mass of attention that policies 0 to 3 recover of a row, the mean over rows, [4]."""
    masses: Doubles = row_masses(attention, scores, kinds, boundary, rule).mean(axis=1)
    return masses


def row_masses(
    attention: Doubles, scores: Doubles, kinds: NDArray[np.uint8], boundary: int, rule: KeepRule
) -> Doubles:
    """The mass of attention that policies 0 to 3 recover of each row, [4, R].

    Special, punctuation and frequent tokens are those that are kept at the end of the prompt. The window slides: each
    row has the one that ends at its own token.
    """
    rows, n = attention.shape
    positions = np.arange(n)
    lengths = np.arange(n - rows, n) + 1
    windows = positions >= lengths[:, None] - rule.window_tokens(n, boundary)
    masses = np.empty((FULL, rows))
    for policy in range(FULL):
        fixed = mask_without_window(policy, kinds, positions, scores, n, n, boundary, rule)
        kept = fixed | windows if "local" in rule.policy_parts(policy) else fixed[None]
        masses[policy] = (attention * kept).sum(axis=1)
    return masses


def _visible(rows: int, n: int) -> NDArray[np.bool_]:
    """Which tokens the last `rows` rows of n see, [rows, n]."""
    return np.arange(n) <= np.arange(n - rows, n)[:, None]
