"""Kernels of rows that eviction judges and moves, on the CPU.

`score_rows` is `kvcache.eviction.zap.KeepSurrogate.score_rows`, compiled: a row's score is the same to the bit whatever
rows are beside it. `copy_rows` moves kept rows of a raw pool into frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.jit import jit
from kvcache.eviction.kept_rows import FRAME_TOKENS
from kvcache.eviction.zap import MIN_NORM, Angles

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

FRAME = FRAME_TOKENS


@cache
def _build_score_kernel(width: int) -> Callable[..., None]:
    """The kernel of `score_rows` for one head dimension."""

    @jit
    def run(keys: Any, values: Any, cos: Any, sin: Any, weights: Any, scores: Any) -> None:
        half = width // 2
        for n in range(len(scores)):
            total, key_square, value_square = np.float64(0), np.float64(0), np.float64(0)
            at, angle = n * width, n * half
            for i in range(half):
                low, high = np.float64(keys[at + i]), np.float64(keys[at + half + i])
                c, s = cos[angle + i], sin[angle + i]
                first, second = low * c + high * s, high * c - low * s
                key_square += first * first + second * second
                total += weights[i] * first + weights[half + i] * second
            for i in range(width):
                x = np.float64(values[at + i])
                value_square += x * x
                total += weights[width + i] * x
            total += weights[2 * width] * math.log(max(math.sqrt(key_square), MIN_NORM))
            total += weights[2 * width + 1] * math.log(max(math.sqrt(value_square), MIN_NORM))
            scores[n] = total + weights[2 * width + 2]

    return run


@cache
def _build_copy_kernel(width: int) -> Callable[..., None]:
    """The kernel of `copy_rows` for one head dimension."""

    @jit
    def run(pool: Any, places: Any, first: int, frames: Any) -> None:
        for n in range(len(places)):
            key, value = places[n, 0] * width, places[n, 1] * width
            at = ((first + n // FRAME) * 2 * FRAME + n % FRAME) * width
            for i in range(width):
                frames[at + i] = pool[key + i]
                frames[at + FRAME * width + i] = pool[value + i]

    return run


def list_score_kernels(width: int) -> list[Any]:
    """The kernels that `score_rows` calls for one head dimension."""
    return [_build_score_kernel(width)]


def list_copy_kernels(width: int) -> list[Any]:
    """The kernels that `copy_rows` calls for one head dimension."""
    return [_build_copy_kernel(width)]


def score_rows(keys: Floats, values: Floats, angles: Angles, weights: Doubles) -> Doubles:
    """The scores of rows of a head, [n].

    Args:
        keys: [n, D], rotated.
        values: [n, D].
        angles: of at least n positions; those of the rows are the last n.
        weights: of the head, [2 D + 3].
    """
    scores = np.empty(len(keys))
    cos, sin = angles.take_last(len(keys))
    _build_score_kernel(keys.shape[1])(
        keys.reshape(-1), values.reshape(-1), cos.reshape(-1), sin.reshape(-1), weights, scores
    )
    return scores


def copy_rows(pool: Floats, places: Ints, first: int, frames: Floats) -> None:
    """Copy the rows of a head into its frames, one after the other.

    Args:
        pool: [rows, D], all keys and values.
        places: [n, 2], contiguous: the rows of each key and of its value.
        first: the head's first frame.
        frames: [rows, D]: 16 keys and their values in each frame.
    """
    _build_copy_kernel(pool.shape[1])(pool.reshape(-1), places, first, frames.reshape(-1))
