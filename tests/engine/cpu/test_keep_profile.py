"""The second pass over scores against whole matrices in float64, at every edge of a block of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.cpu.keep_profile import RowColumns, sum_attention

EDGES = [1, 2, 7, 63, 64, 65, 130, 500, 2000]


def whole_matrices(
    queries: Any, keys: Any, rows: Any, columns: Any, window: int, near: int
) -> tuple[Any, Any, Any]:
    """Sums of columns, the same within `near`, and the number of rows that see each column."""
    q = queries.astype(np.float64)  # [rows, group, width]
    scores = np.einsum("rgd,nd->rgn", q, keys.astype(np.float64)) / np.sqrt(keys.shape[1])
    seen = columns[None] <= rows[:, None]
    if window:
        seen &= columns[None] > rows[:, None] - window
    weights = np.exp(np.where(seen[:, None], scores, -np.inf) - scores.max(axis=-1, keepdims=True))
    pooled = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=1)
    close = columns[None] > rows[:, None] - near
    return pooled.sum(axis=0), (pooled * close).sum(axis=0), seen.sum(axis=0)


def compare(width: int, group: int, rows: Any, columns: Any, window: int, near: int, seed: int) -> None:
    """Check one head, the second of three, against `whole_matrices`."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((len(columns), width)).astype(np.float32)
    queries = 2 * rng.standard_normal((len(rows), 3 * group, width)).astype(np.float32)
    seen = RowColumns.of_positions(rows, columns, window, near)
    found = sum_attention(queries.reshape(len(rows), -1), 1, group, keys, seen)
    sums, local, counts = whole_matrices(queries[:, group : 2 * group], keys, rows, columns, window, near)
    np.testing.assert_allclose(found[0], sums, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found[1], local, rtol=2e-5, atol=2e-6)
    assert np.array_equal(seen.count_rows(len(columns)), counts)


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_sums_are_those_of_whole_matrices(width: int, group: int) -> None:
    for n in EDGES:
        for window in (0, 1, 40, 100):
            rows = np.arange(max(0, n - 64), n)
            compare(width, group, rows, np.arange(n), window, 3 * n // 10, seed=n + window)


@pytest.mark.parametrize("window", [0, 90])
def test_columns_may_be_any_positions(window: int) -> None:
    rng = np.random.default_rng(3)
    for n in (65, 200, 900):
        rows = np.arange(n - 64, n)
        old = np.flatnonzero(rng.random(n - 64) < 0.4)
        compare(32, 2, rows, np.concatenate([old, rows]), window, 50, seed=n)


def test_keys_behind_the_last_one_do_not_count() -> None:
    rng = np.random.default_rng(5)
    memory = np.full((72, 32), np.nan, np.float32)
    memory[:67] = rng.standard_normal((67, 32))
    queries = rng.standard_normal((3, 64)).astype(np.float32)
    seen = RowColumns.of_positions(np.arange(64, 67), np.arange(67), 0, 20)
    sums, near = sum_attention(queries, 0, 2, memory[:67], seen)
    assert sums.sum() == pytest.approx(3, rel=1e-5) and 0 < near.sum() < 3
    without = sum_attention(queries, 0, 2, memory[:67], seen, with_near=False)
    assert np.array_equal(without[0], sums) and not without[1].any()
