"""Hand-off between hosts: the decode worker reads the prefill worker's registered pool with NIXL (UCX underneath).

Which wire UCX takes (InfiniBand, RoCE, TCP) is its own decision and configuration (`UCX_TLS`, `UCX_NET_DEVICES`).

Five things were found out the hard way (nixl 1.5.1), and shape this file:

* The agent of NIXL's Python API spins in its progress thread (0.7 to 0.9 of a core, idle), because it fixes `pthrDelay`
  to 0. The binding underneath takes a delay, and then waits for events (0.001 of a core); hence the binding.
* A read that was given up, released and whose peer was removed still writes into our memory when a stopped peer
  continues: 53 MB of 60 in a test. Only the end of the agent ends its transfers. So every source has an agent of its
  own here, which is ended before an error is told (milliseconds), and the next read makes a new one: the slabs are then
  free of writers, and reads from other sources go on.
* Nothing tells how far a read has come, and over a slow link a megabyte takes minutes: see `watch`.
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
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from diptych.errors import StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.board import ENTRY_BYTES, Entries, entries
from kvtransfer.early import Copy
from kvtransfer.handoff import Aborted
from kvtransfer.memory import SharedMemory
from kvtransfer.parts import Move, Parts, count_slabs, layer_moves, moves, slab_sizes
from kvtransfer.transports.blocking import Blocking
from kvtransfer.transports.joining import Joining
from kvtransfer.transports.watch import Pulse, Tripwire, Watch
from kvtransfer.turns import AT_ONCE, Turns

IDLE_US = 100_000  # longest sleep of a source's progress thread; events wake it earlier
BATCH_BYTES = 1 << 20
IN_FLIGHT = 8  # batches posted at a time
SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # between two looks at a transfer
PROBES = ((4096, 9), (64 << 10, 3), (4 << 20, 3))  # bytes, and how often
PROBE_BYTES = max(size for size, _ in PROBES)
PROBE_S = 0.1

Segment = tuple[int, int, int]  # address there, address here, bytes


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A source as its pullers need it: the agent's own metadata, where each part of its pool lies, and its board."""

    metadata: Annotated[bytes, Meta(max_length=1 << 16)]
    parts: Annotated[list[tuple[Shard, int, int]], Meta(min_length=1)]  # address and bytes
    board: int  # its address; 0: there is none
    version: Annotated[int, Meta(ge=2, le=2)] = 2


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
        if self.agent is None:
            raise TransferError("a NIXL read failed", "its connection was ended")
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
    """Prefill side: registers pool and board, and keeps answering reads, on NIXL's own thread, until closed."""

    def __init__(
        self, parts: Sequence[tuple[Shard, SharedMemory]], name: str, board: SharedMemory | None = None
    ) -> None:
        self._parts, self._board = parts, board
        regions = [memory.view for _, memory in parts] + ([board.view] if board is not None else [])
        self._agent = Agent(f"{name}-{uuid.uuid4().hex}", regions, serve=True)

    def endpoint(self) -> bytes:
        parts = [(shard, address(memory.view), memory.num_bytes) for shard, memory in self._parts]
        board = address(self._board.view) if self._board is not None else 0
        return msgspec.msgpack.encode(Endpoint(self._agent.agent.getLocalMD(), parts, board))

    def close(self) -> None:
        self._agent.close()


