"""The plan of two-phase attention: every chunk of every row exactly once, whatever the rows share."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.chunks import CHUNK_TOKENS
from engine.batching import prefix_plan
from engine.batching.batch import pack_batch
from engine.batching.prefix_plan import PrefixPlan
from engine.step_work import StepWork

Rows = list[list[int]]


def grow(choices: list[list[int]], lengths: list[int]) -> tuple[Rows, list[int]]:
    """Rows of `lengths` full chunks and a tail: equal beginnings of `choices` are equal beginnings of slabs."""
    slabs: dict[tuple[int, ...], int] = {}
    rows: Rows = []
    for choice, length in zip(choices, lengths, strict=True):
        shared_part = [slabs.setdefault(tuple(choice[: c + 1]), len(slabs)) for c in range(length)]
        rows.append(shared_part)
    return [[*row, len(slabs) + index] for index, row in enumerate(rows)], lengths


@st.composite
def trees(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    """Up to 64 rows of up to 12 full chunks that share beginnings of any depth, each with a tail of its own."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=64))
    wide = draw(st.integers(1, 3))
    choices = [draw(st.lists(st.integers(0, wide), min_size=n, max_size=n)) for n in lengths]
    return grow(choices, lengths)


def arrange(rows: Rows, full: list[int]) -> tuple[Rows, list[int], PrefixPlan]:
    """Rows and full chunks in the plan's order, and the plan."""
    order = prefix_plan.sort_by_prefix(rows, full)
    assert sorted(order) == list(range(len(rows)))
    rows, full = [rows[index] for index in order], [full[index] for index in order]
    table = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return rows, full, prefix_plan.plan_prefixes(table, np.array(full, np.int64))


def check(rows: Rows, full: list[int], plan: PrefixPlan) -> None:
    """Runs of a row join up from chunk 0 to where it goes on alone, and every row of a run has the same slabs there."""
    covered = [0] * len(rows)
    for first, last, top, bottom in plan.runs.tolist():
        assert first < last and bottom - top >= 2
        for row in range(top, bottom):
            assert covered[row] == first  # no gap, nothing twice, and what it continues came before it
            assert rows[row][:last] == rows[top][:last]
            covered[row] = last
    assert covered == plan.shared.tolist()
    assert all(chunks <= limit for chunks, limit in zip(covered, full, strict=True))


def common(left: list[int], right: list[int]) -> int:
    equal = (a == b for a, b in zip(left, right, strict=False))
    return next((index for index, same in enumerate(equal) if not same), min(len(left), len(right)))


@given(trees())
def test_every_chunk_is_read_exactly_once_per_row(tree: tuple[Rows, list[int]]) -> None:
    rows, full, plan = arrange(*tree)
    check(rows, full, plan)


@given(trees())
def test_all_that_is_shared_is_in_a_run_and_runs_are_as_wide_as_can_be(tree: tuple[Rows, list[int]]) -> None:
    rows, full, plan = arrange(*tree)
    heads = [row[:count] for row, count in zip(rows, full, strict=True)]
    for index, head in enumerate(heads):
        others = [common(head, other) for at, other in enumerate(heads) if at != index]
        assert plan.shared[index] == max(others, default=0)
    for first, last, top, bottom in plan.runs.tolist():
        for chunk in range(first, last):
            having = [at for at, head in enumerate(heads) if head[: chunk + 1] == heads[top][: chunk + 1]]
            assert having == list(range(top, bottom))


@given(trees(), st.integers(1, 20), st.integers(1, 8), st.sampled_from([1, 4, 16, 1 << 30]))
def test_a_plan_without_runs_that_do_not_pay_is_still_a_plan(
    tree: tuple[Rows, list[int]], least: int, group: int, tile: int
) -> None:
    rows, full, plan = arrange(*tree)
    less = plan.without_costly_runs(least, group, tile)
    check(rows, full, less)
    runs = set(map(tuple, plan.runs.tolist()))
    for run in map(tuple, less.runs.tolist()):
        queries = (run[3] - run[2]) * group
        assert run in runs and queries >= least * -(-queries // tile)


@given(trees(), st.randoms(use_true_random=False))
def test_rows_set_apart_share_nothing(tree: tuple[Rows, list[int]], rng: random.Random) -> None:
    rows, full, plan = arrange(*tree)
    alone = np.array([rng.random() < 0.3 for _ in rows])
    less = plan.without_rows(alone)
    check(rows, full, less)
    assert not less.shared[alone].any()


def test_a_tree_of_two_levels() -> None:
    rows, _, plan = arrange([[5, 9], [1, 2, 3, 4, 8], [1, 2, 7, 6], [1, 2, 3, 4, 10]], [1, 4, 3, 4])
    assert rows == [[1, 2, 3, 4, 8], [1, 2, 3, 4, 10], [1, 2, 7, 6], [5, 9]]
    assert plan.runs.tolist() == [[0, 2, 0, 3], [2, 4, 0, 2]]
    assert plan.shared.tolist() == [4, 4, 2, 0]


def test_the_plan_is_made_anew_only_when_what_is_shared_changes() -> None:
    rows, full = [[1, 2, 3], [1, 2, 4], [9, 5]], [2, 2, 1]
    _, _, before = arrange(rows, full)
    _, _, grown = arrange([[1, 2, 3, 11], [1, 2, 4], [9, 5, 12]], [3, 2, 2])  # private chunks fill and follow
    assert grown is before
    _, _, joined = arrange([*rows, [1, 2, 7]], [*full, 2])
    assert joined is not before and joined.runs.tolist() == [[0, 2, 0, 3]]


@pytest.mark.parametrize(("start", "runs"), [(127, [[0, 1, 0, 2]]), (128, [[0, 2, 0, 2]])])
def test_the_chunk_that_a_token_is_written_to_is_never_shared(start: int, runs: list[list[int]]) -> None:
    batch = pack_batch([StepWork([0], start, [4, 5, 6], "none"), StepWork([0], start, [4, 5, 7], "none")])
    assert batch.plan.runs.tolist() == runs


def test_rows_stay_with_their_tokens_when_sorted() -> None:
    works = [
        StepWork([7], 64, [9, 1], "last"),
        StepWork([8, 8], 0, [2], "last"),
        StepWork([5], 70, [3, 4], "last"),
        StepWork([6], 65, [9, 5], "last"),
    ]
    batch = pack_batch(works)
    assert batch.rows.tolist() == [3, 0, 4] and batch.lengths.tolist() == [71, 65, 66]
    assert batch.table.tolist() == [[3, 4], [9, 1], [9, 5]]
    assert batch.plan.runs.tolist() == [[0, 1, 1, 3]]
    assert batch.tokens.tolist() == [7, 8, 8, 5, 6] and batch.wanted.tolist() == [0, 2, 3, 4]
    assert batch.positions.tolist() == [64, 0, 1, 70, 65] and CHUNK_TOKENS == 64
