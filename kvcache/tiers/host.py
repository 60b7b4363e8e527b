"""The host tier: keeps the KV of preempted sequences in memory outside the pool until the sequences continue.

KV is stored as plain bytes, slab by slab, from the pool of every rank. The tier has a fixed capacity: KV that does not
fit is dropped, and has to be computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol


class SlabMemory(Protocol):
    """A pool whose memory the host maps (`kvcache.pool.KvPool`)."""

    def slab_bytes(self, slab: int) -> memoryview:
        """A writable view of the bytes of `slab`."""


class SlabStorage(Protocol):
    """A pool's memory as the host tier needs it, wherever it is (`kvcache.device.pool.DevicePool`)."""

    @property
    def slab_size(self) -> int:
        """Bytes of a slab."""

    def read_slab(self, slab: int, target: memoryview) -> None:
        """Copy the bytes of `slab` into `target`, which has its size; they are there on return."""

    def write_slab(self, slab: int, source: memoryview) -> None:
        """Copy `source`, which has the size of a slab, into `slab`; it is there on return."""


class MappedStorage:
    """A `SlabStorage` over memory that the host maps. `first` is the number of its first slab."""

    def __init__(self, memory: SlabMemory, first: int) -> None:
        self._memory, self.slab_size = memory, memory.slab_bytes(first).nbytes

    def read_slab(self, slab: int, target: memoryview) -> None:
        """See `SlabStorage.read_slab`."""
        target[:] = self._memory.slab_bytes(slab)

    def write_slab(self, slab: int, source: memoryview) -> None:
        """See `SlabStorage.write_slab`."""
        self._memory.slab_bytes(slab)[:] = source


class HostTier:
    """Stores up to `capacity_bytes`. `slab_bytes` is the size of one slab, summed over all pools (one per rank).

    `memories` are pools that the host maps, and `first` is the number of their first slab. Other pools, on a device,
    are `storages`.
    """

    def __init__(
        self,
        memories: Sequence[SlabMemory],
        capacity_bytes: int,
        first: int = 0,
        storages: Sequence[SlabStorage] = (),
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._storages = [*(MappedStorage(memory, first) for memory in memories), *storages]
        self.slab_bytes = sum(storage.slab_size for storage in self._storages)
        self._held: dict[str, list[bytearray]] = {}
        self.used_bytes = 0

    def arena_of(self, kv_class: str) -> HostTier:
        """The tier for KV of a class: itself, since a worker with one pool has one class."""
        return self

    def has_room(self, n: int) -> bool:
        """Whether `n` more slabs fit."""
        return self.used_bytes + n * self.slab_bytes <= self.capacity_bytes

    def put_slabs(self, key: str, slabs: Sequence[int]) -> int:
        """Copy `slabs` from the pools into the tier, under `key`; returns the bytes copied.

        Raises:
            ValueError: the slabs do not fit, or the tier has `key` already.
            MemoryError: the machine has no memory for the copy; nothing is stored.
        """
        if key in self._held or not self.has_room(len(slabs)):
            raise ValueError(f"{len(slabs)} slabs of {key} do not fit, or are here already")
        self._held[key] = [self._read_slab(slab) for slab in slabs]
        num_bytes = len(slabs) * self.slab_bytes
        self.used_bytes += num_bytes
        return num_bytes

    def restore_slabs(self, key: str, slabs: Sequence[int], start: int = 0) -> int:
        """Copy the stored slabs of `key`, from index `start` on, back into `slabs`, and drop `key`; returns the bytes
        copied.

        `slabs` may be longer than the stored list. Raises KeyError if the tier has nothing for `key`.
        """
        held = self._held[key]
        for slab, content in zip(slabs[start : len(held)], held[start:], strict=True):
            self._write_slab(slab, content)
        self.drop_slabs(key)
        return max(0, len(held) - start) * self.slab_bytes

    def drop_slabs(self, key: str) -> None:
        """Drop the stored slabs of `key`. Idempotent."""
        self.used_bytes -= len(self._held.pop(key, ())) * self.slab_bytes

    def __len__(self) -> int:
        return len(self._held)

    def _read_slab(self, slab: int) -> bytearray:
        """A copy of one slab's bytes, from all ranks' pools one after the other."""
        content = bytearray(self.slab_bytes)
        for storage, part in self._split_bytes(content):
            storage.read_slab(slab, part)
        return content

    def _write_slab(self, slab: int, content: bytearray) -> None:
        """Write bytes from `_read_slab` back into a slab of all ranks' pools."""
        for storage, part in self._split_bytes(content):
            storage.write_slab(slab, part)

    def _split_bytes(self, content: bytearray) -> Iterator[tuple[SlabStorage, memoryview]]:
        """Each pool, and its part of a slab's bytes."""
        at, view = 0, memoryview(content)
        for storage in self._storages:
            yield storage, view[at : at + storage.slab_size]
            at += storage.slab_size


class HostArenas:
    """A host tier per KV class, each with its share of the capacity (`kvcache.arenas.KvArenas`)."""

    def __init__(self, tiers: Mapping[str, HostTier]) -> None:
        self._tiers = dict(tiers)

    def arena_of(self, kv_class: str) -> HostTier:
        """The tier for KV of a class. Raises KeyError."""
        return self._tiers[kv_class]

    def drop_slabs(self, key: str) -> None:
        """Drop the stored slabs of `key`, in whichever tier they are. Idempotent."""
        for tier in self._tiers.values():
            tier.drop_slabs(key)

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))
