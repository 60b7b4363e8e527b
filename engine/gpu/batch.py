"""Packs a step into one block of 32-bit integers, so that it reaches a GPU in one copy, at fixed addresses.

`measure_sizes` gives the length of each array, `fill_step` writes a `ForwardBatch` into host memory, and `view_step`
makes the arrays from the copy on the device. A CUDA graph is captured for padded sizes: padding rows have no slot and
length 0, and padding items no rows, so that the kernels skip them.

Shared runs (`engine.batching.prefix_plan`) are cut into *items* short enough to fill the device. The result of an item
is one part of each of its rows; the number of the part follows from the prefix tree, so the order of reduction is the
same for the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batching.batch import ForwardBatch, PrefillSpan
from engine.batching.prefix_plan import PrefixPlan
from engine.model.device_step import MAX_PARTS

Ints = NDArray[np.int32]
Array = TypeVar("Array", NDArray[np.int32], torch.Tensor)

# Number of integers per item: first chunk, end chunk, first row, end row, part.
ITEM_FIELDS = 5
# Number of integers per tile: first row, tokens, position of the first token, line of the table.
TILE_FIELDS = 4
# Number of integers per span: position of its first token, end, sink.
SPAN_FIELDS = 3


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Lengths of a step's arrays. Steps of equal sizes replay the same CUDA graph."""

    # Number of rows of the matrix products.
    rows: int
    # Number of rows that need logits.
    wanted: int
    # Number of rows that decode one token over their pages.
    singles: int
    items: int
    tiles: int
    # Number of lines of the table: one per single row, then one per span.
    lines: int
    # Number of chunks per line of the table.
    chunks: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the fields of `DeviceStep`, in their order."""
        rows, singles = (self.rows,), (self.singles,)
        spans = (self.lines - self.singles, SPAN_FIELDS)
        arrays = ((self.items, ITEM_FIELDS), (self.tiles, TILE_FIELDS), spans, (self.lines, self.chunks))
        return (rows, rows, rows, (self.wanted,), *[singles] * 5, *arrays)

    @property
    def starts(self) -> tuple[int, ...]:
        """Offsets of the arrays and of the end, in integers; multiples of 16 bytes, for which kernels are compiled."""
        lengths = (-(-int(np.prod(shape)) // 4) * 4 for shape in self.shapes)
        return tuple(accumulate(lengths, initial=0))

    @property
    def numbers(self) -> int:
        """Number of integers of the whole step."""
        return self.starts[-1]


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The arrays of a step on the device, all int32."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    # [rows]: slab into which each row's keys and values are written; -1 writes nothing.
    slots: torch.Tensor
    # [wanted]: indices of the rows that need logits.
    wanted: torch.Tensor
    rows: torch.Tensor  # [singles]
    # [singles]: number of tokens that each row attends to; 0 for padding.
    lengths: torch.Tensor
    # [singles]: number of leading chunks of each row that shared items read.
    begins: torch.Tensor
    # [singles]: number of shared parts of each row.
    covers: torch.Tensor
    # [singles]: the place of each row's first token among the sinks, for coded pages.
    sinks: torch.Tensor
    items: torch.Tensor  # [items, 5]
    tiles: torch.Tensor  # [tiles, 4]
    spans: torch.Tensor  # [spans, 3]
    # [lines, chunks]: slabs of each line.
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedItems:
    """The shared runs of a decode step, cut into items for the device."""

    items: Ints  # [items, 5]
    begins: Ints  # [singles]
    covers: Ints  # [singles]


def cut_shared_runs(plan: PrefixPlan, chunks: int | None) -> SharedItems:
    """Cut the runs of `plan` into items of at most `chunks` chunks. None: nothing is shared.

    Items get longer where a row would have too many parts. Runs come in tree order, so all rows of a run have the same
    number of parts before it. A run that would exceed `MAX_PARTS` parts, and its continuations, are read row by row.
    """
    begins, covers = (np.zeros(len(plan.shared), np.int32) for _ in range(2))
    if chunks is None:
        return SharedItems(np.empty((0, ITEM_FIELDS), np.int32), begins, covers)
    deepest = int(plan.shared.max(initial=0))
    # At least this many chunks per part: then at most half of a row's parts come from the length of the runs, and the
    # other half may come from branching.
    size = max(chunks, -(-2 * deepest // MAX_PARTS))
    items = []
    for first, last, top, bottom in plan.runs.tolist():
        count = -(-(last - first) // size)
        if begins[top] != first or covers[top] + count > MAX_PARTS:
            continue
        for part, begin in enumerate(range(first, last, size), int(covers[top])):
            items.append((begin, min(begin + size, last), top, bottom, part))
        covers[top:bottom] += count
        begins[top:bottom] = last
    return SharedItems(np.array(items, np.int32).reshape(-1, ITEM_FIELDS), begins, covers)


def cut_prefill_spans(spans: Sequence[PrefillSpan], tokens: int, line: int) -> Ints:
    """Cut the spans into tiles of at most `tokens` tokens: [tiles, 4]. `line` is the table's line of the first span."""
    tiles = [
        (span.row + begin, min(tokens, span.count - begin), span.start + begin, number)
        for number, span in enumerate(spans, line)
        for begin in range(0, span.count, tokens)
    ]
    return np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)


