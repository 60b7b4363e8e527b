"""Profiles attention heads on the CPU: how much attention columns get from the last rows (FastGen, section 3).

An eviction is decided from the queries of at most 64 rows. Their scores are computed a second time here, head by head
and for sixteen queries at once, as in `engine.cpu.tiled_attention`: a block of 64 columns after the other, then the
weights, which are added to the sums of their columns. The weights of more than sixteen queries never exist at a time.
Nothing else is needed of a head:

    sums[j]     the attention that column j gets, over all rows
    near[j]     the same over the rows in whose window it is

For a policy without a window, the recovered mass is the mean over rows of its columns' sums. The window slides with
each row, and `near` is what it adds in columns that are not kept for another reason. `kvcache.keep` decides by these.
Queries of a group are pooled by their mean.
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


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Which columns each profiled row sees, as numbers of columns; its own is the last one, and they ascend.

    Row r sees columns lows[r] to highs[r]; those from nears[r] on are in the window of the policy `local`.
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
    tile: Any, first: Any, end: Any, low: Any, high: Any, q: Any, keys: Any, s: Any, top: Any, total: Any,
    width: int,
) -> None:  # fmt: skip
    """Set s[t], for columns t from `first` to `end` - 1, to the weights of a tile's queries, and `total` to their sums.

    The weights of a query are relative to its largest one.
    """
    literally(width)
    lane, at = tile * LANES, tile * LANES * width
    largest = splat(LOWEST)
    for c in range(first, end, PAGE):
        used, page = min(PAGE, end - c), s[c * LANES :]
        old = largest
        largest = score_tile(q, at, keys, c * width, used, 0, old, page, width)
        if high[lane] < c + used - 1 or low[lane + LANES - 1] > c:
            largest = mask_scores(page, used, load(low, lane), load(high, lane), c, old)
    store(top, 0, splat(LOWEST))
    store(total, 0, splat(np.float32(0)))
    softmax_tile(s[first * LANES :], end - first, largest, top, total, 0)


@jit_inner
def _add_columns(first: Any, end: Any, s: Any, share: Any, lanes: Any) -> None:
    """Add the weights of columns `first` to `end` - 1, times each query's share, to `lanes`."""
    mine = load(share, 0)
    for t in range(first, end):
        store(lanes, t * LANES, add(load(lanes, t * LANES), mul(load(s, t * LANES), mine)))


@jit_inner
def _add_near(
    first: Any, end: Any, tile: Any, window: Any, high: Any, s: Any, share: Any, lanes: Any
) -> None:
    """The same, only of queries in whose window a column is."""
    mine, none = load(share, 0), splat(np.float32(0))
    low, last = load(window, tile * LANES), load(high, tile * LANES)
    for t in range(first, end):
        weight = within(mul(load(s, t * LANES), mine), low, splat(np.float32(t)), last, none)
        store(lanes, t * LANES, add(load(lanes, t * LANES), weight))


@jit_inner
def _sum_lanes(first: Any, end: Any, lanes: Any, sums: Any) -> None:
    """Set sums[t], for t from `first` to `end` - 1, to the sum of lanes[t]."""
    for t in range(first, end):
        column = np.float32(0)
        for i in range(LANES):
            column += lanes[t * LANES + i]
        sums[t] = column


@cache
def build_profile_kernel(width: int) -> Callable[..., None]:
    """The kernel that sums the attention of each column, for one KV head; `sum_attention` calls it."""

    @jit
    def run(
        queries: Any, head: int, group: int, keys: Any, columns: int,
        lows: Any, highs: Any, nears: Any, with_near: bool, sums: Any, near: Any,
    ) -> None:  # fmt: skip
        scale = np.float32(LOG2_E / np.sqrt(np.float32(width)))
        used = queries.shape[0] * group
        tiles = (used + LANES - 1) // LANES
        room, padded = tiles * LANES, keys.shape[0] // width
        q = np.zeros(room * width, np.float32)
        top, total, share = (
            np.empty(LANES, np.float32),
            np.empty(LANES, np.float32),
            np.empty(LANES, np.float32),
        )
        # Numbers of columns are held as floats, which are exact below 2**24.
        low, high, window = np.empty(room, np.float32), np.empty(room, np.float32), np.empty(room, np.float32)
        s, lanes = np.empty(padded * LANES, np.float32), np.zeros(padded * LANES, np.float32)
        for lane in range(room):
            row = min(lane, used - 1) // group
            low[lane], high[lane], window[lane] = lows[row], highs[row], max(lows[row], nears[row])
        for lane in range(used):
            load_lane(queries[lane // group], head * group + lane % group, scale, q, lane, width)
        # Columns from `outer` on are near to some rows, those from `inner` on to all that see them.
        outer, inner = (int(window[0]), int(window[room - 1])) if with_near else (columns, columns)
        some = np.zeros(min(inner, columns) * LANES if with_near else 0, np.float32)
        for tile in range(tiles):
            first = int(low[tile * LANES]) // UNROLL * UNROLL
            end = (int(high[tile * LANES + LANES - 1]) + UNROLL) // UNROLL * UNROLL
            _weigh_tile(tile, first, end, low, high, q, keys, s, top, total, width)
            for i in range(LANES):
                valid = tile * LANES + i < used
                share[i] = np.float32(1) / (total[i] * np.float32(group)) if valid else np.float32(0)
            _add_columns(first, end, s, share, lanes)
            if outer < inner:
                _add_near(max(first, outer), min(end, inner, columns), tile, window, high, s, share, some)
        _sum_lanes(0, columns, lanes, sums)
        near[: min(outer, columns)] = np.float32(0)
        _sum_lanes(outer, min(inner, columns), some, near)
        near[inner:] = sums[inner:]

    return run


def sum_attention(
    queries: Floats, head: int, group: int, keys: Floats, seen: RowColumns, with_near: bool = True
) -> tuple[Floats, Floats]:
    """The attention that each column of a KV head gets from all rows, and from those in whose window it is.

    Args:
        queries: [rows, heads * head_dim], rotated; those of one layer.
        head: the KV head.
        group: query heads per KV head.
        keys: [columns, head_dim], rotated.
        seen: the columns of each row.
        with_near: whether the second is asked for; else it is zeros.

    Returns:
        [columns] each. Every row adds 1 to the sum of all columns.
    """
    columns, width = keys.shape
    # The kernel reads eight keys at a time; it ignores what follows the last.
    room = -(-columns // UNROLL) * UNROLL
    padded = np.zeros((room, width), np.float32) if room != columns else keys
    padded[:columns] = keys
    sums, near = np.empty((2, columns), np.float32)
    build_profile_kernel(width)(
        queries,
        head,
        group,
        padded.reshape(-1),
        columns,
        seen.lows,
        seen.highs,
        seen.nears,
        with_near,
        sums,
        near,
    )
    return sums, near
