"""Calibration of KVQuant, as arithmetic on arrays: ranges of keys, weighted datatypes, Q-Norm.

What a model computes for calibration text comes in as arrays [tokens, channels]: keys before rotation and values, and
for each of them the squared gradient of the loss (the diagonal of the Fisher information). First tokens are left out by
the caller (`kvcache.codecs.page`). Sections are those of KVQuant, arXiv 2401.18079.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.datatype import (
    MIN_SCALE,
    Datatype,
    LayerConstants,
    assign_codes,
    half_range,
    normalise_keys,
    normalise_values,
    value_ranges,
)
from kvcache.codecs.page import Floats, Halves
from kvcache.codecs.storage import outliers_per_side

Doubles = NDArray[np.float64]
Weigh = Callable[[Floats, Floats], Floats]

# Share of a channel's keys that are outliers on each side: 1 % in all (KVQuant, section 3.4).
OUTLIER_QUANTILE = 0.005
# Q-Norm is used for 2 bits only, since it helps only there.
QNORM_BITS = 2
# More points than this are gathered into this many cells.
MAX_CELLS = 1 << 14
# The exact search runs over at most this many cells.
MAX_EXACT_CELLS = 512
MAX_ITERATIONS = 100


@dataclass(frozen=True, slots=True)
class LayerSample:
    """What one layer computed for calibration text; all arrays are [tokens, KV heads · head_dim] float32.

    Fisher weights are squared gradients of the loss; arrays of ones weigh all numbers alike.
    """

    keys: Floats
    values: Floats
    key_fisher: Floats
    value_fisher: Floats


def weigh_errors(fisher: Floats, scales: Floats) -> Floats:
    """What an error of a normalised number costs: squared gradient times squared scale (section 3.3, equation 7)."""
    return fisher * np.square(scales)


def fit_layer(
    sample: LayerSample, codec_ids: Iterable[CodecId], group: int, weigh: Weigh = weigh_errors
) -> dict[str, LayerConstants]:
    """Constants of one layer for each codec, by codec name.

    Args:
        sample: without first tokens.
        codec_ids: `nuq*` codecs; only their names matter here.
        group: numbers that share a value's scale; it divides the channels.
        weigh: weights of numbers from their squared gradients and scales, which broadcast.
    """
    ids, found = list(codec_ids), dict[str, LayerConstants]()
    for has_outliers in (False, True):
        # Codecs that differ in their bits alone code the same numbers.
        alike = [one for one in ids if one.has_outliers == has_outliers]
        if alike:
            constants = _fit_codecs(sample, alike, group, weigh)
            found.update(zip((one.name for one in alike), constants, strict=True))
    return {one.name: found[one.name] for one in ids}


def _fit_codecs(
    sample: LayerSample, codec_ids: Sequence[CodecId], group: int, weigh: Weigh
) -> list[LayerConstants]:
    """Constants for codecs that all have outliers, or all none."""
    first, bits = codec_ids[0], [one.code_bits[0] for one in codec_ids]
    scales, zeros = fit_key_ranges(sample.keys, first.has_outliers)
    numbers = normalise_keys(sample.keys, scales, zeros)
    inliers = np.abs(numbers) <= 1
    if not first.has_outliers:
        numbers, inliers = np.clip(numbers, -1, 1), np.ones_like(inliers)
    weights = weigh(sample.key_fisher, scales.astype(np.float32))
    keys = fit_datatypes(numbers[inliers], weights[inliers], bits)

    grouped = sample.values.reshape(-1, group)
    value_scales, value_zeros, places = value_ranges(grouped, outliers_per_side(first, group))
    numbers = np.clip(normalise_values(grouped, value_scales, value_zeros), -1, 1)
    inliers = np.ones(grouped.shape, bool)
    np.put_along_axis(inliers, places, False, axis=-1)
    weights = weigh(sample.value_fisher.reshape(-1, group), value_scales.astype(np.float32)[:, None])
    values = fit_datatypes(numbers[inliers], weights[inliers], bits)
    return [LayerConstants(scales, zeros, *pair) for pair in zip(keys, values, strict=True)]


def fit_key_ranges(keys: Floats, outliers: bool) -> tuple[Halves, Halves]:
    """Scale and zero point per channel: the range of all its keys, or of all but 0.5 % at each end (section 3.4).

    Args:
        keys: [tokens, channels].
        outliers: whether keys beyond the range will be stored as outliers.
    """
    share = OUTLIER_QUANTILE if outliers else 0.0
    low, high = np.quantile(keys.astype(np.float64), [share, 1 - share], axis=0).astype(np.float32)
    scales, zeros = half_range(low, high)
    return np.maximum(scales, MIN_SCALE), zeros


def fit_datatypes(numbers: Floats, weights: Floats, bits: Sequence[int]) -> list[Datatype]:
    """The 2^b numbers with the least weighted square error for normalised inliers, for each b of `bits` (section 3.3,
    equation 7).

    Args:
        numbers: [n] in −1 to 1.
        weights: [n], squared gradient times squared scale.
        bits: of codes. At 2 bits, levels are corrected by Q-Norm.
    """
    weights = weights if weights.any() else np.ones_like(weights)
    found = []
    for one, clusters in zip(bits, weighted_kmeans(numbers, weights, [1 << b for b in bits]), strict=True):
        centroids = clusters.astype(np.float32)
        levels = correct_levels(numbers, weights, centroids) if one == QNORM_BITS else centroids.copy()
        found.append(Datatype(centroids, levels))
    return found


def correct_levels(numbers: Floats, weights: Floats, centroids: Floats) -> Floats:
    """Q-Norm: stretches and shifts levels so that coded numbers have the mean and deviation of the numbers (KVQuant,
    arXiv v3). Both are weighted as the centroids are: without weights the levels would be pulled to where errors are
    cheap."""
    coded = centroids[assign_codes(numbers, centroids)]
    mean, spread = _weigh_moments(numbers, weights)
    coded_mean, coded_spread = _weigh_moments(coded, weights)
    if coded_spread == 0:
        return centroids.copy()
    levels: Floats = ((centroids - coded_mean) * (spread / coded_spread) + mean).astype(np.float32)
    return levels


def _weigh_moments(numbers: Floats, weights: Floats) -> tuple[float, float]:
    """Weighted mean and standard deviation."""
    total = weights.sum(dtype=np.float64)
    mean = np.multiply(numbers, weights, dtype=np.float64).sum() / total
    return float(mean), float(np.sqrt((np.square(numbers - mean) * weights).sum() / total))


def weighted_kmeans(
    points: NDArray[np.floating], weights: NDArray[np.floating], counts: Sequence[int]
) -> list[Doubles]:
    """For each of `counts` as many centroids of weighted points on a line, ascending, with the least sum of
    weight · distance².

    With up to 512 points the result is the optimum; beyond that points are gathered into cells, the optimum over cells
    is found, and Lloyd's iteration over finer cells improves it. If there are fewer points than centroids,
    the last centroid is repeated. If no point weighs anything, all weigh the same.

    Raises:
        ValueError: there are no points, or a weight is negative or not finite.
    """
    if not len(points) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("k-means needs points, and weights that are finite and not negative")
    weights = weights if weights.any() else np.ones_like(weights)
    cells, mass = _gather_cells(points.astype(np.float64), weights.astype(np.float64), MAX_CELLS)
    coarse = _gather_cells(cells, mass, MAX_EXACT_CELLS)
    return [_improve_centroids(cells, mass, _split_exactly(*coarse, count)) for count in counts]


def _improve_centroids(cells: Doubles, mass: Doubles, centroids: Doubles) -> Doubles:
    """The centroids after Lloyd's iteration over cells."""
    total, moment = _running_sums(mass), _running_sums(mass * cells)
    for _ in range(MAX_ITERATIONS):
        cuts = np.searchsorted(cells, (centroids[:-1] + centroids[1:]) / 2)
        ends = np.concatenate([[0], cuts, [len(cells)]])
        share = np.diff(total[ends])
        better = np.divide(np.diff(moment[ends]), share, out=centroids.copy(), where=share > 0)
        if np.array_equal(better, centroids):
            break
        centroids = better
    return np.sort(centroids)


