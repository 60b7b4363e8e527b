"""Transfers KV between processes of one host: the decode worker maps the prefill worker's pool and copies slabs from
it.

On each side one process has the memory of all its worker's ranks, however the worker is split: the copying process maps
every part of the source, and writes into every part of its own pool.

There is no staging buffer, no second process to wake, and nothing that can stall: the bytes stay readable while their
owner is stopped, and even after its death as long as they are mapped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from diptych.errors import StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.cooperative import RUN_NOW, CoopTask
from kvtransfer.copy_hash import CopyHasher
from kvtransfer.digests import STREAM_HASHERS, PayloadHasher
from kvtransfer.handoff import HandoffAborted
from kvtransfer.layer_progress import ProgressEntries, view_entries
from kvtransfer.pipelined_pull import LayerCopy
from kvtransfer.resharding import ArenaMoves, ArenaSpan, MoveRun, PairedPools, ShardedPool
from kvtransfer.shared_memory import SharedMemory, SharedMemoryAddress, attach_memory
from kvtransfer.stream_copy import ByteArray, copy_bytes, copy_bytes_at
from kvtransfer.transports.blocking import BlockingPuller

PROBE_BYTES = 16 << 20
# How copies are hashed: XXH3 in the copying kernel itself.
COPY_HASHERS: dict[str, Callable[[], PayloadHasher]] = {**STREAM_HASHERS, "xxh3": CopyHasher}
# Bytes that are copied and then hashed at a time otherwise, so that the hash finds some of them still in the caches.
PIECE_BYTES = 512 << 10


class ShmEndpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How pullers reach a source: the memory of each rank's pool, and of the layer progress, if there is one.

    `spans` say where the slabs of each KV class are; without them all slabs are of the puller's own first class.
    """

    shards: Annotated[list[tuple[Shard, SharedMemoryAddress]], Meta(min_length=1)]
    progress: SharedMemoryAddress | None
    spans: tuple[ArenaSpan, ...] = ()
    version: Annotated[int, Meta(ge=3, le=3)] = 3


class ShmSource:
    """Prefill side: publishes the addresses of the pool's parts and the layer progress. The kernel does the rest."""

    def __init__(
        self,
        shards: Sequence[tuple[Shard, SharedMemory]],
        name: str,
        progress_memory: SharedMemory | None = None,
        spans: Sequence[ArenaSpan] = (),
    ) -> None:
        self._shards, self._progress_memory, self._spans = shards, progress_memory, tuple(spans)

    def endpoint(self) -> bytes:
        """The addresses of all parts of the pool and of the layer progress, as msgpack."""
        progress = self._progress_memory.address() if self._progress_memory is not None else None
        return msgspec.msgpack.encode(
            ShmEndpoint([(shard, part.address()) for shard, part in self._shards], progress, self._spans)
        )

    def close(self) -> None:
        """Does nothing: the memory belongs to its creator."""


class ShmConnection:
    """The mapped pool of one life of a source, and the moves that copy its chunks, by stage and by layer."""

    def __init__(self, own_pool: ShardedPool, endpoint: ShmEndpoint) -> None:
        self._pools = PairedPools(
            own_pool, [(shard, at.num_bytes) for shard, at in endpoint.shards], endpoint.spans
        )
        self.layers, self.num_slabs = self._pools.layers, self._pools.num_slabs
        self.memories = tuple(as_array(attach_memory(address)) for _, address in endpoint.shards)
        self._bases = tuple(memory.ctypes.data for memory in self.memories)
        self._progress = (
            view_entries(attach_memory(endpoint.progress)) if endpoint.progress is not None else None
        )
        if self._progress is not None and len(self._progress) != self.num_slabs:
            raise ValueError(f"{len(self._progress)} progress entries for {self.num_slabs} slabs")
        self._own_pool, self._targets = (
            own_pool,
            [as_array(memory).ctypes.data for memory in own_pool.memories],
        )
        for moves in self._pools.all_moves:
            moves.sources = moves.source.places(self._bases)
            moves.targets = moves.own_arena.places(self._targets)

    def pull_chunks(
        self,
        pairs: Sequence[tuple[int, int]],
        payloads: Sequence[PayloadHasher],
        stop: Callable[[], bool] | None,
    ) -> CoopTask[None]:
        """Copy whole chunks, stage by stage of the own pool; see `ShmPuller.pull_task`.

        Raises HandoffAborted if `stop` returns True, which is checked between two copies.
        """
        moves = [self._pools.moves_of(source, target) for source, target in pairs]
        for stage in range(max((len(one.stages) for one in moves), default=0)):
            for (source, target), one, payload in zip(pairs, moves, payloads, strict=True):
                if stop is not None and stop():
                    raise HandoffAborted("the pull was stopped")
                self._copy_pages(one, source, target, one.stages[stage], payload)
                yield RUN_NOW

    def read_progress(self, slabs: Sequence[int]) -> CoopTask[ProgressEntries | None]:
        """The source's layer progress of these slabs; see `kvtransfer.pipelined_pull.SourceConnection`."""
        yield from ()
        return None if self._progress is None else self._progress[list(slabs)]

    def copy_layers(self, copies: Sequence[LayerCopy], stop: Callable[[], bool]) -> CoopTask[None]:
        """Copy layers of chunks; see `kvtransfer.pipelined_pull.SourceConnection`.

        Raises HandoffAborted if `stop` returns True, which is checked between two chunks.
        """
        for copy in copies:
            moves = self._pools.moves_of(copy.far, copy.own)
            if stop():
                raise HandoffAborted("the pull was stopped")
            whole = copy.end - copy.first == self.layers
            for run in moves.stages if whole else moves.layers[copy.first : copy.end]:
                self._copy_pages(moves, copy.far, copy.own, run, copy.payload)
            yield RUN_NOW

    def _copy_pages(
        self,
        moves: ArenaMoves,
        source: int,
        target: int,
        run: MoveRun,
        payload: PayloadHasher,
    ) -> None:
        """Copy the moves `run` of one slab; each is hashed while it is copied, or in pieces in its copy."""
        memories, bases = self._own_pool.memories, self._targets
        if isinstance(payload, CopyHasher):
            payload.copy_slab(run.rows, run.num_bytes, moves.sources, source, moves.targets, target)
            return
        for move in run.moves:
            far = moves.source.offset_of(source, move.source) + move.far
            own = moves.own_arena.offset_of(target, move.target) + move.own
            there, here, memory = self._bases[move.source], bases[move.target], memories[move.target]
            for at in range(0, move.num_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, move.num_bytes - at)
                copy_bytes_at(here + own + at, there + far + at, size)
                payload.update(memory[own + at : own + at + size])


