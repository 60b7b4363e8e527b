"""A worker's pool over its ranks, and which pages to copy where between two workers with different splits.

Slab numbers are the same on all ranks of a worker; every rank's slab is its `Shard` of the chunk. The pages of a chunk
have one order, by layer and then by KV head (or group of heads, if a codec codes several together), whatever the split:
bytes are copied and hashed in this order, so a chunk has the same payload hash on any number of ranks.

    whole:      l0h0 l0h1 │ l1h0 l1h1       tp 2:  rank 0  l0h0 l1h0        pp 2:  stage 0  l0h0 l0h1
                                                   rank 1  l0h1 l1h1               stage 1  l1h0 l1h1
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from diptych.errors import TransferError
from kvcache.codecs.codec_id import MAX_ID_CHARS
from kvcache.layout import KvLayout, Shard
from kvtransfer.digests import HASH_FUNCTIONS, STREAM_HASHERS, PayloadHasher

# Most slabs of a pool.
MAX_SLABS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PageMove:
    """A contiguous copy of `num_bytes`: from byte `far` of a slab of the source's rank `source`, to byte `own` of a
    slab of the target's rank `target`."""

    source: int
    far: int
    target: int
    own: int
    num_bytes: int


def stage_moves(
    layout: KvLayout, sources: Sequence[Shard], targets: Sequence[Shard]
) -> tuple[tuple[PageMove, ...], ...]:
    """How one chunk is copied from the shards `sources` to the shards `targets`: a list of moves per target stage.

    The stages are in the order of their layers, the moves in the chunk's order, and adjacent pages are merged.

    Raises:
        ValueError: either side does not hold every page of `layout` exactly once.
    """
    return _plan_moves(layout, sources, targets, {shard.layers[0] for shard in targets})


def layer_moves(
    layout: KvLayout, sources: Sequence[Shard], targets: Sequence[Shard]
) -> tuple[tuple[PageMove, ...], ...]:
    """As `stage_moves`, but with one list of moves per layer."""
    return _plan_moves(layout, sources, targets, set(range(layout.layers)))


def _plan_moves(
    layout: KvLayout, sources: Sequence[Shard], targets: Sequence[Shard], layers: Set[int]
) -> tuple[tuple[PageMove, ...], ...]:
    """The moves of a chunk, as one list of moves for each range of layers that begins at one of `layers`."""
    froms, tos = _locate_pages(layout, sources), _locate_pages(layout, targets)
    starts = {layer * layout.pages_per_layer for layer in layers}
    runs: list[list[PageMove]] = []
    for page, ((source, far), (target, own)) in enumerate(zip(froms, tos, strict=True)):
        if page in starts:
            runs.append([])
        move, page_moves = PageMove(source, far, target, own, layout.page_bytes), runs[-1]
        if page_moves and (page_moves[-1].source, page_moves[-1].target) == (source, target):
            # Adjacent at both ends: the two moves become one.
            page_moves[-1] = replace(page_moves[-1], num_bytes=page_moves[-1].num_bytes + move.num_bytes)
        else:
            page_moves.append(move)
    return tuple(tuple(page_moves) for page_moves in runs)


class ArenaSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the slabs of one KV class are in a worker's memory (`kvcache.arenas`).

    Slab `first + i` begins `i` slabs after byte `offsets[rank]` of the memory of each rank.
    """

    kv_class: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    first: Annotated[int, Meta(ge=0, le=MAX_SLABS)]
    num_slabs: Annotated[int, Meta(ge=1, le=MAX_SLABS)]
    offsets: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 62)], ...], Meta(min_length=1)]


def plan_spans(
    layouts: Sequence[tuple[KvLayout, int]], shards: Sequence[Shard]
) -> tuple[tuple[ArenaSpan, ...], tuple[int, ...]]:
    """One span after the other for these (layout, number of slabs); and the bytes of all of them on each rank."""
    spans: list[ArenaSpan] = []
    first, offsets = 0, (0,) * len(shards)
    for layout, num_slabs in layouts:
        spans.append(ArenaSpan(layout.kv_class, first, num_slabs, offsets))
        first += num_slabs
        sizes = slab_bytes_by_rank(layout, shards)
        offsets = tuple(at + num_slabs * size for at, size in zip(offsets, sizes, strict=True))
    return tuple(spans), offsets


class PoolArena:
    """The slabs of one KV class in the pool of one worker."""

    def __init__(self, layout: KvLayout, shards: Sequence[Shard], span: ArenaSpan) -> None:
        self.layout, self.span, self.shards = layout, span, tuple(shards)
        self.pages = tuple(move for stage in stage_moves(layout, shards, shards) for move in stage)
        self.layers = layer_moves(layout, shards, shards)
        self.slab_bytes = slab_bytes_by_rank(layout, shards)

    def __contains__(self, slab: int) -> bool:
        return 0 <= slab - self.span.first < self.span.num_slabs

    def offset_of(self, slab: int, rank: int) -> int:
        """The byte at which a slab begins in the memory of a rank."""
        return self.span.offsets[rank] + (slab - self.span.first) * self.slab_bytes[rank]

    def places(self, bases: Sequence[int]) -> NDArray[np.int64]:
        """For `kvtransfer.copy_hash`: the address of slab 0 on each rank, and the bytes of a slab; int64 [ranks, 2].

        `bases` are the addresses of the ranks' memories. Slab 0 may be another arena's.
        """
        rows = [
            (base + at - self.span.first * size, size)
            for base, at, size in zip(bases, self.span.offsets, self.slab_bytes, strict=True)
        ]
        return np.array(rows, np.int64)


class ShardedPool:
    """The pool of one worker, with the memory of all its ranks. `shards` are in the order of the ranks.

    A worker with several KV classes has an arena for each: `classes` are their layouts and numbers of slabs, `layout`
    is the first of them. Slab numbers are unique over all arenas. Without `classes` there is one arena of `layout`.

    Raises:
        ValueError: the shards do not form `layout` exactly, or their memories do not hold the same whole slabs.
    """

    def __init__(
        self,
        layout: KvLayout,
        shards: Sequence[tuple[Shard, memoryview]],
        classes: Sequence[tuple[KvLayout, int]] = (),
    ) -> None:
        self.layout = layout
        self.shards = tuple(shard for shard, _ in shards)
        self.memories = tuple(memory.cast("B") for _, memory in shards)
        shard_sizes = [(shard, memory.nbytes) for shard, memory in shards]
        classes = classes or [(layout, count_slabs(layout, shard_sizes))]
        spans, ends = plan_spans(classes, self.shards)
        if ends != tuple(size for _, size in shard_sizes):
            raise ValueError(f"arenas of {ends} bytes do not fill the ranks' memory of {shard_sizes}")
        self.arenas = tuple(
            PoolArena(one, self.shards, span) for (one, _), span in zip(classes, spans, strict=True)
        )
        self.slab_bytes = self.arenas[0].slab_bytes
        self.num_slabs = sum(count for _, count in classes)

    @property
    def spans(self) -> tuple[ArenaSpan, ...]:
        """Where the slabs of each class are."""
        return tuple(arena.span for arena in self.arenas)

    def layout_of(self, kv_class: str) -> KvLayout:
        """The layout of KV of a class; the only one, if there is only one. Raises ValueError if there is none."""
        for arena in self.arenas:
            if len(self.arenas) == 1 or arena.layout.kv_class == kv_class:
                return arena.layout
        raise ValueError(f"there is no KV of the class {kv_class} here")

    def arena_at(self, slab: int) -> PoolArena:
        """The arena that a slab is in. Raises ValueError if there is no such slab."""
        for arena in self.arenas:
            if slab in arena:
                return arena
        raise ValueError(f"there is no slab {slab} in a pool of {self.num_slabs}")

    def hash_slab(self, slab: int, algorithm: str) -> bytes:
        """The payload hash of the chunk in `slab`; `algorithm` is a key of `HASH_FUNCTIONS`. Raises ValueError."""
        arena = self.arena_at(slab)
        if len(arena.pages) == 1:
            return HASH_FUNCTIONS[algorithm](self._page_view(arena, slab, arena.pages[0]))
        payload = STREAM_HASHERS[algorithm]()
        for page in arena.pages:
            payload.update(self._page_view(arena, slab, page))
        return payload.digest()

    def hash_layers(self, payload: PayloadHasher, slab: int, first: int, end: int) -> None:
        """Add layers `first` to `end` - 1 of the chunk in `slab` to the payload hash."""
        arena = self.arena_at(slab)
        for layer in arena.layers[first:end]:
            for page in layer:
                payload.update(self._page_view(arena, slab, page))

    def chunk_views(self, slab: int) -> list[memoryview]:
        """The bytes of the chunk in `slab`, in the order of its pages, without a copy. Raises ValueError."""
        arena = self.arena_at(slab)
        return [self._page_view(arena, slab, page) for page in arena.pages]

    def _page_view(self, arena: PoolArena, slab: int, page: PageMove) -> memoryview:
        """The bytes of one move's target in `slab`, without a copy."""
        at = arena.offset_of(slab, page.target) + page.own
        return self.memories[page.target][at : at + page.num_bytes]


class MoveRun:
    """Moves that are made one after the other. `rows` has one per row, for `kvtransfer.copy_hash`."""

    def __init__(self, moves: tuple[PageMove, ...]) -> None:
        self.moves = moves
        self.rows = np.array([astuple(move) for move in moves], np.int64).reshape(-1, 5)
        self.num_bytes = sum(move.num_bytes for move in moves)


class ArenaMoves:
    """How chunks of one KV class are copied from a source's pool into the own one.

    Who copies by addresses keeps here where the slabs of both begin (`PoolArena.places`).
    """

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]

    def __init__(self, own_arena: PoolArena, source: PoolArena) -> None:
        self.own_arena, self.source = own_arena, source
        shards = source.shards, own_arena.shards
        self.stages = tuple(map(MoveRun, stage_moves(own_arena.layout, *shards)))
        self.layers = tuple(map(MoveRun, layer_moves(own_arena.layout, *shards)))


