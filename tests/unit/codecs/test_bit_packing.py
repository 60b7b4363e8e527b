"""Codes survive packing, in exactly the bytes that the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.codecs.bit_packing import pack_codes, packed_bytes, unpack_codes


@st.composite
def code_rows(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    bits, columns = draw(st.integers(1, 8)), draw(st.integers(1, 40))
    row = st.lists(st.integers(0, (1 << bits) - 1), min_size=columns, max_size=columns)
    return bits, draw(st.lists(row, min_size=1, max_size=4))


@given(code_rows())
def test_unpacking_gives_the_codes_back(drawn: tuple[int, list[list[int]]]) -> None:
    bits, rows = drawn
    codes = np.array(rows, np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (len(rows), packed_bytes(codes.shape[1], bits))
    assert np.array_equal(unpack_codes(packed, bits, codes.shape[1]), codes)


@given(code_rows())
def test_a_row_is_a_stream_of_bits_lowest_first(drawn: tuple[int, list[list[int]]]) -> None:
    bits, rows = drawn
    for row, packed in zip(rows, pack_codes(np.array(rows, np.uint8), bits), strict=True):
        number = sum(code << (bits * place) for place, code in enumerate(row))
        assert int.from_bytes(packed.tobytes(), "little") == number


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into 3 bits"):
        pack_codes(np.array([8], np.uint8), 3)
    with pytest.raises(ValueError, match="1 to 8 bits"):
        pack_codes(np.array([0], np.uint8), 9)
    with pytest.raises(ValueError, match="are not 5 bytes"):
        unpack_codes(np.zeros(5, np.uint8), 3, 8)
