"""Rotary positions relative to a chunk: keys that are stored before rotation need one constant table.

Rotations add up: R(p) = R(p0) R(j) for a token at p = p0 + j. So for a query q that is rotated to its own position, and
a chunk whose first token is at p0,

    q · R(p0 + j) k  =  (R(p0)ᵀ q) · (R(j) k)

The few queries are rotated back by p0 once per chunk, the 64 keys by the same 64 angles in every chunk. It holds for
any frequencies, so for every scaling of them. Angles are float64: a float32 product of a position and a frequency is
off by up to 1e-4 at position 2,048.

Rows are in Hugging Face's half-split layout: the pair of dimension i is i and i + head_dim / 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.page import Floats

Doubles = NDArray[np.float64]


def rotate_rows(rows: Floats, positions: NDArray[Any], frequencies: Doubles) -> Floats:
    """Rotates each row to its position.

    Args:
        rows: [tokens, ..., head_dim] float32.
        positions: [tokens], whole numbers; negative ones rotate back.
        frequencies: [head_dim / 2], radians per token of each pair.
    """
    angles = positions.astype(np.float64)[:, None] * frequencies
    middle = (1,) * (rows.ndim - 2)
    cos, sin = (
        table.astype(np.float32).reshape(len(rows), *middle, -1) for table in (np.cos(angles), np.sin(angles))
    )
    x, y = np.split(rows, 2, axis=-1)
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)


def rotate_queries_back(queries: Floats, chunk_start: int, frequencies: Doubles) -> Floats:
    """Queries [rows, ..., head_dim], rotated to their own positions, become relative to a chunk that begins at
    `chunk_start`."""
    return rotate_rows(queries, np.full(len(queries), -chunk_start), frequencies)


def rotate_chunk_keys(keys: Floats, frequencies: Doubles) -> Floats:
    """Keys of a chunk before rotation, [at most 64, ..., head_dim], become relative to the chunk's first token.

    Raises:
        ValueError: there are more rows than a chunk has.
    """
    if len(keys) > CHUNK_TOKENS:
        raise ValueError(f"a chunk has {CHUNK_TOKENS} tokens, not {len(keys)}")
    return rotate_rows(keys, np.arange(len(keys)), frequencies)