class ShmPuller(BlockingPuller):
    """Decode side: copies slabs of linked workers into the `own_pool` pool and hashes the copies.

    `algorithm` is a key of `COPY_HASHERS`. The lock guards only the table of links, so a link can be dropped during a
    pull: the pull keeps its mapping alive.
    """

    name = "shm"

    def __init__(self, own_pool: ShardedPool, algorithm: str = "xxh3") -> None:
        self._own_pool, self._hash = own_pool, COPY_HASHERS[algorithm]
        self._lock = threading.Lock()
        self._links: dict[str, tuple[str, ShmConnection]] = {}

    def link_task(self, worker: str, incarnation: str, endpoint: bytes) -> CoopTask[None]:
        """Map the pool at `endpoint`; replaces a link to an earlier life of the worker.

        Raises:
            TransferError: the pool is on another host, not readable for us, not as announced, or not of our layout.
        """
        try:
            connection = ShmConnection(self._own_pool, msgspec.msgpack.decode(endpoint, type=ShmEndpoint))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise TransferError(f"no shared memory with {worker}", str(error)) from error
        with self._lock:
            self._links[worker] = (incarnation, connection)
        yield from ()

    def pull_task(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> CoopTask[list[bytes]]:
        """Copy (source slab, own slab) pairs; returns the payload hash of every copy.

        When it returns or raises, nothing writes to the slabs. `stop` is called between slabs.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: a slab is outside the source's or the own pool.
            HandoffAborted: `stop` returned True.
        """
        payloads = [self._hash() for _ in pairs]
        yield from self.connection_to(worker, incarnation).pull_chunks(pairs, payloads, stop)
        return [payload.digest() for payload in payloads]

    def measure_task(self, worker: str) -> CoopTask[tuple[float, float]]:
        """Measure copies from this worker into scratch memory, about 20 ms; returns (GB/s, µs for one page)."""
        with self._lock:
            theirs = self._links[worker][1].memories[0]
        theirs = theirs[: min(PROBE_BYTES, theirs.nbytes) // 64 * 64]
        scratch = np.zeros(theirs.nbytes + 64, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 64 :][: theirs.nbytes]
        page = min(4096, theirs.nbytes)
        large = min(_time_call(lambda: copy_bytes(scratch, theirs)) for _ in range(3))
        yield RUN_NOW
        small = sorted(_time_call(lambda: copy_bytes(scratch[:page], theirs[:page])) for _ in range(9))[4]
        return theirs.nbytes / large / 1e9, small * 1e6

    def unlink(self, worker: str) -> None:
        """Forget a worker; its memory is unmapped after the last pull from it. Idempotent."""
        with self._lock:
            self._links.pop(worker, None)

    def close(self) -> None:
        """Drop all links. A pull in progress keeps its mapping until it ends."""
        with self._lock:
            self._links.clear()

    def connection_to(self, worker: str, incarnation: str) -> ShmConnection:
        """The connection to this life of the worker. Raises StaleTicket if it is not linked."""
        with self._lock:
            linked, connection = self._links.get(worker, ("none", None))
        if connection is None or linked != incarnation:
            why = f"offered: {incarnation}\nlinked:  {linked}"
            raise StaleTicket(f"no link to this life of {worker}", why)
        return connection


def as_array(memory: memoryview) -> ByteArray:
    """The bytes of `memory` as a flat array, without a copy."""
    return np.frombuffer(memory, np.uint8)


def _time_call(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
