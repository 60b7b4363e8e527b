"""The random rotation of the `tq` codecs, and the datatypes for what it rotates.

A head is multiplied by random signs, then by the Walsh-Hadamard matrix over √n. Afterwards the numbers of a head look
like coordinates of a random point on a sphere, whatever the head was before, so one datatype fits all heads
(TurboQuant, arXiv 2504.19874, section 3). The rotation is orthogonal: it may as well be applied to queries.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from diptych.hashing import hash_fields

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# Fewest values of a block. If the largest power of two that divides a head is smaller, the transform would hardly mix
# its values.
MIN_BLOCK = 8
GRID_POINTS = 20_001
# Edge of the grid in standard deviations. Practically no values lie beyond it.
GRID_EDGE = 8.0
MAX_ITERATIONS = 5_000
TOLERANCE = 1e-8
# Levels are rounded to multiples of this, so that every machine computes the same table.
TABLE_STEP = 2.0**-12


def block_size(head_dim: int) -> int:
    """The largest power of two that divides `head_dim`: a head is rotated in blocks of this size."""
    return head_dim & -head_dim


@cache
def random_signs(seed: int, head_dim: int) -> Floats:
    """[head_dim] of 1 and −1: bits of SHA-256 over the seed, so they never change with a library."""
    digests = [hash_fields(["tq signs", seed, head_dim, part]) for part in range(-(-head_dim // 256))]
    bits = np.unpackbits(np.frombuffer(b"".join(digests), np.uint8))[:head_dim]
    signs = np.where(bits == 1, np.float32(-1), np.float32(1))
    signs.flags.writeable = False
    return signs


def rotate_heads(rows: Floats, seed: int) -> Floats:
    """Signs, then Walsh-Hadamard over √n in blocks; [..., head_dim] float32."""
    return _transform_blocks(rows * random_signs(seed, rows.shape[-1]))


def unrotate_heads(rows: Floats, seed: int) -> Floats:
    """The inverse of `rotate_heads`."""
    return _transform_blocks(rows) * random_signs(seed, rows.shape[-1])


def _transform_blocks(rows: Floats) -> Floats:
    """Sums and differences at distance 1, 2, 4 ..., then one multiplication by 1 / √n."""
    block = block_size(rows.shape[-1])
    mixed, distance = rows.astype(np.float32), 1
    while distance < block:
        pairs = mixed.reshape(*rows.shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        mixed = np.stack([first + second, first - second], axis=-2).reshape(rows.shape)
        distance *= 2
    return mixed * np.float32(1 / np.sqrt(block))


@cache
def lloyd_max_levels(bits: int, head_dim: int) -> Floats:
    """The 2^bits levels with the least mean square error for a coordinate of a random point on a sphere.

    The sphere has `head_dim` dimensions and radius √head_dim, so a coordinate has variance 1 and the density
    (1 − t²/d)^((d − 3) / 2): nearly Gaussian. Lloyd's iteration over a fine grid; the density is log-concave, so there
    is one solution.
    """
    edge = min(np.sqrt(head_dim), GRID_EDGE)
    grid = np.linspace(-edge, edge, GRID_POINTS)
    density = np.maximum(1 - grid**2 / head_dim, 0) ** ((head_dim - 3) / 2)
    mass, moment = _running_integral(density), _running_integral(density * grid)
    levels = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits), mass / mass[-1], grid)
    for _ in range(MAX_ITERATIONS):
        ends = np.concatenate([[-edge], (levels[:-1] + levels[1:]) / 2, [edge]])
        better = np.diff(np.interp(ends, grid, moment)) / np.diff(np.interp(ends, grid, mass))
        change, levels = np.abs(better - levels).max(), better
        if change < TOLERANCE:
            break
    even = (levels - levels[::-1]) / 2
    table: Floats = (np.rint(even / TABLE_STEP) * TABLE_STEP).astype(np.float32)
    table.flags.writeable = False
    return table


def _running_integral(heights: Doubles) -> Doubles:
    return np.concatenate([[0.0], np.cumsum((heights[:-1] + heights[1:]) / 2)])


@cache
def uniform_levels(bits: int) -> Floats:
    """2^bits levels at equal distances from −1 to 1: a code less the middle one, times the distance."""
    middle = np.float32(((1 << bits) - 1) / 2)
    table: Floats = (np.arange(1 << bits, dtype=np.float32) - middle) * (np.float32(1) / middle)
    table.flags.writeable = False
    return table
