"""Plans two-phase attention: which chunks of KV are read once for several decode rows (ChunkAttention, section 3.3).

A row is a sequence that decodes one token. Rows are sorted so that rows with equal prefixes are adjacent; the prefixes
form a tree of any depth. A *run* is a range of chunks that a range of adjacent rows share:

    row 0  1 2 3 4 │ 9             run (0, 2, 0, 3)   chunks 0..1 for rows 0..2
    row 1  1 2 3 4 │ 8             run (2, 4, 0, 2)   chunks 2..3 for rows 0..1
    row 2  1 2 │ 7 6
    row 3  │ 5                     shared = [4, 4, 2, 0]

In the first phase every run is read once for all its rows, in the second phase each row reads its other chunks alone.
The slabs of a run can be taken from any of its rows. The plan has only numbers: the kernels of all back-ends follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
SharedRun = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class SharingPrice:
    """When reading a run together is worth it; the fields are the arguments of `PrefixPlan.without_costly_runs`."""

    least: int
    group: int
    tile: int

    def pays_off(self, rows: int) -> bool:
        """Whether reading a run together for `rows` rows costs at most as much as reading it for each row alone."""
        queries = rows * self.group
        return queries >= self.least * -(-queries // self.tile)


ALWAYS_SHARE = SharingPrice(1, 1, 1 << 30)


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The shared prefixes of a decode step. Ranges of rows and chunks are half-open; a run precedes its continuations.

    The runs of a row follow each other without a gap from chunk 0 to `shared`; the row reads its later chunks alone.
    """

    # [rows]: number of full chunks that each row shares with the row before it.
    depths: tuple[int, ...]
    # [runs, 4]: first chunk, end chunk, first row and end row of each run.
    runs: Ints
    # [rows]: number of leading chunks of each row that the runs cover.
    shared: Ints

    def without_costly_runs(self, least: int, group: int = 1, tile: int = 1 << 30) -> PrefixPlan:
        """The plan without runs that are cheaper to read row by row; their continuations are dropped with them.

        A row has `group` queries per KV head. A kernel reads a run once for every `tile` queries, which costs as much
        as `least` queries that read it alone.
        """
        return _cached_plan(self.depths, SharingPrice(least, group, tile)) if len(self.runs) else self

    def without_rows(self, rows: NDArray[np.bool_]) -> PrefixPlan:
        """The plan in which the marked rows share nothing, for example because a sliding window excludes their
        prefix.
        """
        if not len(self.runs) or not rows.any():
            return self
        alone = rows.copy()
        alone[1:] |= rows[:-1]
        depths = np.where(alone, 0, np.asarray(self.depths))
        return _cached_plan(tuple(depths.tolist()), ALWAYS_SHARE)


def sort_by_prefix(slabs: Sequence[list[int]], full: Sequence[int]) -> list[int]:
    """Row indices sorted by the first `full[row]` slabs, so that rows with equal prefixes are adjacent."""
    firsts = [row[0] for row, chunks in zip(slabs, full, strict=True) if chunks]
    if len(set(firsts)) == len(firsts):
        return list(range(len(slabs)))  # no two rows share a chunk: the usual case, so it avoids the sort
    return sorted(range(len(slabs)), key=lambda row: slabs[row][: full[row]])


def plan_prefixes(table: Ints, full: Ints) -> PrefixPlan:
    """The plan for rows in the order of `sort_by_prefix`, from a cache if the sharing is the same as in an earlier
    step.

    Args:
        table: [rows, max chunks] slabs of each row, in order.
        full: [rows] number of leading chunks of each row that are complete and immutable; only these are shared.
    """
    if len(full) < 2 or not (table[1:, :1] == table[:-1, :1]).any():
        return _cached_plan((0,) * len(full), ALWAYS_SHARE)
    most = int(full.max())
    alike = np.logical_and.accumulate(table[1:, :most] == table[:-1, :most], axis=1).sum(axis=1)
    depths = np.minimum(alike, np.minimum(full[1:], full[:-1]))
    return _cached_plan((0, *depths.tolist()), ALWAYS_SHARE)


@lru_cache(maxsize=256)
def _cached_plan(depths: tuple[int, ...], price: SharingPrice) -> PrefixPlan:
    """Build the plan for rows that share `depths` chunks with the row before, with the runs that are worth `price`."""
    found: list[SharedRun] = []
    shared = np.zeros(len(depths), np.int64)
    for start, last, top, bottom in _walk_runs(depths):
        # A run continues the runs before it: it is dropped if these did not cover its first rows up to `start`.
        if shared[top] == start and price.pays_off(bottom - top):
            found.append((start, last, top, bottom))
            shared[top:bottom] = last
    return PrefixPlan(depths, np.array(found, np.int64).reshape(-1, 4), shared)


def _walk_runs(depths: Sequence[int]) -> Iterator[SharedRun]:
    """All runs in tree order: first the chunks that a group of rows shares beyond `start`, then those of its
    subgroups.
    """
    waiting = [(0, 0, len(depths))]
    while waiting:
        start, top, bottom = waiting.pop()
        if bottom - top < 2:
            continue
        common = min(depths[top + 1 : bottom])
        if common > start:
            yield start, common, top, bottom
        edges = [top, *(row for row in range(top + 1, bottom) if depths[row] == common), bottom]
        waiting += [(common, *part) for part in zip(edges[-2::-1], edges[:0:-1], strict=True)]
