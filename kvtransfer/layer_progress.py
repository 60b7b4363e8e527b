"""Layer progress: shared memory with the number of layers of each slab's KV that are computed, while a step runs.

A puller uses it to copy KV layer by layer during prefill. There is one uint64 per slab: `mark << 16 | layers done`. A
mark is a number that is never used twice; it identifies one use of a slab for one chunk. The prefill worker writes with
plain stores. A puller in another process reads the entry, copies the layers that are done, and discards its copy if it
later sees another mark.

    hint: slabs 7, 9 under mark 41     entry of slab 7:   41|0  ─▶ 41|1 ─▶ … ─▶ 41|32     (─▶ 58|0, another use)
                                                             └ layer 0 may be copied

Correctness does not depend on these entries, which only say when a copy is worthwhile. The digests in the ticket
decide: they are compared with hashes of the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ENTRY_BYTES = 8
LAYER_BITS = 16
MAX_LAYERS = (1 << LAYER_BITS) - 1
# In place of a mark: the chunks are complete and immutable, so their progress need not be read.
COMPLETE_MARK = 0

ProgressEntries = NDArray[np.uint64]


class LayerProgress:
    """The prefill worker's side: one entry per slab, in `memory` of `num_slabs` x `ENTRY_BYTES` bytes.

    The memory is cleared, which makes earlier marks void. Only the engine's thread may use it.

    Raises:
        ValueError: the memory has another size.
    """

    def __init__(self, num_slabs: int, memory: memoryview) -> None:
        self._entries = view_entries(memory)
        if len(self._entries) != num_slabs:
            raise ValueError(f"{len(self._entries)} progress entries do not fit {num_slabs} slabs")
        self._entries[:] = 0
        self._mark = COMPLETE_MARK

    def next_mark(self) -> int:
        """The next unused mark; never `COMPLETE_MARK`."""
        self._mark += 1
        return self._mark

    def stage_slabs(self, slabs: Sequence[int], mark: int) -> None:
        """From now on these slabs are computed under `mark`; none of their layers is done yet."""
        self._entries[list(slabs)] = mark << LAYER_BITS

    def advance_layers(self, slabs: Sequence[int] | NDArray[np.int64], layers: int) -> None:
        """The first `layers` layers of these slabs are done. An array of slab numbers is used without a copy."""
        held = self._entries[slabs]
        self._entries[slabs] = (held >> np.uint64(LAYER_BITS) << np.uint64(LAYER_BITS)) | np.uint64(layers)

    def clear_slabs(self, slabs: Sequence[int]) -> None:
        """The slabs are no longer computed for the request for which they were staged."""
        self._entries[list(slabs)] = 0


def view_entries(memory: memoryview) -> ProgressEntries:
    """The entries in `memory`, without a copy. Raises ValueError if its size is not a multiple of `ENTRY_BYTES`."""
    return np.frombuffer(memory, np.uint64)


def split_entries(held: ProgressEntries) -> list[tuple[int, int]]:
    """(mark, layers done) of each entry; `held` must be a copy, which the prefill worker does not change."""
    marks, layers = held >> np.uint64(LAYER_BITS), held & np.uint64(MAX_LAYERS)
    return list(zip(marks.tolist(), layers.tolist(), strict=True))
