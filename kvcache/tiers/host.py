"""The host tier: KV of preempted sequences, in memory outside the pool, until they come back.

Plain bytes, slab by slab, of every rank's pool. Bounded; what does not fit is refused, and then computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Memory(Protocol):
    """A pool's memory (`kvcache.pool.Pool`): a writable window on each slab."""

    def slab_bytes(self, slab: int) -> memoryview: ...


class HostTier:
    """Room for `capacity_bytes` of slabs, each of them `slab_bytes` over all `pools` (one per rank)."""

    def __init__(self, pools: Sequence[Memory], capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._pools = list(pools)
        self.slab_bytes = sum(pool.slab_bytes(0).nbytes for pool in self._pools)
        self._held: dict[str, list[bytearray]] = {}
        self.used_bytes = 0

    def fits(self, n: int) -> bool:
        """Is there room for `n` more slabs?"""
        return self.used_bytes + n * self.slab_bytes <= self.capacity_bytes

    def put(self, key: str, slabs: Sequence[int]) -> int:
        """Copy `slabs` here, under `key`; the bytes copied.

        Raises:
            ValueError: they do not fit, or `key` is here already.
            MemoryError: the machine has no memory for them; nothing is held.
        """
        if key in self._held or not self.fits(len(slabs)):
            raise ValueError(f"{len(slabs)} slabs of {key} do not fit, or are here already")
        self._held[key] = [self._read(slab) for slab in slabs]
        num_bytes = len(slabs) * self.slab_bytes
        self.used_bytes += num_bytes
        return num_bytes

    def get(self, key: str, slabs: Sequence[int], start: int = 0) -> int:
        """Copy what `key` holds into `slabs`, from its slab `start` on, and forget it; the bytes copied.

        `slabs` may be longer than what is held. Raises KeyError if nothing is here for `key`.
        """
        held = self._held[key]
        for slab, content in zip(slabs[start : len(held)], held[start:], strict=True):
            self._write(slab, content)
        self.drop(key)
        return max(0, len(held) - start) * self.slab_bytes

    def drop(self, key: str) -> None:
        """Forget what `key` holds. Idempotent."""
        self.used_bytes -= len(self._held.pop(key, ())) * self.slab_bytes

    def __len__(self) -> int:
        return len(self._held)

    def _read(self, slab: int) -> bytearray:
        content = bytearray(self.slab_bytes)
        at = 0
        for pool in self._pools:
            window = pool.slab_bytes(slab)
            content[at : at + window.nbytes] = window
            at += window.nbytes
        return content

    def _write(self, slab: int, content: bytearray) -> None:
        at = 0
        for pool in self._pools:
            window = pool.slab_bytes(slab)
            window[:] = memoryview(content)[at : at + window.nbytes]
            at += window.nbytes
