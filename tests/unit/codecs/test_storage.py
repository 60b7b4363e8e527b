"""The formula of storage is what pages really take, and gives the figures of the papers."""

from __future__ import annotations

import pytest

from kvcache.codecs.codec_id import CODE_BITS, complete_codec_id, parse_codec_id
from kvcache.codecs.storage import (
    bits_per_value,
    bytes_per_token,
    chunk_bytes,
    coded_page_bytes,
    heads_per_page,
    index_bits,
    mean_bits,
    outliers_per_side,
)
from kvcache.layout import KvLayout
from tests.unit.codecs.sample_codecs import make_codec

HASH = "0" * 16


@pytest.mark.parametrize("name", CODE_BITS)
@pytest.mark.parametrize("shape", [(4, 32), (2, 64), (8, 16), (3, 8), (5, 64)])
def test_pages_are_as_large_as_the_formula_says(name: str, shape: tuple[int, int]) -> None:
    codec = make_codec(name, *shape)
    pages = shape[0] // codec.shape.heads
    assert codec.page_bytes % 64 == 0
    assert pages * codec.page_bytes == chunk_bytes(codec.codec_id, 1, *shape)
    assert heads_per_page(codec.codec_id, shape[1]) == codec.shape.heads
    assert coded_page_bytes(codec.codec_id, shape[1]) == codec.page_bytes


def test_a_row_of_codes_that_is_no_whole_number_of_bytes_is_filled_up() -> None:
    """Only then is a page larger than the formula: 3 heads of 4 values are 36 bits, or 5 bytes."""
    codec = make_codec("nuq3", 3, 4)
    assert chunk_bytes(codec.codec_id, 1, 3, 4) == 64 * (4.5 + 4.5 + 4) < codec.page_bytes == 64 * (5 + 5 + 4)
    assert coded_page_bytes(codec.codec_id, 4) == codec.page_bytes


@pytest.mark.parametrize(("name", "bits"), [("nuq4-1%", 4.54), ("nuq3-1%", 3.54), ("nuq2-1%", 2.54)])
def test_the_embedded_model_stores_the_bits_that_were_promised(name: str, bits: float) -> None:
    """4.54 counts 1 % of keys with 16-bit places; fixed slots with 8-bit places take a little less."""
    codec_id = make_codec(name).codec_id
    stored = make_codec(name).page_bytes * 8 / (2 * 64 * 128)
    assert stored == mean_bits(codec_id, 32) == int(bits) + 0.5
    assert abs(stored / bits - 1) <= 0.03
    assert 16 / stored >= {4.54: 3.5, 3.54: 4.5, 2.54: 6.3}[bits]
    assert bytes_per_token(codec_id, 6, 4, 32) == 6 * 2 * 128 * stored / 8


def test_bits_of_keys_and_values() -> None:
    def bits(name: str, heads: int, head_dim: int) -> tuple[float, float]:
        return bits_per_value(complete_codec_id(parse_codec_id(name), heads, head_dim, HASH), head_dim)

    assert bits("nuq4-1%", 4, 32) == (4 + 2 * 24 / 128, 4 + 2 * 24 / 128 + 32 / 128)
    assert bits("nuq4-1%", 8, 128) == (4 + 12 * 32 / 1024, 4 + 12 * 32 / 1024 + 32 / 1024)
    assert bits("nuq2", 8, 128) == (2, 2 + 32 / 1024)
    assert bits("int4", 8, 128) == (4.5, 4.5) and bits("int4", 4, 32) == (5, 5)
    assert bits("tq4", 8, 128) == (4.125, 4.125) and bits("tq-k8v4", 4, 32) == (8.5, 4.5)
    assert bits("bf16", 8, 128) == (16, 16)


@pytest.mark.parametrize(("bits", "paper"), [(4, 4.33), (3, 3.33), (2, 2.33)])
def test_a_group_of_the_paper_stores_the_bits_of_the_paper(bits: int, paper: float) -> None:
    """LLaMA-7B: groups of 4,096 values, 21 outliers on each side (KVQuant, table 18)."""
    codec_id = complete_codec_id(parse_codec_id(f"nuq{bits}-1%"), 32, 128, HASH)
    assert outliers_per_side(codec_id, 4096) == 21
    assert (index_bits(128), index_bits(256), index_bits(257), index_bits(4096)) == (8, 8, 16, 16)
    assert abs(mean_bits(codec_id, 128) / paper - 1) <= 0.005


def test_plain_pages_are_those_of_the_layout() -> None:
    for name, dtype in (("raw", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")):
        assert make_codec(name).page_bytes == KvLayout(6, 4, 32, dtype).page_bytes
