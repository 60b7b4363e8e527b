"""Limits the time that slow grammar masks take in a step, so that they do not delay all other sequences (pure).

A mask of a complex grammar can take 20 ms per row. A step samples only some of the slow rows; the others wait for a
later step, in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.protocols import SamplingState

# A row whose mask takes more seconds than this counts as slow.
SLOW_MASK_S = 0.002
# Seconds that the slow rows of one step may take together for their masks.
MASK_BUDGET_S = 0.03


class MaskBudget:
    """Chooses the slow rows of each step; remembers how many steps in a row each sequence was left out."""

    def __init__(self) -> None:
        self._left_out = Counter[str]()

    def choose_left_out(self, rows: Iterable[tuple[str, SamplingState]]) -> set[str]:
        """Keys of the sequences that the coming step does not sample, among all `rows` that it could sample."""
        slow = [(key, sampling.cost_s) for key, sampling in rows if sampling.cost_s > SLOW_MASK_S]
        left_out = set[str]()
        if not slow and not self._left_out:
            return left_out
        spent_s, before = 0.0, self._left_out
        self._left_out = Counter()
        for key, cost_s in sorted(slow, key=lambda item: -before[item[0]]):
            if spent_s and spent_s + cost_s > MASK_BUDGET_S:
                self._left_out[key] = before[key] + 1
                left_out.add(key)
            else:
                spent_s += cost_s
        return left_out
