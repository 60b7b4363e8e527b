"""Hand-off between hosts: the decode worker reads the prefill worker's registered pool with NIXL (UCX underneath).

Which wire UCX takes (InfiniBand, RoCE, TCP) is its own decision and configuration (`UCX_TLS`, `UCX_NET_DEVICES`).

Four things were found out the hard way (nixl 1.5.1), and shape this file:

* The agent of NIXL's Python API spins in its progress thread (0.7 to 0.9 of a core, idle), because it fixes `pthrDelay`
  to 0. The binding underneath takes a delay, and then waits for events (0.001 of a core); hence the binding.
* A read that was given up, released and whose peer was removed still writes into our memory when a stopped peer
  continues: 53 MB of 60 in a test. Only the end of the agent ends its transfers. So whatever goes wrong in a read,
  the puller's agent is ended before the error is told (0.1 s), and the next read makes a new one: the slabs are then
  free of writers.
* Over TCP, where UCX emulates reads in software, a connection that is cut in the middle of a read can take the *source*
  process with it (segmentation fault or abort in UCX's progress). Pullers killed in mid-read of an ordinary prompt did
  that in 0 of 48 runs with UCX's error handling "none", in 1 of 41 with "peer"; under requests of 50 MB in one piece
  both do it sooner or later. So reads are posted in batches of a megabyte; a dead source is still told at once, or else
  found by the watchdog; and a pull that is aborted is not cut: it posts no more, and waits for what it has posted. A
  worker that dies of it is restarted like any other. RDMA reads do not involve the source's process at all.
* Without a progress thread of its own the puller is two to three times as fast over TCP: the waiting caller drives the
  transfer.
"""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from diptych.errors import StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.handoff import Aborted
from kvtransfer.memory import SharedMemory
from kvtransfer.parts import Move, Parts, count_slabs, moves, slab_sizes

IDLE_US = 100_000  # longest sleep of a source's progress thread; events wake it earlier
BATCH_BYTES = 1 << 20  # what must arrive within `stall_s`
IN_FLIGHT = 8  # batches posted at a time
SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # between two looks at a transfer
PROBE_BYTES = 4 << 20

Segment = tuple[int, int, int]  # address there, address here, bytes


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A source as its pullers need it: the agent's own metadata, and where each part of its pool lies."""

    metadata: Annotated[bytes, Meta(max_length=1 << 16)]
    parts: Annotated[list[tuple[Shard, int, int]], Meta(min_length=1)]  # address and bytes


class Agent:
    """One NIXL agent with the UCX backend and some registered host memory. Everything ends with `close`."""

    def __init__(self, name: str, regions: Sequence[memoryview], *, serve: bool) -> None:
        try:
            self.api: Any = importlib.import_module("nixl._bindings")
        except ImportError as error:  # an optional dependency, and only this file needs it
            raise TransferError("NIXL is not usable here", str(error), "pip install nixl") from error
        config = self.api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay, config.useListenThread = serve, IDLE_US, False
        config.syncMode = self.api.NIXL_THREAD_SYNC_STRICT
        try:
            self.agent: Any = self.api.nixlAgent(name, config)
            backend = self.agent.createBackend("UCX", {"ucx_error_handling_mode": "none"})
            held = [(address(region), region.nbytes, 0, "") for region in regions]
            self.agent.registerMem(self.api.nixlRegDList(self.api.DRAM_SEG, held), [backend])
        except Exception as error:  # nixlBackendError and its kin; they share no base of their own
            fix = "check UCX_TLS and UCX_NET_DEVICES"
            raise TransferError("the NIXL agent did not start", repr(error), fix) from error
        self._regions = regions  # registered memory must outlive the agent

    def add(self, metadata: bytes) -> Any:
        return self.agent.loadRemoteMD(metadata)

    def post(self, peer: Any, segments: Sequence[Segment]) -> int:
        """Begin to read `segments` from `peer`; returns the transfer's handle."""
        api = self.api
        here = api.nixlXferDList(api.DRAM_SEG, [(own, size, 0) for _, own, size in segments])
        there = api.nixlXferDList(api.DRAM_SEG, [(far, size, 0) for far, _, size in segments])
        handle: int = self.agent.createXferReq(api.NIXL_READ, here, there, peer, b"", [])
        self.agent.postXferReq(handle, b"")
        return handle

    def done(self, handle: int) -> bool:
        """Whether the read is complete (its handle is then released). Also drives all reads of this agent."""
        state = self.agent.getXferStatus(handle)
        if state == self.api.NIXL_IN_PROG:
            return False
        if state != self.api.NIXL_SUCCESS:
            raise TransferError("a NIXL read failed", str(state))
        self.agent.releaseXferReq(handle)
        return True

    def close(self) -> None:
        """End the agent, and with it every transfer it still had under way."""
        self.agent = None


