"""How kernels read and write coded pages, whatever the codec: the loops around the two functions of a family.

`engine.cpu.coded.page_factory` compiles the loops for each family (`PageKernels`), which has these two:

    expand_side(data, at, page, table, side, first, count, scratch, to, stride, work, heads, width)
        rows `first` to `first + count - 1` of the keys (side 0) or values (1) of the page at data[at]: those of head h
        to scratch[to + h * stride :]. `first` is a multiple of 16; up to the next multiple of 16 rows scratch may be
        overwritten. `work` is room for `work_floats` numbers
    encode_row(keys, values, data, at, page, row, table, work, width)
        one token's keys and values [heads · width], finite and in the basis, into a row of a page; may overwrite them,
        and `work`

Both give the bits of the family's NumPy codec. Arguments that belong together come as tuples:

    pages     the pool's bytes, bytes of a slab, offset of the layer in it, `page`, `constants`, and the layer's `basis`
              (`engine.cpu.coded.stored_space`): pages hold rows in it, and attention stays in it
    page      figures of a page and offsets of its sections, in the order of the names below
    constants [pages of a layer, n]: each row is the `table` of one page
    angles    cosines and sines, [positions · head_dim / 2] each

Keys that are stored before rotation come with tables of angles, computed in float64 and rounded to float32. Decode
rotates the query back by the first position of the chunk, and keys by their place in it: the same 64 angles in every
chunk. It expands sixteen tokens at a time, keys for the scores and then values, so that they stay in the cache. Pages
for several queries are expanded with keys rotated to their positions: the kernels for raw pools read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload
from numba.misc.special import literally

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.coded.exact import exact_add, exact_mul, exact_sub, jit_exact
from engine.cpu.coded.stored_space import KEY_FACTORS, VALUE_FACTORS, enter_half_range, put_sink
from engine.cpu.jit import JIT_OPTIONS, NO_WRAPPERS, jit_inner
from engine.cpu.simd import LANES, load, store

PAGE = CHUNK_TOKENS
# Families.
PLAIN, GROUPED, CALIBRATED, ROTATED = range(4)
NUM_FAMILIES = 4
# Places in `page`: bytes of a page, its KV heads, bits of a key's and of a value's code, a number that each family uses
# in its own way, and the offsets of the sections, in the order of the NumPy codec.
BYTES, HEADS, KEY_BITS, VALUE_BITS, DETAIL, SECTIONS = range(6)


@dataclass(frozen=True, slots=True)
class PageKernels:
    """The compiled kernels of one family for one head dimension; arguments are those of the functions named here."""

    # `encode_tokens`
    encode: Callable[..., None]
    # `engine.cpu.coded.decode_kernels.decode_rows`
    decode: Callable[..., None]
    # `expand_chunks`
    expand: Callable[..., None]
    # `engine.cpu.coded.decode_kernels.read_runs`
    shared: Callable[..., None]
    # `engine.cpu.coded.frame_kernels.expand_rows`
    kept: Callable[..., None]
    # `engine.cpu.coded.frame_kernels.attend_rows`
    ragged: Callable[..., None]
    # `engine.cpu.coded.frame_kernels.add_segments`
    segments: Callable[..., None]
    # `engine.cpu.coded.stored_space.map_rows`
    map_queries: Callable[..., None]


@dataclass(frozen=True, slots=True)
class PageFunctions:
    """The two functions of a family, made by `jit_exact`."""

    expand_side: Any
    encode_row: Any


# By number. A kernel cannot take a function as an argument, or numba would not store it on disk. So kernels are
# compiled for a number, which says family and variant, and the compiler takes the functions of that number for
# `expand_side_of` and `_encode`. A variant is what would take a kernel much longer to compile beside others.
_FUNCTIONS: dict[int, PageFunctions] = {}
_OPTIONS: Any = JIT_OPTIONS | NO_WRAPPERS


def number_functions(family: int, variant: int) -> int:
    """The number of a variant's functions."""
    return variant * NUM_FAMILIES + family