class Lane:
    """One life of one source, with an agent of its own: ending that ends the reads from this source and no others.

    Used by one thread at a time.
    """

    def __init__(
        self, own: Parts, scratch: memoryview, endpoint: Endpoint, stall_s: Callable[[], float]
    ) -> None:
        shards = [shard for shard, _, _ in endpoint.parts]
        self._own, self._endpoint, self._stall_s, self._scratch = own, endpoint, stall_s, scratch
        self._stages = moves(own.layout, shards, own.shards)
        self._layers = layer_moves(own.layout, shards, own.shards)
        self.layers = own.layout.layers
        self.num_slabs = count_slabs(
            own.layout, [(shard, num_bytes) for shard, _, num_bytes in endpoint.parts]
        )
        self._sizes = slab_sizes(own.layout, shards)
        self._bases, self._targets = (
            [base for _, base, _ in endpoint.parts],
            [address(memory) for memory in own.memories],
        )
        self._notes = memoryview(bytearray(self.num_slabs * ENTRY_BYTES))  # what was last seen of the board
        self._looking = False
        self._pulse = Pulse()
        self._agent: Agent | None = None
        self._joining: Joining[Agent] | None = None
        self._peer: Any = None

    def probe(self) -> Turns[None]:
        """Read a little of every part. Raises TransferError."""
        here = address(self._scratch)
        yield from self._read([(base, here, min(4096, size)) for _, base, size in self._endpoint.parts], None)

    def measure(self) -> Turns[tuple[float, float]]:
        """(GB/s, µs for one page), into scratch memory."""
        _, base, num_bytes = self._endpoint.parts[0]
        speed, latency = 0.0, 0.0
        for size, times in PROBES:
            size, taken = min(size, num_bytes), []
            for _ in range(times):
                began_s = time.perf_counter()
                yield from self._read([(base, address(self._scratch), size)], None)
                taken.append(time.perf_counter() - began_s)
            latency, speed = latency or sorted(taken)[times // 2], size / min(taken) / 1e9
            if min(taken) > PROBE_S:  # a larger one would take long, and tell nothing new
                break
        return speed, latency * 1e6

    def pull(self, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool] | None) -> Turns[None]:
        """Whole chunks, stage by stage of the own pool."""
        self._exist(pairs)
        segments = (
            segment
            for stage in self._stages
            for source, target in pairs
            for segment in self._segments(source, target, stage)
        )
        yield from self._read(segments, stop)

    def look(self, slabs: Sequence[int]) -> Turns[Entries | None]:
        """See `kvtransfer.early.Lane`: one small read."""
        if not self._endpoint.board:
            return None
        board, here = self._endpoint.board, address(self._notes)
        runs = [(first * ENTRY_BYTES, count * ENTRY_BYTES) for first, count in _runs(slabs)]
        while self._looking:  # another pull: both would note it down at the same place
            yield LONGEST_S
        self._looking = True
        try:
            yield from self._read([(board + at, here + at, size) for at, size in runs], None)
            return entries(self._notes)[list(slabs)]
        finally:
            self._looking = False

    def copy(self, copies: Sequence[Copy], stop: Callable[[], bool]) -> Turns[None]:
        """See `kvtransfer.early.Lane`. All that is copied is hashed when the last byte has arrived."""
        self._exist([(one.far, one.own) for one in copies])
        segments = (
            segment
            for one in copies
            for layer in self._layers[one.first : one.end]
            for segment in self._segments(one.far, one.own, layer)
        )
        yield from self._read(segments, stop)
        for one in copies:
            self._own.feed(one.payload, one.own, one.first, one.end)
            yield AT_ONCE

    def close(self) -> None:
        """End the agent and all it has under way; the next read makes a new one and finds its peer again."""
        if self._agent is not None:
            self._agent.close()
        self._agent = None

    def _exist(self, pairs: Sequence[tuple[int, int]]) -> None:
        bounds = (self.num_slabs, self._own.num_slabs)
        if any(not (0 <= far < bounds[0] and 0 <= own < bounds[1]) for far, own in pairs):
            raise TransferError("a slab does not exist", f"{bounds[0]} slabs there, {bounds[1]} here")

    def _segments(self, source: int, target: int, run: Sequence[Move]) -> Iterator[Segment]:
        for move in run:
            far = self._bases[move.source] + source * self._sizes[move.source] + move.far
            own = self._targets[move.target] + target * self._own.slab_bytes[move.target] + move.own
            yield far, own, move.num_bytes

    def _read(self, segments: Iterable[Segment], stop: Callable[[], bool] | None) -> Turns[None]:
        """Run a read to its end, or end the agent: after this returns or raises, nothing writes to our memory.

        Reads beside it fail with their agent, but not those that have begun with its successor since.
        """
        agent: Agent | None = None
        try:
            agent = yield from self._started()
            yield from self._drive(agent, batches(segments), stop)
        except Aborted:
            raise  # nothing is under way
        except TransferError:
            self._end(agent)
            raise
        except GeneratorExit:
            self._end(agent)
            raise
        except Exception as error:  # nixlRemoteDisconnectError and its kin
            self._end(agent)
            raise TransferError("KV did not arrive", repr(error)) from error

    def _end(self, agent: Agent | None) -> None:
        if self._agent is agent:
            self.close()

    def _drive(
        self, agent: Agent, batches: Iterator[list[Segment]], stop: Callable[[], bool] | None
    ) -> Turns[None]:
        """Keep `IN_FLIGHT` batches posted until all are done, or until `stop` says so and what was posted has arrived.

        NIXL offers nothing to wait on, so this looks again after a rest: short while data flows, at most 1 ms when it
        does not. Spinning would take the core from the decode step.
        """
        flying: dict[int, Tripwire] = {}
        watch, pause_s, stopped = Watch(self._stall_s, time.monotonic(), self._pulse), SHORTEST_S, False
        while True:
            stopped = stopped or (stop is not None and stop())
            while not stopped and len(flying) < IN_FLIGHT and (batch := next(batches, None)) is not None:
                wire = Tripwire(batch)
                flying[agent.post(self._peer, batch)] = wire
            if not flying:
                break
            over = [handle for handle in flying if agent.done(handle)]
            for handle in over:
                del flying[handle]
            if over:
                pause_s = SHORTEST_S
                watch.moved(time.monotonic())
                continue
            if watch.due(now_s := time.monotonic()):
                watch.look(sum(wire.reached() for wire in flying.values()), now_s)
            yield pause_s
            pause_s = min(2 * pause_s, LONGEST_S)
        if stopped:
            raise Aborted("the pull was stopped")

    def _started(self) -> Turns[Agent]:
        """The agent, with its peer. While one cannot find its peer there is no other."""
        if self._agent is not None:
            return self._agent
        if self._joining is None:
            regions = [*self._own.memories, self._scratch, self._notes]
            name, metadata = f"pull-{uuid.uuid4().hex}", self._endpoint.metadata
            self._joining = Joining(
                lambda: Agent(name, regions, serve=False), lambda agent: agent.add(metadata)
            )
        joining = self._joining
        try:
            agent = yield from joining.wait(self._stall_s())
        finally:
            mine = self._joining is joining
            if mine and joining.done:
                self._joining = None
        if mine:
            self._agent, self._peer = agent, joining.peer
        if self._agent is None:
            raise TransferError("a NIXL read failed", "its connection was ended")
        return self._agent


