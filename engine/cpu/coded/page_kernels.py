"""How kernels read and write coded pages, whatever the codec: the loops around the two functions of a family.

`engine.cpu.coded.page_factory` compiles the loops for each family (`PageKernels`), which has these two:

    expand_page(data, at, page, table, count, scratch, heads, width)
        the first `count` rows of the page at data[at] into scratch [heads, 2, 64, width], the layout of a raw pool
    encode_row(keys, values, data, at, page, row, table, work, width)
        one token's keys and values [heads · width], finite, into a row of a page; may overwrite them, and `work`

Both give the bits of the family's NumPy codec. Arguments that belong together come as tuples:

    pages     the pool's bytes, bytes of a slab, offset of the layer in it, `page`, `constants`
    page      figures of a page and offsets of its sections, in the order of the names below
    constants [pages of a layer, n]: each row is the `table` of one page
    angles    cosines and sines, [positions · head_dim / 2] each

Keys that are stored before rotation come with tables of angles, computed in float64 and rounded to float32. Decode
rotates the query back by the first position of the chunk, and keys by their place in it: the same 64 angles in every
chunk. Pages for several queries are expanded with keys rotated to their positions: the kernels for raw pools read them.
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
from engine.cpu.attention import mix_values, score_page, softmax_page
from engine.cpu.coded.exact import exact_add, exact_mul, exact_sub, jit_exact
from engine.cpu.jit import JIT_OPTIONS, LOG2_E, LOWEST, NO_WRAPPERS, jit_inner, prefetch
from engine.cpu.simd import LANES, load, store
from engine.cpu.tiled_attention import clear_lanes, load_lane, read_run, store_lane

PAGE = CHUNK_TOKENS
CACHE_LINE = 64
# Chunks of a shared run that are expanded before they are read: few enough to stay in the cache.
CHUNKS_PER_PIECE = 4
# Families.
PLAIN, GROUPED, CALIBRATED, ROTATED = range(4)
# Places in `page`: bytes of a page, its KV heads, bits of a key's and of a value's code, a number that each family uses
# in its own way, and the offsets of the sections, in the order of the NumPy codec.
BYTES, HEADS, KEY_BITS, VALUE_BITS, DETAIL, SECTIONS = range(6)


@dataclass(frozen=True, slots=True)
class PageKernels:
    """The compiled kernels of one family for one head dimension; arguments are those of the functions named here."""

    # `encode_tokens`
    encode: Callable[..., None]
    # `decode_rows`
    decode: Callable[..., None]
    # `expand_chunks`
    expand: Callable[..., None]
    # `read_runs`
    shared: Callable[..., None]
    # `engine.cpu.coded.frame_kernels.expand_rows`
    kept: Callable[..., None]
    # `engine.cpu.coded.frame_kernels.attend_rows`
    ragged: Callable[..., None]


@dataclass(frozen=True, slots=True)
class PageFunctions:
    """The two functions of a family, made by `jit_exact`."""

    expand_page: Any
    encode_row: Any


# By family. A kernel cannot take a function as an argument, or numba would not store it on disk. So kernels are
# compiled for the number of a family, and the compiler takes the functions of that family for `expand_page_of` and
# `_encode`.
_FUNCTIONS: dict[int, PageFunctions] = {}
_OPTIONS: Any = JIT_OPTIONS | NO_WRAPPERS


def register_functions(family: int, expand_page: Any, encode_row: Any) -> None:
    """Make the functions of a family known, for kernels of the module that calls this."""
    _FUNCTIONS[family] = PageFunctions(expand_page, encode_row)


def family_functions(family: int) -> PageFunctions:
    """The functions of a family."""
    return _FUNCTIONS[family]


def expand_page_of(
    family: int, data: Any, at: Any, page: Any, table: Any, count: Any, scratch: Any, heads: int, width: int
) -> None:
    """`expand_page` of a family."""


def _encode(
    family: int, keys: Any, values: Any, data: Any, at: Any, page: Any, row: Any, table: Any, work: Any, width: int
) -> None:  # fmt: skip
    """`encode_row` of a family."""


@overload(expand_page_of, prefer_literal=True, jit_options=_OPTIONS)
def _choose_expand(
    family: Any, data: Any, at: Any, page: Any, table: Any, count: Any, scratch: Any, heads: Any, width: Any
) -> Any:
    if not isinstance(family, types.IntegerLiteral):
        return None  # numba tries again when it knows the number
    expand = _FUNCTIONS[family.literal_value].expand_page

    def call(
        family: Any,
        data: Any,
        at: Any,
        page: Any,
        table: Any,
        count: Any,
        scratch: Any,
        heads: Any,
        width: Any,
    ) -> Any:
        expand(data, at, page, table, count, scratch, heads, width)

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


@jit_inner
def _rotate_back(q: Any, cos: Any, sin: Any, angles: Any, rotated: Any, width: int) -> None:
    """All heads of a query, rotated back by the angles at cos[angles :] and sin[angles :], into `rotated`."""
    literally(width)
    half = width // 2
    for head in range(0, q.shape[0], width):
        for i in range(half):
            x, y, c, s = q[head + i], q[head + half + i], cos[angles + i], sin[angles + i]
            rotated[head + i] = x * c + y * s
            rotated[head + half + i] = y * c - x * s


@jit_exact
def restore_sink(sink: Any, scratch: Any, heads: int, width: int) -> None:
    """Put the exact first token, sink [2, heads, width], over row 0 of an expanded page."""
    literally(width)
    side = PAGE * width
    for h in range(heads):
        for i in range(width):
            scratch[h * 2 * side + i] = sink[0, h, i]
            scratch[h * 2 * side + side + i] = sink[1, h, i]


@jit_exact
def rotate_keys(scratch: Any, count: Any, cos: Any, sin: Any, position: Any, heads: int, width: int) -> None:
    """Rotate the first `count` keys of every head of an expanded page, the first one to `position`."""
    literally(width)
    for h in range(heads):
        for t in range(count):
            rotate_head(scratch, (h * 2 * PAGE + t) * width, cos, sin, (position + t) * (width // 2), width)


@jit_inner
def _attend_chunks(
    family: int, q: Any, rotated: Any, length: int, slabs: Any, done: int, sinks: Any, top: Any, total: Any,
    acc: Any, data: Any, slab: int, offset: int, page: Any, constants: Any, cos: Any, sin: Any, window: int,
    scratch: Any, s: Any, heads: int, width: int,
) -> None:  # fmt: skip
    """Attention of one sequence over its chunks from `done` on, as `engine.cpu.attention` does it over raw pages."""
    literally(width), literally(family)
    pages, side, size, relative = constants.shape[0], PAGE * width, page[BYTES], cos.shape[0] > 0
    group = q.shape[0] // width // (pages * heads)
    if done == 0:
        top[:], total[:], acc[:] = LOWEST, np.float32(0), np.float32(0)
    begin, chunks = max(0, length - window) if window > 0 else 0, (length + PAGE - 1) // PAGE
    for c in range(max(done, begin // PAGE), chunks):
        first, last = max(0, begin - c * PAGE), min(PAGE, length - c * PAGE)
        if relative:
            _rotate_back(q, cos, sin, c * PAGE * (width // 2), rotated, width)
        for p in range(pages):
            if c + 1 < chunks:
                for line in range(0, size, CACHE_LINE):
                    prefetch(data, slabs[c + 1] * slab + offset + p * size + line)
            expand_page_of(
                family,
                data,
                slabs[c] * slab + offset + p * size,
                page,
                constants[p],
                last,
                scratch,
                heads,
                width,
            )
            if relative:
                rotate_keys(scratch, last, cos, sin, 0, heads, width)
            if c == 0:
                restore_sink(sinks[:, p * heads : (p + 1) * heads], scratch, heads, width)
            for h in range(heads):
                g0, g1 = (p * heads + h) * group, (p * heads + h + 1) * group
                mine, k = acc[g0 * width : g1 * width], h * 2 * side
                score_page(rotated[g0 * width : g1 * width], scratch[k : k + side], s, group, width)
                softmax_page(s, top[g0:g1], total[g0:g1], mine, first, last, width)
                mix_values(s, scratch[k + side : k + 2 * side], mine, group, first, last, width)
    for h in range(q.shape[0] // width):
        share = np.float32(1) / total[h]
        for i in range(width):
            acc[h * width + i] *= share


@jit_inner
def decode_rows(
    family: int,
    qkv: Any,
    batch: Any,
    state: Any,
    pages: Any,
    angles: Any,
    window: int,
    out: Any,
    width: int,
) -> None:
    """As `engine.cpu.attention.build_decode_kernel`; a page is expanded once for all query heads.

    batch: rows, lengths and slabs of the sequences, their sinks' places, and all sinks of the layer. state: chunks that
    are done, maxima and sums. Angles are empty if keys are stored rotated.
    """
    literally(width), literally(family)
    (rows, lengths, table, sinks, sink_rows), (done, tops, totals) = batch, state
    (data, slab, offset, page, constants), (cos, sin) = pages, angles
    scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
    heads, size = page[HEADS], out.shape[1]
    q, rotated = np.empty(size, np.float32), np.empty(size, np.float32)
    scratch = np.empty(heads * 2 * PAGE * width, np.float32)
    s = np.empty(size // width // (constants.shape[0] * heads) * PAGE, np.float32)
    for n in range(rows.shape[0]):
        for i in range(size):
            q[i] = qkv[rows[n], i] * scale
            rotated[i] = q[i]
        _attend_chunks(
            family, q, rotated, lengths[n], table[n], done[n], sink_rows[sinks[n]], tops[n], totals[n],
            out[rows[n]], data, slab, offset, page, constants, cos, sin, window, scratch, s, heads, width,
        )  # fmt: skip


@jit_inner
def expand_chunks(
    family: int, slabs: Any, first: int, length: int, sink: Any, pages: Any, angles: Any, scratch: Any, width: int
) -> None:  # fmt: skip
    """Expand chunks `first` to `first + len(slabs) − 1` of a sequence of `length` tokens.

    scratch: [chunks, kv_heads, 2, 64, head_dim], in the layout of a raw pool. Angles are empty if keys are stored
    rotated.
    """
    literally(width), literally(family)
    (data, slab, offset, page, constants), (cos, sin) = pages, angles
    heads, groups = page[HEADS], constants.shape[0]
    floats = heads * 2 * PAGE * width
    for c in range(slabs.shape[0]):
        begin = (first + c) * PAGE
        count = min(PAGE, length - begin)
        for p in range(groups):
            place = (c * groups + p) * floats
            room = scratch[place : place + floats]
            at = slabs[c] * slab + offset + p * page[BYTES]
            expand_page_of(family, data, at, page, constants[p], count, room, heads, width)
            if cos.shape[0] > 0:
                rotate_keys(room, count, cos, sin, begin, heads, width)
            if begin == 0:
                restore_sink(sink[:, p * heads : (p + 1) * heads], room, heads, width)


@jit_inner
def read_runs(
    family: int, qkv: Any, batch: Any, runs: Any, pages: Any, angles: Any, state: Any, out: Any, width: int
) -> None:  # fmt: skip
    """The first phase of decode, as `engine.cpu.tiled_attention.build_shared_prefix_kernel`: every run is read once for
    all its rows. Its chunks are expanded a few at a time, and the queries' state stays where it is meanwhile.

    batch: rows and slabs of the sequences, their sinks' places, and all sinks of the layer. state: maxima and sums.
    """
    literally(width), literally(family)
    (rows, table, sinks, sink_rows), (tops, totals) = batch, state
    scale, one = np.float32(LOG2_E / np.sqrt(np.float32(width))), np.float32(1)
    kv_heads = pages[3][HEADS] * pages[4].shape[0]
    group, floats = out.shape[1] // width // kv_heads, kv_heads * 2 * PAGE * width
    room = (rows.shape[0] * group + LANES - 1) // LANES * LANES
    q, o = np.empty(kv_heads * room * width, np.float32), np.empty(kv_heads * room * width, np.float32)
    top, total = np.empty(kv_heads * room, np.float32), np.empty(kv_heads * room, np.float32)
    s, order = np.empty(PAGE * LANES, np.float32), np.arange(CHUNKS_PER_PIECE)
    scratch = np.empty(CHUNKS_PER_PIECE * floats, np.float32)
    for r in range(runs.shape[0]):
        start, last, first = runs[r, 0], runs[r, 1], runs[r, 2]
        lanes = (runs[r, 3] - first) * group
        tiles = (lanes + LANES - 1) // LANES
        for h in range(kv_heads):
            at, place = h * room, h * room * width
            clear_lanes(tiles * LANES, q[place:], o[place:], top[at:], total[at:], width)
            for lane in range(lanes):
                n, g = first + lane // group, h * group + lane % group
                load_lane(qkv[rows[n]], g, scale, q[place:], lane, width)
                if start > 0:
                    load_lane(out[rows[n]], g, one, o[place:], lane, width)
                    top[at + lane], total[at + lane] = tops[n, g], totals[n, g]
        for begin in range(start, last, CHUNKS_PER_PIECE):
            end = min(last, begin + CHUNKS_PER_PIECE)
            slabs, sink = table[first, begin:end], sink_rows[sinks[first]]
            expand_chunks(family, slabs, begin, end * PAGE, sink, pages, angles, scratch, width)
            for h in range(kv_heads):
                at, place = h * room, h * room * width
                read_run(
                    0, end - begin, order, scratch, floats, h * 2 * PAGE * width, tiles,
                    q[place:], o[place:], top[at:], total[at:], s, width,
                )  # fmt: skip
        for h in range(kv_heads):
            for lane in range(lanes):
                n, g, at = first + lane // group, h * group + lane % group, h * room + lane
                store_lane(o[h * room * width :], lane, one, out[rows[n]], g, width)
                tops[n, g], totals[n, g] = top[at], total[at]


@jit_inner
def encode_tokens(
    family: int, qkv: Any, positions: Any, slots: Any, queries: int, pages: Any, angles: Any, rotated: bool,
    width: int,
) -> None:  # fmt: skip
    """Rotate the queries of every token in place, and code its keys (`rotated`, or before rotation) and values.

    Keys and values must be finite. Queries and keys in qkv are normalised.
    """
    literally(width), literally(family)
    (data, slab, offset, page, constants), (cos, sin) = pages, angles
    heads, groups, half = page[HEADS], constants.shape[0], width // 2
    group = heads * width
    keys, values = np.empty(group, np.float32), np.empty(group, np.float32)
    work = (
        np.empty(group, np.float32), np.empty(group, np.int32), np.empty(2 * group + 2, np.int64),
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
            at = slots[n] * slab + offset + p * page[BYTES]
            _encode(family, keys, values, data, at, page, positions[n] % PAGE, constants[p], work, width)