def register_functions(family: int, variant: int, functions: PageFunctions) -> None:
    """Make the functions of a variant of a family known, for kernels of the module that calls this."""
    _FUNCTIONS[number_functions(family, variant)] = functions


def find_functions(number: int) -> PageFunctions:
    """The functions with a number."""
    return _FUNCTIONS[number]


def expand_side_of(
    family: int, data: Any, at: Any, page: Any, table: Any, side: Any, first: Any, count: Any, scratch: Any, to: Any,
    stride: Any, work: Any, heads: int, width: int,
) -> None:  # fmt: skip
    """`expand_side` of a family."""


def _encode(
    family: int, keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
) -> None:  # fmt: skip
    """`encode_row` of a family."""


@overload(expand_side_of, prefer_literal=True, jit_options=_OPTIONS)
def _choose_expand(
    family: Any, data: Any, at: Any, page: Any, table: Any, side: Any, first: Any, count: Any, scratch: Any, to: Any,
    stride: Any, work: Any, heads: Any, width: Any,
) -> Any:  # fmt: skip
    if not isinstance(family, types.IntegerLiteral):
        return None  # numba tries again when it knows the number
    expand = _FUNCTIONS[family.literal_value].expand_side

    def call(
        family: Any, data: Any, at: Any, page: Any, table: Any, side: Any, first: Any, count: Any, scratch: Any,
        to: Any, stride: Any, work: Any, heads: Any, width: Any,
    ) -> Any:  # fmt: skip
        expand(data, at, page, table, side, first, count, scratch, to, stride, work, heads, width)

    return call


@overload(_encode, prefer_literal=True, jit_options=_OPTIONS)
def _choose_encode(
    family: Any, keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: Any
) -> Any:  # fmt: skip
    if not isinstance(family, types.IntegerLiteral):
        return None
    encode = _FUNCTIONS[family.literal_value].encode_row

    def call(
        family: Any, keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any,
        width: Any,
    ) -> Any:  # fmt: skip
        encode(keys, values, data, at, page, row, table, work, width)

    return call


@jit_exact
def work_floats(heads: int, width: int) -> int:
    """Numbers of the room that `expand_side` needs: of scales, zero points and outliers of a page's side."""
    return 2 * PAGE * heads * width + 4 * LANES


@jit_inner
def expand_page_of(
    family: int, data: Any, at: Any, page: Any, table: Any, count: Any, scratch: Any, work: Any, heads: int, width: int
) -> None:  # fmt: skip
    """The first `count` rows of a page, into scratch [heads, 2, 64, width]: the layout of a raw pool."""
    literally(width), literally(family)
    for side in range(2):
        to = side * PAGE * width
        expand_side_of(
            family, data, at, page, table, side, 0, count, scratch, to, 2 * PAGE * width, work, heads, width
        )


@jit_exact
def rotate_head(row: Any, at: Any, cos: Any, sin: Any, angles: Any, width: int) -> None:
    """Rotate one head, row[at : at + width], by the angles at cos[angles :] and sin[angles :]."""
    literally(width)
    half = width // 2
    if half % LANES == 0:
        for i in range(0, half, LANES):
            a, b = load(row, at + i), load(row, at + half + i)
            cosines, sines = load(cos, angles + i), load(sin, angles + i)
            store(row, at + i, exact_sub(exact_mul(a, cosines), exact_mul(b, sines)))
            store(row, at + half + i, exact_add(exact_mul(b, cosines), exact_mul(a, sines)))
        return
    for i in range(half):
        x, y, c, s = row[at + i], row[at + half + i], cos[angles + i], sin[angles + i]
        row[at + i] = x * c - y * s
        row[at + half + i] = y * c + x * s


