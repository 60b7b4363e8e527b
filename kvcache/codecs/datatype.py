"""KVQuant's numbers: normalised values, non-uniform datatypes, ranges of values (arXiv 2401.18079, section 3).

All arithmetic is float32, one rounding per operation, in the order in which it is written here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.page import Bytes, Floats, Halves, to_half

# The smallest normal float16. A channel whose values are all equal gets this scale.
MIN_SCALE = np.float16(2.0**-14)
# A channel's factor is at most this, and at least one over it.
MAX_FACTOR = 2.0**12


@dataclass(frozen=True, slots=True)
class Datatype:
    """A datatype of 2^b numbers in −1 to 1, ascending.

    `centroids` decide which code a number gets, `levels` what the code stands for. They differ only by Q-Norm.
    """

    centroids: Floats
    levels: Floats


@dataclass(frozen=True, slots=True)
class LayerConstants:
    """What calibration found for one layer and codec: a scale and a zero point per key channel, and two datatypes.

    `key_scales` and `key_zeros` are [KV heads · head_dim] float16, heads one after the other.
    """

    key_scales: Halves
    key_zeros: Halves
    keys: Datatype
    values: Datatype


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """What calibration found for one layer and a codec without constants: a factor per channel of keys and of values,
    [KV heads · head_dim] float32 (`kvcache.codecs.basis`).
    """

    keys: Floats
    values: Floats


def assign_codes(numbers: Floats, centroids: Floats) -> Bytes:
    """Code of the nearest centroid of each number; between two equally near ones, the lower code."""
    midpoints = (centroids[:-1] + centroids[1:]) * np.float32(0.5)
    return np.searchsorted(midpoints, numbers, side="left").astype(np.uint8)


def normalise_keys(keys: Floats, scales: Halves, zeros: Halves) -> Floats:
    """(key − zero) / scale per channel, [tokens, channels]. Beyond −1 to 1 it is an outlier."""
    away = keys - zeros.astype(np.float32)
    return np.divide(away, scales.astype(np.float32), dtype=np.float32)


def normalise_values(values: Floats, scales: Halves, zeros: Halves) -> Floats:
    """(value − zero) / scale per token, 0 where the scale is 0. Values are [tokens, group], the others [tokens]."""
    scale = scales.astype(np.float32)[:, None]
    away = values - zeros.astype(np.float32)[:, None]
    numbers: Floats = np.divide(away, scale, out=np.zeros_like(away), where=scale > 0)
    return numbers


def value_ranges(values: Floats, per_side: int) -> tuple[Halves, Halves, NDArray[np.intp]]:
    """Scale and zero point of each token's inliers, and which of its values are outliers.

    Outliers are the `per_side` smallest and the `per_side` largest values; among equal values, the one with the lower
    index counts as the smaller.

    Args:
        values: [tokens, group].
        per_side: outliers at each end; 0 for none.

    Returns:
        scales and zeros [tokens], and the outliers' places [tokens, 2 · per_side], ascending.
    """
    order = np.argsort(values, axis=-1, kind="stable")
    low = np.take_along_axis(values, order[:, per_side, None], axis=-1)[:, 0]
    high = np.take_along_axis(values, order[:, -1 - per_side, None], axis=-1)[:, 0]
    ends = np.concatenate([order[:, :per_side], order[:, order.shape[1] - per_side :]], axis=-1)
    return *half_range(low, high), np.sort(ends, axis=-1)


def half_range(low: Floats, high: Floats) -> tuple[Halves, Halves]:
    """Scale and zero point that map `low` to −1 and `high` to 1, rounded to float16."""
    half = np.float32(0.5)
    return to_half((high - low) * half), to_half((high + low) * half)
