"""Hand-off between processes of one host: the decode worker maps the prefill worker's pool and copies slabs out of it.

However the two workers are split into ranks, one process of each has the memory of all its ranks: the process that
copies maps every part of the source, and writes into every part of its own pool.

No staging, no second process to wake, and nothing that can stall: the bytes stay readable even when their owner is
stopped, and, for as long as the mapping lives, when it is dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from diptych.errors import StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.copying import Bytes, copy, copy_at
from kvtransfer.digests import HASHERS, Hasher
from kvtransfer.handoff import Aborted
from kvtransfer.memory import Address, SharedMemory, attach
from kvtransfer.parts import Move, Parts, count_slabs, moves, slab_sizes

PROBE_BYTES = 16 << 20
PIECE_BYTES = 512 << 10  # copied, then hashed while the caches still have some of it


class Source:
    """Prefill side: says where the pool's parts are. The kernel does the rest."""

    def __init__(self, parts: Sequence[tuple[Shard, SharedMemory]], name: str) -> None:
        self._parts = parts

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode([(shard, memory.address()) for shard, memory in self._parts])

    def close(self) -> None:
        """Nothing is held besides the memory, which is its creator's."""


@dataclass(frozen=True, slots=True)
class _Peer:
    """A linked worker: the mapped parts of its pool, the size of a slab in each, and how its chunks come here."""

    incarnation: str
    memories: tuple[Bytes, ...]
    bases: tuple[int, ...]  # their addresses
    sizes: tuple[int, ...]
    num_slabs: int
    stages: tuple[tuple[Move, ...], ...]


class Puller:
    """Decode side: copies slabs of linked workers into the `own` pool and hashes the copies.

    `algorithm` is a key of `HASHERS`. One lock guards the table of links only, so a link can be dropped while a pull
    runs: the pull keeps its mapping alive.
    """

    name = "shm"

    def __init__(self, own: Parts, algorithm: str = "xxh3") -> None:
        self._own, self._hash = own, HASHERS[algorithm]
        self._bases = [as_array(memory).ctypes.data for memory in own.memories]
        self._lock = threading.Lock()
        self._links: dict[str, _Peer] = {}

    def link(self, worker: str, incarnation: str, endpoint: bytes) -> None:
        """Map the pool that `endpoint` tells of; replaces a link to an earlier life.

        Raises:
            TransferError: it is on another host, not ours to read, not what the endpoint says, or not of our layout.
        """
        try:
            peer = self._map(incarnation, msgspec.msgpack.decode(endpoint, type=list[tuple[Shard, Address]]))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise TransferError(f"no shared memory with {worker}", str(error)) from error
        with self._lock:
            self._links[worker] = peer

    def _map(self, incarnation: str, parts: list[tuple[Shard, Address]]) -> _Peer:
        layout, shards = self._own.layout, [shard for shard, _ in parts]
        stages = moves(layout, shards, self._own.shards)
        num_slabs = count_slabs(layout, [(shard, address.num_bytes) for shard, address in parts])
        memories = tuple(as_array(attach(address)) for _, address in parts)
        bases = tuple(memory.ctypes.data for memory in memories)
        return _Peer(incarnation, memories, bases, slab_sizes(layout, shards), num_slabs, stages)

    def pull(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> list[bytes]:
        """Copy (source slab, own slab) pairs, stage by stage of the own pool; returns the payload hash of every copy.

        `stop` is asked between slabs.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: a slab is outside the source's or the own pool.
            Aborted: `stop` said so.
        """
        peer, payloads = self._peer(worker, incarnation), [self._hash() for _ in pairs]
        for source, target in pairs:
            _exists(source, peer.num_slabs)
            _exists(target, self._own.num_slabs)
        for stage in peer.stages:
            for (source, target), payload in zip(pairs, payloads, strict=True):
                if stop is not None and stop():
                    raise Aborted("the pull was stopped")
                self._copy(peer, source, target, stage, payload)
        return [payload.digest() for payload in payloads]

    def _copy(self, peer: _Peer, source: int, target: int, stage: Sequence[Move], payload: Hasher) -> None:
        """One stage of one slab: every piece is copied, and hashed where it now lies."""
        memories, bases, sizes = self._own.memories, self._bases, self._own.slab_bytes
        for move in stage:
            far, own = source * peer.sizes[move.source] + move.far, target * sizes[move.target] + move.own
            there, here, memory = peer.bases[move.source], bases[move.target], memories[move.target]
            for at in range(0, move.num_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, move.num_bytes - at)
                copy_at(here + own + at, there + far + at, size)
                payload.update(memory[own + at : own + at + size])

    def measure(self, worker: str) -> tuple[float, float]:
        """(GB/s, µs for one page) of copies from this worker, into scratch memory; about 20 ms."""
        with self._lock:
            theirs = self._links[worker].memories[0]
        theirs = theirs[: min(PROBE_BYTES, theirs.nbytes) // 64 * 64]
        scratch = np.zeros(theirs.nbytes + 64, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 64 :][: theirs.nbytes]
        page = min(4096, theirs.nbytes)
        large = min(_seconds(lambda: copy(scratch, theirs)) for _ in range(3))
        small = sorted(_seconds(lambda: copy(scratch[:page], theirs[:page])) for _ in range(9))[4]
        return theirs.nbytes / large / 1e9, small * 1e6

    def unlink(self, worker: str) -> None:
        """Forget a worker; its memory goes when the last pull from it has ended. Idempotent."""
        with self._lock:
            self._links.pop(worker, None)

    def close(self) -> None:
        with self._lock:
            self._links.clear()

    def _peer(self, worker: str, incarnation: str) -> _Peer:
        with self._lock:
            peer = self._links.get(worker)
        if peer is None or peer.incarnation != incarnation:
            told = f"offered: {incarnation}\nlinked:  {peer.incarnation if peer else 'none'}"
            raise StaleTicket(f"no link to this life of {worker}", told)
        return peer


def as_array(memory: memoryview) -> Bytes:
    """The bytes of `memory` as a flat array, without a copy."""
    return np.frombuffer(memory, np.uint8)


def _exists(slab: int, num_slabs: int) -> None:
    if not 0 <= slab < num_slabs:
        raise TransferError(f"slab {slab} does not exist", f"the pool has {num_slabs} slabs")


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
