"""Profiles attention heads on the CPU: how much attention columns get from the last rows (FastGen, section 3).

An eviction is decided from the queries of at most 64 rows. Their scores are computed a second time here, head by head:
a tile is one query head's queries of sixteen rows, as in `engine.cpu.tiled_attention`, and goes over a block of 64
columns after the other. What is left of a KV head is its strip, the attention of each row to each column, pooled over
the query heads of the group by their mean:

    strip [blocks of 16 rows, columns, 16]

A strip takes 256 bytes for each column, and only one exists at a time. Two things are read from it: the sums of its
columns, for the scores, and the mass that falls on the columns that a policy keeps, of the row with the least. The
window of a policy slides with each row. `tests.support.keep_reference` is the same, slow and in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


@jit_inner
def _find_largest(values: Any, length: Any, count: Any) -> Any:
    """The `count`-th largest of the first `length` values, which it puts into another order (Hoare's selection)."""
    wanted, left, right = length - count, 0, length - 1
    while left < right:
        pivot, i, j = values[(left + right) // 2], left, right
        while i <= j:
            while values[i] < pivot:
                i += 1
            while pivot < values[j]:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if j < wanted:
            left = i
        if wanted < i:
            right = j
    return values[wanted]


@jit_inner
def _keep_frequent(scores: Any, candidates: Any, count: Any, values: Any, kept: Any) -> None:
    """Add to `kept` what `kvcache.eviction.policies.pick_frequent` picks; `values` is room for as many scores and one
    more."""
    found = 0
    for t in range(len(scores)):
        values[found] = scores[t]
        found += candidates[t]
    if count >= found:
        kept |= candidates
        return
    lowest, equal = np.inf, count
    if count:
        lowest = _find_largest(values, found, count)
        for i in range(found):
            equal -= values[i] > lowest
    for t in range(len(scores)):
        kept[t] |= candidates[t] & (scores[t] > lowest)
    # Of those with the lowest score that is picked, the first ones.
    for t in range(len(scores)):
        if equal > 0 and scores[t] == lowest and candidates[t]:
            kept[t] = True
            equal -= 1


@jit_inner
def _find_least_mass(strip: Any, room: Any, rows: Any, kept: Any, nears: Any, local: Any, places: Any) -> Any:
    """The attention to `kept` columns, of the row that has the least; with `local`, also to its window.

    `places` is room for the numbers of all columns and one more.
    """
    least, columns, found = np.float32(np.inf), len(kept), 0
    for t in range(columns):
        places[found] = t
        found += kept[t]
    near, lanes, none = np.empty(LANES, np.float32), np.empty(LANES, np.float32), splat(np.float32(0))
    for start in range(0, rows, LANES):
        for lane in range(LANES):
            near[lane] = nears[min(start + lane, rows - 1)]
        # Columns from `outer` on are near to some rows of the block, those from `inner` on to all.
        outer, inner = columns, columns
        if local:
            outer, inner = min(int(near[0]), columns), min(int(near[LANES - 1]), columns)
        at, low, mass = start * room, load(near, 0), splat(np.float32(0))
        i = 0
        while i < found and places[i] < outer:
            mass = add(mass, load(strip, at + places[i] * LANES))
            i += 1
        for t in range(outer, inner):
            x = load(strip, at + t * LANES)
            y = within(x, low, splat(np.float32(t)), splat(_NO_COLUMN), none)
            mass = add(mass, x if kept[t] else y)
        for t in range(inner, columns):
            mass = add(mass, load(strip, at + t * LANES))
        store(lanes, 0, mass)
        for lane in range(min(LANES, rows - start)):
            # Once it is no number, it stays so.
            if least == least and not lanes[lane] >= least:
                least = lanes[lane]
    return least


@jit
def _try_policies(
    strip: Any, room: int, rows: int, nears: Any, scores: Any, plain: Any, candidates: Any, local: Any,
    frequent: int, threshold: float, masses: Any, kept: Any,
) -> None:  # fmt: skip
    """Set `masses` and `kept` as `PolicyTrial` says."""
    values, places = np.empty(len(kept) + 1, np.float64), np.empty(len(kept) + 1, np.int64)
    for policy in range(len(masses)):
        kept[:] = plain[policy]
        _keep_frequent(scores, candidates[policy], frequent, values, kept)
        masses[policy] = _find_least_mass(strip, room, rows, kept, nears, local[policy], places)
        if masses[policy] >= threshold:
            break


def list_profile_kernels(width: int) -> list[Any]:
    """The kernels of this module for one head dimension."""
    return [build_profile_kernel(width), _sum_columns, _try_policies]


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


@dataclass(frozen=True, slots=True)
class PolicyTrial:
    """Tries the policies on heads that all have the same columns: those of a prompt, before anything is dropped.

    Args:
        seen: the columns of each row.
        visible: how many rows see each column, 1 if none does, [columns].
        plain: the columns that policies 0 to 3 keep whatever their scores, without windows, [4, columns].
        candidates: of their frequent tokens, [4, columns].
        local: whether they have a window, [4].
        frequent: the number of frequent tokens.
        threshold: of recovered mass.

    Memory for a strip is here too: heads use it one after the other.
    """

    row_columns: RowColumns
    visible: Ints
    plain: Bools
    candidates: Bools
    local: Bools
    frequent: int
    threshold: float
    strip: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strip", make_strip(len(self.row_columns.highs), len(self.visible)))

    def run(self, queries: Floats, head: int, group: int, keys: Floats) -> tuple[NDArray[np.float64], Bools]:
        """Try one KV head; arguments as `attend_columns`.

        Returns:
            The recovered mass of policies up to the first that suffices, then NaN, [4]; and the columns that the last
            of these policies keeps, its window aside, [columns].
        """
        columns, strip = len(keys), attend_columns(queries, head, group, keys, self.row_columns, self.strip)
        masses, kept = np.full(len(self.local), np.nan), np.empty(columns, np.bool_)
        _try_policies(
            strip,
            pad_columns(columns),
            len(queries),
            self.row_columns.nears,
            sum_strip(strip, columns) / self.visible,
            self.plain,
            self.candidates,
            self.local,
            self.frequent,
            self.threshold,
            masses,
            kept,
        )
        return masses, kept