class Source:
    """Prefill side: registers the pool and keeps answering reads, on NIXL's own thread, until closed."""

    def __init__(self, parts: Sequence[tuple[Shard, SharedMemory]], name: str) -> None:
        self._parts = parts
        self._agent = Agent(f"{name}-{uuid.uuid4().hex}", [memory.view for _, memory in parts], serve=True)

    def endpoint(self) -> bytes:
        parts = [(shard, address(memory.view), memory.num_bytes) for shard, memory in self._parts]
        return msgspec.msgpack.encode(Endpoint(self._agent.agent.getLocalMD(), parts))

    def close(self) -> None:
        self._agent.close()


@dataclass(frozen=True, slots=True)
class _Peer:
    """A linked worker: the size of a slab in each of its parts, and how its chunks come here."""

    incarnation: str
    endpoint: Endpoint
    sizes: tuple[int, ...]
    num_slabs: int
    stages: tuple[tuple[Move, ...], ...]


class Puller:
    """Decode side: reads slabs of linked workers into the `own` pool and hashes the copies.

    A read that makes no progress (not one batch of `BATCH_BYTES`) for `stall_s` is given up. The agent is used by one
    thread at a time; the table of links has a lock of its own, so that nobody waits for a read in order to drop a link.
    """

    name = "nixl"

    def __init__(self, own: Parts, algorithm: str = "xxh3", stall_s: float = 2.0) -> None:
        self._own, self._algorithm, self._stall_s = own, algorithm, stall_s
        self._bases = [address(memory) for memory in own.memories]
        self._scratch = memoryview(bytearray(PROBE_BYTES))
        self._table, self._reading = threading.Lock(), threading.Lock()
        self._links: dict[str, _Peer] = {}
        self._agent: Agent | None = None
        self._peers: dict[str, tuple[bytes, Any]] = {}  # worker -> (metadata, its name in the present agent)

    def link(self, worker: str, incarnation: str, endpoint: bytes) -> None:
        """Connect to the source that `endpoint` tells of; replaces a link to an earlier life.

        Raises:
            TransferError: NIXL is not usable here, there is no way to that source, or it is not of our layout.
        """
        try:
            peer = self._plan(incarnation, msgspec.msgpack.decode(endpoint, type=Endpoint))
        except (ValueError, msgspec.MsgspecError) as error:
            raise TransferError(f"no NIXL link to {worker}", f"malformed endpoint: {error}") from error
        here = address(self._scratch)
        probe = [(base, here, min(4096, num_bytes)) for _, base, num_bytes in peer.endpoint.parts]
        with self._reading:
            self._read(worker, peer.endpoint, probe, None)
        with self._table:
            self._links[worker] = peer

    def _plan(self, incarnation: str, endpoint: Endpoint) -> _Peer:
        layout, shards = self._own.layout, [shard for shard, _, _ in endpoint.parts]
        num_slabs = count_slabs(layout, [(shard, num_bytes) for shard, _, num_bytes in endpoint.parts])
        stages = moves(layout, shards, self._own.shards)
        return _Peer(incarnation, endpoint, slab_sizes(layout, shards), num_slabs, stages)

    def pull(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> list[bytes]:
        """Read (source slab, own slab) pairs, as `shm.Puller.pull`; returns the payload hash of every copy.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: the source is dead, stalled or unreachable, or a slab does not exist.
            Aborted: `stop` said so; what was under way has arrived.
        """
        with self._table:
            peer = self._links.get(worker)
        if peer is None or peer.incarnation != incarnation:
            told = f"offered: {incarnation}\nlinked:  {peer.incarnation if peer else 'none'}"
            raise StaleTicket(f"no link to this life of {worker}", told)
        bounds = (peer.num_slabs, self._own.num_slabs)
        if any(not (0 <= far < bounds[0] and 0 <= own < bounds[1]) for far, own in pairs):
            raise TransferError("a slab does not exist", f"{bounds[0]} slabs there, {bounds[1]} here")
        with self._reading:
            self._read(worker, peer.endpoint, self._segments(peer, pairs), stop)
        return [self._own.payload(own, self._algorithm) for _, own in pairs]

    def _segments(self, peer: _Peer, pairs: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        """What to read, stage by stage of the own pool."""
        bases, sizes = [base for _, base, _ in peer.endpoint.parts], self._own.slab_bytes
        for stage in peer.stages:
            for source, target in pairs:
                for move in stage:
                    far = bases[move.source] + source * peer.sizes[move.source] + move.far
                    own = self._bases[move.target] + target * sizes[move.target] + move.own
                    yield far, own, move.num_bytes

    def measure(self, worker: str) -> tuple[float, float]:
        """(GB/s, µs for one page) of reads from this worker, into scratch memory."""
        with self._table:
            endpoint = self._links[worker].endpoint
        _, base, num_bytes = endpoint.parts[0]
        large, small, times = min(PROBE_BYTES, num_bytes), min(4096, num_bytes), []
        with self._reading:
            for size in [large] * 3 + [small] * 9:
                began = time.perf_counter()
                self._read(worker, endpoint, [(base, address(self._scratch), size)], None)
                times.append(time.perf_counter() - began)
        return large / min(times[:3]) / 1e9, sorted(times[3:])[4] * 1e6

    def unlink(self, worker: str) -> None:
        """Forget a worker; the connection goes with its next life's, or with `close`. Idempotent."""
        with self._table:
            self._links.pop(worker, None)

    def close(self) -> None:
        with self._table:
            self._links.clear()
        with self._reading:
            self._end()

    def _read(
        self, worker: str, endpoint: Endpoint, segments: Iterable[Segment], stop: Callable[[], bool] | None
    ) -> None:
        """Run a read to its end, or end the agent: after this returns or raises, nothing writes to our memory."""
        try:
            agent = self._started()
            metadata, peer = self._peers.get(worker, (b"", None))
            if metadata != endpoint.metadata:
                if peer is not None:
                    agent.agent.invalidateRemoteMD(peer)
                peer = agent.add(endpoint.metadata)
                self._peers[worker] = (endpoint.metadata, peer)
            self._drive(agent, peer, _batches(segments), stop)
        except Aborted:
            raise  # nothing is under way
        except TransferError:
            self._end()
            raise
        except Exception as error:  # nixlRemoteDisconnectError and its kin
            self._end()
            raise TransferError(f"KV did not arrive from {worker}", repr(error)) from error

    def _drive(
        self, agent: Agent, peer: Any, batches: Iterator[list[Segment]], stop: Callable[[], bool] | None
    ) -> None:
        """Keep `IN_FLIGHT` batches posted until all are done, or until `stop` says so and what was posted has arrived.

        NIXL offers nothing to wait on, so this looks again after a sleep: short while data flows, at most 1 ms when it
        does not. Spinning would take the core from the decode step.
        """
        flying: list[int] = []
        progressed_s, pause_s, stopped = time.monotonic(), SHORTEST_S, False
        while True:
            stopped = stopped or (stop is not None and stop())
            if not stopped:
                room = range(IN_FLIGHT - len(flying))
                flying += [agent.post(peer, batch) for _, batch in zip(room, batches, strict=False)]
            if not flying:
                break
            left = [handle for handle in flying if not agent.done(handle)]
            if len(left) < len(flying):
                flying, progressed_s, pause_s = left, time.monotonic(), SHORTEST_S
            elif time.monotonic() - progressed_s > self._stall_s:
                raise TransferError("a KV transfer stalled", f"nothing arrived for {self._stall_s:.1f} s")
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)
        if stopped:
            raise Aborted("the pull was stopped")

    def _started(self) -> Agent:
        if self._agent is None:
            regions = [*self._own.memories, self._scratch]
            self._agent = Agent(f"pull-{uuid.uuid4().hex}", regions, serve=False)
        return self._agent

    def _end(self) -> None:
        """End the agent and all it has under way; the next read makes a new one and finds its peers again."""
        if self._agent is not None:
            self._agent.close()
        self._agent = None
        self._peers.clear()


def address(memory: memoryview) -> int:
    """Where `memory` begins in this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """The same bytes in lists of at most `BATCH_BYTES`, large segments cut."""
    batch: list[Segment] = []
    room = BATCH_BYTES
    for far, own, size in segments:
        while size:
            part = min(size, room)
            batch.append((far, own, part))
            far, own, size, room = far + part, own + part, size - part, room - part
            if not room:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch
