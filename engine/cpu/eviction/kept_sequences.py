"""What an evictor has of each sequence, and how it writes and reads segments and bags in the slabs of its pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import PROFILE_ROWS
from engine.cpu.eviction.evicted_works import KeptBag
from engine.cpu.eviction.ragged_attention import KeptStore
from engine.cpu.eviction.step_records import PromptSums
from kvcache.eviction.kept_rows import KeptRows, frame_bytes, frames_per_slab, map_frames
from kvcache.eviction.kept_segments import SEGMENT_SLABS
from kvcache.pool import KvPool

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class KeptSequence:
    """What the evictor has of one sequence."""

    # [layers, 64, heads * head_dim]: the query of position p is in row p % 64; the positions, -1 without a query. There
    # are no rows until one is recorded.
    queries: Floats
    positions: Ints
    bag: KeptBag | None = None
    # What `fastgen` decides from, until it has.
    sums: PromptSums | None = None
    # The segments before the bag.
    segments: list[KeptBag] = field(default_factory=list)

    @property
    def segment_slabs(self) -> list[int]:
        """The slabs of its segments."""
        return [slab for one in self.segments for slab in one.slabs]

    def check_slabs(self, key: str, slabs: list[int]) -> None:
        """Check that `slabs` are those behind its whole chunks: of segments, the ring, and its bag.

        Raises ValueError if they are not.
        """
        mine, bag = self.segment_slabs, self.bag
        if bag is None or slabs[: len(mine)] != mine or slabs[len(mine) + 1 :] != bag.slabs:
            raise ValueError(f"the kept rows of {key} are in other slabs: load them first")

    def last_rows(self, length: int, count: int) -> Ints:
        """The positions of the last `count` of `length` tokens. Raises ValueError if a query of theirs is missing."""
        rows = np.arange(length - count, length)
        missing = rows[self.positions[rows % PROFILE_ROWS] != rows]
        if len(missing):
            raise ValueError(
                f"an eviction at {length} tokens needs the queries of position {missing[0]}, which was not computed"
            )
        return rows


class BagMemory:
    """The memory of a pool, whose rows `store` finds. Slabs are those of the pool."""

    def __init__(self, pool: KvPool, store: KeptStore) -> None:
        self._layout, self._store = pool.layout, store
        # [slabs, chunk_bytes]
        self._memory = pool.data.view(-1).numpy().view(np.uint8).reshape(pool.num_slabs, -1)

    def write_frames(self, kept: KeptRows, frames: Bytes, slabs: list[int]) -> KeptBag:
        """Write a segment or a bag into its slabs."""
        per_slab = frames_per_slab(self._layout)
        for index, slab in enumerate(slabs[: kept.num_slabs]):
            part = frames[index * per_slab : (index + 1) * per_slab].reshape(-1)
            self._memory[slab, : len(part)] = part
        return self._store.open_bag(kept, slabs)

    def read_map(self, slabs: list[int]) -> KeptRows:
        """The map at the beginning of some slabs. Raises ValueError if there is none."""
        frame, per_slab = frame_bytes(self._layout), frames_per_slab(self._layout)
        lead = map_frames(self._memory[slabs[0], :frame].tobytes(), self._layout, len(slabs))
        used = slabs[: -(-lead // per_slab)]
        data = b"".join(self._memory[slab, : per_slab * frame].tobytes() for slab in used)[: lead * frame]
        return KeptRows.decode(data, self._layout)

    def read_segments(self, begin: int, length: int, slabs: list[int]) -> list[KeptBag]:
        """The segments at the beginning of `slabs`, before a bag that was decided about at `length` tokens.

        Each map goes on where the one before it ends, the first one at position `begin`; that of the bag ends at
        `length`. Raises ValueError if there is something else than maps.
        """
        found = list[KeptBag]()
        while slabs:
            kept = self.read_map(slabs)
            ends = kept.length % CHUNK_TOKENS == 0 and kept.length <= length - CHUNK_TOKENS
            if not ends or kept.boundary != begin or kept.num_slabs > min(SEGMENT_SLABS, len(slabs) - 1):
                break
            found.append(self._store.open_bag(kept, slabs[: kept.num_slabs]))
            begin, slabs = kept.length, slabs[kept.num_slabs :]
        return found
