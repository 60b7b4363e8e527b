"""The chunks in the transfer buffer of a prefill worker: who uses them, and when their slabs are free again.

    add_chunks ─▶ copied ─▶ hashed ─▶ used by sequences, under lease ─▶ unused ─▶ given back

A chunk of the prefix tree is copied once: as long as the tree knows it, its slab is kept when nobody uses it any more,
and can be offered again. If no slab is free, the chunk that was unused for longest makes room. The key is the tree's
node, so a chunk disappears with the node, and never stands for other tokens.

A thread waits for the copies and hashes the slabs that they wrote. A slab is given back only when nobody uses its chunk
and it was copied and hashed. All but the thread's task runs on the engine's thread.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kvcache.prefix_tree import PrefixNode
from kvtransfer.cooperative import RUN_NOW, CoopTask
from kvtransfer.pipelined_pull import MAX_POLL_S, MIN_POLL_S
from kvtransfer.transfer_buffer import CACHED_OWNER, LEASED_OWNER, TransferBuffer
from worker.task_thread import TaskThread

if TYPE_CHECKING:
    # It imports torch, which only what copies needs.
    from kvcache.device.copies import CopyBatch, SlabCopies

# The owner of buffer slabs whose chunks are copied, hashed, or used by sequences that are not offered yet.
OFFER_OWNER = "offers"


@dataclass(slots=True, eq=False)
class BufferedChunk:
    """A chunk in a slab of the buffer."""

    slab: int
    # The copy that writes to the slab; None once it has ended.
    batch: CopyBatch | None = None
    # The hash of the slab's content; empty until it was computed.
    payload: bytes = b""
    # The keys of the sequences that use it, and of those that it is leased to.
    holders: set[str] = field(default_factory=set)
    leases: set[str] = field(default_factory=set)
    # The chunk in the prefix tree; None if it is not in there (any more).
    node: weakref.ref[PrefixNode] | None = None
    owner: str = OFFER_OWNER

    @property
    def is_copied(self) -> bool:
        """Whether its copy has ended. Raises DeviceLost."""
        if self.batch is not None and self.batch.is_done():
            self.batch = None
        return self.batch is None

    @property
    def is_used(self) -> bool:
        """Whether any sequence uses it, or it is under lease."""
        return bool(self.holders or self.leases)


class BufferedChunks:
    """The chunks in `buffer`. `copies` are from the device, `algorithm` is the payload hash (of `HASH_FUNCTIONS`).

    `wake` is called from another thread when copies have ended and when chunks were hashed.
    """

    def __init__(
        self, buffer: TransferBuffer, copies: SlabCopies, algorithm: str, wake: Callable[[], None]
    ) -> None:
        self.buffer = buffer
        self._copies, self._algorithm, self._wake = copies, algorithm, wake
        self._thread = TaskThread("kv-offer", self._on_thread_died)
        self._error: BaseException | None = None
        self._closed = False
        # All chunks by their slab. Those in `_cached` are unused, in the order in which they were last used.
        self._chunks: dict[int, BufferedChunk] = {}
        self._cached: OrderedDict[BufferedChunk, None] = OrderedDict()
        # The chunks of the prefix tree. One that the tree has forgotten is not in here, and comes to `_orphans`.
        self._by_node: WeakKeyDictionary[PrefixNode, BufferedChunk] = WeakKeyDictionary()
        self._orphans: deque[tuple[int, weakref.ref[PrefixNode]]] = deque()
        # Chunks that are being copied or hashed, and the hashes that the thread has computed.
        self._in_work: set[BufferedChunk] = set()
        self._hashed: SimpleQueue[tuple[BufferedChunk, bytes]] = SimpleQueue()

    def open(self) -> None:
        """Start the thread that waits for copies."""
        self._thread.open()

    def close(self) -> None:
        """Wait for all copies and hashes, and keep no unused chunk from now on."""
        self._thread.close()
        self._closed = True
        self.refresh()
        for chunk in list(self._cached):
            self._drop_chunk(chunk)

    @property
    def is_busy(self) -> bool:
        """Whether any chunk is being copied or hashed."""
        return bool(self._in_work)

    @property
    def has_room(self) -> bool:
        """Whether a slab is free, or its chunk unused."""
        return bool(self._cached) or self.buffer.free > 0

    @property
    def awaits_room(self) -> bool:
        """Whether a slab will be free or unused when it was copied and hashed."""
        return any(not chunk.is_used for chunk in self._in_work)

    def refresh(self) -> None:
        """Take over the hashes that the thread has computed, and forget chunks that the prefix tree has forgotten.

        Raises the error that ended the thread.
        """
        if self._error is not None:
            raise self._error
        try:
            while True:
                chunk, payload = self._hashed.get_nowait()
                chunk.payload = payload
                self._in_work.discard(chunk)
                self._settle(chunk)
        except Empty:
            pass
        while self._orphans:
            slab, ref = self._orphans.popleft()
            known = self._chunks.get(slab)
            if known is not None and known.node is ref:
                known.node = None
                self._settle(known)

    def use_chunks(
        self, key: str, wanted_nodes: Iterable[tuple[int, PrefixNode | None]]
    ) -> list[BufferedChunk]:
        """Let sequence `key` use chunks: their slabs on the device, and the nodes of those in the prefix tree.

        Those that are not in the buffer begin to be copied. If there is no room for one, the list ends before it.
        """
        chunks, fresh = list[BufferedChunk](), list[tuple[int, BufferedChunk]]()
        for source, node in wanted_nodes:
            chunk = self._by_node.get(node) if node is not None else None
            if chunk is None:
                if (slab := self._take_slab()) is None:
                    break
                chunk = self._add_chunk(slab, node)
                fresh.append((source, chunk))
            chunk.holders.add(key)
            self._settle(chunk)
            chunks.append(chunk)
        if fresh:
            self._begin_copies(fresh)
        return chunks

    def lease_chunks(self, key: str, chunks: Sequence[BufferedChunk]) -> None:
        """The chunks that sequence `key` uses are under lease now, until `let_go`."""
        for chunk in chunks:
            chunk.holders.discard(key)
            chunk.leases.add(key)
            self._settle(chunk)

    def let_go(self, key: str, chunks: Sequence[BufferedChunk]) -> None:
        """Sequence `key` does not use these chunks any more, and has no lease on them."""
        for chunk in chunks:
            chunk.holders.discard(key)
            chunk.leases.discard(key)
            self._settle(chunk)

    def forget(self, chunks: Sequence[BufferedChunk]) -> None:
        """Offer these chunks to no other sequence: they are copied again. Used ones stay until they are not."""
        for chunk in chunks:
            if chunk.node is not None and (node := chunk.node()) is not None:
                self._by_node.pop(node, None)
            chunk.node = None
            self._settle(chunk)

    def _take_slab(self) -> int | None:
        """A slab of the buffer: a free one, or that of the chunk that was unused for longest."""
        if not (slabs := self.buffer.take_free(1, OFFER_OWNER)) and self._cached:
            self._drop_chunk(next(iter(self._cached)))
            slabs = self.buffer.take_free(1, OFFER_OWNER)
        return slabs[0] if slabs else None

    def _add_chunk(self, slab: int, node: PrefixNode | None) -> BufferedChunk:
        """A chunk that will be copied to `slab`, which was taken for it."""
        chunk = self._chunks[slab] = BufferedChunk(slab)
        if node is not None:
            self._by_node[node] = chunk
            orphans = self._orphans
            chunk.node = weakref.ref(node, lambda ref: orphans.append((slab, ref)))
        return chunk

    def _begin_copies(self, fresh_chunks: Sequence[tuple[int, BufferedChunk]]) -> None:
        """Copy chunks from these slabs of the device, and let the thread hash them."""
        chunks = [chunk for _, chunk in fresh_chunks]
        self.buffer.count_copies(len(chunks))
        self._in_work.update(chunks)
        batch = self._copies.to_host([(source, chunk.slab) for source, chunk in fresh_chunks])
        for chunk in chunks:
            chunk.batch = batch
        self._thread.add_task(self._hash_task(batch, chunks))

    def _hash_task(self, batch: CopyBatch, chunks: Sequence[BufferedChunk]) -> CoopTask[None]:
        """The thread's part: wait for the copies, then hash the slabs that they wrote."""
        yield from _await_copies(batch)
        self.buffer.count_copies(-len(chunks))
        self._wake()
        for chunk in chunks:
            self._hashed.put((chunk, self.buffer.pool.hash_slab(chunk.slab, self._algorithm)))
            yield RUN_NOW
        self._wake()

    def _settle(self, chunk: BufferedChunk) -> None:
        """Give a chunk's slab the owner that its use asks for, or give it back."""
        cached = _is_idle(chunk)
        if cached and (self._closed or chunk.node is None or chunk.node() is None):
            return self._drop_chunk(chunk)
        if not cached:
            self._cached.pop(chunk, None)
        elif chunk not in self._cached:
            self._cached[chunk] = None
        owner = CACHED_OWNER if cached else LEASED_OWNER if chunk.leases else OFFER_OWNER
        if owner != chunk.owner:
            self.buffer.change_owner([chunk.slab], chunk.owner, owner)
            chunk.owner = owner
        return None

    def _drop_chunk(self, chunk: BufferedChunk) -> None:
        """Give back the slab of an idle chunk."""
        self._cached.pop(chunk, None)
        del self._chunks[chunk.slab]
        if chunk.node is not None and (node := chunk.node()) is not None:
            self._by_node.pop(node, None)
        self.buffer.give_back([chunk.slab], chunk.owner)

    def _on_thread_died(self, error: BaseException) -> None:
        self._error = error
        self._wake()


def _is_idle(chunk: BufferedChunk) -> bool:
    """Whether nothing uses, writes or reads a chunk's slab."""
    return not chunk.is_used and bool(chunk.payload)


def _await_copies(batch: CopyBatch) -> CoopTask[None]:
    """Wait until the copies have ended, without blocking the thread."""
    pause_s = MIN_POLL_S
    while not batch.is_done():
        yield pause_s
        pause_s = min(2 * pause_s, MAX_POLL_S)
