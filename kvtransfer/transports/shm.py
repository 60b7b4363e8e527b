"""Hand-off between processes of one host: the decode worker maps the prefill worker's pool and copies slabs out of it.

No staging, no second process to wake, and nothing that can stall: the bytes stay readable even when their owner is
stopped, and, for as long as the mapping lives, when it is dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from diptych.errors import StaleTicket, TransferError
from kvtransfer.copying import Bytes, copy
from kvtransfer.digests import HASHERS
from kvtransfer.handoff import Aborted
from kvtransfer.memory import Address, SharedMemory, attach

PROBE_BYTES = 16 << 20
PIECE_BYTES = 512 << 10  # copied, then hashed while the caches still have some of it


class Source:
    """Prefill side: says where the pool is. The kernel does the rest."""

    def __init__(self, memory: SharedMemory, name: str) -> None:
        self._memory = memory

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode(self._memory.address())

    def close(self) -> None:
        """Nothing is held besides the memory, which is its creator's."""


class Puller:
    """Decode side: copies slabs of linked workers into `memory` and hashes the copies.

    `memory` is the own pool's bytes, `slab_bytes` the size of a slab on both sides, `algorithm` a key of `HASHERS`. One
    lock guards the table of links only, so a link can be dropped while a pull runs: the pull keeps its mapping alive.
    """

    name = "shm"

    def __init__(self, memory: memoryview, slab_bytes: int, algorithm: str = "xxh3") -> None:
        self._own, self._slab_bytes, self._hash = as_array(memory), slab_bytes, HASHERS[algorithm]
        self._lock = threading.Lock()
        self._links: dict[str, tuple[str, Bytes]] = {}  # worker -> (incarnation, its pool)

    def link(self, worker: str, incarnation: str, endpoint: bytes) -> None:
        """Map the pool that `endpoint` tells of; replaces a link to an earlier life.

        Raises:
            TransferError: it is on another host, not ours to read, or not what the endpoint says.
        """
        try:
            view = attach(msgspec.msgpack.decode(endpoint, type=Address))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise TransferError(f"no shared memory with {worker}", str(error)) from error
        with self._lock:
            self._links[worker] = (incarnation, as_array(view))

    def pull(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> list[bytes]:
        """Copy (source slab, own slab) pairs; returns the payload hash of every copy.

        `stop` is asked between slabs.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: a slab is outside the source's or the own pool.
            Aborted: `stop` said so.
        """
        theirs, size = self._peer(worker, incarnation), self._slab_bytes
        payloads = []
        for source, target in pairs:
            if stop is not None and stop():
                raise Aborted("the pull was stopped")
            own, other, payload = _slab(self._own, target, size), _slab(theirs, source, size), self._hash()
            for at in range(0, size, PIECE_BYTES):
                piece = own[at : at + PIECE_BYTES]
                copy(piece, other[at : at + PIECE_BYTES])
                payload.update(piece.data)
            payloads.append(payload.digest())
        return payloads

    def measure(self, worker: str) -> tuple[float, float]:
        """(GB/s, µs for one page) of copies from this worker, into scratch memory; about 20 ms."""
        with self._lock:
            _, theirs = self._links[worker]
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

    def _peer(self, worker: str, incarnation: str) -> Bytes:
        with self._lock:
            known, theirs = self._links.get(worker, ("", None))
        if theirs is None or known != incarnation:
            told = f"offered: {incarnation}\nlinked:  {known or 'none'}"
            raise StaleTicket(f"no link to this life of {worker}", told)
        return theirs


def as_array(memory: memoryview) -> Bytes:
    """The bytes of `memory` as a flat array, without a copy."""
    return np.frombuffer(memory, np.uint8)


def _slab(pool: Bytes, slab: int, size: int) -> Bytes:
    if not 0 <= slab < pool.nbytes // size:
        raise TransferError(
            f"slab {slab} does not exist", f"the pool has {pool.nbytes // size} slabs of {size} bytes"
        )
    return pool[slab * size : (slab + 1) * size]


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
