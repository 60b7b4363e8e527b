"""What decode kernels have in common, whatever a page holds: which rows a program works on, and what it leaves."""

from __future__ import annotations

from diptych.chunks import CHUNK_TOKENS
from engine.gpu.batch import ITEM_FIELDS
from engine.gpu.triton_kernel import tl, triton_kernel

PAGE = tl.constexpr(CHUNK_TOKENS)
ITEM_NUMBERS = tl.constexpr(ITEM_FIELDS)
# Precision of float32 products: three passes over tensor cores are as exact as float32 sums.
PRECISION = tl.constexpr("tf32x3")
LOWEST = tl.constexpr(-1e30)  # used as minus infinity: differences between such numbers stay finite
# A part with a weight below this is empty.
EMPTY_PART = tl.constexpr(-1e29)


@triton_kernel
def weigh_scores(s, seen, top, total):  # type: ignore[no-untyped-def]
    """One page in the running softmax of all rows: scores s [M, 64], seen [M, 64].

    Returns the weights of its tokens [M, 64], by what all earlier sums shrink [M], the highest score and the sum of all
    weights [M].
    """
    s = tl.where(seen, s, LOWEST)
    high = tl.maximum(top, tl.max(s, 1))
    p = tl.where(seen, tl.exp2(s - high[:, None]), 0.0)
    fade = tl.exp2(top - high)
    return p, fade, high, total * fade + tl.sum(p, 1)


@triton_kernel
def _row_part(lengths, begins, line, part, splits, window):  # type: ignore[no-untyped-def]
    """The range of chunks of split `part`, if a row's own chunks are cut into `splits` splits."""
    length = tl.load(lengths + line)
    begin = tl.load(begins + line)
    if window > 0:
        begin = tl.maximum(begin, tl.maximum(length - window, 0) // PAGE)
    end = (length + PAGE - 1) // PAGE
    share = (tl.maximum(end - begin, 0) + splits - 1) // splits
    first = begin + part * share
    return first, tl.minimum(end, first + share)


@triton_kernel
def locate_rows(  # type: ignore[no-untyped-def]
    rows, lengths, begins, items, number, tiles, splits, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The rows and chunks of a program of a decode kernel.

    number: SHARED: item * tiles + tile of its rows; else row * splits + split.

    Returns:
        The line of the table that names the chunks, and the part that the program computes; for each of its BLOCK_M
        rows its number and whether it exists; the first chunk, and the one behind the last; each row's query head, the
        tokens that it attends to (low to high - 1), the most tokens of any row, and where its queries and output are.
    """
    m = tl.arange(0, BLOCK_M)
    if SHARED:
        item = items + number // tiles * ITEM_NUMBERS
        first, last = tl.load(item), tl.load(item + 1)
        line, bottom, part = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4) + splits
        m = number % tiles * BLOCK_M + m
        row = line + m // GROUP
        live = row < bottom
    else:
        line = number // splits
        part = number % splits
        row = line + m * 0
        live = m < GROUP
        first, last = _row_part(lengths, begins, line, part, splits, window)
    head = tl.program_id(0) * GROUP + m % GROUP
    # A row attends to the tokens at places low to high - 1.
    high = tl.load(lengths + row, mask=live, other=0)
    low = tl.where(window > 0, tl.maximum(high - window, 0), 0)
    # Tokens at this place and later are not read, since their memory may hold anything.
    reach = tl.max(high, 0)
    at = tl.load(rows + row, mask=live, other=0).to(tl.int64)
    return line, part, row, live, first, last, head, low, high, reach, at


@triton_kernel
def store_part(  # type: ignore[no-untyped-def]
    acc, top, total, at, row, part, head, d, live, inside, out, parts, weights, most, out_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Store what a program has computed: finished rows of `out` with DIRECT, else a part and its weight."""
    if DIRECT:
        tl.store(out + at[:, None] * out_stride + head[:, None] * WIDTH + d[None, :], acc, mask=inside)
    else:
        # An empty part stores only its weight; the merge does not read its values.
        slot = (row.to(tl.int64) * most + part) * HEADS + head
        weight = tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), LOWEST)
        tl.store(weights + slot, weight, mask=live)
        tl.store(parts + slot[:, None] * WIDTH + d[None, :], acc, mask=inside & (total > 0.0)[:, None])
