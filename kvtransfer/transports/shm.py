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
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from diptych.errors import StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.board import Entries, entries
from kvtransfer.copying import Bytes, copy, copy_at
from kvtransfer.digests import HASHERS, Hasher
from kvtransfer.early import Copy
from kvtransfer.handoff import Aborted
from kvtransfer.memory import Address, SharedMemory, attach
from kvtransfer.parts import Move, Parts, count_slabs, layer_moves, moves, slab_sizes
from kvtransfer.transports.blocking import Blocking
from kvtransfer.turns import AT_ONCE, Turns

PROBE_BYTES = 16 << 20
PIECE_BYTES = 512 << 10  # copied, then hashed while the caches still have some of it


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A source as its pullers need it: where each part of its pool lies, and its board, if it has one."""

    parts: Annotated[list[tuple[Shard, Address]], Meta(min_length=1)]
    board: Address | None
    version: Annotated[int, Meta(ge=2, le=2)] = 2


class Source:
    """Prefill side: says where the pool's parts are, and its board. The kernel does the rest."""

    def __init__(
        self, parts: Sequence[tuple[Shard, SharedMemory]], name: str, board: SharedMemory | None = None
    ) -> None:
        self._parts, self._board = parts, board

    def endpoint(self) -> bytes:
        board = self._board.address() if self._board is not None else None
        return msgspec.msgpack.encode(
            Endpoint([(shard, part.address()) for shard, part in self._parts], board)
        )

    def close(self) -> None:
        """Nothing is held besides the memory, which is its creator's."""


class Lane:
    """The mapped parts of one life's pool, and how its chunks come here: by stage of the own pool, and by layer."""

    def __init__(self, own: Parts, endpoint: Endpoint) -> None:
        shards = [shard for shard, _ in endpoint.parts]
        self._stages = moves(own.layout, shards, own.shards)
        self._layers = layer_moves(own.layout, shards, own.shards)
        self.layers = own.layout.layers
        self.num_slabs = count_slabs(own.layout, [(shard, at.num_bytes) for shard, at in endpoint.parts])
        self._sizes = slab_sizes(own.layout, shards)
        self.memories = tuple(as_array(attach(address)) for _, address in endpoint.parts)
        self._bases = tuple(memory.ctypes.data for memory in self.memories)
        self._board = entries(attach(endpoint.board)) if endpoint.board is not None else None
        if self._board is not None and len(self._board) != self.num_slabs:
            raise ValueError(f"a board of {len(self._board)} entries for {self.num_slabs} slabs")
        self._own, self._targets = own, [as_array(memory).ctypes.data for memory in own.memories]

    def pull(
        self, pairs: Sequence[tuple[int, int]], payloads: Sequence[Hasher], stop: Callable[[], bool] | None
    ) -> Turns[None]:
        """Copy whole chunks, stage by stage of the own pool; see `Puller.pulling`."""
        for source, target in pairs:
            _exists(source, self.num_slabs)
            _exists(target, self._own.num_slabs)
        for stage in self._stages:
            for (source, target), payload in zip(pairs, payloads, strict=True):
                if stop is not None and stop():
                    raise Aborted("the pull was stopped")
                self._copy(source, target, stage, payload)
                yield AT_ONCE

    def look(self, slabs: Sequence[int]) -> Turns[Entries | None]:
        """What the board says now; see `kvtransfer.early.Lane`."""
        yield from ()
        return None if self._board is None else self._board[list(slabs)]

    def copy(self, copies: Sequence[Copy], stop: Callable[[], bool]) -> Turns[None]:
        """See `kvtransfer.early.Lane`; `stop` is asked between chunks."""
        for one in copies:
            _exists(one.far, self.num_slabs)
            _exists(one.own, self._own.num_slabs)
            if stop():
                raise Aborted("the pull was stopped")
            runs = self._stages if one.end - one.first == self.layers else self._layers[one.first : one.end]
            for run in runs:
                self._copy(one.far, one.own, run, one.payload)
            yield AT_ONCE

    def _copy(self, source: int, target: int, run: Sequence[Move], payload: Hasher) -> None:
        """Part of one slab: every piece is copied, and hashed where it now lies."""
        memories, bases, sizes = self._own.memories, self._targets, self._own.slab_bytes
        for move in run:
            far, own = source * self._sizes[move.source] + move.far, target * sizes[move.target] + move.own
            there, here, memory = self._bases[move.source], bases[move.target], memories[move.target]
            for at in range(0, move.num_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, move.num_bytes - at)
                copy_at(here + own + at, there + far + at, size)
                payload.update(memory[own + at : own + at + size])


class Puller(Blocking):
    """Decode side: copies slabs of linked workers into the `own` pool and hashes the copies.

    `algorithm` is a key of `HASHERS`. One lock guards the table of links only, so a link can be dropped while a pull
    runs: the pull keeps its mapping alive.
    """

    name = "shm"

    def __init__(self, own: Parts, algorithm: str = "xxh3") -> None:
        self._own, self._hash = own, HASHERS[algorithm]
        self._lock = threading.Lock()
        self._links: dict[str, tuple[str, Lane]] = {}

    def linking(self, worker: str, incarnation: str, endpoint: bytes) -> Turns[None]:
        """Map the pool that `endpoint` tells of; replaces a link to an earlier life.

        Raises:
            TransferError: it is on another host, not ours to read, not what the endpoint says, or not of our layout.
        """
        try:
            lane = Lane(self._own, msgspec.msgpack.decode(endpoint, type=Endpoint))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise TransferError(f"no shared memory with {worker}", str(error)) from error
        with self._lock:
            self._links[worker] = (incarnation, lane)
        yield from ()

    def pulling(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> Turns[list[bytes]]:
        """Copy (source slab, own slab) pairs; returns the payload hash of every copy.

        When it returns or raises, nothing writes to the slabs. `stop` is asked between slabs.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: a slab is outside the source's or the own pool.
            Aborted: `stop` said so.
        """
        payloads = [self._hash() for _ in pairs]
        yield from self.lane(worker, incarnation).pull(pairs, payloads, stop)
        return [payload.digest() for payload in payloads]

    def measuring(self, worker: str) -> Turns[tuple[float, float]]:
        """(GB/s, µs for one page) of copies from this worker, into scratch memory; about 20 ms."""
        with self._lock:
            theirs = self._links[worker][1].memories[0]
        theirs = theirs[: min(PROBE_BYTES, theirs.nbytes) // 64 * 64]
        scratch = np.zeros(theirs.nbytes + 64, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 64 :][: theirs.nbytes]
        page = min(4096, theirs.nbytes)
        large = min(_seconds(lambda: copy(scratch, theirs)) for _ in range(3))
        yield AT_ONCE
        small = sorted(_seconds(lambda: copy(scratch[:page], theirs[:page])) for _ in range(9))[4]
        return theirs.nbytes / large / 1e9, small * 1e6

    def unlink(self, worker: str) -> None:
        """Forget a worker; its memory goes when the last pull from it has ended. Idempotent."""
        with self._lock:
            self._links.pop(worker, None)

    def close(self) -> None:
        with self._lock:
            self._links.clear()

    def lane(self, worker: str, incarnation: str) -> Lane:
        """The way to that life of the worker. Raises StaleTicket if it is not linked."""
        with self._lock:
            linked, lane = self._links.get(worker, ("none", None))
        if lane is None or linked != incarnation:
            told = f"offered: {incarnation}\nlinked:  {linked}"
            raise StaleTicket(f"no link to this life of {worker}", told)
        return lane


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
