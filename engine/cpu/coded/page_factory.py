"""Builds the kernels of coded pages: the loops of `page_kernels` and `frame_kernels` around the functions of a family.

A kernel has its family as a number, which names no module, and the kernel cache looks for changed sources from the
module in which a kernel stands (`diptych.kernels.cache`). So this module imports all families: one that has changed
makes all these kernels new.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.cpu.coded.decode_kernels import decode_rows, read_runs
from engine.cpu.coded.families import (
    grouped_kernels,
    nuq_encode,
    nuq_expand,
    nuq_frames,
    plain_kernels,
    turbo_kernels,
)
from engine.cpu.coded.frame_kernels import add_segments, attend_rows, expand_rows, register_frames
from engine.cpu.coded.page_kernels import (
    CALIBRATED,
    GROUPED,
    PLAIN,
    ROTATED,
    PageFunctions,
    PageKernels,
    encode_tokens,
    expand_chunks,
    register_functions,
)
from engine.cpu.coded.stored_space import map_rows
from engine.cpu.jit import jit

register_functions(PLAIN, 0, PageFunctions(plain_kernels.expand_side, plain_kernels.encode_row))
for _bits in (4, 8):
    for _whole in (False, True):
        register_functions(GROUPED, 2 * _bits + _whole, grouped_kernels.make_functions(_bits, _whole))
register_functions(CALIBRATED, 0, PageFunctions(nuq_expand.expand_side, nuq_encode.encode_row))
for _by_size in (False, True):
    register_functions(ROTATED, int(_by_size), turbo_kernels.make_functions(_by_size))
register_frames(CALIBRATED, nuq_frames.expand_frame)


@cache
def build_page_kernels(family: int, width: int) -> PageKernels:
    """The kernels of a variant of a family for one head dimension, both compiled as constants.

    `family` is the number of `engine.cpu.coded.page_kernels.number_functions`.
    """

    @jit
    def encode(
        qkv: Any, positions: Any, slots: Any, queries: int, pages: Any, angles: Any, rotated: bool
    ) -> None:
        encode_tokens(family, qkv, positions, slots, queries, pages, angles, rotated, width)

    @jit
    def decode(qkv: Any, rows: Any, state: Any, pages: Any, angles: Any, window: int, out: Any) -> None:
        decode_rows(family, qkv, rows, state, pages, angles, window, out, width)

    @jit
    def expand(slabs: Any, first: int, length: int, sink: Any, pages: Any, angles: Any, scratch: Any) -> None:
        expand_chunks(family, slabs, first, length, sink, pages, angles, scratch, width)

    @jit
    def shared(qkv: Any, batch: Any, runs: Any, pages: Any, angles: Any, state: Any, out: Any) -> None:
        read_runs(family, qkv, batch, runs, pages, angles, state, out, width)

    @jit
    def kept(
        data: Any, slab: int, frames: Any, heads: Any, head: int, sink: Any, angles: Any, out: Any
    ) -> None:
        expand_rows(family, data, slab, frames, heads, head, sink, angles, out, width)

    @jit
    def ragged(
        qkv: Any, batch: Any, chunks: Any, ring: int, start: int, sink: Any, pages: Any, frames: Any, heads: Any,
        angles: Any, window: int, softmax: Any, out: Any,
    ) -> None:  # fmt: skip
        attend_rows(
            family, qkv, batch, chunks, ring, start, sink, pages, frames, heads, angles, window, softmax, out, width
        )  # fmt: skip

    @jit
    def segments(
        qkv: Any, rows: Any, sink: Any, data: Any, slab: int, frames: Any, heads: Any, angles: Any, state: Any, out: Any
    ) -> None:  # fmt: skip
        add_segments(family, qkv, rows, sink, data, slab, frames, heads, angles, state, out, width)

    @jit
    def map_queries(queries: Any, kv_heads: int, basis: Any, back: bool) -> None:
        map_rows(queries, kv_heads, basis, back, width)

    return PageKernels(encode, decode, expand, shared, kept, ragged, segments, map_queries)
