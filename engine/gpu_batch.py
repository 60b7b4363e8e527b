"""A step as one block of 32-bit integers, so that it reaches a GPU in one copy and its arrays can stay where they are.

`measure` says how long each array is, `fill` writes a `Batch` into host memory, `view` names the parts of the copy on
the device. A CUDA graph is captured for padded sizes: rows beyond the real ones have no slot and no length, items
beyond the real ones no rows, so that the kernels pass over them.

Shared runs (`engine.attention.shared`) are cut into *items* short enough to fill the device. An item's result is one
part of each of its rows; which part follows from the tree, so the order of reduction is fixed for a given tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.batch import Batch, Span
from engine.attention.shared import Plan

Ints = NDArray[np.int32]
Array = TypeVar("Array", NDArray[np.int32], torch.Tensor)

ITEM = 5  # numbers of an item: first chunk, last chunk, first row, last row, part
TILE = 4  # numbers of a tile: first row, tokens, position of the first, line of the table
MOST_PARTS = 32  # shared parts of one row, at most: what runs deeper in the tree share is read row by row


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of a step's arrays; steps of equal sizes replay one graph."""

    rows: int  # of the matrix products
    wanted: int
    singles: int  # rows that decode one token over their pages
    items: int
    tiles: int
    lines: int  # of the table: one for each single, then one for each span
    chunks: int  # in a line of the table

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the fields of `Step`, in their order."""
        rows, singles = (self.rows,), (self.singles,)
        arrays = ((self.items, ITEM), (self.tiles, TILE), (self.lines, self.chunks))
        return (rows, rows, rows, (self.wanted,), singles, singles, singles, singles, *arrays)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each array begins, and the whole ends: at multiples of 16 bytes, which kernels are compiled for."""
        lengths = (-(-int(np.prod(shape)) // 4) * 4 for shape in self.shapes)
        return tuple(accumulate(lengths, initial=0))

    @property
    def numbers(self) -> int:
        """Integers of the whole step."""
        return self.starts[-1]


@dataclass(frozen=True, slots=True)
class Step:
    """Arrays of a step on the device, all int32."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows] slab that takes the row's keys and values; -1 writes nothing
    wanted: torch.Tensor  # [wanted] rows whose logits are asked for
    rows: torch.Tensor  # [singles]
    lengths: torch.Tensor  # [singles] tokens attended to; 0 for padding
    begins: torch.Tensor  # [singles] chunks that shared items read for the row
    covers: torch.Tensor  # [singles] shared parts of the row
    items: torch.Tensor  # [items, 5]
    tiles: torch.Tensor  # [tiles, 4]
    table: torch.Tensor  # [lines, chunks] slabs


@dataclass(frozen=True, slots=True)
class Shared:
    """The plan of a decode step, cut for the device."""

    items: Ints  # [items, 5]
    begins: Ints  # [singles]
    covers: Ints  # [singles]


def cut_runs(plan: Plan, chunks: int | None) -> Shared:
    """The runs of `plan` in items of at most `chunks` chunks, more where a row would have too many parts. None: none.

    Runs come in tree order, so all rows of one have as many parts before it. A run that would exceed `MOST_PARTS`
    parts is left to its rows, and with it all that continue it.
    """
    begins, covers = (np.zeros(len(plan.shared), np.int32) for _ in range(2))
    if chunks is None:
        return Shared(np.empty((0, ITEM), np.int32), begins, covers)
    deepest = int(plan.shared.max(initial=0))
    size = max(chunks, -(-2 * deepest // MOST_PARTS))  # half of the parts for length, half for branching
    items = []
    for first, last, top, bottom in plan.runs.tolist():
        count = -(-(last - first) // size)
        if begins[top] != first or covers[top] + count > MOST_PARTS:
            continue
        for part, begin in enumerate(range(first, last, size), int(covers[top])):
            items.append((begin, min(begin + size, last), top, bottom, part))
        covers[top:bottom] += count
        begins[top:bottom] = last
    return Shared(np.array(items, np.int32).reshape(-1, ITEM), begins, covers)


def cut_spans(spans: Sequence[Span], tokens: int, line: int) -> Ints:
    """The spans in tiles of at most `tokens` tokens, [tiles, 4]; the first span's line of the table is `line`."""
    tiles = [
        (span.row + begin, min(tokens, span.count - begin), span.start + begin, number)
        for number, span in enumerate(spans, line)
        for begin in range(0, span.count, tokens)
    ]
    return np.array(tiles, np.int32).reshape(-1, TILE)


def measure(batch: Batch, shared: Shared, tiles: Ints) -> Sizes:
    """The least sizes that hold this step."""
    longest = max((len(span.slabs) for span in batch.spans), default=0)
    return Sizes(
        rows=len(batch.tokens),
        wanted=len(batch.wanted),
        singles=len(batch.rows),
        items=len(shared.items),
        tiles=len(tiles),
        lines=len(batch.rows) + len(batch.spans),
        chunks=max(longest, batch.table.shape[1]),
    )


def fill(ints: Ints, sizes: Sizes, batch: Batch, shared: Shared, tiles: Ints) -> None:
    """Write the step into `ints`, [sizes.numbers], the rest as padding."""
    ints[:] = 0
    tokens, positions, slots, wanted, rows, lengths, begins, covers, items, cuts, table = split(ints, sizes)
    count, singles = len(batch.positions), len(batch.rows)
    tokens[: len(batch.tokens)] = batch.tokens.numpy()
    positions[:count] = batch.positions
    slots[count:] = -1
    slots[:count] = batch.slots
    wanted[: len(batch.wanted)] = batch.wanted.numpy()
    rows[singles:] = np.arange(singles, len(rows))  # rows of padding, each its own, to be set to zero
    rows[:singles], lengths[:singles] = batch.rows, batch.lengths
    begins[:singles], covers[:singles] = shared.begins, shared.covers
    items[: len(shared.items)] = shared.items
    cuts[: len(tiles)] = tiles
    table[:singles, : batch.table.shape[1]] = batch.table
    for line, span in zip(table[singles:], batch.spans, strict=False):
        line[: len(span.slabs)] = span.slabs.numpy()


def split(ints: Array, sizes: Sizes) -> list[Array]:
    """The parts of a step's integers, as views, in the order of the fields of `Step`."""
    places = zip(sizes.starts, sizes.shapes, strict=False)
    return [ints[at : at + int(np.prod(shape))].reshape(shape) for at, shape in places]


def view(ints: torch.Tensor, sizes: Sizes) -> Step:
    """The step in `ints`, [sizes.numbers] int32 on the device."""
    return Step(**dict(zip((field.name for field in fields(Step)), split(ints, sizes), strict=True)))
