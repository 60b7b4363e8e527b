"""Profiles attention heads on the CPU: how much attention columns get from the last rows (FastGen, section 3).

An eviction is decided from the queries of at most 64 rows. Their scores are computed a second time here, head by head:
a tile is one query head's queries of sixteen rows, as in `engine.cpu.tiled_attention`, and goes over a block of 64
columns after the other. What is left of a KV head is its strip, the attention of each row to each column, pooled over
the query heads of the group by their mean:

    strip [blocks of 16 rows, columns, 16]

A strip takes 256 bytes for each column, and only one exists at a time. The sums of its columns are read from it: of
all rows, and of those rows whose window holds the column, since the window of a policy slides with each row.
`tests.support.keep_reference` is the same, slow and in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba.misc.special import literally
from numpy.typing import NDArray

from engine.cpu.jit import LOG2_E, LOWEST, jit, jit_inner
from engine.cpu.simd import LANES, add, load, mul, splat, store, within
from engine.cpu.tiled_attention import (
    PAGE,
    UNROLL,
    load_lane,
    mask_scores,
    score_tile,
    softmax_tile,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# Numbers of columns are held as floats, which are exact below it.
_NO_COLUMN = np.float32(2**24)


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Which columns each profiled row sees, as numbers of columns; its own is the last one, and they ascend.

    Row r sees columns lows[r] to highs[r]; those from nears[r] on are in the window of policies with local tokens.
    """

    # [rows] each, ascending.
    lows: Ints
    highs: Ints
    nears: Ints

    @classmethod
    def of_positions(cls, rows: Ints, columns: Ints, window: int, near_tokens: int) -> RowColumns:
        """The columns of rows at positions `rows`, where `columns` are the positions of the columns.

        Both ascend. A row sees columns up to itself, only the last `window` if the layer has one (not 0); the last
        `near_tokens` are near.
        """
        lows = np.searchsorted(columns, rows + 1 - window) if window else np.zeros(len(rows), np.int64)
        return cls(
            lows.astype(np.int64),
            np.searchsorted(columns, rows, "right") - 1,
            np.searchsorted(columns, rows + 1 - near_tokens).astype(np.int64),
        )

    def count_rows(self, num_columns: int) -> Ints:
        """How many rows see each column, [num_columns]."""
        columns = np.arange(num_columns)
        unborn, gone = np.searchsorted(self.highs, columns), np.searchsorted(-self.lows[::-1], -columns)
        return len(self.highs) - unborn - gone


@jit_inner
def _weigh_tile(
    first: Any, end: Any, low: Any, high: Any, q: Any, keys: Any, s: Any, top: Any, total: Any, width: int
) -> None:
    """Set s[t], for columns t from `first` to `end` - 1, to the weights of a tile's queries, and `total` to their sums.

    The weights of a query are relative to its largest one.
    """
    literally(width)
    largest = splat(LOWEST)
    for c in range(first, end, PAGE):
        used, page = min(PAGE, end - c), s[c * LANES :]
        old = largest
        largest = score_tile(q, 0, keys, c * width, used, 0, old, page, width)
        if high[0] < c + used - 1 or low[LANES - 1] > c:
            largest = mask_scores(page, used, load(low, 0), load(high, 0), c, old)
    store(top, 0, splat(LOWEST))
    store(total, 0, splat(np.float32(0)))
    softmax_tile(s[first * LANES :], end - first, largest, top, total, 0)


@jit_inner
def _hide_columns(first: Any, end: Any, low: Any, high: Any, s: Any) -> None:
    """Set the weights of columns `first` to `end` - 1 to 0 in the lanes of rows that do not see them.

    They are tiny, but such columns must be equal to each other.
    """
    lowest, highest, none = load(low, 0), load(high, 0), splat(np.float32(0))
    for t in range(first, end):
        store(s, t * LANES, within(load(s, t * LANES), lowest, splat(np.float32(t)), highest, none))


@jit_inner
def _add_tile(first: Any, end: Any, s: Any, share: Any, strip: Any, at: Any, begins: Any) -> None:
    """Add the weights of columns `first` to `end` - 1, times each query's share, to a block of the strip.

    The block is at `at`. `begins` says that this is its first query head: nothing is in it yet.
    """
    mine = load(share, 0)
    for t in range(first, end):
        weight = mul(load(s, t * LANES), mine)
        if not begins:
            weight = add(load(strip, at + t * LANES), weight)
        store(strip, at + t * LANES, weight)


