"""The basis of a codec: products and sums stay, and channels that stick out no longer cost the others their steps."""

from __future__ import annotations

import numpy as np
import pytest

from engine.calibration.channel_factors import fit_factors
from engine.calibration.fitting import LayerSample
from kvcache.codecs.basis import Basis
from kvcache.codecs.calibration import FACTORED_NAMES
from kvcache.codecs.codec_id import parse_codec_id
from kvcache.codecs.rotation import rotate_rows
from tests.unit.codecs.sample_codecs import HEAD_DIM, make_codec

PAIRS = HEAD_DIM // 2
FREQUENCIES = 10000.0 ** -(np.arange(PAIRS) / PAIRS)
TOKENS = 256


def make_factors(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.exp2(rng.uniform(-4, 4, PAIRS)).astype(np.float32)
    return np.tile(pairs, 2), np.exp2(rng.uniform(-4, 4, HEAD_DIM)).astype(np.float32)


@pytest.mark.parametrize("seed", [None, 3])
def test_products_and_sums_are_those_of_the_model(seed: int | None) -> None:
    rng = np.random.default_rng(0)
    basis = Basis(*make_factors(rng), seed)
    queries, keys, values, weights = rng.standard_normal((4, 8, HEAD_DIM)).astype(np.float32)
    scores = basis.match_queries(queries) @ basis.store_keys(keys).T
    assert np.allclose(scores, queries @ keys.T, atol=1e-4)
    mixed = weights[:, :8] @ basis.store_values(values)
    assert np.allclose(basis.restore_values(mixed), weights[:, :8] @ values, atol=1e-4)
    assert np.allclose(basis.restore_keys(basis.store_keys(keys)), keys, atol=1e-5)


def test_factors_of_keys_commute_with_rotation() -> None:
    rng = np.random.default_rng(1)
    factors, _ = make_factors(rng)
    keys, at = rng.standard_normal((9, HEAD_DIM)).astype(np.float32), np.arange(9) * 100
    first = rotate_rows(keys * factors, at, FREQUENCIES)
    assert np.allclose(first, rotate_rows(keys, at, FREQUENCIES) * factors, rtol=1e-5, atol=1e-5)


def draw_sample(outliers: bool) -> LayerSample:
    """Keys and values of two heads; with a rotary pair and some values that stick out, and gradients that fit them."""
    rng = np.random.default_rng(2)
    keys, values = rng.standard_normal((2, TOKENS, 2, HEAD_DIM)).astype(np.float32)
    fisher = np.ones((2, TOKENS, 2, HEAD_DIM), np.float32)
    if outliers:
        for channel, rows, side in ((5, keys, 0), (5 + PAIRS, keys, 0), (7, values, 1)):
            rows[:, :, channel] *= 16
            fisher[side, :, :, channel] /= 256
    return LayerSample(*(one.reshape(TOKENS, -1) for one in (keys, values, *fisher)))


def test_factors_are_found_where_channels_stick_out_and_nowhere_else() -> None:
    ids = [parse_codec_id(name) for name in FACTORED_NAMES]
    positions = np.arange(1, TOKENS + 1)
    for plain in fit_factors(draw_sample(False), positions, FREQUENCIES, ids).values():
        for factors in (plain.factors.keys, plain.factors.values):
            assert 0.5 < factors.min() <= factors.max() < 2, "only what chance makes of so few tokens"
    found = fit_factors(draw_sample(True), positions, FREQUENCIES, ids)
    for one in found.values():
        keys, values = one.factors.keys.reshape(2, 2, PAIRS), one.factors.values.reshape(2, HEAD_DIM)
        assert np.array_equal(keys[:, 0], keys[:, 1]), "a rotary pair has one factor"
        assert (np.median(keys[:, 0], axis=1) > 2 * keys[:, 0, 5]).all()
        assert (np.median(values, axis=1) > 2 * values[:, 7]).all()


@pytest.mark.parametrize("name", ["int4", "tq4"])
def test_factors_that_are_found_lower_the_error(name: str) -> None:
    """To that of rows in which nothing sticks out, nearly."""
    errors = []
    for outliers in (True, False):
        sample = draw_sample(outliers)
        found = fit_factors(sample, np.arange(1, TOKENS + 1), FREQUENCIES, [parse_codec_id(name)])[
            name
        ].factors
        codec = make_codec(name)
        basis = Basis(found.keys[:HEAD_DIM], found.values[:HEAD_DIM], codec.basis.seed)
        for one in (codec.basis, basis):
            rows = sample.values[:, :HEAD_DIM]
            coded = one.restore_values(codec.round_rows("value", one.store_values(rows)))  # type: ignore[attr-defined]
            errors.append(float((np.square(coded - rows) * sample.value_fisher[:, :HEAD_DIM]).mean()))
    blind, fitted, plain, _ = errors
    assert fitted < 1.3 * plain < 0.3 * blind
