"""The plan of two-phase attention: which chunks are read once for which rows (ChunkAttention, section 3.3).

Rows are sequences that decode one token, sorted so that equal beginnings are neighbours. They form a tree of any depth,
of which only the shared part matters. A *run* is a stretch of chunks that the same neighbouring rows have in common:

    row 0  1 2 3 4 │ 9             run (0, 2, 0, 3)   chunks 0..1 for rows 0..2
    row 1  1 2 3 4 │ 8             run (2, 4, 0, 2)   chunks 2..3 for rows 0..1
    row 2  1 2 │ 7 6
    row 3  │ 5                     shared = [4, 4, 2, 0]

First every run is read once for all of its rows, then each row goes on alone with the chunks that are its own. The
slabs of a run are those of any of its rows. Numbers only: the kernels of every back-end follow the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Run = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Price:
    """What reading a run together costs: see `Plan.paying`."""

    least: int
    group: int
    tile: int

    def pays(self, rows: int) -> bool:
        """Whether it is no more than `rows` rows would pay alone."""
        queries = rows * self.group
        return queries >= self.least * -(-queries // self.tile)


ANY = Price(1, 1, 1 << 30)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a decode step shares. Rows and chunks are half-open ranges; a run comes before those that continue it.

    A row's runs follow one another from chunk 0 without a gap up to `shared`; from there on its chunks are its own.
    """

    depths: tuple[int, ...]  # [rows] full chunks that a row has in common with the row before it
    runs: Ints  # [runs, 4] first chunk, last chunk, first row, last row
    shared: Ints  # [rows] chunks of each row that runs cover

    def paying(self, least: int, group: int = 1, tile: int = 1 << 30) -> Plan:
        """Without the runs that have too few queries: their rows read these chunks, and what follows, on their own.

        A row has `group` queries per KV head. A kernel reads a run once for every `tile` of its queries, at the price
        of reading it alone for `least` of them.
        """
        return _plan(self.depths, Price(least, group, tile)) if len(self.runs) else self

    def apart(self, rows: NDArray[np.bool_]) -> Plan:
        """With the marked rows sharing nothing, as when a sliding window hides the beginning from them."""
        if not len(self.runs) or not rows.any():
            return self
        alone = rows.copy()
        alone[1:] |= rows[:-1]
        depths = np.where(alone, 0, np.asarray(self.depths))
        return _plan(tuple(depths.tolist()), ANY)


def order(slabs: Sequence[list[int]], full: Sequence[int]) -> list[int]:
    """The rows sorted by their first `full[row]` slabs, so that rows that begin alike are neighbours."""
    firsts = [row[0] for row, chunks in zip(slabs, full, strict=True) if chunks]
    if len(set(firsts)) == len(firsts):
        return list(range(len(slabs)))  # no two begin alike: most steps without sharing end here
    return sorted(range(len(slabs)), key=lambda row: slabs[row][: full[row]])


def plan(table: Ints, full: Ints) -> Plan:
    """The plan for rows in the order of `order`; made anew only when what they share has changed.

    Args:
        table: [rows, most chunks] slabs of each row, in order.
        full: [rows] leading chunks of each that are complete and will not be written again; only those are shared.
    """
    if len(full) < 2 or not (table[1:, :1] == table[:-1, :1]).any():
        return _plan((0,) * len(full), ANY)
    most = int(full.max())
    alike = np.logical_and.accumulate(table[1:, :most] == table[:-1, :most], axis=1).sum(axis=1)
    depths = np.minimum(alike, np.minimum(full[1:], full[:-1]))
    return _plan((0, *depths.tolist()), ANY)


@lru_cache(maxsize=256)
def _plan(depths: tuple[int, ...], price: Price) -> Plan:
    """The runs that are worth their price."""
    found: list[Run] = []
    shared = np.zeros(len(depths), np.int64)
    for start, last, top, bottom in _runs(depths):
        # Those that it continues came before it: without them it has nothing to continue.
        if shared[top] == start and price.pays(bottom - top):
            found.append((start, last, top, bottom))
            shared[top:bottom] = last
    return Plan(depths, np.array(found, np.int64).reshape(-1, 4), shared)


def _runs(depths: Sequence[int]) -> Iterator[Run]:
    """All runs, in tree order: of a group of rows that share `start` chunks, what more they share, then its parts."""
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