class Puller(Blocking):
    """Decode side: reads slabs of linked workers into the `own` pool and hashes the copies.

    A read of which no byte arrives for `stall_s` is given up; one that is slow is left alone. Links and pulls may be
    driven by different threads; an agent is only used by one of them, until it is in the table and after.
    """

    name = "nixl"

    def __init__(self, own: Parts, algorithm: str = "xxh3", stall_s: float = 2.0) -> None:
        self._own, self._algorithm, self._stall_s = own, algorithm, stall_s
        self._scratch = memoryview(bytearray(PROBE_BYTES))
        self._table = threading.Lock()
        self._links: dict[str, tuple[str, Lane]] = {}
        self._dropped: list[
            Lane
        ] = []  # to be forgotten by a thread that may wait: ending an agent takes a while

    def linking(self, worker: str, incarnation: str, endpoint: bytes) -> Turns[None]:
        """Connect to the source that `endpoint` tells of; replaces a link to an earlier life.

        Raises:
            TransferError: NIXL is not usable here, there is no way to that source, or it is not of our layout.
        """
        try:
            known = msgspec.msgpack.decode(endpoint, type=Endpoint)
            lane = Lane(self._own, self._scratch, known, lambda: self._stall_s)
        except (ValueError, MemoryError, msgspec.MsgspecError) as error:  # also of a board beyond all memory
            raise TransferError(f"no NIXL link to {worker}", f"malformed endpoint: {error}") from error
        yield from lane.probe()
        with self._table:
            self._dropped.clear()
            self._links[worker] = (incarnation, lane)

    def pulling(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> Turns[list[bytes]]:
        """Read (source slab, own slab) pairs, as `shm.Puller.pulling`; returns the payload hash of every copy.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: the source is dead, stalled or unreachable, or a slab does not exist.
            Aborted: `stop` said so; what was under way has arrived.
        """
        yield from self.lane(worker, incarnation).pull(pairs, stop)
        payloads = []
        for _, own in pairs:
            payloads.append(self._own.payload(own, self._algorithm))
            yield AT_ONCE
        return payloads

    def measuring(self, worker: str) -> Turns[tuple[float, float]]:
        """(GB/s, µs for one page) of reads from this worker, into scratch memory."""
        with self._table:
            lane = self._links[worker][1]
        return (yield from lane.measure())

    def unlink(self, worker: str) -> None:
        """Forget a worker; the connection goes with the last pull over it. Idempotent."""
        with self._table:
            if worker in self._links:
                self._dropped.append(self._links.pop(worker)[1])

    def close(self) -> None:
        """End all connections; to be called when nothing is being pulled any more."""
        with self._table:
            for _, lane in self._links.values():
                lane.close()
            self._links.clear()
            self._dropped.clear()

    def lane(self, worker: str, incarnation: str) -> Lane:
        """The way to that life of the worker. Raises StaleTicket if it is not linked."""
        with self._table:
            linked, lane = self._links.get(worker, ("none", None))
        if lane is None or linked != incarnation:
            told = f"offered: {incarnation}\nlinked:  {linked}"
            raise StaleTicket(f"no link to this life of {worker}", told)
        return lane


def address(memory: memoryview) -> int:
    """Where `memory` begins in this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
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


def _runs(slabs: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbours in one piece: (first, how many)."""
    runs: list[tuple[int, int]] = []
    for slab in sorted(set(slabs)):
        if runs and sum(runs[-1]) == slab:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slab, 1))
    return runs
