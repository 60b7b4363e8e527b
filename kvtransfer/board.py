"""The board: how far the chunks that are being computed are, readable from outside while they are.

One uint64 per slab, in shared memory of its own beside the pool: `mark << 16 | layers done`. A mark is a number that
is never used twice; it stands for one staging of one chunk. The prefill worker writes, with plain stores. A puller
looks before it copies, copies the layers that are done, and drops what it has when it sees another mark.

    hint: slabs 7, 9 under mark 41     entry of slab 7:   41|0  ─▶ 41|1 ─▶ … ─▶ 41|32     (─▶ 58|0, someone else's)
                                                             └ layer 0 may be copied

Nothing depends on the board being right: it only says when a copy is worth while. What counts are the digests in the
ticket, and they are compared with hashes of the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ENTRY_BYTES = 8
LAYER_BITS = 16
MAX_LAYERS = (1 << LAYER_BITS) - 1
DONE = 0  # instead of a mark: the chunks are complete and will not be written again, so nobody needs to look

Entries = NDArray[np.uint64]


class Board:
    """The writing side: one entry for each of `num_slabs` slabs, in `memory` of `num_slabs` x `ENTRY_BYTES` bytes.

    Clears the memory; marks of an earlier board there mean nothing any more. For one thread, the engine's.

    Raises:
        ValueError: the memory has another size.
    """

    def __init__(self, num_slabs: int, memory: memoryview) -> None:
        self._entries = entries(memory)
        if len(self._entries) != num_slabs:
            raise ValueError(f"a board of {len(self._entries)} entries does not fit {num_slabs} slabs")
        self._entries[:] = 0
        self._mark = DONE

    def mark(self) -> int:
        """The next unused mark; never `DONE`."""
        self._mark += 1
        return self._mark

    def stage(self, slabs: Sequence[int], mark: int) -> None:
        """From now on these slabs are computed under `mark`; none of their layers is done."""
        self._entries[list(slabs)] = mark << LAYER_BITS

    def advance(self, slabs: Sequence[int] | NDArray[np.int64], layers: int) -> None:
        """The first `layers` layers of these slabs are written. An array of indexes is taken as it is: one store."""
        held = self._entries[slabs]
        self._entries[slabs] = (held >> np.uint64(LAYER_BITS) << np.uint64(LAYER_BITS)) | np.uint64(layers)

    def clear(self, slabs: Sequence[int]) -> None:
        """These slabs are no longer computed for the request they were staged for."""
        self._entries[list(slabs)] = 0


def entries(memory: memoryview) -> Entries:
    """The entries of a board, without a copy. Raises ValueError if that is not a whole number of them."""
    return np.frombuffer(memory, np.uint64)


def split(held: Entries) -> list[tuple[int, int]]:
    """Mark and layers done of each entry; `held` is a copy, taken at once."""
    marks, layers = held >> np.uint64(LAYER_BITS), held & np.uint64(MAX_LAYERS)
    return list(zip(marks.tolist(), layers.tolist(), strict=True))
