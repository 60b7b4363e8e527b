"""The tiers below one worker's pool: host memory that all workers of the host share, and a disk below it.

    released chunks ─▶ host thread: slab ─▶ host tier ─▶ disk thread: host tier ─▶ disk
    a prefix to read back ─▶ the thread of the tier with its next chunk: file, verified ─▶ slab ─▶ that of the next one

A chunk is copied from its slab without a lock, and counts if the prefix tree has it still afterwards: then nothing
wrote to the slab meanwhile. No thread of a tier takes slabs or changes their owners.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile

from diptych.errors import CorruptChunk
from diptych.stats.tier_rates import DISK, FIRST_RATES, HOST, TierRate
from diptych.stats.tiers import TierStats
from engine.prefix_restores import PrefixRestore
from engine.scheduling.new_token_ratio import MeasuredRate
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.prefix_tree import PrefixNode
from kvcache.tiers.chunk_store import STORE_ERRORS, ChunkStore, NewChunk
from kvtransfer.resharding import ShardedPool
from worker.tiers.tier_thread import TierThread

# Chunks that one batch stores. A look-up waits for a batch.
BATCH_CHUNKS = 4
# Most chunks that wait to be stored in a tier.
MAX_WAITING = 1024
# For how many seconds the size of a tier is not asked for again.
COUNT_S = 2.0
# A tier whose rate says that nothing is read from it is read once in so many seconds, to measure it again.
PROBE_S = 10.0


class _Tier:
    """One store, its thread and its measured rate."""

    def __init__(self, name: str, store: ChunkStore, thread: TierThread[list[PrefixNode]]):
        self.name, self.store, self.thread = name, store, thread
        first = FIRST_RATES[name]
        self.delay_s, self.rate = first.delay_s, MeasuredRate(first.bytes_per_s)
        self.num_stored = self.num_restored = 0
        # When its rate was last measured, in clock seconds.
        self._measured_s = float("-inf")
        self._counted_s, self._count = float("-inf"), (0, 0)
        # Whether this worker has stored something since its size was asked for.
        self.changed = False
        # Where chunks are verified, before they are copied into slabs.
        self._chunk = bytearray()
        # Addresses of chunks that nobody may use any more, and which could not be removed.
        self.doubtful: set[bytes] = set()

    def stats(self) -> TierStats:
        """What the worker says of the tier."""
        chunks, num_bytes = self._count
        return TierStats(
            capacity_bytes=self.store.capacity_bytes,
            used_bytes=num_bytes,
            chunks=chunks,
            stored_chunks=self.num_stored,
            restored_chunks=self.num_restored,
            dropped_chunks=self.thread.num_dropped,
            corrupt_chunks=self.store.num_corrupt,
            failures=self.thread.num_failed,
            waiting_chunks=self.thread.num_waiting,
            paused=self.thread.is_paused,
            read_bytes_per_s=self.rate.value,
            read_delay_s=self.delay_s,
        )

    def add_sample(self, num_bytes: int, begun_s: float, ended_s: float) -> None:
        """So many bytes were read."""
        self.rate.add_sample(num_bytes, ended_s - begun_s)
        self._measured_s = ended_s

    def read(self, address: bytes, num_bytes: int) -> memoryview:
        """A verified chunk, until the next call. Raises as `ChunkStore.read`. Called by its thread."""
        if len(self._chunk) < num_bytes:
            self._chunk = bytearray(num_bytes)
        chunk = memoryview(self._chunk)[:num_bytes]
        self.store.read(address, [chunk])
        return chunk

    def remove_doubtful(self) -> None:
        """Remove the chunks that are in doubt. Called by its thread."""
        if self.doubtful:
            self.doubtful = self.store.remove(sorted(self.doubtful))

    def measure(self, address: bytes, clock: Callable[[], float]) -> None:
        """Read a chunk for nobody, unless the rate was measured lately: a tier that was slow may be faster now."""
        if clock() - self._measured_s > PROBE_S:
            begun_s = self._measured_s = clock()
            self.add_sample(self.store.read_bytes(address).nbytes, begun_s, clock())

    def may_count(self, now_s: float) -> bool:
        """Whether its size was not asked for lately."""
        return now_s - self._counted_s > COUNT_S

    def count(self, now_s: float) -> None:
        """Ask the store for its size, unless that was done lately. Called by its thread."""
        if self.may_count(now_s):
            self._counted_s, self.changed = now_s, False
            self._count = self.store.count()


class WorkerTiers:
    """The tiers below `pool`, whose books are `kv` (`engine.prefix_restores.TierReader`). It closes its stores.

    `wake` is called from the threads of the tiers when there is something for `take_answers`.
    """

    def __init__(
        self,
        pool: ShardedPool,
        kv: KvAllocator | KvArenas,
        host: ChunkStore,
        disk: ChunkStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._clock = pool, clock
        self._wake: Callable[[], None] = lambda: None
        self._answers: queue.SimpleQueue[PrefixRestore] = queue.SimpleQueue()
        # A chunk of each tier that the latest look-ups have found.
        self._found: list[tuple[_Tier, bytes]] = []
        self._host_thread = TierThread[list[PrefixNode]](HOST, self._store_nodes, MAX_WAITING, clock)
        self._tiers = {HOST: _Tier(HOST, host, self._host_thread)}
        self._disk_thread: TierThread[list[PrefixNode]] | None = None
        if disk is not None:
            self._disk_thread = TierThread[list[PrefixNode]](DISK, self._copy_down, MAX_WAITING, clock)
            self._tiers[DISK] = _Tier(DISK, disk, self._disk_thread)
        arenas = kv.arenas.values() if isinstance(kv, KvArenas) else (kv,)
        self._trees = [arena.tree for arena in arenas if arena.tree is not None]

    def open(self) -> None:
        """Start the threads, and store what sequences release from now on."""
        for tier in self._tiers.values():
            tier.thread.open()
            tier.thread.ask_idle(partial(self._count, tier))
        for tree in self._trees:
            tree.on_released, tree.on_forgotten = self._on_released, self._on_forgotten

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when there are answers."""
        self._wake = wake

    def close(self) -> None:
        """End the threads and close the stores. Idempotent."""
        for tree in self._trees:
            tree.on_released = tree.on_forgotten = None
        for tier in self._tiers.values():
            tier.thread.close()
        for tier in self._tiers.values():
            if not tier.thread.is_alive:
                tier.store.close()

    @property
    def stats(self) -> dict[str, TierStats]:
        """What the worker says of its tiers, the fastest first."""
        now_s = self._clock()
        for tier in self._tiers.values():
            if tier.changed and tier.may_count(now_s):
                tier.thread.ask_idle(partial(self._count, tier))
        return {name: tier.stats() for name, tier in self._tiers.items()}

    # ---- storing

    def _on_released(self, nodes: list[PrefixNode]) -> None:
        """Store chunks that nobody holds now, the deepest first. Called by the engine's thread."""
        for start in range(0, len(nodes), BATCH_CHUNKS):
            self._host_thread.add_batch(nodes[start : start + BATCH_CHUNKS])

    def _on_forgotten(self, addresses: list[bytes]) -> None:
        """Remove the copies of chunks that are in doubt, before anything else is looked up or stored."""
        for tier in self._tiers.values():
            tier.thread.ask(partial(self._remove, tier, addresses))

    def _remove(self, tier: _Tier, addresses: list[bytes]) -> None:
        """Remove chunks from a tier. What cannot be removed now is not found here, and tried again."""
        tier.doubtful.update(addresses)
        tier.remove_doubtful()

    def _store_nodes(self, nodes: list[PrefixNode]) -> None:
        """Store chunks of the prefix tree in the host tier."""
        tier = self._tiers[HOST]
        tier.remove_doubtful()
        present = [node for node in nodes if _is_intact(node)]
        chunks = [
            NewChunk(node.key, node.depth, self._pool.chunk_views(node.slab), partial(_is_intact, node))
            for node in present
        ]
        if chunks:
            tier.num_stored += len(tier.store.store(chunks))
            tier.changed = True
            if self._disk_thread is not None:
                self._disk_thread.add_batch(present)

    def _copy_down(self, nodes: list[PrefixNode]) -> None:
        """Copy chunks from the host tier to the disk, unless they are there. Either way they count as used."""
        host, disk = self._tiers[HOST].store, self._tiers[DISK]
        known = disk.store.find([node.key for node in nodes])
        if known:
            disk.store.touch(sorted(known))
        for node in nodes:
            if node.key not in known and not node.doubtful:
                try:
                    view = host.read_bytes(node.key)
                except (KeyError, CorruptChunk):
                    continue
                disk.num_stored += len(disk.store.store([NewChunk(node.key, node.depth, [view])]))
        disk.changed = True

    # ---- reading back

    def rates(self) -> Mapping[str, TierRate]:
        """How fast each tier is read now."""
        return {name: TierRate(tier.delay_s, tier.rate.value) for name, tier in self._tiers.items()}

    def take_answers(self) -> list[PrefixRestore]:
        """The restores whose look-up or reading has ended since the last call."""
        # What was found the last time is being read by now, or it is not worth it, as far as is known.
        for tier, address in self._found:
            tier.thread.ask_idle(partial(self._measure, tier, address))
        self._found, answers = [], []
        while not self._answers.empty():
            answers.append(restore := self._answers.get())
            if not (restore.ready or restore.slabs):
                firsts = {name: restore.tiers.index(name) for name in restore.tiers}
                self._found += [(self._tiers[name], restore.missing_keys[at]) for name, at in firsts.items()]
        return answers

    def look_up(self, restore: PrefixRestore) -> None:
        """Report the tiers of those leading missing chunks that are stored: what host memory has, then all."""
        if self._host_thread.is_stuck:
            return self._answer_found(restore, {}, ends=True)
        self._host_thread.ask(partial(self._find, HOST, restore, {}))

    def _find(self, name: str, restore: PrefixRestore, found: dict[bytes, str]) -> None:
        """Look for the missing chunks in one tier, then in the one below."""
        if restore.found:
            return
        tier, keys = self._tiers[name], restore.missing_keys
        try:
            tier.remove_doubtful()
            for address in tier.store.find([key for key in keys if key not in found]) - tier.doubtful:
                found[address] = name
        except STORE_ERRORS as error:
            tier.thread.note_failure(error)
        disk = self._disk_thread
        asks_disk = name == HOST and disk is not None and len(found) < len(keys) and not disk.is_stuck
        self._answer_found(restore, found, ends=not asks_disk)
        if asks_disk and disk is not None:
            disk.ask(partial(self._find, DISK, restore, found))
        tier.thread.ask_idle(partial(self._count, tier))

    def _answer_found(self, restore: PrefixRestore, found: Mapping[bytes, str], ends: bool) -> None:
        """Report the leading chunks among those that were found."""
        leading = [found[key] for key in takewhile(found.__contains__, restore.missing_keys)]
        if restore.report_found(leading, ends) and ends:
            self._answer(restore)

    def _count(self, tier: _Tier) -> None:
        """Look how much a tier has, which may be that of others or of an earlier life."""
        with contextlib.suppress(*STORE_ERRORS):
            tier.count(self._clock())

    def _measure(self, tier: _Tier, address: bytes) -> None:
        """Measure a tier, unless it was read lately."""
        with contextlib.suppress(KeyError, CorruptChunk):
            tier.measure(address, self._clock)

    def read_chunks(self, restore: PrefixRestore) -> None:
        """Fill the slabs of `restore`, in order, until a chunk fails or it is stopped."""
        tier = self._tiers[restore.tiers[restore.restored]]
        tier.thread.ask(partial(self._read_run, tier, restore))

    def _read_run(self, tier: _Tier, restore: PrefixRestore) -> None:
        """Read the next chunks that are in this tier; another one goes on behind them."""
        size = sum(view.nbytes for view in self._pool.chunk_views(restore.slabs[0]))
        begun_s, read = self._clock(), list[bytes]()
        try:
            while (address := restore.next_in(tier.name)) is not None:
                chunk = tier.read(address, size)
                read.append(address)
                tier.num_restored += restore.fill_next(partial(self._fill_slab, chunk))
        except (KeyError, CorruptChunk):
            restore.stop()
        except STORE_ERRORS as error:
            restore.stop()
            tier.thread.note_failure(error)
        if read:
            tier.add_sample(len(read) * size, begun_s, self._clock())
        if restore.is_read:
            self._answer(restore)
        else:
            self.read_chunks(restore)
        # What is wrong with that, storing tells.
        with contextlib.suppress(*STORE_ERRORS):
            tier.store.touch(read)

    def _fill_slab(self, chunk: memoryview, slab: int) -> None:
        """Copy a verified chunk into its slab."""
        at = 0
        for view in self._pool.chunk_views(slab):
            view[:] = chunk[at : at + view.nbytes]
            at += view.nbytes

    def _answer(self, restore: PrefixRestore) -> None:
        self._answers.put(restore)
        self._wake()


def _is_intact(node: PrefixNode) -> bool:
    """Whether the slab of a chunk has held that chunk until now, and nobody doubts it."""
    return not (node.evicted or node.doubtful)
