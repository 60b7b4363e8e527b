"""The basis of a codec in kernels (`kvcache.codecs.basis`): rows into it, as NumPy does to the bit, and queries and
outputs.

A basis is None where rows are stored as they are; else a tuple of factors [4, kv_heads, width], or None without a
calibration, and signs [width] of the random rotation, or None without one. The factors are those of keys and of values,
and one over them: of queries and of outputs. Kernels are compiled for what there is of it, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload
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
from engine.cpu.jit import JIT_OPTIONS, NO_WRAPPERS, jit_inner
from engine.cpu.simd import LANES, load, splat, store
from kvcache.codecs.hadamard import random_signs
from kvcache.codecs.page import Codec

KEY_FACTORS, VALUE_FACTORS, QUERY_FACTORS, OUTPUT_FACTORS = range(4)
# No limit of a number.
ANY_SIZE = np.float32(np.inf)


# Factors and signs.
BasisArrays = tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]
_OPTIONS: Any = JIT_OPTIONS | NO_WRAPPERS


def basis_arrays(codecs: Sequence[Codec], width: int) -> BasisArrays | None:
    """The basis of a layer, from the codecs of its pages."""
    bases = [codec.basis for codec in codecs]
    factors, ones = None, np.ones(width, np.float32)
    if any(basis.has_factors for basis in bases):
        four = [
            [basis.key_factors, basis.value_factors, basis.query_factors, basis.output_factors]
            for basis in bases
        ]
        factors = np.array(
            [[ones if one is None else one for one in kind] for kind in zip(*four, strict=True)], np.float32
        )
    signs = None if bases[0].seed is None else random_signs(bases[0].seed, width).copy()
    return None if factors is None and signs is None else (factors, signs)


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
def _scale_head(row: Any, at: Any, factors: Any, limit: Any, width: int) -> None:
    """One head, row[at : at + width], times factors. What is beyond ±limit becomes that."""
    literally(width)
    if width % LANES == 0:
        for i in range(0, width, LANES):
            store(row, at + i, clip(exact_mul(load(row, at + i), load(factors, i)), splat(limit)))
        return
    for i in range(width):
        row[at + i] = min(max(row[at + i] * factors[i], -limit), limit)


@jit_exact_part
def _rotate_head(row: Any, at: Any, signs: Any, limit: Any, width: int) -> None:
    """One head, clipped to ±limit, through the random rotation."""
    literally(width)
    if width % LANES == 0:
        for i in range(0, width, LANES):
            store(row, at + i, exact_mul(clip(load(row, at + i), splat(limit)), load(signs, i)))
    else:
        for i in range(width):
            row[at + i] = min(max(row[at + i], -limit), limit) * signs[i]
    transform_head(row, at, width)


@jit_exact_part
def _rotate_head_back(row: Any, at: Any, signs: Any, width: int) -> None:
    literally(width)
    transform_head(row, at, width)
    for i in range(width):
        row[at + i] = row[at + i] * signs[i]


def _has_parts(basis: Any) -> tuple[bool, bool]:
    """Whether a basis of a type has factors, and signs."""
    if isinstance(basis, types.NoneType):
        return False, False
    factors, signs = (not isinstance(part, types.NoneType) for part in basis.types)
    return factors, signs


def enter_basis(row: Any, at: Any, kind: Any, head: Any, basis: Any, limit: Any, width: int) -> None:
    """One head, row[at : at + width], into the basis; kind: which factors. What is beyond ±limit becomes that."""


@overload(enter_basis, prefer_literal=True, jit_options=_OPTIONS)
def _choose_enter(row: Any, at: Any, kind: Any, head: Any, basis: Any, limit: Any, width: Any) -> Any:
    if not isinstance(width, types.IntegerLiteral):
        return None  # numba tries again when it knows the number
    scaled, rotated = _has_parts(basis)

    def stay(row: Any, at: Any, kind: Any, head: Any, basis: Any, limit: Any, width: Any) -> None:
        pass

    def scale(row: Any, at: Any, kind: Any, head: Any, basis: Any, limit: Any, width: Any) -> None:
        _scale_head(row, at, basis[0][kind, head], limit, width)

    def rotate(row: Any, at: Any, kind: Any, head: Any, basis: Any, limit: Any, width: Any) -> None:
        _rotate_head(row, at, basis[1], limit, width)

    def scale_and_rotate(row: Any, at: Any, kind: Any, head: Any, basis: Any, limit: Any, width: Any) -> None:
        _scale_head(row, at, basis[0][kind, head], limit, width)
        _rotate_head(row, at, basis[1], limit, width)

    return (scale_and_rotate if rotated else scale) if scaled else rotate if rotated else stay


def leave_basis(row: Any, at: Any, head: Any, basis: Any, width: int) -> None:
    """One head of an output, row[at : at + width], out of the basis."""


@overload(leave_basis, prefer_literal=True, jit_options=_OPTIONS)
def _choose_leave(row: Any, at: Any, head: Any, basis: Any, width: Any) -> Any:
    if not isinstance(width, types.IntegerLiteral):
        return None
    scaled, rotated = _has_parts(basis)

    def stay(row: Any, at: Any, head: Any, basis: Any, width: Any) -> None:
        pass

    def scale(row: Any, at: Any, head: Any, basis: Any, width: Any) -> None:
        _scale_head(row, at, basis[0][OUTPUT_FACTORS, head], ANY_SIZE, width)

    def rotate(row: Any, at: Any, head: Any, basis: Any, width: Any) -> None:
        _rotate_head_back(row, at, basis[1], width)

    def rotate_and_scale(row: Any, at: Any, head: Any, basis: Any, width: Any) -> None:
        _rotate_head_back(row, at, basis[1], width)
        _scale_head(row, at, basis[0][OUTPUT_FACTORS, head], ANY_SIZE, width)

    return (rotate_and_scale if rotated else scale) if scaled else rotate if rotated else stay


@jit_inner
def match_queries(queries: Any, kv_heads: int, basis: Any, width: int) -> None:
    """All heads of a query [heads · width], in place."""
    literally(width)
    heads = queries.shape[0] // width
    for g in range(heads):
        enter_basis(queries, g * width, QUERY_FACTORS, g // (heads // kv_heads), basis, ANY_SIZE, width)


@jit_inner
def restore_outputs(outputs: Any, kv_heads: int, basis: Any, width: int) -> None:
    """All heads of an output [heads · width], in place."""
    literally(width)
    heads = outputs.shape[0] // width
    for g in range(heads):
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
    enter_basis(row, at, side, head, basis, ANY_SIZE, width)


@jit_exact
def enter_half_range(row: Any, side: Any, first: Any, basis: Any, width: int) -> None:
    """All heads of one side of a page's row, the first one with number `first`, into the basis, to be coded."""
    literally(width)
    for h in range(row.shape[0] // width):
        enter_basis(row, h * width, side, first + h, basis, MAX_HALF, width)
