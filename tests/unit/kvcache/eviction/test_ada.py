"""Heads that compete: bins, marks and cuts against the definitions, written out on lists."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.eviction.ada import (
    GOES,
    LAST_TOKENS,
    NUM_BINS,
    STAYS,
    LayerTally,
    Marks,
    add_tallies,
    bin_scores,
    mark_answer,
    mark_prompt,
    pool_scores,
)


def test_bins_ascend_with_scores_and_are_a_thirty_second_of_an_octave() -> None:
    scores = np.concatenate([[0.0, 1e-12], np.logspace(-9, 0, 3000), [1.0]]).astype(np.float32)
    bins = bin_scores(scores)
    assert (np.diff(bins) >= 0).all() and (bins[0], bins[-1]) == (0, NUM_BINS - 1)
    for score, found in zip(scores.tolist(), bins.tolist(), strict=True):
        exponent = math.floor(math.log2(score)) if score else -99
        step = int((Fraction(score) / Fraction(2) ** exponent - 1) * 32) if score else 0
        assert found == max(0, min(NUM_BINS - 1, (exponent + 32) * 32 + step))
    assert bin_scores(np.array([np.nan, 1.5], np.float32)).tolist() == [NUM_BINS - 1] * 2


def test_a_row_has_the_largest_score_of_its_neighbours() -> None:
    scores = np.random.default_rng(0).random(50).astype(np.float32)
    expected = [scores[max(0, i - 3) : i + 4].max() for i in range(50)]
    assert pool_scores(scores).tolist() == expected


def test_first_last_and_unseen_rows_do_not_compete() -> None:
    scores, seen = np.full(100, 0.01, np.float32), np.arange(100) >= 2
    marks = mark_prompt(scores, 100, 0, seen)
    assert (marks == GOES).nonzero()[0].tolist() == [0, 1]
    assert (marks == STAYS).nonzero()[0].tolist() == [2, 3, *range(100 - LAST_TOKENS, 100)]
    assert (mark_prompt(scores, 100, 64, seen) == STAYS)[2:64].all()
    positions = np.array([0, 5, 70, 90, 130, 150, 160, 200])
    later = mark_answer(scores[:8], positions, 80, 201, np.arange(8) > 0)
    assert later.tolist() == [GOES, STAYS, STAYS, *bin_scores(scores[:2]).tolist(), STAYS, STAYS, STAYS]


def random_layer(seed: int) -> tuple[list[Marks], list[NDArray[np.float64]]]:
    """Marks of three heads, with many equal ones, and the attention of their rows: 1 for each head."""
    rng = np.random.default_rng(seed)
    marks, masses = list[Marks](), list[NDArray[np.float64]]()
    for _ in range(3):
        one = rng.integers(200, 220, 60).astype(np.int16)
        one[:5], one[5:8] = STAYS, GOES
        mass = rng.random(60) ** 4
        marks.append(one)
        masses.append(mass / mass.sum())
    return marks, masses


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.75, 0.98, 1 - 1e-9])
def test_the_fewest_bins_that_recover_the_threshold_stay(seed: int, threshold: float) -> None:
    marks, masses = random_layer(seed)
    tally = LayerTally(1)
    for one, mass in zip(marks, masses, strict=True):
        tally.add_prompt_head(0, one, mass)
    [cut] = tally.cut_prompt(threshold)

    def recovered(lowest: int) -> float:
        """The mean of heads; rows that cannot be seen count as recovered, since nobody misses them."""
        return float(
            np.mean([mass[(m >= lowest) | (m == GOES)].sum() for m, mass in zip(marks, masses, strict=True)])
        )

    assert recovered(cut) >= threshold - 1e-12 or cut == 0
    higher = sorted({int(mark) for one in marks for mark in one if cut < mark})
    assert cut == STAYS or recovered(higher[0]) < threshold


@pytest.mark.parametrize("room", [0.0, 3.4, 20.0, 1e6])
def test_no_more_rows_of_an_answer_stay_than_may(room: float) -> None:
    marks, _ = random_layer(4)
    tally = LayerTally(1)
    for one in marks:
        tally.add_answer_head(0, one, room)
    [cut] = tally.cut_answer()
    kept = sum(int(((one >= cut) & (one < NUM_BINS)).sum()) for one in marks)
    assert kept <= 3 * room
    below = max((int(mark) for one in marks for mark in one if 0 <= mark < cut), default=None)
    if below is not None:
        assert sum(int(((one >= below) & (one < NUM_BINS)).sum()) for one in marks) > 3 * room


def test_ranks_cut_as_one_rank_does() -> None:
    """Two stages of two lanes each: lanes share layers, stages do not."""
    layers = [random_layer(seed) for seed in range(4)]
    whole = LayerTally(4)
    parts = [LayerTally(2) for _ in range(4)]
    for layer, (marks, masses) in enumerate(layers):
        for head, (one, mass) in enumerate(zip(marks, masses, strict=True)):
            whole.add_prompt_head(layer, one, mass)
            parts[layer // 2 * 2 + head % 2].add_prompt_head(layer % 2, one, mass)
    sent = [LayerTally.decode(part.encode()) for part in parts]
    merged = add_tallies(sent, [0, 0, 2, 2], 4)
    assert merged.cut_prompt(0.8) == whole.cut_prompt(0.8)
    assert merged.counts == pytest.approx(whole.counts)
    with pytest.raises(ValueError, match="reshape|size|buffer"):
        LayerTally.decode(b"123")


def test_attention_that_is_no_number_makes_a_layer_keep_everything() -> None:
    marks, masses = random_layer(1)
    masses[1][:] = np.nan
    marks[1][8:] = bin_scores(masses[1][8:].astype(np.float32))
    tally = LayerTally(1)
    for one, mass in zip(marks, masses, strict=True):
        tally.add_prompt_head(0, one, mass)
    assert tally.cut_prompt(0.5) == [0]
