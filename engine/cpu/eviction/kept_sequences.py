"""What an evictor has of each sequence, and how it writes and reads segments and bags in the slabs of its pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import PROFILE_ROWS
from engine.cpu.eviction.evicted_works import KeptBag
from engine.cpu.eviction.ragged_attention import KeptStore
from engine.cpu.eviction.segment_cuts import describe_segment
from engine.cpu.eviction.step_records import PromptSums
from kvcache.eviction.kept_rows import KeptRows, frame_bytes, frames_per_slab, map_frames
from kvcache.eviction.kept_segments import KeptSegment, count_segment_slabs
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

    def read_bag(self, key: str, begin: int, length: int, slabs: list[int]) -> KeptRows:
        """The map of the bag of a sequence in `slabs`, of positions `begin` to `length` - 1. Raises ValueError if there
        is none, or that of others.
        """
        kept = self.read_map(slabs)
        if (kept.boundary, kept.length) != (begin, length):
            raise ValueError(
                f"the kept rows of {key} are those of {kept.length} tokens from {kept.boundary} on,"
                f" not of {length} from {begin} on"
            )
        return kept

    def read_segments(self, begin: int, expected: Sequence[KeptSegment], slabs: list[int]) -> list[KeptBag]:
        """The segments `expected` at the beginning of `slabs`, before a bag; the first one is of position `begin` on.

        Raises ValueError if there is something else than their maps.
        """
        if (need := count_segment_slabs(expected)) >= len(slabs):
            raise ValueError(f"{need} slabs of segments and a bag are not in {len(slabs)} slabs")
        found = list[KeptBag]()
        for number, one in enumerate(expected):
            mine, slabs = slabs[: one.slabs], slabs[one.slabs :]
            kept = self.read_map(mine)
            if kept.boundary != begin or describe_segment(kept) != one:
                raise ValueError(
                    f"segment {number} has the map of other rows: of {kept.length} tokens from {kept.boundary} on,"
                    f" not of {one.end * CHUNK_TOKENS} from {begin} on, or another choice of them"
                )
            found.append(self._store.open_bag(kept, mine))
            begin = kept.length
        return found