class PairedPools:
    """The own pool and that of a source: what is copied where, for each class that both have.

    Args:
        own: the pool that is copied to.
        sizes: the shard and the bytes of each rank's memory at the source.
        spans: those of the source; without them it has one arena of the own pool's first class.

    Raises:
        ValueError: the source's memory does not have the shards or slabs that `spans` say, or no class is shared.
    """

    def __init__(
        self, own_pool: ShardedPool, shard_sizes: Sequence[tuple[Shard, int]], spans: Sequence[ArenaSpan] = ()
    ) -> None:
        shards = [shard for shard, _ in shard_sizes]
        if not spans:
            num_slabs = count_slabs(own_pool.layout, shard_sizes)
            spans = [ArenaSpan(own_pool.layout.kv_class, 0, num_slabs, (0,) * len(shards))]
        self.num_slabs, self.layers = (
            max(span.first + span.num_slabs for span in spans),
            own_pool.layout.layers,
        )
        if self.num_slabs > min(size for _, size in shard_sizes):
            raise ValueError(f"{self.num_slabs} slabs do not fit into ranks of {shard_sizes}")
        self._own_pool = own_pool
        theirs = {span.kv_class: span for span in spans}
        self._moves: dict[str, ArenaMoves] = {}
        for arena in own_pool.arenas:
            if (span := theirs.get(arena.layout.kv_class)) is not None:
                source = PoolArena(arena.layout, shards, span)
                _check_span(source, [size for _, size in shard_sizes])
                self._moves[span.kv_class] = ArenaMoves(arena, source)
        if not self._moves:
            raise ValueError(f"no KV class is shared: {sorted(theirs)} there")

    @property
    def all_moves(self) -> list[ArenaMoves]:
        """Those of all classes."""
        return list(self._moves.values())

    def moves_of(self, far: int, own: int) -> ArenaMoves:
        """The moves for a copy of slab `far` of the source to the own slab.

        Raises:
            TransferError: a slab does not exist, or the two are not of the same class.
        """
        try:
            moves = self._moves.get(self._own_pool.arena_at(own).layout.kv_class)
        except ValueError:
            moves = None
        if moves is None or far not in moves.source:
            there, here = self.num_slabs, self._own_pool.num_slabs
            why = f"{there} slabs there, {here} here, in {len(self._moves)} classes of both"
            raise TransferError(f"slab {far} does not exist, or not for slab {own}", why)
        return moves


def _check_span(arena: PoolArena, sizes: Sequence[int]) -> None:
    """Raises ValueError if a source's arena is not within its ranks' memory of these sizes."""
    span = arena.span
    if len(span.offsets) != len(sizes):
        raise ValueError(f"an arena has {len(span.offsets)} parts on {len(sizes)} ranks")
    ends = [at + span.num_slabs * one for at, one in zip(span.offsets, arena.slab_bytes, strict=True)]
    if any(end > size for end, size in zip(ends, sizes, strict=True)):
        raise ValueError(f"arenas that end at {ends} do not fit into ranks of {list(sizes)} bytes")


def unsharded_pool(layout: KvLayout, memory: memoryview) -> ShardedPool:
    """The pool of a worker with a single rank."""
    return ShardedPool(layout, [(Shard((0, layout.layers), (0, layout.kv_heads)), memory)])


def slab_bytes_by_rank(layout: KvLayout, shards: Sequence[Shard]) -> tuple[int, ...]:
    """Bytes of a slab on each rank."""
    return tuple(layout.shard_layout(shard).chunk_bytes for shard in shards)


def count_slabs(layout: KvLayout, shard_sizes: Sequence[tuple[Shard, int]]) -> int:
    """Number of slabs of a worker whose ranks have pools of these `shard_sizes` in bytes.

    Raises ValueError if they differ.
    """
    counts = {divmod(size, layout.shard_layout(shard).chunk_bytes) for shard, size in shard_sizes}
    if len(counts) != 1 or min(counts)[1]:
        raise ValueError(
            f"ranks of {[size for _, size in shard_sizes]} bytes do not have the same number of slabs"
        )
    return min(counts)[0]


def _locate_pages(layout: KvLayout, shards: Sequence[Shard]) -> list[tuple[int, int]]:
    """For every page of a chunk, in the chunk's order: its rank, and its byte offset in the rank's slab."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    total = 0
    for part, shard in enumerate(shards):
        layout.shard_layout(shard)  # raises ValueError if the shard reaches beyond the layout
        pages = list(product(range(*shard.layers), range(*shard.heads, layout.page_heads)))
        places |= {page: (part, number * layout.page_bytes) for number, page in enumerate(pages)}
        total += len(pages)
    if len(places) != total or total != layout.layers * layout.pages_per_layer:
        raise ValueError(f"the shards {list(shards)} do not hold every page of {layout} exactly once")
    return [places[page] for page in sorted(places)]
