"""The evicted works of a step: what each has of kept rows, and which segments several of them have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batching.prefix_plan import SharingPrice
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.kept_rows import KeptRows
from kvcache.layout import KvLayout

Ints = NDArray[np.int64]


@dataclass(slots=True)
class KeptBag:
    """The kept rows of a sequence, and the slabs of the pool that they are in.

    `tokens` are the numbers of the rows' tokens (`KeptRows.number_tokens`), for pools whose frames need them.
    """

    kept: KeptRows
    slabs: list[int]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    # [layers, kv_heads]
    counts: Ints = field(init=False)
    frames: Ints = field(init=False)
    # First frames of the table of tokens and of the list of outliers.
    table_frame: int = field(init=False)
    outlier_frame: int = field(init=False)
    # By layer, what kernels for coded rows take, once they have taken it.
    views: dict[Any, tuple[tuple[Any, ...], tuple[Any, ...]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.counts, self.frames = self.kept.counts.astype(np.int64), self.kept.first_frames
        self.table_frame, self.outlier_frame = self.kept.table_frame, self.kept.outlier_frame

    def count_before(self, positions: Ints, layer: int) -> Ints:
        """How many kept rows of each head of a layer are below each of `positions`, [positions, kv_heads]."""
        heads = range(self.counts.shape[1])
        kept = (self.kept.head_positions(layer, head) for head in heads)
        return np.stack([np.searchsorted(one, positions) for one in kept], axis=1)


@dataclass(frozen=True, slots=True)
class EvictedWork:
    """A work of an evicted sequence in a step, whose first row is `row`, with its bag.

    `sink` is the place of its first token among the sinks, for pools with a codec. `segments` are those before the bag.
    """

    row: int
    work: StepWork
    kept: KeptWork
    bag: KeptBag
    sink: int
    segments: Sequence[KeptBag] = ()

    @property
    def positions(self) -> Ints:
        """Of its tokens."""
        return np.arange(self.work.start, self.work.start + len(self.work.tokens))

    @property
    def rows(self) -> Ints:
        """Its rows of the step."""
        return self.row + np.arange(len(self.work.tokens))

    @property
    def chunks(self) -> list[int]:
        """Slabs of the whole chunks that no head evicts from."""
        return self.work.slabs[: self.kept.spec.boundary_chunks]

    @property
    def ring(self) -> int:
        """The slab of the newest tokens."""
        return self.work.slabs[self.kept.ring_place]

    def count_skipped(self, windows: Sequence[int]) -> Ints:
        """Kept rows before the window of each token, [tokens, layers, kv_heads]; `windows` by layer, 0: none."""
        skips = np.zeros((len(self.work.tokens), *self.bag.counts.shape), np.int64)
        for layer, window in enumerate(windows):
            if window:
                skips[:, layer] = self.bag.count_before(self.positions + 1 - window, layer)
        return skips


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A segment in a step, and which of the step's ragged rows have it. `sink` is as in `EvictedWork`."""

    bag: KeptBag
    members: Ints
    sink: int


def share_segments(evicted: Sequence[EvictedWork]) -> list[SharedSegment]:
    """The segments of a step's evicted works, each once. Those of one row are in their order."""
    found: dict[int, tuple[EvictedWork, KeptBag, list[Ints]]] = {}
    row = 0
    for work in evicted:
        numbers = row + np.arange(len(work.work.tokens))
        row += len(numbers)
        for bag in work.segments:
            found.setdefault(bag.slabs[0], (work, bag, []))[2].append(numbers)
    return [SharedSegment(bag, np.concatenate(rows), work.sink) for work, bag, rows in found.values()]


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Segments that follow each other and belong to the same ragged rows, as `SharedSegment`."""

    bags: tuple[KeptBag, ...]
    members: Ints
    sink: int


def group_segments(evicted: Sequence[EvictedWork]) -> list[SegmentGroup]:
    """The segments of a step's evicted works, by the rows that have them. Those of one row are in their order."""
    groups: dict[bytes, list[SharedSegment]] = {}
    for one in share_segments(evicted):
        groups.setdefault(one.members.tobytes(), []).append(one)
    return [
        SegmentGroup(tuple(one.bag for one in group), group[0].members, group[0].sink)
        for group in groups.values()
    ]


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """The segments of a step as their kernel takes them (`engine.cpu.eviction.segment_kernels`)."""

    # Those that are read together: [members of all of them], [runs + 1], and their numbers, [runs].
    members: Ints
    bounds: Ints
    runs: Ints
    # [sequences, max] and [sequences]: numbers of the others of each sequence, padded with 0, and how many they are.
    alone: Ints
    counts_alone: Ints
    # Of all: [segments, slabs]; and by layer first, [layers, segments, kv_heads].
    slabs: Ints
    counts: Ints
    frames: Ints

    @classmethod
    def of_works(cls, evicted: Sequence[EvictedWork], layout: KvLayout, price: SharingPrice) -> SegmentRows:
        """The arrays of a step's segments; `price` says for how many rows one is read together."""
        shared = share_segments(evicted)
        bags, places = [one.bag for one in shared], {one.bag.slabs[0]: n for n, one in enumerate(shared)}
        runs = [n for n, one in enumerate(shared) if price.pays_off(len(one.members))]
        members = [shared[n].members for n in runs]
        together, none = set(runs), np.zeros((layout.layers, layout.kv_heads), np.int64)
        numbers = ([places[bag.slabs[0]] for bag in work.segments] for work in evicted)
        alone = [[n for n in row if n not in together] for row in numbers]
        # One line more, so that the arrays have the same type without any.
        return cls(
            members=np.concatenate([np.empty(0, np.int64), *members]),
            bounds=np.cumsum([0, *map(len, members)]),
            runs=np.array(runs, np.int64),
            alone=pad_table(alone),
            counts_alone=np.array([len(row) for row in alone], np.int64),
            slabs=pad_table([*(bag.slabs for bag in bags), [0]]),
            counts=np.stack([*(bag.counts for bag in bags), none], axis=1),
            frames=np.stack([*(bag.frames for bag in bags), none], axis=1),
        )

    def of_layer(self, layer: int) -> tuple[Ints, Ints, Ints]:
        """What kernels take as `segments`."""
        return self.slabs, self.counts[layer], self.frames[layer]


def pad_table(lists: Sequence[list[int]]) -> Ints:
    """[lists, longest], padded with 0."""
    table = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for line, values in zip(table, lists, strict=True):
        line[: len(values)] = values
    return table
