"""The board: marks are never used twice, and what a reader sees is what was said last."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layer_progress import (
    COMPLETE_MARK,
    ENTRY_BYTES,
    MAX_LAYERS,
    LayerProgress,
    split_entries,
    view_entries,
)

NUM_SLABS = 8


def made(num_slabs: int = NUM_SLABS) -> tuple[LayerProgress, memoryview]:
    memory = memoryview(bytearray(b"\xff" * (num_slabs * ENTRY_BYTES)))
    return LayerProgress(num_slabs, memory), memory


def seen(memory: memoryview, *slabs: int) -> list[tuple[int, int]]:
    return split_entries(view_entries(memory)[list(slabs)])


def test_a_new_board_says_nothing() -> None:
    _, memory = made()
    assert seen(memory, *range(NUM_SLABS)) == [(COMPLETE_MARK, 0)] * NUM_SLABS


def test_layers_advance_under_a_mark_until_the_slab_is_somebody_elses() -> None:
    board, memory = made()
    first, second = board.next_mark(), board.next_mark()
    board.stage_slabs([3, 5], first)
    board.advance_layers([3, 5], 1)
    board.advance_layers(np.array([3]), 32)
    assert seen(memory, 3, 5, 4) == [(first, 32), (first, 1), (COMPLETE_MARK, 0)]
    board.stage_slabs([5], second)
    assert seen(memory, 3, 5) == [(first, 32), (second, 0)]
    board.clear_slabs([3])
    assert seen(memory, 3) == [(COMPLETE_MARK, 0)]


@given(st.lists(st.tuples(st.integers(0, NUM_SLABS - 1), st.integers(0, MAX_LAYERS)), max_size=30))
def test_an_entry_is_its_last_mark_and_how_far_that_has_come(steps: list[tuple[int, int]]) -> None:
    board, memory = made()
    expected = [(COMPLETE_MARK, 0)] * NUM_SLABS
    marks = set()
    for slab, layers in steps:
        if layers % 3 == 0:
            mark = board.next_mark()
            assert mark != COMPLETE_MARK and mark not in marks
            marks.add(mark)
            board.stage_slabs([slab], mark)
            expected[slab] = (mark, 0)
        else:
            board.advance_layers([slab], layers)
            expected[slab] = (expected[slab][0], layers)
        assert seen(memory, *range(NUM_SLABS)) == expected


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        LayerProgress(3, memoryview(bytearray(4 * ENTRY_BYTES)))
    with pytest.raises(ValueError):
        view_entries(memoryview(bytearray(7)))