def _gather_cells(points: Doubles, weights: Doubles, limit: int) -> tuple[Doubles, Doubles]:
    """At most `limit` points, ascending, with their weights: equal points together, or all within an equal cell."""
    low, high = points.min(), points.max()
    if len(points) <= MAX_CELLS:
        places, which = np.unique(points, return_inverse=True)
    if len(points) > MAX_CELLS or len(places) > limit:
        scale = limit / (high - low) if high > low else 0.0
        which = np.minimum(((points - low) * scale).astype(np.intp), limit - 1)
    mass: Doubles = np.bincount(which, weights).astype(np.float64)
    moment = np.bincount(which, weights * points)
    held = mass > 0
    return moment[held] / mass[held], mass[held]


def _split_exactly(cells: Doubles, mass: Doubles, count: int) -> Doubles:
    """Optimal centroids, [count], by dynamic programming over where each cluster ends; the last one may repeat."""
    total, moment, square = (_running_sums(mass * cells**power) for power in (0, 1, 2))
    start, end = np.arange(len(cells))[:, None], np.arange(1, len(cells) + 1)[None]
    share, first = total[end] - total[start], moment[end] - moment[start]
    valid = start < end
    spread = np.divide(first**2, share, out=np.zeros_like(first), where=valid)
    cost = np.where(valid, np.maximum(square[end] - square[start] - spread, 0), np.inf)
    best, cuts = cost[0], []
    for _ in range(1, min(count, len(cells))):
        together = np.concatenate([[np.inf], best[:-1]])[:, None] + cost
        cuts.append(together.argmin(axis=0))
        best = together.min(axis=0)
    ends = [len(cells)]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1] - 1]))
    edges = np.array([0, *reversed(ends)])
    centroids = np.diff(moment[edges]) / np.diff(total[edges])
    return np.concatenate([centroids, np.repeat(centroids[-1:], count - len(centroids))])


def _running_sums(numbers: Doubles) -> Doubles:
    return np.concatenate([[0.0], np.cumsum(numbers)])
