"""Scores with positions relative to a chunk are the scores with absolute positions."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.codecs.rotation import rotate_chunk_keys, rotate_queries_back, rotate_rows

HEAD_DIM = 32
PLAIN = 1e6 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
SCALED = PLAIN * np.random.default_rng(3).uniform(
    0.1, 1, HEAD_DIM // 2
)  # any scaling acts on frequencies alone


@pytest.mark.parametrize("frequencies", [PLAIN, SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize("chunk_start", [0, 64, 1984, 70_016, 1_000_000])
def test_chunk_relative_scores_are_the_absolute_ones(frequencies: np.ndarray, chunk_start: int) -> None:
    rng = np.random.default_rng(chunk_start)
    queries, keys = (rng.standard_normal((n, HEAD_DIM)).astype(np.float32) for n in (5, 64))
    positions = chunk_start + 63 + np.array([0, 1, 40, 500, 3000])
    rotated = rotate_rows(queries, positions, frequencies)
    scores = rotate_queries_back(rotated, chunk_start, frequencies) @ rotate_chunk_keys(keys, frequencies).T

    angles = (positions[:, None] - (chunk_start + np.arange(64)))[
        ..., None
    ] * frequencies  # relative, in float64
    half = HEAD_DIM // 2
    q, k = queries.astype(np.float64)[:, None], keys.astype(np.float64)[None]
    along = q[..., :half] * k[..., :half] + q[..., half:] * k[..., half:]
    across = q[..., half:] * k[..., :half] - q[..., :half] * k[..., half:]
    exact = (along * np.cos(angles) - across * np.sin(angles)).sum(axis=-1)
    assert np.abs(scores - exact).max() / np.sqrt(HEAD_DIM) <= 1e-5


def test_heads_are_rotated_alike() -> None:
    rows = np.random.default_rng(0).standard_normal((7, 3, HEAD_DIM)).astype(np.float32)
    together = rotate_chunk_keys(rows, PLAIN)
    assert np.array_equal(together[:, 1], rotate_chunk_keys(rows[:, 1], PLAIN))
    assert np.array_equal(together[0], rows[0])
    with pytest.raises(ValueError, match="64 tokens"):
        rotate_chunk_keys(np.zeros((65, HEAD_DIM), np.float32), PLAIN)
