"""Factors per channel: found where they lower the error, and sane where channels are dead."""

from __future__ import annotations

import numpy as np
import pytest

from engine.calibration.channel_factors import FactorFit, fit_factors, select_factors
from engine.calibration.fitting import LayerSample
from kvcache.codecs.codec_id import CodecId
from kvcache.codecs.datatype import MAX_FACTOR, LayerFactors

HEADS, WIDTH, TOKENS = 2, 16, 256
FREQUENCIES = 1e4 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))


def find(sizes: np.ndarray, name: str = "int4") -> LayerFactors:
    """Factors for rows whose channels have these sizes, [heads · width]."""
    rng = np.random.default_rng(3)
    keys, values = rng.standard_normal((2, TOKENS, HEADS * WIDTH)).astype(np.float32) * sizes.astype(
        np.float32
    )
    ones = np.ones_like(keys)
    sample = LayerSample(keys, values, ones, ones)
    return fit_factors(sample, np.arange(1, TOKENS + 1), FREQUENCIES, [CodecId(name)])[name].factors


def test_a_codec_gets_factors_only_where_they_lower_the_error_of_all_layers_enough() -> None:
    ones = np.ones(4, np.float32)
    factors = LayerFactors(2 * ones, ones)
    much, little = FactorFit(factors, 10.0, 5.0), FactorFit(factors, 10.0, 9.5)
    found = select_factors([{"int4": much, "tq4": little}, {"int4": little, "tq4": little}])
    assert found == {"int4": (factors, factors)} and select_factors([]) == {}


@pytest.mark.parametrize("name", ["int4", "int8", "tq4", "tq3"])
def test_a_channel_that_sticks_out_is_made_smaller_in_its_head_alone(name: str) -> None:
    sizes = np.ones(HEADS * WIDTH)
    sizes[[3, 3 + WIDTH // 2]] = 100
    found = find(sizes, name)
    for factors in (found.keys, found.values):
        assert (factors[[3, 11]] < 0.3 * np.delete(factors[:WIDTH], [3, 11]).min()).all()
        assert factors[WIDTH:].max() <= 3 * factors[WIDTH:].min(), "nothing sticks out there"
    pairs = found.keys.reshape(HEADS, 2, WIDTH // 2)
    assert np.array_equal(pairs[:, 0], pairs[:, 1])


@pytest.mark.parametrize("dead", [1, 4, 7, 8])
def test_dead_channels_leave_the_factors_of_others_alone(dead: int) -> None:
    """`dead` of the eight pairs of each head are always zero; one of the others sticks out."""
    sizes = np.ones((HEADS, 2, WIDTH // 2))
    sizes[:, :, 0] = 100
    sizes[:, :, WIDTH // 2 - dead :] = 0
    found = find(sizes.reshape(-1))
    for factors in (found.keys, found.values):
        assert (
            np.isfinite(factors).all() and (factors >= 1 / MAX_FACTOR).all() and (factors <= MAX_FACTOR).all()
        )
        pairs = factors.reshape(HEADS, 2, WIDTH // 2)
        assert (pairs[:, :, WIDTH // 2 - dead :] == 1).all()
        alive = pairs[:, :, : WIDTH // 2 - dead]
        assert alive.size == 0 or 0.3 < np.exp(np.log(alive).mean()) < 3, "as if there were no others"
        assert alive.shape[2] < 2 or (alive[:, :, 0] < 0.5 * alive[:, :, 1]).all()


def test_a_channel_that_hardly_moves_counts_as_if_it_moved_a_little() -> None:
    sizes = np.ones(HEADS * WIDTH)
    sizes[[3, 11]], sizes[[5, 13]] = 100, 1e-20
    found = find(sizes)
    for factors in (found.keys[:WIDTH], found.values[:WIDTH]):
        rest = np.delete(factors, [3, 5, 11, 13])
        assert (factors[[3, 11]] < 0.5 * rest.min()).all() and rest.max() < 30 * rest.min()
