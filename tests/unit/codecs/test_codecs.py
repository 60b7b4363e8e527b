"""Every codec: what a page expands to is what the paper's formula gives, to the bit, however the page was written."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from diptych.errors import ConfigError
from kvcache.codecs.codec_id import ROTATED, parse_codec_id
from kvcache.codecs.datatype import Datatype, LayerConstants, assign_codes
from kvcache.codecs.hadamard import (
    lloyd_max_levels,
    random_signs,
    rotate_heads,
    unrotate_heads,
)
from kvcache.codecs.nuq import NuqCodec
from kvcache.codecs.page import Codec, PageShape, restore_sink
from kvcache.codecs.registry import build_codec
from kvcache.codecs.turbo import fold_sum
from tests.unit.codecs import oracles
from tests.unit.codecs.oracles import Floats, outlier_rows
from tests.unit.codecs.sample_codecs import HEAD_DIM, HEADS, NAMES, NUQ, calibration, make_codec

OTHERS = tuple(name for name in NAMES if not name.startswith("nuq"))


def draw_rows(codec: Codec, seed: int = 1, tokens: int = 64) -> tuple[Floats, Floats]:
    return outlier_rows(np.random.default_rng(seed), tokens, codec.shape.heads, codec.shape.head_dim)


def blank_page(codec: Codec) -> NDArray[np.uint8]:
    return np.full(codec.page_bytes, 0xA5, np.uint8)


def encode(codec: Codec, keys: Floats, values: Floats) -> NDArray[np.uint8]:
    page = blank_page(codec)
    codec.encode_rows(keys, values, page)
    return page


@pytest.mark.parametrize("name", NUQ)
@pytest.mark.parametrize("shape", [(4, 32), (2, 64), (3, 8), (5, 64)])
def test_kvquant_is_the_formula_of_the_paper_to_the_bit(name: str, shape: tuple[int, int]) -> None:
    codec, width = make_codec(name, *shape), shape[0] * shape[1]
    constants = calibration(*shape).constants[name][1]
    keys, values = draw_rows(codec, tokens=24)
    per_side = -(-width // 200) if name.endswith("%") else 0
    found = codec.expand_page(encode(codec, keys, values), 24)
    for row in range(24):
        key = oracles.nuq_key(keys[row].reshape(-1), constants, 2 * per_side)
        value = oracles.nuq_value(values[row].reshape(-1), constants.values, per_side)
        assert found[0][row].tobytes() == (key[2].reshape(shape) + 0.0).tobytes()
        assert found[1][row].tobytes() == (value[2].reshape(shape) + 0.0).tobytes()


@pytest.mark.parametrize("name", ["int8", "int4", "int4.g16"])
def test_groups_are_the_formula_of_flexgen_to_the_bit(name: str) -> None:
    codec = make_codec(name)
    keys, values = draw_rows(codec)
    keys[3], keys[4, 0, :16] = 0, 2.5
    group = 16 if name.endswith("g16") else HEAD_DIM
    for rows, found in zip((keys, values), codec.expand_page(encode(codec, keys, values)), strict=True):
        simulated = np.stack([oracles.grouped(row[0], 4 if "int4" in name else 8, group) for row in rows])
        assert found[:, 0].tobytes() == simulated.tobytes()


@pytest.mark.parametrize("name", ["tq4", "tq3.s5", "tq-k8v4"])
def test_rotated_codes_are_the_formula_of_turboquant_to_the_bit(name: str) -> None:
    codec = make_codec(name)
    keys, values = draw_rows(codec)
    keys[3] = values[4] = 0
    signs = random_signs(5 if name.endswith("s5") else 0, HEAD_DIM)
    found = codec.expand_page(encode(codec, keys, values))
    sides = zip(found, (keys, values), codec.codec_id.code_bits, strict=True)
    for expanded, rows, bits in sides:
        for row in range(64):
            if bits == 8:
                expected = oracles.rotated_uniform(rows[row, 0], signs)
            else:
                expected = oracles.rotated(rows[row, 0], signs, lloyd_max_levels(bits, HEAD_DIM))
            assert np.array_equal(expanded[row, 0], expected)


@pytest.mark.parametrize("name", ["tq4", "tq3"])
def test_rotated_codes_keep_the_norm_of_a_row(name: str) -> None:
    codec = make_codec(name)
    rows = draw_rows(codec)
    for before, after in zip(rows, codec.expand_page(encode(codec, *rows)), strict=True):
        norm, kept = (np.linalg.norm(side, axis=-1) for side in (before, after))
        assert np.allclose(norm, kept, rtol=1e-3)


@pytest.mark.parametrize("width", [8, 16, 24, 80, 128])
def test_sums_are_folded_in_one_order(width: int) -> None:
    rows = np.random.default_rng(width).standard_normal((20, width)).astype(np.float32)
    assert fold_sum(rows).tolist() == [oracles.fold(list(row)) for row in rows]


def test_plain_codecs_keep_or_round_every_number() -> None:
    keys, values = draw_rows(make_codec("raw"))
    keys[0, 0, :4] = 1e-8, 3.4e38, -1e5, 65519
    raw, fp16, bf16 = (make_codec(name) for name in ("raw", "fp16", "bf16"))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(raw.expand_page(encode(raw, keys, values)), (keys, values), strict=True)
    )
    halves = np.clip(keys, -65504, 65504).astype(np.float16).astype(np.float32)
    assert np.array_equal(fp16.expand_page(encode(fp16, keys, values))[0], halves)
    fp8 = make_codec("fp8")
    keys[1, 0, :6] = 448, 449, -3e38, 2**-10, 2**-10 * 1.5, -0.0
    eighths = [oracles.eighth(x) for x in keys.reshape(-1)]
    assert fp8.expand_page(encode(fp8, keys, values))[0].reshape(-1).tolist() == eighths
    rounded = [oracles.bfloat16(x) for x in keys.reshape(-1)]
    assert bf16.expand_page(encode(bf16, keys, values))[0].reshape(-1).tolist() == rounded


@pytest.mark.parametrize("name", NAMES)
def test_coding_token_by_token_is_coding_at_once(name: str) -> None:
    """In any order, twice, and whatever the page held before."""
    codec = make_codec(name)
    keys, values = draw_rows(codec)
    at_once, one_by_one = encode(codec, keys, values), np.zeros(codec.page_bytes, np.uint8)
    for row in [5, *np.random.default_rng(0).permutation(64), 5]:
        codec.encode_rows(keys[row : row + 1], values[row : row + 1], one_by_one, row)
    assert at_once.tobytes() == one_by_one.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_were_not_written_stay_as_they_are(name: str) -> None:
    codec = make_codec(name)
    keys, values = draw_rows(codec, tokens=10)
    page, whole = blank_page(codec), draw_rows(codec)
    codec.encode_rows(*whole, page)
    codec.encode_rows(keys, values, page, 20)
    for found, before, new in zip(codec.expand_page(page), whole, (keys, values), strict=True):
        expected, written = np.concatenate([before[:20], new, before[30:]]), blank_page(codec)
        codec.encode_rows(expected, expected, written)
        side = 0 if new is keys else 1
        assert np.array_equal(found, codec.expand_page(written)[side])


@pytest.mark.parametrize("name", NAMES)
def test_constant_and_extreme_rows_expand_to_finite_numbers(name: str) -> None:
    codec = make_codec(name)
    shape = (codec.shape.heads, codec.shape.head_dim)
    rows = np.stack(
        [np.full(shape, x, np.float32) for x in (0, -0.0, 3, -7, 1e-30, 3e38, -3e38, 65504)]
        + [np.where(np.indices(shape)[1] % 2, np.float32(3e38), np.float32(-3e38))]
    )
    keys, values = codec.expand_page(encode(codec, rows, rows), len(rows))
    assert np.isfinite(keys).all() and np.isfinite(values).all()
    if codec.codec_id.family != ROTATED:  # a rotated constant is not constant
        assert (values[:4] == rows[:4]).all()
    assert not values[:2].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused_and_nothing_written(name: str, bad: float) -> None:
    codec = make_codec(name)
    keys, values = draw_rows(codec)
    page = blank_page(codec)
    values[7, 0, 3] = bad
    for pair in ((keys, values), (values, keys)):
        with pytest.raises(ValueError, match="finite"):
            codec.encode_rows(*pair, page)
    assert (page == 0xA5).all()


@pytest.mark.parametrize("name", NAMES)
def test_other_shapes_and_pages_are_refused(name: str) -> None:
    codec = make_codec(name)
    keys, values = draw_rows(codec, tokens=3)
    page = blank_page(codec)
    for bad in (page[:-1], np.append(page, page), np.append(page, page)[::2], page.reshape(2, -1)):
        with pytest.raises(ValueError, match="contiguous bytes"):
            codec.expand_page(bad)
    with pytest.raises(ValueError, match="64 rows"):
        codec.encode_rows(keys, values, page, 62)
    with pytest.raises(ValueError, match="are not"):
        codec.encode_rows(keys[..., :-1], values[..., :-1], page)


@pytest.mark.parametrize("name", ["nuq4", "nuq2-1%"])
def test_ties_go_to_the_lower_index(name: str) -> None:
    """Equal values share the ends of the order: the lower index is the smaller one."""
    codec = make_codec(name)
    values = np.zeros((1, HEADS, HEAD_DIM), np.float32)
    values[0, 1, :] = 1
    values[0, 2, :] = -1
    constants = calibration().constants[name][1]
    per_side = 1 if name.endswith("%") else 0
    codes, outliers, expanded = oracles.nuq_value(values.reshape(-1), constants.values, per_side)
    assert outliers == ({64, 63} if per_side else set())
    assert np.array_equal(codec.expand_page(encode(codec, values, values), 1)[1].reshape(-1), expanded)
    assert len(set(codes)) == 3


def test_a_number_between_two_centroids_gets_the_lower_code() -> None:
    centroids = np.array([-1, -0.5, 0.5, 1], np.float32)
    numbers = np.array([-0.75, 0, 0.75, 0.75000006, -1, 1], np.float32)
    assert assign_codes(numbers, centroids).tolist() == [0, 1, 2, 3, 0, 3]


def test_a_key_at_the_end_of_its_range_is_no_outlier() -> None:
    """It expands to the last level; the next larger key takes a slot and is kept."""
    table = Datatype(*(np.array([-0.75, -0.25, 0.25, 0.75], np.float32) for _ in range(2)))
    ones = np.ones(HEAD_DIM, np.float16)
    codec_id = parse_codec_id(f"nuq2-1%.g{HEAD_DIM}@{calibration().digest}")
    codec = NuqCodec(codec_id, PageShape(1, HEAD_DIM), LayerConstants(ones, ones * 0, table, table))
    keys = np.zeros((1, 1, HEAD_DIM), np.float32)
    keys[0, 0, 3], keys[0, 0, 4], keys[0, 0, 5] = 1, 1.25, -1
    found = codec.expand_page(encode(codec, keys, keys), 1)[0]
    assert found[0, 0, 3:7].tolist() == [0.75, 1.25, -0.75, -0.25]


def test_more_outliers_than_slots_keep_the_largest_residuals() -> None:
    codec, constants = make_codec("nuq4-1%"), calibration().constants["nuq4-1%"][1]
    scales, zeros = (x.astype(np.float32) for x in (constants.key_scales, constants.key_zeros))
    keys = zeros.copy()
    keys[[9, 40, 77]] += scales[[9, 40, 77]] + np.array([4, 6, 5], np.float32)
    _, outliers, expanded = oracles.nuq_key(keys, constants, 2)
    assert outliers == {40, 77}
    rows = keys.reshape(1, HEADS, HEAD_DIM)
    found = codec.expand_page(encode(codec, rows, rows), 1)[0].reshape(-1)
    assert np.array_equal(found, expanded)
    assert np.abs(found - keys)[[40, 77]].max() < 5e-3 < 3 < abs(found - keys)[9]


def test_fewer_bits_lose_more_and_outliers_help() -> None:
    def error(name: str) -> float:
        codec = make_codec(name)
        rows = draw_rows(codec, 3)
        found = codec.expand_page(encode(codec, *rows))
        return float(sum(np.square(a - b).mean() for a, b in zip(found, rows, strict=True)))

    nuq = [error(name) for name in ("nuq4", "nuq3", "nuq2")]
    sparse = [error(f"{name}-1%") for name in ("nuq4", "nuq3", "nuq2")]
    assert nuq == sorted(nuq) and sparse == sorted(sparse)
    assert all(with_outliers < without for with_outliers, without in zip(sparse, nuq, strict=True))
    assert error("raw") == 0 < error("fp16") < error("bf16") < error("int8") < error("int4")
    assert error("tq-k8v4") < error("tq4") < error("tq3")


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
def test_the_rotation_is_orthogonal_and_its_own_inverse(head_dim: int) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 2, head_dim)).astype(np.float32)
    mixed = rotate_heads(rows, 3)
    assert np.allclose(unrotate_heads(mixed, 3), rows, atol=1e-6)
    assert np.allclose(np.square(mixed).sum(-1), np.square(rows).sum(-1), rtol=1e-5)
    assert not np.allclose(mixed, rotate_heads(rows, 4), atol=0.1)
    spike = np.zeros(head_dim, np.float32)
    spike[0] = 1
    assert np.abs(rotate_heads(spike, 0)).max() <= 1 / np.sqrt(head_dim & -head_dim) + 1e-6


def test_lloyd_max_levels_are_those_of_the_literature() -> None:
    """Max, 'Quantizing for minimum distortion', 1960, table I, for a Gaussian: a sphere of many dimensions."""
    table = {
        2: [0.4528, 1.510],
        3: [0.2451, 0.7560, 1.344, 2.152],
        4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
    }
    for bits, positive in table.items():
        levels = lloyd_max_levels(bits, 100_000)
        assert np.allclose(levels[1 << bits - 1 :], positive, atol=3e-3)
        assert np.array_equal(levels, -levels[::-1])
    assert lloyd_max_levels(4, 32)[-1] < 2.6 < lloyd_max_levels(4, 100_000)[-1], (
        "a small sphere has short tails"
    )


def test_an_exact_sink_takes_the_place_of_row_0_of_the_first_page_alone() -> None:
    """A first token unlike all others, which most queries attend to: its 2-bit codes cost much."""
    rng, codec = np.random.default_rng(0), make_codec("nuq2-1%")
    keys, values = draw_rows(codec, 4)
    keys[0], values[0] = rng.standard_normal((2, HEADS, HEAD_DIM)).astype(np.float32) * 5
    coded = codec.expand_page(encode(codec, keys, values))
    exact = (coded[0].copy(), coded[1].copy())
    restore_sink(*exact, 64, (keys[0], values[0]))
    assert np.array_equal(exact[0], coded[0]) and np.array_equal(exact[1], coded[1])
    restore_sink(*exact, 0, (keys[0], values[0]))
    assert np.array_equal(exact[0][0], keys[0]) and np.array_equal(exact[0][1:], coded[0][1:])
    queries = keys[0] * 0.05 + rng.standard_normal((50, HEADS, HEAD_DIM)).astype(np.float32)

    def attend(keys: Floats, values: Floats) -> Floats:
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed: Floats = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
        return mixed

    loss, left = (float(np.square(attend(*one) - attend(keys, values)).mean()) for one in (coded, exact))
    assert left <= 0.8 * loss


def test_codecs_that_do_not_fit_are_refused() -> None:
    known = calibration()
    with pytest.raises(ConfigError, match="another calibration"):
        build_codec(parse_codec_id("nuq4.g128@0123456789abcdef"), HEAD_DIM, known)
    with pytest.raises(ConfigError, match="another calibration"):
        build_codec(parse_codec_id("nuq4.g128"), HEAD_DIM)
    with pytest.raises(ConfigError, match="does not fit the calibration"):
        build_codec(parse_codec_id(f"nuq4.g64@{known.digest}"), HEAD_DIM, known)
    with pytest.raises(ConfigError, match="cannot rotate"):
        build_codec(parse_codec_id("tq4.s0"), 36)
    with pytest.raises(ConfigError, match="no group"):
        build_codec(parse_codec_id("int4"), HEAD_DIM)


def test_the_id_of_a_codec_is_the_one_it_was_built_from() -> None:
    ids = {str(make_codec(name).codec_id) for name in NAMES}
    assert len(ids) == len(NAMES)
    assert f"nuq4-1%.g128@{calibration().digest}" in ids and "tq4.s0" in ids and "int4.g32" in ids
