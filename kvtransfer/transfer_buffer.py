"""The transfer buffer of a worker whose pool is on a device: host memory through which all its KV leaves and arrives.

    device slab ──copy──▶ buffer slab ══transport══▶ buffer slab ──copy──▶ device slab
         prefill worker                                   decode worker

Transports, tickets, hints and leases name slabs of the buffer; the device's slabs have other numbers. A slab of the
buffer belongs to one owner from before a copy or a pull begins to write to it until the last one that reads it has
ended. Chunks that are only kept because they may be offered again belong to `CACHED_OWNER`; they are not used.

On a decode worker the pulling thread takes slabs and gives them back while the engine's thread reads the counts, so
every method holds a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from diptych.messages import WorkerStats
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.layout import KvLayout
from kvcache.slab_ledger import SlabLedger
from kvtransfer.resharding import unsharded_pool
from kvtransfer.shared_memory import SharedMemory

# The owner of chunks that nobody uses and that may be offered again.
CACHED_OWNER = "cached chunks"
# The owner of chunks under lease.
LEASED_OWNER = "leases"


def min_buffer_bytes(layout: KvLayout, max_model_len: int) -> int:
    """The size of the smallest buffer in bytes: it holds the KV of one request of `max_model_len` tokens.

    That is `layout.num_chunks(max_model_len)` slabs of `layout.chunk_bytes`.
    """
    return layout.num_chunks(max_model_len) * layout.chunk_bytes


class TransferBuffer:
    """As many whole slabs of `layout.chunk_bytes` as fit into `num_bytes`, numbered from 0, in shared memory.

    `pool` is what transports publish (`kvtransfer.transports.links.OfferedTransports`, with `memory`) or pull into.
    Any thread may call any method.

    Raises:
        ValueError: not one slab fits.
    """

    def __init__(self, layout: KvLayout, num_bytes: int) -> None:
        self.num_slabs = num_bytes // layout.chunk_bytes
        if self.num_slabs < 1:
            raise ValueError(f"a buffer of {num_bytes} bytes holds no slab of {layout.chunk_bytes}")
        self.layout = layout
        self.memory = SharedMemory(self.num_slabs * layout.chunk_bytes)
        self.pool = unsharded_pool(layout, self.memory.view)
        self._ledger, self._lock = SlabLedger(self.num_slabs), threading.Lock()
        self._copying = 0

    @property
    def free(self) -> int:
        """Slabs without an owner."""
        with self._lock:
            return self._ledger.free

    @property
    def used(self) -> int:
        """Slabs that are written, read or under lease; 0 at rest. Cached chunks are not among them."""
        return sum(self.owners().values())

    @property
    def cached(self) -> int:
        """Slabs with chunks that nobody uses and that may be offered again."""
        return self._count_owned(CACHED_OWNER)

    @property
    def leased(self) -> int:
        """Slabs under lease."""
        return self._count_owned(LEASED_OWNER)

    @property
    def copying(self) -> int:
        """Slabs that a copy to or from the device reads or writes now; 0 at rest."""
        with self._lock:
            return self._copying

    def count_copies(self, change: int) -> None:
        """Count copies of so many slabs that begin, or that have ended (`change` below 0)."""
        with self._lock:
            self._copying += change

    def take_free(self, count: int, owner: str) -> list[int]:
        """Take up to `count` free slabs for `owner`; none if none is free. They still have their old content."""
        with self._lock:
            return self._ledger.take_slabs(min(count, self._ledger.free), owner)

    def give_back(self, slabs: Sequence[int], owner: str) -> None:
        """Return slabs of `owner`. Nothing may write to them or read them any more.

        Raises:
            ValueError: a slab is not owned by `owner`, or is listed twice; none was returned.
        """
        with self._lock:
            self._ledger.give_back(slabs, owner)

    def change_owner(self, slabs: Sequence[int], owner: str, new_owner: str) -> None:
        """Pass `slabs` from `owner` to `new_owner`. Raises ValueError as `give_back`."""
        with self._lock:
            self._ledger.change_owner(slabs, owner, new_owner)

    def owners(self) -> dict[str, int]:
        """Number of used slabs by owner, without owners of 0."""
        with self._lock:
            return {
                owner: count
                for owner, count in self._ledger.count_by_owner().items()
                if owner != CACHED_OWNER
            }

    def check_books(self) -> None:
        """Check that every slab is free or has exactly one owner. Raises AssertionError if not."""
        with self._lock:
            self._ledger.check_books()
            if not 0 <= self._copying <= self._ledger.used:
                raise AssertionError(f"{self._copying} copies run on {self._ledger.used} owned slabs")

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` with the counts of the buffer added."""
        return msgspec.structs.replace(
            stats,
            buffer_slabs=self.num_slabs,
            buffer_used=self.used,
            buffer_leased=self.leased,
            buffer_cached=self.cached,
            copies_in_flight=self.copying,
        )

    def close(self) -> None:
        """Other processes can open the memory no longer. No copy may run any more. Idempotent."""
        self.memory.close()

    def _count_owned(self, owner: str) -> int:
        with self._lock:
            return self._ledger.count_by_owner().get(owner, 0)


class BufferedBooks:
    """The slab accounts of a worker with a transfer buffer: those of its pool and of the buffer together.

    `worker.loop.WorkerLoop` checks them when the worker is at rest.
    """

    def __init__(self, kv: KvAllocator | KvArenas, buffer: TransferBuffer) -> None:
        self._kv, self._buffer = kv, buffer

    @property
    def used(self) -> int:
        """Slabs that are held on the device or used in the buffer; 0 at rest, when no copy runs either."""
        return self._kv.used + max(self._buffer.used, self._buffer.copying)

    def owners(self) -> dict[str, int]:
        """Number of slabs by owner; owners in the buffer are named so, and slabs that are being copied are listed."""
        in_buffer = {f"buffer: {owner}": count for owner, count in self._buffer.owners().items()}
        copying = self._buffer.copying
        return self._kv.owners() | in_buffer | ({"copies": copying} if copying else {})

    def check_books(self) -> None:
        """Check both accounts. Raises AssertionError."""
        self._kv.check_books()
        self._buffer.check_books()
