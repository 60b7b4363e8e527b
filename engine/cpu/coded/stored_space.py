"""The basis of a codec in kernels (`kvcache.codecs.basis`): rows into it, as NumPy does to the bit, and queries and
outputs.

A basis is a tuple: factors [4, kv_heads, width], empty without a calibration, and signs [width] of the random rotation,
empty without one. The factors are those of keys and of values, and one over them: of queries and of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.misc.special import literally
from numpy.typing import NDArray

from engine.cpu.coded.exact import (
    MAX_HALF,
    clip,
    exact_add,
    exact_mul,
    exact_sub,
    jit_exact,
    jit_exact_part,
    transform_lanes,
)
from engine.cpu.jit import jit_inner
from engine.cpu.simd import LANES, load, splat, store
from kvcache.codecs.hadamard import random_signs
from kvcache.codecs.page import Codec

KEY_FACTORS, VALUE_FACTORS, QUERY_FACTORS, OUTPUT_FACTORS = range(4)


def basis_arrays(codecs: Sequence[Codec], width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The basis of a layer, from the codecs of its pages."""
    bases = [codec.basis for codec in codecs]
    factors, ones = np.empty((4, 0, 0), np.float32), np.ones(width, np.float32)
    if any(basis.has_factors for basis in bases):
        four = [
            [basis.key_factors, basis.value_factors, basis.query_factors, basis.output_factors]
            for basis in bases
        ]
        factors = np.array(
            [[ones if one is None else one for one in kind] for kind in zip(*four, strict=True)], np.float32
        )
    seed = bases[0].seed
    return factors, np.empty(0, np.float32) if seed is None else random_signs(seed, width).copy()


@jit_exact
def transform_head(row: Any, at: Any, width: int) -> None:
    """Walsh-Hadamard over √n of one head, row[at : at + width], in blocks as in `kvcache.codecs.hadamard`."""
    literally(width)
    block = width & -width
    root = np.float32(1 / np.sqrt(np.float64(block)))
    distance = 1
    if block % LANES == 0:
        for i in range(0, width, LANES):
            store(row, at + i, transform_lanes(load(row, at + i)))
        distance = LANES
    while distance < block:
        for first in range(0, width, 2 * distance):
            if distance >= LANES:
                for i in range(at + first, at + first + distance, LANES):
                    x, y = load(row, i), load(row, i + distance)
                    store(row, i, exact_add(x, y))
                    store(row, i + distance, exact_sub(x, y))
            else:
                for i in range(at + first, at + first + distance):
                    a, b = row[i], row[i + distance]
                    row[i], row[i + distance] = a + b, a - b
        distance *= 2
    if width % LANES == 0:
        for i in range(at, at + width, LANES):
            store(row, i, exact_mul(load(row, i), splat(root)))
        return
    for i in range(at, at + width):
        row[i] = row[i] * root


@jit_exact_part
def enter_basis(row: Any, at: Any, kind: Any, head: Any, basis: Any, limit: Any, width: int) -> None:
    """One head, row[at : at + width], into the basis; kind: which factors. What is beyond ±limit becomes that."""
    literally(width)
    factors, signs = basis
    scaled, rotated = factors.shape[1] > 0, signs.shape[0] > 0
    if width % LANES == 0:
        for i in range(0, width, LANES):
            x = load(row, at + i)
            if scaled:
                x = exact_mul(x, load(factors[kind, head], i))
            x = clip(x, splat(limit))
            store(row, at + i, exact_mul(x, load(signs, i)) if rotated else x)
    else:
        for i in range(width):
            y = row[at + i] * factors[kind, head, i] if scaled else row[at + i]
            y = min(max(y, -limit), limit)
            row[at + i] = y * signs[i] if rotated else y
    if rotated:
        transform_head(row, at, width)


@jit_exact_part
def leave_basis(row: Any, at: Any, head: Any, basis: Any, width: int) -> None:
    """One head of an output, row[at : at + width], out of the basis."""
    literally(width)
    factors, signs = basis
    if signs.shape[0] > 0:
        transform_head(row, at, width)
        for i in range(width):
            row[at + i] = row[at + i] * signs[i]
    for i in range(width if factors.shape[1] > 0 else 0):
        row[at + i] = row[at + i] * factors[OUTPUT_FACTORS, head, i]


@jit_inner
def match_queries(queries: Any, kv_heads: int, basis: Any, width: int) -> None:
    """All heads of a query [heads · width], in place."""
    literally(width)
    heads = queries.shape[0] // width
    for g in range(heads if basis[0].shape[1] + basis[1].shape[0] > 0 else 0):
        enter_basis(
            queries, g * width, QUERY_FACTORS, g // (heads // kv_heads), basis, np.float32(np.inf), width
        )


@jit_inner
def restore_outputs(outputs: Any, kv_heads: int, basis: Any, width: int) -> None:
    """All heads of an output [heads · width], in place."""
    literally(width)
    heads = outputs.shape[0] // width
    for g in range(heads if basis[0].shape[1] + basis[1].shape[0] > 0 else 0):
        leave_basis(outputs, g * width, g // (heads // kv_heads), basis, width)


@jit_inner
def map_rows(queries: Any, kv_heads: int, basis: Any, back: bool, width: int) -> None:
    """Rows of queries [rows, heads · width] into the basis, in place; with `back`, outputs out of it."""
    literally(width)
    for n in range(queries.shape[0]):
        if back:
            restore_outputs(queries[n], kv_heads, basis, width)
        else:
            match_queries(queries[n], kv_heads, basis, width)


@jit_exact
def put_sink(sink: Any, side: Any, head: Any, row: Any, at: Any, basis: Any, width: int) -> None:
    """The exact first token, sink [2, heads, width], as one side of a head is stored: to row[at:]."""
    literally(width)
    for i in range(width):
        row[at + i] = sink[side, head, i]
    enter_basis(row, at, side, head, basis, np.float32(np.inf), width)


@jit_exact
def enter_half_range(row: Any, side: Any, first: Any, basis: Any, width: int) -> None:
    """All heads of one side of a page's row, the first one with number `first`, into the basis, to be coded."""
    literally(width)
    if basis[0].shape[1] == 0 and basis[1].shape[0] == 0:
        return
    for h in range(row.shape[0] // width):
        enter_basis(row, h * width, side, first + h, basis, MAX_HALF, width)
