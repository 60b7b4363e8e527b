"""The second pass over scores against whole matrices in float64, at every edge of a block of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.cpu.eviction.head_profile import RowColumns, attend_columns, sum_attention, sum_near_strip

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


@pytest.mark.parametrize("group", [1, 2, 3])
def test_near_sums_are_those_of_rows_whose_window_holds_the_column(group: int) -> None:
    for seed, n in enumerate((1, 17, 63, 64, 65, 81, 130, 500)):
        for window, near in ((0, 0), (0, 1), (0, 30), (40, 30), (40, 60), (0, 1000)):
            queries, keys = random_head(np.random.default_rng(seed), min(n, 64), n, 32, group)
            rows, columns = np.arange(n - len(queries), n), np.arange(n)
            seen = RowColumns.of_positions(rows, columns, window, near)
            strip = attend_columns(queries.reshape(len(rows), -1), 1, group, keys, seen)
            pooled, visible = whole_matrix(queries[:, group : 2 * group], keys, rows, columns, window)
            held = visible & (columns[None] > rows[:, None] - near)
            found = sum_near_strip(strip, n, seen)
            np.testing.assert_allclose(found, (pooled * held).sum(axis=0), rtol=2e-5, atol=2e-6)
