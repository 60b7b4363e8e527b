"""The rule `ada`: the KV heads of a layer compete for what the last rows of a prompt look at.

After Ada-KV (Feng et al. 2024, arXiv 2407.11550), whose heads share a budget, and SnapKV (Li et al. 2024, arXiv
2404.14469), which pools scores over neighbours. Here no budget is given: a layer keeps the fewest rows of all its heads
together that recover the threshold's share of the attention of the last rows, on average over rows and heads. In the
answer the prompt's rows stay, and rows of the answer compete for the share that the layer kept of its prompt.

A row's score is the mean attention of the last rows that see it, the largest among its neighbours within three tokens.
Scores are counted in bins of about 3 %, and whole bins stay or go: so heads on several ranks compete by exchanging
counts (`LayerTally`), and what stays depends neither on their order nor on how ranks split a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.eviction.policies import FIRST_TOKENS

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
# The bin of each row's score; or `STAYS`, or `GOES` for a row that cannot be seen any more.
Marks = NDArray[np.int16]

# The newest tokens of a prompt, which all heads keep.
LAST_TOKENS = 32
# A row takes the largest score of so many tokens before it, itself and as many behind it.
POOLED_SIDE = 3
# Scores are at most 1. Those below 2^-32 share a bin.
_OCTAVES, _BITS = 32, 5
NUM_BINS = (_OCTAVES << _BITS) + 1
STAYS, GOES = NUM_BINS, -1
# Room for the error of a sum of shares before it is rounded down.
_SLACK = 1e-6


def pool_scores(scores: Floats) -> Floats:
    """The largest score among each row and its neighbours, [n]."""
    padded = np.pad(scores, POOLED_SIDE)
    pooled: Floats = np.lib.stride_tricks.sliding_window_view(padded, 2 * POOLED_SIDE + 1).max(axis=-1)
    return pooled


def bin_scores(scores: Floats) -> Marks:
    """The bin of each score, [n]; higher bins have higher scores. One that is not a number is in the highest.

    A bin is the exponent of a float32 and the first five bits of its fraction.
    """
    steps = (np.asarray(scores, np.float32).view(np.int32) >> (23 - _BITS)) - ((127 - _OCTAVES) << _BITS)
    bins: Marks = np.clip(steps, 0, NUM_BINS - 1).astype(np.int16)
    return bins


def mark_prompt(scores: Floats, length: int, boundary: int, visible: Bools) -> Marks:
    """The marks of a head's rows at the end of a prompt of `length` tokens, [length].

    Args:
        scores: mean attention to each token.
        length: of the prompt.
        boundary: positions below it stay.
        visible: what later tokens can see (`kvcache.eviction.policies.select_visible`).
    """
    positions = np.arange(length)
    marks = bin_scores(pool_scores(scores))
    marks[(positions < max(boundary, FIRST_TOKENS)) | (positions >= length - LAST_TOKENS)] = STAYS
    marks[~visible] = GOES
    return marks


def mark_answer(
    scores: Floats, positions: NDArray[np.int64], prompt_tokens: int, length: int, visible: Bools
) -> Marks:
    """The marks of the rows that a head still has at a later point, at `length` tokens, [n].

    Rows of the prompt stay, and the newest 64.
    """
    marks = bin_scores(pool_scores(scores))
    marks[(positions < prompt_tokens) | (positions >= length - 64)] = STAYS
    marks[~visible] = GOES
    return marks


class LayerTally:
    """What the heads of each layer have, as ranks exchange it: [layers, 2, NUM_BINS + 1] float64.

    By bin, the rows that compete and their share of the attention. At the end of a line, the number of heads, and what
    needs no competition: the attention of rows that stay or cannot be seen, or in the answer the rows that may stay.
    """

    def __init__(self, layers: int, counts: Doubles | None = None) -> None:
        self.counts = np.zeros((layers, 2, NUM_BINS + 1)) if counts is None else counts

    @classmethod
    def decode(cls, data: bytes) -> LayerTally:
        """What `encode` made. Raises ValueError if it is none."""
        counts = np.frombuffer(data, np.float64).reshape(-1, 2, NUM_BINS + 1)
        return cls(len(counts), counts)

    def encode(self) -> bytes:
        """For `decode`."""
        return self.counts.tobytes()

    def add_prompt_head(self, layer: int, marks: Marks, masses: Doubles) -> None:
        """Count a head at the end of a prompt; `masses` are the rows' shares of its attention, [n]."""
        competes = (marks >= 0) & (marks < NUM_BINS)
        self._add(layer, marks[competes], masses[competes], float(masses[~competes].sum()))

    def add_answer_head(self, layer: int, marks: Marks, room: float) -> None:
        """Count a head at a point of the answer, which brings `room` rows that may stay."""
        bins = marks[(marks >= 0) & (marks < NUM_BINS)]
        self._add(layer, bins, np.zeros(len(bins)), room)

    def _add(self, layer: int, bins: Marks, masses: Doubles, rest: float) -> None:
        self.counts[layer, 0, :NUM_BINS] += np.bincount(bins, minlength=NUM_BINS)
        self.counts[layer, 1, :NUM_BINS] += np.bincount(bins, masses, NUM_BINS)
        self.counts[layer, :, NUM_BINS] += 1, rest

    def cut_prompt(self, threshold: float) -> list[int]:
        """The lowest bin of each layer that stays, so that the fewest rows recover the threshold; 0: all stay."""
        cuts = list[int]()
        for (_, mass), need in zip(self.counts, self._needs(threshold), strict=True):
            enough = need <= np.cumsum(mass[NUM_BINS - 1 :: -1])
            found = NUM_BINS - 1 - int(enough.argmax()) if enough.any() else 0
            cuts.append(NUM_BINS if need <= 0 else found)
        return cuts

    def _needs(self, threshold: float) -> Doubles:
        """The attention that competing rows must recover in each layer."""
        needs: Doubles = threshold * self.counts[:, 0, NUM_BINS] - self.counts[:, 1, NUM_BINS]
        return needs

    def cut_answer(self) -> list[int]:
        """The lowest bin of each layer that stays, so that no more rows stay than may."""
        rows = np.cumsum(self.counts[:, 0, NUM_BINS - 1 :: -1], axis=1)
        fitting = rows <= np.floor(self.counts[:, 1, NUM_BINS:] + _SLACK)
        return [NUM_BINS - int(count) for count in fitting.sum(axis=1)]


def add_tallies(tallies: Sequence[LayerTally], starts: Sequence[int], layers: int) -> LayerTally:
    """The tally of a whole model from those of its ranks, whose first layers are `starts`."""
    whole = LayerTally(layers)
    for tally, start in zip(tallies, starts, strict=True):
        whole.counts[start : start + len(tally.counts)] += tally.counts
    return whole
