"""The kernels that judge and move rows, beside NumPy's way of doing the same."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cpu.eviction.row_kernels import copy_rows, score_rows
from kvcache.codecs.calibration import CalibratedModel
from kvcache.eviction.kept_rows import FRAME_TOKENS
from kvcache.eviction.zap import NUM_THRESHOLDS, Angles, KeepSurrogate


@pytest.mark.parametrize("width", [2, 16, 32, 64, 128])
@pytest.mark.parametrize("rows", [0, 1, 63, 200])
def test_scores_are_those_of_the_slow_way(width: int, rows: int) -> None:
    rng = np.random.default_rng(width + rows)
    weights = rng.standard_normal((2, 3, 2 * width + 3)).astype(np.float32)
    surrogate = KeepSurrogate(
        CalibratedModel("f" * 16, 2, 3, width), weights, np.zeros(NUM_THRESHOLDS, np.float32)
    )
    keys, values = rng.standard_normal((2, rows, width)).astype(np.float32)
    if rows:
        values[-1] = 0
    angles = Angles(np.arange(7, 307), 10000.0 ** -np.linspace(0, 1, width // 2))
    found = score_rows(keys, values, angles, weights[1, 2].astype(np.float64))
    np.testing.assert_allclose(found, surrogate.score_rows(1, 2, keys, values, angles), rtol=0, atol=1e-10)


def test_a_score_is_the_same_to_the_bit_whatever_is_beside_it() -> None:
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 200, 32)).astype(np.float32)
    weights, angles = rng.standard_normal(67), Angles(np.arange(200), 1 / np.arange(1, 17))
    every = score_rows(keys, values, angles, weights)
    for first in (1, 100, 199):
        assert np.array_equal(score_rows(keys[first:], values[first:], angles, weights), every[first:])


@pytest.mark.parametrize("rows", [0, 1, FRAME_TOKENS, FRAME_TOKENS + 1, 100])
def test_rows_are_copied_into_frames_key_by_key(rows: int) -> None:
    rng = np.random.default_rng(rows)
    pool, first = rng.standard_normal((500, 8)).astype(np.float32), 3
    places = rng.integers(0, 500, (rows, 2))
    frames = np.zeros((12 * 2 * FRAME_TOKENS, 8), np.float32)
    copy_rows(pool, places, first, frames)
    expected = np.zeros((12, 2, FRAME_TOKENS, 8), np.float32)
    for n, (key, value) in enumerate(places):
        frame, place = divmod(n, FRAME_TOKENS)
        expected[first + frame, :, place] = pool[key], pool[value]
    assert np.array_equal(frames.reshape(expected.shape), expected)
