"""The paper's definitions number by number, on lists and sets: slow, and written without a look at the product.

FastGen (Ge et al. 2024): equation 1 with the mean distance of total variation of a row, equation 2, and both
algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SPECIAL, PUNCT = 1, 2
PAPER = ("special", "punct", "frequent", "local")
OTHER = ("special", "frequent", "local", "punct")

Matrix = list[list[float]]


def attention_rows(queries: Sequence[Sequence[Sequence[float]]], keys: Sequence[Sequence[float]]) -> Matrix:
    """Softmax of each of the last rows, the mean over the group; row r has as many columns as it sees."""
    n, rows = len(keys), list[list[float]]()
    for number, group in enumerate(queries):
        seen = n - len(queries) + number + 1
        pooled = [0.0] * seen
        for query in group:
            logits = [
                math.fsum(a * b for a, b in zip(query, keys[j], strict=True)) / math.sqrt(len(query))
                for j in range(seen)
            ]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for j in range(seen):
                pooled[j] += weights[j] / math.fsum(weights) / len(group)
        rows.append(pooled)
    return rows


def mean_attention(rows: Matrix) -> dict[int, float]:
    """By column: the mean of the rows that see it."""
    found = dict[int, list[float]]()
    for row in rows:
        for j, weight in enumerate(row):
            found.setdefault(j, []).append(weight)
    return {j: math.fsum(weights) / len(weights) for j, weights in found.items()}


def kept_positions(
    parts: Sequence[str],
    kinds: Mapping[int, int],
    scores: Mapping[int, float],
    length: int,
    prompt: int,
    boundary: int,
) -> set[int]:
    """What stays of the positions in `kinds`, with shares of three tenths of what lies behind the boundary."""
    kept = {j for j in kinds if j < boundary or j < 4 or kinds[j] & SPECIAL}
    if "punct" in parts:
        kept |= {j for j in kinds if kinds[j] & PUNCT}
    if "local" in parts:
        kept |= {j for j in kinds if length - j <= 3 * (prompt - boundary) // 10}
    if "frequent" in parts:
        rest = sorted(kinds.keys() - kept, key=lambda j: (-scores[j], j))
        kept |= set(rest[: 3 * (length - boundary) // 10])
    return kept


def total_variation(row: Sequence[float], kept: set[int]) -> float:
    """Half the sum of differences between a row and the softmax over kept columns alone."""
    mass = math.fsum(weight for j, weight in enumerate(row) if j in kept)
    if mass == 0:
        return 1.0
    return 0.5 * math.fsum(
        abs(weight - (weight / mass if j in kept else 0.0)) for j, weight in enumerate(row)
    )


def recovered_mass(rows: Matrix, kinds: Mapping[int, int], parts: Sequence[str], boundary: int) -> float:
    """1 - the mean distance; each row has a window of its own, and all else is what the prompt's end keeps."""
    n, scores = len(rows[-1]), mean_attention(rows)
    distances = list[float]()
    for row in rows:
        kept = kept_positions(parts, kinds, scores, n, n, boundary)
        if "local" in parts:
            window = {j for j in kinds if len(row) - j <= 3 * (n - boundary) // 10}
            last = {j for j in kinds if n - j <= 3 * (n - boundary) // 10}
            others = kept_positions(
                [p for p in parts if p not in ("local", "frequent")], kinds, {}, n, n, boundary
            )
            kept = others | (kept - last) | window
        distances.append(total_variation(row, kept))
    return 1 - math.fsum(distances) / len(distances)


def choose_policy(masses: Sequence[float], threshold: float) -> int:
    """The cheapest policy that is within the threshold, 4 if none is."""
    if threshold == 1:
        return 4
    return next((policy for policy, mass in enumerate(masses) if 1 - mass <= 1 - threshold), 4)