def measure_sizes(batch: ForwardBatch, shared: SharedItems, tiles: Ints) -> StepSizes:
    """The smallest sizes that hold this step."""
    longest = max((len(span.slabs) for span in batch.spans), default=0)
    return StepSizes(
        rows=len(batch.tokens),
        wanted=len(batch.wanted),
        singles=len(batch.rows),
        items=len(shared.items),
        tiles=len(tiles),
        lines=len(batch.rows) + len(batch.spans),
        chunks=max(longest, batch.table.shape[1]),
    )


def fill_step(ints: Ints, sizes: StepSizes, batch: ForwardBatch, shared: SharedItems, tiles: Ints) -> None:
    """Write the step into `ints`, [sizes.numbers]; the rest of every array is padding."""
    ints[:] = 0
    tokens, positions, slots, wanted, rows, lengths, begins, covers, sinks, items, cuts, spans, table = (
        split_arrays(ints, sizes)
    )
    count, singles = len(batch.positions), len(batch.rows)
    tokens[: len(batch.tokens)] = batch.tokens.numpy()
    positions[:count] = batch.positions
    slots[count:] = -1
    slots[:count] = batch.slots
    wanted[: len(batch.wanted)] = batch.wanted.numpy()
    # Every padding row has an output row of its own, which becomes zero.
    rows[singles:] = np.arange(singles, len(rows))
    rows[:singles], lengths[:singles] = batch.rows, batch.lengths
    begins[:singles], covers[:singles] = shared.begins, shared.covers
    sinks[:singles] = batch.sinks
    items[: len(shared.items)] = shared.items
    cuts[: len(tiles)] = tiles
    table[:singles, : batch.table.shape[1]] = batch.table
    for line, numbers, span in zip(table[singles:], spans, batch.spans, strict=False):
        line[: len(span.slabs)] = span.slabs.numpy()
        numbers[:] = span.start, span.start + span.count, span.sink


def split_arrays(ints: Array, sizes: StepSizes) -> list[Array]:
    """The arrays of a step as views of its integers, in the order of the fields of `DeviceStep`."""
    places = zip(sizes.starts, sizes.shapes, strict=False)
    return [ints[at : at + int(np.prod(shape))].reshape(shape) for at, shape in places]


def view_step(ints: torch.Tensor, sizes: StepSizes) -> DeviceStep:
    """The arrays of the step in `ints`, [sizes.numbers] int32 on the device."""
    return DeviceStep(
        **dict(zip((field.name for field in fields(DeviceStep)), split_arrays(ints, sizes), strict=True))
    )
