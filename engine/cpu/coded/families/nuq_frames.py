"""Expands frames of `nuq*` in kernels: the numbers that the page had before its rows were taken apart, to the bit.

What is in a frame: `kvcache.eviction.kept_rows.FrameFormat`. The figures of a frame have, from `SECTIONS` on, the
offsets of the codes of keys and of values, of the numbers of outliers and of the first one, then the bytes of an
outlier, and the bits of a number of outliers. `DETAIL` is the number of outlier slots of a page's row; a head's
constants are those of `engine.cpu.coded.families.nuq_expand` for the head alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.misc.special import literally
from numpy.typing import NDArray

from engine.cpu.coded.code_rows import expand_row, read_code
from engine.cpu.coded.exact import add_at, exact_add, exact_mul, jit_exact, jit_exact_part
from engine.cpu.coded.packed import byte_at, load_half
from engine.cpu.coded.page_kernels import BYTES, DETAIL, KEY_BITS, PAGE, SECTIONS
from engine.cpu.simd import LANES, load, splat, store
from kvcache.codecs.page import PageShape
from kvcache.eviction.kept_rows import FrameFormat

TOKEN_BYTES = 4


@jit_exact
def _find_entry(slab: Any, frames: Any, first: Any, entry: Any, size: Any) -> Any:
    """Where an entry of `size` bytes lies, in a table or list that begins at frame `first` of a bag."""
    figures, bag, per_slab = frames[0], frames[2], frames[3]
    per_frame = figures[BYTES] // size
    frame = first + entry // per_frame
    return bag[frame // per_slab] * slab + frame % per_slab * figures[BYTES] + entry % per_frame * size


@jit_exact
def _add_outliers(data: Any, slab: Any, at: Any, frames: Any, count: Any, scratch: Any, width: int) -> None:
    """Add the outliers' residuals of the first `count` rows of a frame. What is beyond the list or the head, in a
    damaged bag, is ignored.
    """
    literally(width)
    figures, first, outliers = frames[0], frames[5], frames[6]
    size, bits = figures[SECTIONS + 4], figures[SECTIONS + 5]
    place, entry, number = at + figures[SECTIONS + 3], 0, np.empty(1, np.float32)
    for byte in range(4):
        entry |= byte_at(data, place + byte) << 8 * byte
    for t in range(count):
        for side in range(2):
            for _ in range(read_code(data, at + figures[SECTIONS + 2], bits, 2 * t + side)):
                if entry >= outliers:
                    return
                where = _find_entry(slab, frames, first, entry, size)
                i = byte_at(data, where)
                if size == 4:
                    i |= byte_at(data, where + 1) << 8
                if i < width:
                    number[0] = load_half(data, where + size - 2)
                    add_at(scratch, (side * PAGE + t) * width + i, number, 0)
                entry += 1


@jit_exact_part
def expand_frame(
    data: Any, slab: Any, at: Any, frames: Any, head: Any, tokens: Any, scratch: Any, width: int
) -> None:
    """As `engine.cpu.coded.frame_kernels.register_frames`; keys before rotation."""
    literally(width)
    figures, table, numbers = frames[0], frames[1][head], np.empty(LANES, np.float32)
    bits, levels = figures[KEY_BITS], 2 * width
    row = (width * bits + 7) // 8
    for t in range(tokens.shape[0]):
        codes = at + figures[SECTIONS] + t * row
        expand_row(data, codes, bits, table, levels, table, scratch, t * width, 0, 1, width)
        shared = _find_entry(slab, frames, frames[4], tokens[t], TOKEN_BYTES)
        # As in `engine.cpu.coded.families.nuq_expand.expand_page`.
        scale, zero = load_half(data, shared), load_half(data, shared + 2) + np.float32(0)
        scaled = exact_mul(load(table, levels + LANES), splat(scale))
        store(numbers, 0, exact_add(scaled, splat(zero)))
        codes = at + figures[SECTIONS + 1] + t * row
        expand_row(data, codes, bits, numbers, 0, table[:0], scratch, (PAGE + t) * width, 0, 1, width)
    if figures[DETAIL] > 0:
        _add_outliers(data, slab, at, frames, tokens.shape[0], scratch, width)


def frame_figures(page: NDArray[np.int64], frame_format: FrameFormat) -> NDArray[np.int64]:
    """The figures of a frame, from those of the page."""
    rest = [*frame_format.offsets, frame_format.outlier_bytes, frame_format.count_bits]
    return np.array([frame_format.frame_bytes, 1, *page[KEY_BITS:SECTIONS], *rest], np.int64)


def head_constants(page: NDArray[np.float32], shape: PageShape) -> NDArray[np.float32]:
    """The constants of each head of a page, [heads, n], from those of the page."""
    channels, rest = page[: 2 * shape.width].reshape(2, shape.heads, -1), page[2 * shape.width :]
    return np.stack([np.concatenate([*channels[:, head], rest]) for head in range(shape.heads)])