@jit_exact
def rotate_keys(scratch: Any, count: Any, cos: Any, sin: Any, position: Any, heads: int, width: int) -> None:
    """Rotate the first `count` keys of every head of an expanded page, the first one to `position`."""
    literally(width)
    for h in range(heads):
        for t in range(count):
            rotate_head(scratch, (h * 2 * PAGE + t) * width, cos, sin, (position + t) * (width // 2), width)


@jit_inner
def expand_whole(
    family: int, number: Any, c: Any, count: Any, p: Any, sink: Any, pages: Any, angles: Any, scratch: Any, work: Any,
    width: int,
) -> None:  # fmt: skip
    """The first `count` rows of page p of chunk c, in the slab with a number, into scratch [heads, 2, 64, width]: keys
    at their positions, and the exact first token.
    """
    literally(width), literally(family)
    (data, slab, offset, page, constants, basis), (cos, sin), heads = pages, angles, pages[3][HEADS]
    at = number * slab + offset + p * page[BYTES]
    expand_page_of(family, data, at, page, constants[p], count, scratch, work, heads, width)
    if cos.shape[0] > 0:
        rotate_keys(scratch, count, cos, sin, c * PAGE, heads, width)
    for h in range(heads if c == 0 else 0):
        for side in range(2):
            put_sink(sink, side, p * heads + h, scratch, (2 * h + side) * PAGE * width, basis, width)


@jit_inner
def expand_chunks(
    family: int, slabs: Any, first: int, length: int, sink: Any, pages: Any, angles: Any, scratch: Any, width: int
) -> None:  # fmt: skip
    """Expand chunks `first` to `first + len(slabs) − 1` of a sequence of `length` tokens.

    scratch: [chunks, kv_heads, 2, 64, head_dim], in the layout of a raw pool. Angles are empty if keys are stored
    rotated.
    """
    literally(width), literally(family)
    heads, groups = pages[3][HEADS], pages[4].shape[0]
    floats, work = heads * 2 * PAGE * width, np.empty(work_floats(heads, width), np.float32)
    for c in range(slabs.shape[0]):
        count = min(PAGE, length - (first + c) * PAGE)
        for p in range(groups):
            room = scratch[(c * groups + p) * floats :]
            expand_whole(family, slabs[c], first + c, count, p, sink, pages, angles, room, work, width)


@jit_inner
def encode_tokens(
    family: int, qkv: Any, positions: Any, slots: Any, queries: int, pages: Any, angles: Any, rotated: bool,
    width: int,
) -> None:  # fmt: skip
    """Rotate the queries of every token in place, and code its keys (`rotated`, or before rotation) and values.

    Keys and values must be finite. Queries and keys in qkv are normalised.
    """
    literally(width), literally(family)
    (data, slab, offset, page, constants, basis), (cos, sin) = pages, angles
    heads, groups, half = page[HEADS], constants.shape[0], width // 2
    group = heads * width
    keys, values = np.empty(group, np.float32), np.empty(group, np.float32)
    work = (
        np.empty(2 * group + LANES, np.float32), np.empty(group, np.int32), np.empty(2 * group + 2, np.int64),
        np.empty(group + 2, np.float32),
    )  # fmt: skip
    for n in range(positions.shape[0]):
        row, angles = qkv[n], positions[n] * half
        for h in range(queries):
            rotate_head(row, h * width, cos, sin, angles, width)
        for p in range(groups):
            key = (queries + p * heads) * width
            value = key + groups * group
            for i in range(group):
                keys[i], values[i] = row[key + i], row[value + i]
            if rotated:
                for h in range(heads):
                    rotate_head(keys, h * width, cos, sin, angles, width)
            enter_half_range(keys, KEY_FACTORS, p * heads, basis, width)
            enter_half_range(values, VALUE_FACTORS, p * heads, basis, width)
            at = slots[n] * slab + offset + p * page[BYTES]
            _encode(family, keys, values, data, at, page, positions[n] % PAGE, constants[p], work, width)
