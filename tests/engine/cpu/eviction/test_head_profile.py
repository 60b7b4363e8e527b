"""The second pass over scores against whole matrices in float64, at every edge of a block of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.cpu.eviction.head_profile import PolicyTrial, RowColumns, sum_attention
from kvcache.eviction.policies import (
    FREQUENT_FIRST_ORDER,
    FULL,
    PAPER_ORDER,
    PUNCT_KIND,
    SPECIAL_KIND,
    KeepRule,
    mask_without_window,
    split_rows,
)
from tests.support.keep_reference import row_masses

EDGES = [1, 2, 7, 63, 64, 65, 130, 500, 2000]


def whole_matrix(queries: Any, keys: Any, rows: Any, columns: Any, window: int) -> tuple[Any, Any]:
    """The attention of each row, pooled over the group, and which columns each row sees, [rows, columns]."""
    q = queries.astype(np.float64)  # [rows, group, width]
    scores = np.einsum("rgd,nd->rgn", q, keys.astype(np.float64)) / np.sqrt(keys.shape[1])
    seen = columns[None] <= rows[:, None]
    if window:
        seen &= columns[None] > rows[:, None] - window
    weights = np.exp(np.where(seen[:, None], scores, -np.inf) - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=1), seen


def random_head(
    rng: Any, rows: int, columns: int, width: int, group: int, sharp: float = 2
) -> tuple[Any, Any]:
    """Queries of three KV heads, [rows, heads, width], and the keys of one."""
    keys = rng.standard_normal((columns, width)).astype(np.float32)
    return sharp * rng.standard_normal((rows, 3 * group, width)).astype(np.float32), keys


def compare(width: int, group: int, rows: Any, columns: Any, window: int, seed: int) -> None:
    """Check one head, the second of three, against `whole_matrix`."""
    queries, keys = random_head(np.random.default_rng(seed), len(rows), len(columns), width, group)
    seen = RowColumns.of_positions(rows, columns, window, 9)
    found = sum_attention(queries.reshape(len(rows), -1), 1, group, keys, seen)
    pooled, visible = whole_matrix(queries[:, group : 2 * group], keys, rows, columns, window)
    np.testing.assert_allclose(found, pooled.sum(axis=0), rtol=2e-5, atol=2e-6)
    assert np.array_equal(seen.count_rows(len(columns)), visible.sum(axis=0))


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_sums_are_those_of_whole_matrices(width: int, group: int) -> None:
    for n in EDGES:
        for window in (0, 1, 40, 100):
            rows = np.arange(max(0, n - 64), n)
            compare(width, group, rows, np.arange(n), window, seed=n + window)


@pytest.mark.parametrize("window", [0, 90])
def test_columns_may_be_any_positions(window: int) -> None:
    rng = np.random.default_rng(3)
    for n in (65, 200, 900):
        rows = np.arange(n - 64, n)
        old = np.flatnonzero(rng.random(n - 64) < 0.4)
        compare(32, 2, rows, np.concatenate([old, rows]), window, seed=n)


def test_keys_behind_the_last_one_do_not_count() -> None:
    rng = np.random.default_rng(5)
    memory = np.full((72, 32), np.nan, np.float32)
    memory[:67] = rng.standard_normal((67, 32))
    queries = rng.standard_normal((3, 64)).astype(np.float32)
    seen = RowColumns.of_positions(np.arange(64, 67), np.arange(67), 0, 20)
    sums = sum_attention(queries, 0, 2, memory[:67], seen)
    assert sums.sum() == pytest.approx(3, rel=1e-5) and (sums > 0).all()


RULES = [KeepRule(order) for order in (PAPER_ORDER, FREQUENT_FIRST_ORDER)]


def try_all(
    queries: Any, keys: Any, group: int, kinds: Any, window: int, rule: KeepRule, threshold: float
) -> tuple[Any, Any]:
    """`PolicyTrial` for the second of three heads of a prompt."""
    n, rows = len(keys), np.arange(len(keys) - len(queries), len(keys))
    seen = RowColumns.of_positions(rows, np.arange(n), window, rule.window_tokens(n, 0))
    splits = [split_rows(policy, kinds, np.arange(n), n, n, 0, rule) for policy in range(FULL)]
    trial = PolicyTrial(
        seen,
        np.maximum(seen.count_rows(n), 1),
        np.stack([plain for plain, _ in splits]),
        np.stack([candidates for _, candidates in splits]),
        np.array(["local" in rule.policy_parts(policy) for policy in range(FULL)]),
        rule.num_frequent(n, 0),
        threshold,
    )
    return trial.run(queries.reshape(len(queries), -1), 1, group, keys)


@pytest.mark.parametrize("rule", RULES, ids=["paper", "frequent first"])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_masses_of_rows_and_kept_columns_are_those_of_whole_matrices(rule: KeepRule, group: int) -> None:
    for seed, n in enumerate((17, 40, 63, 64, 65, 81, 130, 500)):
        for window in (0, 40):
            rng = np.random.default_rng(seed)
            queries, keys = random_head(rng, min(n, 64), n, 32, group, sharp=rng.choice([0.5, 2, 6]))
            kinds = rng.choice(np.array([0, PUNCT_KIND, SPECIAL_KIND], np.uint8), n, p=[0.75, 0.2, 0.05])
            found, kept = try_all(queries, keys, group, kinds, window, rule, 1.5)
            rows = np.arange(n - len(queries), n)
            pooled, visible = whole_matrix(queries[:, group : 2 * group], keys, rows, np.arange(n), window)
            scores = pooled.sum(axis=0) / np.maximum(visible.sum(axis=0), 1)
            of_rows = row_masses(pooled, scores, kinds, 0, rule)
            np.testing.assert_allclose(found, of_rows.min(axis=1), rtol=2e-5, atol=2e-6)
            assert np.array_equal(kept, mask_without_window(3, kinds, np.arange(n), scores, n, n, 0, rule))
            for policy, mass in enumerate(found):
                # The first that suffices is the last that is tried.
                first = int(np.argmax(found >= mass))
                some, mask = try_all(queries, keys, group, kinds, window, rule, mass)
                assert (
                    np.array_equal(some[: first + 1], found[: first + 1])
                    and np.isnan(some[first + 1 :]).all()
                )
                expected = mask_without_window(first, kinds, np.arange(n), scores, n, n, 0, rule)
                assert first <= policy and np.array_equal(mask, expected)


def test_equal_scores_pick_lower_positions_and_none_is_picked_without_a_share() -> None:
    """All keys are equal: the mean attention to a column depends only on the rows that see it."""
    queries, keys, kinds = (
        np.ones((64, 3, 32), np.float32),
        np.ones((200, 32), np.float32),
        np.zeros(200, np.uint8),
    )
    _, kept = try_all(queries, keys, 1, kinds, 0, KeepRule(local_share=0.4), 1.5)
    assert np.flatnonzero(kept).tolist() == [*range(4 + 60)]
    _, kept = try_all(queries, keys, 1, kinds, 0, KeepRule(frequent_share=0), 1.5)
    assert np.flatnonzero(kept).tolist() == [*range(4)]
    _, kept = try_all(queries, keys, 1, kinds, 0, KeepRule(frequent_share=1), 1.5)
    assert np.flatnonzero(kept).tolist() == [*range(140)]


def test_a_row_of_no_numbers_makes_a_head_full() -> None:
    rng = np.random.default_rng(9)
    queries, keys = random_head(rng, 64, 100, 32, 1)
    for row in (0, 20, 63):
        broken = queries.copy()
        broken[row] = np.nan
        masses, _ = try_all(broken, keys, 1, np.zeros(100, np.uint8), 0, KeepRule(), 0.01)
        assert not (masses >= 0.01).any()
