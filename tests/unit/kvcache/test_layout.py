"""The KV layout's arithmetic, against bytes counted by hand and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError
from kvcache.layout import KvLayout, Shard, split_layout
from kvcache.pool import KvPool

layouts = st.builds(
    KvLayout,
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 512),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)


def test_embedded_model_sizes() -> None:
    layout = KvLayout(layers=6, kv_heads=4, head_dim=32, dtype="float32")
    assert layout.chunk_shape == (6, 4, 2, 64, 32)
    assert layout.page_bytes == 16_384
    assert layout.layer_bytes == 65_536
    assert layout.chunk_bytes == 393_216
    assert layout.bytes_per_token == 6_144


@given(layouts)
def test_sizes_agree_with_an_array_of_that_shape(layout: KvLayout) -> None:
    array = np.broadcast_to(np.zeros(1, f"u{layout.itemsize}"), layout.chunk_shape)
    assert layout.chunk_bytes == array.nbytes
    assert layout.layer_bytes == array[0].nbytes
    assert layout.page_bytes == array[0, 0].nbytes
    assert layout.bytes_per_token == array[:, :, :, 0].nbytes


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (127, 2), (128, 2), (129, 3), (2048, 32)],
)
def test_num_chunks(tokens: int, chunks: int) -> None:
    assert KvLayout(1, 1, 2, "float32").num_chunks(tokens) == chunks


@given(st.integers(0, 1 << 40))
def test_num_chunks_is_the_least_that_holds_them(tokens: int) -> None:
    chunks = KvLayout(1, 1, 2, "float16").num_chunks(tokens)
    assert chunks * CHUNK_TOKENS >= tokens > (chunks - 1) * CHUNK_TOKENS or chunks == tokens == 0


@pytest.mark.parametrize(
    "wrong", [(0, 1, 1, "float32"), (1, -1, 1, "float32"), (1, 1, 0, "float32"), (1, 1, 1, "int8")]
)
def test_impossible_layouts_are_refused(wrong: tuple[int, int, int, str]) -> None:
    with pytest.raises(ValueError, match="positive|dtype"):
        KvLayout(*wrong)


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        KvLayout(1, 1, 1, "float32").num_chunks(-1)


NUQ = "nuq4-1%.g64@0123456789abcdef"


def test_a_coded_page_has_the_heads_that_are_coded_together() -> None:
    """By hand: 64 values are 32 bytes of codes; 2 slots of 3 bytes; keys have no scale, values have 4 bytes."""
    layout = KvLayout(6, 4, 32, "float32", NUQ)
    assert (layout.page_heads, layout.pages_per_layer) == (2, 2)
    assert layout.page_bytes == 64 * (32 + 6 + 32 + 6 + 4)
    assert layout.chunk_bytes == 6 * layout.layer_bytes == 6 * 2 * layout.page_bytes
    assert layout.chunk_shape == KvLayout(6, 4, 32, "float32").chunk_shape
    int4 = KvLayout(6, 4, 32, "float32", "int4.g32")
    assert (int4.page_heads, int4.page_bytes) == (1, 64 * 2 * (16 + 4))
    pool = KvPool(layout, 3)
    assert pool.data.shape == (3, 6, 2, layout.page_bytes) and pool.memory.nbytes == 3 * layout.chunk_bytes


def test_ranks_never_cut_a_group() -> None:
    layout = KvLayout(6, 4, 32, "float32", NUQ)
    assert {layout.shard_layout(shard).codec for shard in split_layout(layout, 2, 3)} == {NUQ}
    assert layout.shard_layout(Shard((0, 2), (2, 4))).pages_per_layer == 1
    with pytest.raises(ValueError, match="cuts a group of 2 KV heads"):
        layout.shard_layout(Shard((0, 6), (1, 3)))
    with pytest.raises(ValueError, match="2 groups of KV heads"):
        split_layout(layout, 4, 1)
    with pytest.raises(ValueError, match="whole groups of 2"):
        KvLayout(6, 3, 32, "float32", NUQ)
    with pytest.raises(ConfigError, match="not a KV codec"):
        KvLayout(6, 4, 32, "float32", "zip")
