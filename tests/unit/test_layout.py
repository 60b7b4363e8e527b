"""The KV layout's arithmetic, against bytes counted by hand and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import CHUNK_TOKENS, KVLayout

layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 512),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)


def test_embedded_model_sizes() -> None:
    layout = KVLayout(layers=6, kv_heads=4, head_dim=32, dtype="float32")
    assert layout.chunk_shape == (6, 4, 2, 64, 32)
    assert layout.page_bytes == 16_384
    assert layout.layer_bytes == 65_536
    assert layout.chunk_bytes == 393_216
    assert layout.bytes_per_token == 6_144


@given(layouts)
def test_sizes_agree_with_an_array_of_that_shape(layout: KVLayout) -> None:
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
    assert KVLayout(1, 1, 2, "float32").num_chunks(tokens) == chunks


@given(st.integers(0, 1 << 40))
def test_num_chunks_is_the_least_that_holds_them(tokens: int) -> None:
    chunks = KVLayout(1, 1, 2, "float16").num_chunks(tokens)
    assert chunks * CHUNK_TOKENS >= tokens > (chunks - 1) * CHUNK_TOKENS or chunks == tokens == 0


@pytest.mark.parametrize(
    "wrong", [(0, 1, 1, "float32"), (1, -1, 1, "float32"), (1, 1, 0, "float32"), (1, 1, 1, "int8")]
)
def test_impossible_layouts_are_refused(wrong: tuple[int, int, int, str]) -> None:
    with pytest.raises(ValueError, match="positive|dtype"):
        KVLayout(*wrong)


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        KVLayout(1, 1, 1, "float32").num_chunks(-1)