@cache
def build_profile_kernel(width: int) -> Callable[..., None]:
    """The kernel that computes the strip of one KV head; `attend_columns` calls it."""

    @jit
    def run(
        queries: Any, head: int, group: int, keys: Any, lows: Any, highs: Any, strip: Any
    ) -> None:  # fmt: skip
        scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
        rows, room = queries.shape[0], keys.shape[0] // width
        q, s = np.zeros(LANES * width, np.float32), np.empty(room * LANES, np.float32)
        low, high, share = (
            np.empty(LANES, np.float32),
            np.empty(LANES, np.float32),
            np.empty(LANES, np.float32),
        )
        top, total = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        for start in range(0, rows, LANES):
            at = start * room
            for lane in range(LANES):
                row = min(start + lane, rows - 1)
                low[lane], high[lane] = lows[row], highs[row]
            first = int(low[0]) // UNROLL * UNROLL
            end = (int(high[LANES - 1]) + UNROLL) // UNROLL * UNROLL
            strip[at : at + first * LANES] = np.float32(0)
            strip[at + end * LANES : at + room * LANES] = np.float32(0)
            for member in range(group):
                for lane in range(min(LANES, rows - start)):
                    load_lane(queries[start + lane], head * group + member, scale, q, lane, width)
                _weigh_tile(first, end, low, high, q, keys, s, top, total, width)
                # The columns between are seen by all rows.
                _hide_columns(first, min(int(low[LANES - 1]), end), low, high, s)
                _hide_columns(max(int(high[0]) + 1, first), end, low, high, s)
                for lane in range(LANES):
                    valid = start + lane < rows
                    share[lane] = (
                        np.float32(1) / (total[lane] * np.float32(group)) if valid else np.float32(0)
                    )
                _add_tile(first, end, s, share, strip, at, member == 0)

    return run


@jit
def _sum_columns(strip: Any, room: int, sums: Any) -> None:
    """Set each of `sums` to what all rows give its column; a block of the strip has `room` columns."""
    lanes = np.empty(LANES, np.float32)
    for t in range(len(sums)):
        column = splat(np.float32(0))
        for at in range(t * LANES, len(strip), room * LANES):
            column = add(column, load(strip, at))
        store(lanes, 0, column)
        total = np.float32(0)
        for i in range(LANES):
            total += lanes[i]
        sums[t] = total


@jit
def _sum_near_columns(strip: Any, room: int, rows: int, nears: Any, sums: Any) -> None:
    """As `_sum_columns`, of each column only what rows give to which it is near: row r has nears[r] as its first."""
    near, lanes, none = np.empty(LANES, np.float32), np.empty(LANES, np.float32), splat(np.float32(0))
    sums[:] = np.float32(0)
    for start in range(0, rows, LANES):
        for lane in range(LANES):
            near[lane] = nears[min(start + lane, rows - 1)]
        low, at = load(near, 0), start * room
        for t in range(min(int(near[0]), len(sums)), len(sums)):
            x = load(strip, at + t * LANES)
            store(lanes, 0, within(x, low, splat(np.float32(t)), splat(_NO_COLUMN), none))
            total = np.float32(0)
            for i in range(LANES):
                total += lanes[i]
            sums[t] += total


def list_profile_kernels(width: int) -> list[Any]:
    """The kernels of this module for one head dimension."""
    return [build_profile_kernel(width), _sum_columns, _sum_near_columns]


def attend_columns(
    queries: Floats, head: int, group: int, keys: Floats, row_columns: RowColumns, strip: Floats | None = None
) -> Floats:
    """The strip of one KV head, flat.

    Args:
        queries: [rows, heads * head_dim], rotated; those of one layer.
        head: the KV head.
        group: query heads per KV head.
        keys: [columns, head_dim], rotated.
        seen: the columns of each row.
        strip: memory for the result, from `make_strip`; None: new memory.

    Returns:
        [blocks * room * 16]: `columns` of each block and what fills them up to `room`, a multiple of 8.
    """
    columns, width = keys.shape
    # The kernel reads eight keys at a time; what follows the last counts for no row.
    room = pad_columns(columns)
    padded = keys
    if room != columns:
        padded = np.zeros((room, width), np.float32)
        padded[:columns] = keys
    strip = make_strip(len(queries), columns) if strip is None else strip
    build_profile_kernel(width)(
        queries, head, group, padded.reshape(-1), row_columns.lows, row_columns.highs, strip
    )  # fmt: skip
    return strip


def make_strip(rows: int, columns: int) -> Floats:
    """Memory for a strip."""
    return np.empty(-(-rows // LANES) * pad_columns(columns) * LANES, np.float32)


def pad_columns(columns: int) -> int:
    """The room that a block of a strip has for so many columns."""
    return -(-columns // UNROLL) * UNROLL


def sum_attention(queries: Floats, head: int, group: int, keys: Floats, row_columns: RowColumns) -> Floats:
    """The attention that each column of a KV head gets from all rows, [columns]. Arguments as `attend_columns`.

    Every row adds 1 to the sum of all columns.
    """
    return sum_strip(attend_columns(queries, head, group, keys, row_columns), len(keys))


def sum_strip(strip: Floats, columns: int) -> Floats:
    """The sums of a strip's columns, [columns]."""
    sums = np.empty(columns, np.float32)
    _sum_columns(strip, pad_columns(columns), sums)
    return sums


def sum_near_strip(strip: Floats, columns: int, row_columns: RowColumns) -> Floats:
    """The sums of a strip's columns over the rows whose window holds them, [columns]."""
    sums = np.empty(columns, np.float32)
    _sum_near_columns(strip, pad_columns(columns), len(row_columns.nears), row_columns.nears, sums)
    return sums
