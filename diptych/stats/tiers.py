"""What a worker reports of the tiers of KV below its pool."""

from __future__ import annotations

import msgspec

# The fields of `TierStats` that only grow.
_COUNTERS = ("stored_chunks", "restored_chunks", "dropped_chunks", "corrupt_chunks", "failures")


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """A tier of KV below a worker's pool. Bytes and chunks are those of all workers of the host, the rest its own."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    chunks: int = 0
    # Chunks that this worker stored there and read back, and those that it did not store in time.
    stored_chunks: int = 0
    restored_chunks: int = 0
    dropped_chunks: int = 0
    # Chunks that were found damaged, and times that the tier could not be used.
    corrupt_chunks: int = 0
    failures: int = 0
    # Chunks that wait to be stored, and whether nothing is stored for now.
    waiting_chunks: int = 0
    paused: bool = False
    # How fast it is read, as measured, and the seconds before the first byte.
    read_bytes_per_s: float = 0.0
    read_delay_s: float = 0.0

    def since(self, then: TierStats) -> TierStats:
        """These, with the counters counted from `then` on."""
        counts = {name: getattr(self, name) - getattr(then, name) for name in _COUNTERS}
        return msgspec.structs.replace(self, **counts)
