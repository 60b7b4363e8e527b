"""Tiers of KV below the pools, in virtual time: the workers of a cell share them, as those of a host do.

    released chunks ─▶ stored at once in every tier, in place of those that were used longest ago
    a prefix to read back ─▶ `engine.prefix_restores` decides ─▶ chunk by chunk, one prefix after the other per worker

`engine.prefix_restores` is the product's own. Looking up and storing take no time, and a tier is always as fast as it
says.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Protocol

from msgspec.structs import replace

from diptych.messages import WorkerStats
from diptych.stats.tier_rates import TierRate
from diptych.stats.tiers import TierStats
from engine.prefix_restores import NoRestores, PrefixRestore, PrefixRestores
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.prefix_tree import PrefixNode

# An arena's name and the address of a chunk in it.
ChunkAddress = tuple[str, bytes]


class Clock(Protocol):
    """What the tiers use of `planner.sim.exact.event_queue.EventQueue`."""

    now_s: float

    def at(self, at_s: float, call: Callable[..., None], *args: object) -> None:
        """Call `call(*args)` at `at_s`."""


@dataclass(frozen=True, slots=True)
class SimTier:
    """A tier: its name, its bytes in each cell, and how fast each worker reads it."""

    name: str
    capacity_bytes: float
    rate: TierRate


class SimTierStore:
    """The chunks of one tier. Those that were used longest ago make room for new ones."""

    def __init__(self, tier: SimTier) -> None:
        self.tier = tier
        self.used_bytes = 0
        self._bytes_of: OrderedDict[ChunkAddress, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bytes_of)

    def __contains__(self, address: ChunkAddress) -> bool:
        return address in self._bytes_of

    def store(self, address: ChunkAddress, num_bytes: int) -> bool:
        """Store a chunk as the one that was used last. Returns whether it was not there."""
        if address in self._bytes_of:
            self.touch(address)
            return False
        if num_bytes > self.tier.capacity_bytes:
            return False
        while self.used_bytes + num_bytes > self.tier.capacity_bytes:
            _, gone_bytes = self._bytes_of.popitem(last=False)
            self.used_bytes -= gone_bytes
        self._bytes_of[address] = num_bytes
        self.used_bytes += num_bytes
        return True

    def touch(self, address: ChunkAddress) -> None:
        """The chunk was used now."""
        self._bytes_of.move_to_end(address)


class _ReadPort:
    """What one worker reads of one tier: prefixes that wait for it, and whether it is being read."""

    def __init__(self, store: SimTierStore) -> None:
        self.store, self.waiting, self.is_reading = store, deque[PrefixRestore](), False
        self.num_stored = self.num_restored = 0

    def stats(self) -> TierStats:
        """What the worker says of the tier."""
        store = self.store
        return TierStats(
            capacity_bytes=int(store.tier.capacity_bytes),
            used_bytes=store.used_bytes,
            chunks=len(store),
            stored_chunks=self.num_stored,
            restored_chunks=self.num_restored,
            read_bytes_per_s=store.tier.rate.bytes_per_s,
            read_delay_s=store.tier.rate.delay_s,
        )


class SimTiers:
    """The tiers below the pool of one engine (`engine.prefix_restores.TierReader`).

    `stores` are the fastest first, `chunk_bytes` those of a chunk by the name of its arena.
    """

    def __init__(
        self,
        clock: Clock,
        stores: Sequence[SimTierStore],
        kv: KvAllocator | KvArenas,
        chunk_bytes: Mapping[str, int],
    ) -> None:
        self._clock, self._chunk_bytes = clock, dict(chunk_bytes)
        # The name of the only arena; several are named after their classes.
        self._only = next(iter(chunk_bytes))
        self._ports = {store.tier.name: _ReadPort(store) for store in stores}
        self._answers: list[PrefixRestore] = []
        self._wake: Callable[[], None] = lambda: None
        for name, arena in (kv.arenas if isinstance(kv, KvArenas) else {self._only: kv}).items():
            if arena.tree is not None:
                arena.tree.on_released = partial(self._store_nodes, name)

    def _store_nodes(self, arena: str, nodes: Iterable[PrefixNode]) -> None:
        """Store chunks that nobody holds any more."""
        for port in self._ports.values():
            port.num_stored += sum(
                port.store.store((arena, node.key), self._chunk_bytes[arena]) for node in nodes
            )

    # ---- what restores ask

    def rates(self) -> Mapping[str, TierRate]:
        """How fast each tier is read."""
        return {name: port.store.tier.rate for name, port in self._ports.items()}

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake` when there are answers."""
        self._wake = wake

    def take_answers(self) -> list[PrefixRestore]:
        """The restores whose look-up or reading has ended since the last call."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def stats(self) -> dict[str, TierStats]:
        """What is known of the tiers, by name."""
        return {name: port.stats() for name, port in self._ports.items()}

    def look_up(self, restore: PrefixRestore) -> None:
        """Report the tiers of those leading missing chunks that are stored."""
        found = (self._find(self._address(restore, key)) for key in restore.missing_keys)
        if restore.report_found(list(takewhile(bool, found)), ends=True):
            self._answer(restore)

    def read_chunks(self, restore: PrefixRestore) -> None:
        """Fill the slabs of `restore`, in order, until a chunk is gone or it is stopped."""
        port = self._ports[restore.tiers[restore.restored]]
        port.waiting.append(restore)
        if not port.is_reading:
            self._read_next(port)

    # ---- reading

    def _read_next(self, port: _ReadPort) -> None:
        """Begin with the prefix that has waited longest."""
        port.is_reading = bool(port.waiting)
        if port.waiting:
            self._read_chunk(port, port.waiting.popleft(), port.store.tier.rate.delay_s)

    def _read_chunk(self, port: _ReadPort, restore: PrefixRestore, delay_s: float) -> None:
        """Read the next chunk of a prefix in this tier; without one, leave the rest to the tier that has it."""
        key = restore.next_in(port.store.tier.name)
        if key is not None:
            read_s = self._chunk_bytes[self._arena_of(restore)] / port.store.tier.rate.bytes_per_s
            self._clock.at(self._clock.now_s + delay_s + read_s, self._end_chunk, port, restore, key)
            return
        if restore.is_read:
            self._answer(restore)
        else:
            self.read_chunks(restore)
        self._read_next(port)

    def _end_chunk(self, port: _ReadPort, restore: PrefixRestore, key: bytes) -> None:
        """A chunk was read, unless it has made room for others meanwhile."""
        address = self._address(restore, key)
        if address in port.store:
            port.store.touch(address)
            port.num_restored += restore.fill_next(lambda slab: None)
        else:
            restore.stop()
        self._read_chunk(port, restore, 0.0)

    def _find(self, address: ChunkAddress) -> str:
        """The fastest tier that has a chunk; empty if none has."""
        return next((name for name, port in self._ports.items() if address in port.store), "")

    def _address(self, restore: PrefixRestore, key: bytes) -> ChunkAddress:
        return self._arena_of(restore), key

    def _arena_of(self, restore: PrefixRestore) -> str:
        return restore.kv_class if len(self._chunk_bytes) > 1 else self._only

    def _answer(self, restore: PrefixRestore) -> None:
        self._answers.append(restore)
        self._wake()


def sum_tier_stats(parts: Iterable[NoRestores | PrefixRestores]) -> dict[str, TierStats]:
    """What the `restores` of several engines have stored in each tier and read back, by the name of the tier."""
    found: dict[str, TierStats] = {}
    for restores in parts:
        for name, stats in restores.complete_stats(WorkerStats()).tiers.items():
            before = found.get(name, TierStats())
            found[name] = replace(
                stats,
                stored_chunks=before.stored_chunks + stats.stored_chunks,
                restored_chunks=before.restored_chunks + stats.restored_chunks,
            )
    return found
