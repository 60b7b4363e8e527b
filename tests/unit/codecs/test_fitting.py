"""Fitting: the optimum against brute force, ranges, Q-Norm, and what the weights and pre-rotation keys are good for."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.calibration.fitting import (
    correct_levels,
    fit_datatypes,
    fit_key_ranges,
    fit_layer,
    weighted_kmeans,
)
from kvcache.codecs.codec_id import parse_codec_id
from kvcache.codecs.datatype import MIN_SCALE, assign_codes, normalise_keys
from kvcache.codecs.rotation import rotate_rows
from tests.unit.codecs.oracles import Floats, random_sample

Doubles = NDArray[np.float64]


def loss(points: Doubles, weights: Doubles, centroids: Doubles) -> float:
    return float((weights * np.square(points[:, None] - centroids).min(axis=1)).sum())


def brute_force(points: Doubles, weights: Doubles, count: int) -> float:
    """Least loss over all ways to cut the sorted points into `count` runs."""
    order = np.argsort(points)
    points, weights = points[order], weights[order]
    best = np.inf
    for cuts in combinations(range(1, len(points)), count - 1):
        total = 0.0
        for run in np.split(np.arange(len(points)), cuts):
            if weights[run].sum() > 0:
                centre = np.average(points[run], weights=weights[run])
                total += float((weights[run] * np.square(points[run] - centre)).sum())
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_kmeans_finds_the_optimum(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    points, weights = rng.standard_normal(11), rng.exponential(1, 11)
    weights[rng.integers(11)] = 0
    [centroids] = weighted_kmeans(points, weights, [count])
    assert centroids.shape == (count,) and (np.diff(centroids) >= 0).all()
    assert loss(points, weights, centroids) == pytest.approx(brute_force(points, weights, count), abs=1e-12)


def test_kmeans_of_many_points_is_close_to_lloyd_max() -> None:
    """For a million Gaussian numbers the 8 best levels lose 0.03454 (Max, 1960, table I)."""
    points = np.random.default_rng(0).standard_normal(1_000_000)
    [centroids] = weighted_kmeans(points, np.ones_like(points), [8])
    assert loss(points, np.ones_like(points), centroids) / len(points) == pytest.approx(0.03454, rel=0.01)


def test_kmeans_with_fewer_points_than_centroids_and_without_weights() -> None:
    points = np.array([0.5, -0.5, 0.5])
    [found] = weighted_kmeans(points, np.zeros(3), [4])
    assert found.tolist() == [-0.5, 0.5, 0.5, 0.5]
    for bad in (np.array([1.0, -1, 1]), np.array([1.0, np.nan, 1]), np.array([1.0, np.inf, 1])):
        with pytest.raises(ValueError, match="finite and not negative"):
            weighted_kmeans(points, bad, [2])
    with pytest.raises(ValueError, match="needs points"):
        weighted_kmeans(points[:0], points[:0], [2])


def test_ranges_of_keys_are_quantiles_or_extremes() -> None:
    keys = np.linspace(-1, 3, 1001, dtype=np.float32)[:, None].repeat(3, axis=1)
    keys[:, 1] = 7
    keys[0, 2], keys[-1, 2] = -500, 500
    scales, zeros = fit_key_ranges(keys, outliers=True)
    assert np.allclose(scales, [1.98, float(MIN_SCALE), 1.98], rtol=2e-3) and np.allclose(
        zeros, [1, 7, 1], rtol=2e-3
    )
    outside = np.abs(normalise_keys(keys, scales, zeros)) > 1
    assert (outside.mean(axis=0) <= 0.012).all()
    scales, _ = fit_key_ranges(keys, outliers=False)
    assert np.allclose(scales, [2, float(MIN_SCALE), 500], rtol=1e-3)


def test_weights_move_levels_to_where_errors_cost() -> None:
    numbers = np.linspace(-1, 1, 4001, dtype=np.float32)
    [flat] = fit_datatypes(numbers, np.ones_like(numbers), [3])
    [heavy] = fit_datatypes(numbers, np.where(numbers > 0.5, np.float32(100), np.float32(1)), [3])
    assert np.allclose(flat.centroids, np.linspace(-0.875, 0.875, 8), atol=2e-3)
    assert (heavy.centroids > 0.5).sum() > (flat.centroids > 0.5).sum()


def test_q_norm_restores_mean_and_deviation() -> None:
    numbers = np.clip(np.random.default_rng(0).standard_normal(20_000) / 3 + 0.1, -1, 1).astype(np.float32)
    [datatype] = fit_datatypes(numbers, np.ones_like(numbers), [2])
    codes = assign_codes(numbers, datatype.centroids)
    assert datatype.centroids[codes].std() < 0.98 * numbers.std()
    expanded = datatype.levels[codes]
    assert expanded.std() == pytest.approx(numbers.std(), rel=1e-4)
    assert expanded.mean() == pytest.approx(numbers.mean(), abs=1e-5)
    [three_bits] = fit_datatypes(numbers, np.ones_like(numbers), [3])
    assert np.array_equal(three_bits.levels, three_bits.centroids)
    constant = np.full(5, 0.5, np.float32)
    assert correct_levels(constant, constant, constant).tolist() == constant.tolist()


def test_q_norm_weighs_as_the_centroids_do() -> None:
    rng = np.random.default_rng(1)
    numbers = rng.uniform(-1, 1, 5000).astype(np.float32)
    weights = rng.exponential(1, 5000).astype(np.float32) * (numbers > 0)
    [datatype] = fit_datatypes(numbers, weights, [2])
    expanded = datatype.levels[assign_codes(numbers, datatype.centroids)]
    for moment in (1, 2):
        expected = np.average(numbers.astype(np.float64) ** moment, weights=weights)
        found = np.average(expanded.astype(np.float64) ** moment, weights=weights)
        assert found == pytest.approx(expected, rel=1e-4)
    [unweighted] = fit_datatypes(numbers, np.zeros_like(weights), [2])
    assert np.isfinite(unweighted.levels).all()


def test_a_layer_is_fitted_the_same_way_twice() -> None:
    sample = random_sample(np.random.default_rng(2), 200, 2, 16)
    ids = [parse_codec_id(name) for name in ("nuq4-1%", "nuq2")]
    first, second = fit_layer(sample, ids, 32), fit_layer(sample, ids, 16)
    assert first.keys() == {"nuq4-1%", "nuq2"}
    for name, one in fit_layer(sample, ids, 32).items():
        assert one.keys.centroids.tobytes() == first[name].keys.centroids.tobytes()
        assert len(one.values.levels) == (16 if name == "nuq4-1%" else 4)
        assert np.abs(one.keys.centroids).max() <= 1 and np.abs(one.values.centroids).max() <= 1
    assert not np.array_equal(first["nuq2"].values.centroids, second["nuq2"].values.centroids)


def test_keys_are_easier_to_code_before_rotation() -> None:
    """Channels with means of 8 deviations, 2,048 positions: rotation smears each mean over a circle."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((2048, 16)).astype(np.float32) + rng.choice([-8, 8], 16).astype(np.float32)
    after = rotate_rows(keys, np.arange(2048), 10000.0 ** -(np.arange(8) / 8))

    def error(keys: Floats) -> float:
        scales, zeros = fit_key_ranges(keys, outliers=False)
        numbers = np.clip(normalise_keys(keys, scales, zeros), -1, 1)
        [datatype] = fit_datatypes(numbers.reshape(-1), np.ones(numbers.size, np.float32), [3])
        coded = datatype.levels[assign_codes(numbers, datatype.centroids)]
        return float(np.square((coded - numbers) * scales.astype(np.float32)).mean())

    assert error(keys) <= 0.25 * error(after)
