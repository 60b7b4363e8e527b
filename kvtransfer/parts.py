"""A worker's pool as its ranks hold it, and what goes where between two workers that are split differently.

Slab numbers are the same on all ranks of a worker; every rank's slab is its `Shard` of the chunk. The pages of a chunk
have one order, by layer and then by KV head, however they are spread: bytes are copied and hashed in that order, so a
chunk has one payload hash, whoever holds it and in however many parts.

    whole:      l0h0 l0h1 │ l1h0 l1h1       tp 2:  rank 0  l0h0 l1h0        pp 2:  stage 0  l0h0 l0h1
                                                   rank 1  l0h1 l1h1               stage 1  l1h0 l1h1
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import product

from kvcache.layout import KVLayout, Shard
from kvtransfer.digests import HASHERS, HASHES, Hasher


@dataclass(frozen=True, slots=True)
class Move:
    """`num_bytes` in one piece: from byte `far` of a slab of the source's part `source`, to byte `own` of a slab of the
    target's part `target`."""

    source: int
    far: int
    target: int
    own: int
    num_bytes: int


def moves(
    layout: KVLayout, sources: Sequence[Shard], targets: Sequence[Shard]
) -> tuple[tuple[Move, ...], ...]:
    """How one chunk goes from `sources` to `targets`: for each stage of the targets, in the order of their layers, the
    intersections of its shards with the sources', in the chunk's order, as few as there can be.

    Raises:
        ValueError: either side does not hold every page of `layout` exactly once.
    """
    return _cut(layout, sources, targets, {shard.layers[0] for shard in targets})


def layer_moves(
    layout: KVLayout, sources: Sequence[Shard], targets: Sequence[Shard]
) -> tuple[tuple[Move, ...], ...]:
    """The same, for each layer. Raises ValueError as `moves`."""
    return _cut(layout, sources, targets, set(range(layout.layers)))


def _cut(
    layout: KVLayout, sources: Sequence[Shard], targets: Sequence[Shard], layers: Set[int]
) -> tuple[tuple[Move, ...], ...]:
    """The moves of a chunk, in runs that begin at each of `layers`."""
    froms, tos = _places(layout, sources), _places(layout, targets)
    starts = {layer * layout.kv_heads for layer in layers}
    runs: list[list[Move]] = []
    for page, ((source, far), (target, own)) in enumerate(zip(froms, tos, strict=True)):
        if page in starts:
            runs.append([])
        move, run = Move(source, far, target, own, layout.page_bytes), runs[-1]
        if run and (run[-1].source, run[-1].target) == (source, target):  # neighbours on both sides
            run[-1] = replace(run[-1], num_bytes=run[-1].num_bytes + move.num_bytes)
        else:
            run.append(move)
    return tuple(tuple(run) for run in runs)


class Parts:
    """The pool of one worker, all ranks' memory side by side; `parts` are in the order of their ranks.

    Raises:
        ValueError: they are not `layout` exactly once, or not memory for the same number of slabs.
    """

    def __init__(self, layout: KVLayout, parts: Sequence[tuple[Shard, memoryview]]) -> None:
        self.layout = layout
        self.shards = tuple(shard for shard, _ in parts)
        self.memories = tuple(memory.cast("B") for _, memory in parts)
        self._pages = tuple(move for stage in moves(layout, self.shards, self.shards) for move in stage)
        self._layers = layer_moves(layout, self.shards, self.shards)
        self.slab_bytes = slab_sizes(layout, self.shards)
        self.num_slabs = count_slabs(layout, [(shard, memory.nbytes) for shard, memory in parts])

    def payload(self, slab: int, algorithm: str) -> bytes:
        """The payload hash of the chunk in `slab`; `algorithm` is a key of `HASHES`. Raises ValueError."""
        if not 0 <= slab < self.num_slabs:
            raise ValueError(f"there is no slab {slab} in a pool of {self.num_slabs}")
        if len(self._pages) == 1:
            return HASHES[algorithm](self._bytes(slab, self._pages[0]))
        payload = HASHERS[algorithm]()
        for page in self._pages:
            payload.update(self._bytes(slab, page))
        return payload.digest()

    def feed(self, payload: Hasher, slab: int, first: int, end: int) -> None:
        """Go on with the payload hash of the chunk in `slab`: its layers `first` to `end` - 1."""
        for layer in self._layers[first:end]:
            for page in layer:
                payload.update(self._bytes(slab, page))

    def _bytes(self, slab: int, page: Move) -> memoryview:
        at = slab * self.slab_bytes[page.target] + page.own
        return self.memories[page.target][at : at + page.num_bytes]


def whole(layout: KVLayout, memory: memoryview) -> Parts:
    """The pool of a worker that is one rank."""
    return Parts(layout, [(Shard((0, layout.layers), (0, layout.kv_heads)), memory)])


def slab_sizes(layout: KVLayout, shards: Sequence[Shard]) -> tuple[int, ...]:
    """Bytes of a slab on each rank."""
    return tuple(layout.part(shard).chunk_bytes for shard in shards)


def count_slabs(layout: KVLayout, sizes: Sequence[tuple[Shard, int]]) -> int:
    """Slabs of a worker whose ranks have that many bytes each. Raises ValueError if that is not one number."""
    counts = {divmod(size, layout.part(shard).chunk_bytes) for shard, size in sizes}
    if len(counts) != 1 or min(counts)[1]:
        raise ValueError(f"ranks of {[size for _, size in sizes]} bytes do not have the same number of slabs")
    return min(counts)[0]


def _places(layout: KVLayout, shards: Sequence[Shard]) -> list[tuple[int, int]]:
    """For every page of a chunk, in the chunk's order: the part that holds it, and where it begins there."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    total = 0
    for part, shard in enumerate(shards):
        layout.part(shard)  # raises if it reaches beyond
        pages = list(product(range(*shard.layers), range(*shard.heads)))
        places |= {page: (part, number * layout.page_bytes) for number, page in enumerate(pages)}
        total += len(pages)
    if len(places) != total or total != layout.layers * layout.kv_heads:
        raise ValueError(f"{list(shards)} are not {layout}, every page of it once")
    return [places[page] for page in sorted(places)]
