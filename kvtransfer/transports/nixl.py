"""Transfers KV between hosts: the decode worker reads the prefill worker's registered pool with NIXL (over UCX).

UCX chooses the network (InfiniBand, RoCE, TCP) by its own configuration (`UCX_TLS`, `UCX_NET_DEVICES`).

Five observations with nixl 1.5.1 explain this file:

* The agent of NIXL's Python API spins in its progress thread (0.7 to 0.9 of a core, idle), because it fixes `pthrDelay`
  to 0. The binding underneath accepts a delay, and then waits for events (0.001 of a core); hence the binding.
* A read that was given up and released, and whose peer was removed, still writes into our memory when a stopped peer
  continues: 53 MB of 60 in a test. Only the end of the agent ends its transfers. So every source has an agent of its
  own here, which is ended before an error is raised (milliseconds), and the next read makes a new agent: nothing writes
  to the slabs any more, and reads from other sources go on.
* NIXL does not report the progress of a read, and over a slow link a megabyte takes minutes: see `StallWatchdog`.
* Over TCP, where UCX emulates reads in software, a connection that is cut in the middle of a read can crash the
  *source* process (segmentation fault or abort in UCX's progress). Pullers killed during the read of an ordinary prompt
  did so in 0 of 48 runs with UCX's error handling "none", in 1 of 41 with "peer"; under requests of 50 MB in one piece
  both do sooner or later. So reads are posted in batches of a megabyte. A dead source is still reported at once, or
  found by the watchdog. A pull that is aborted is not cut: it posts no more batches, and waits for the posted ones. One
  case remains: a read that was given up, on a link that comes back after 22 seconds, aborts the source ("Endpoint
  timeout"; 5 of 5 times, with either error handling, and without UCX's keepalive and user timeout, too). A worker that
  dies this way is restarted like any other. RDMA reads do not involve the source's process at all.
* Without a progress thread of its own the puller is two to three times as fast over TCP: the waiting caller drives the
  transfer.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from diptych.errors import StaleTicket, TransferError
from kvcache.layout import Shard
from kvtransfer.cooperative import RUN_NOW, CoopTask
from kvtransfer.handoff import HandoffAborted
from kvtransfer.layer_progress import ENTRY_BYTES, ProgressEntries, view_entries
from kvtransfer.pipelined_pull import LayerCopy
from kvtransfer.resharding import ArenaMoves, ArenaSpan, PageMove, PairedPools, ShardedPool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.transports.blocking import BlockingPuller
from kvtransfer.transports.connecting import PeerConnector
from kvtransfer.transports.nixl_agent import NixlAgent, ReadSegment, address_of
from kvtransfer.transports.stall_watchdog import ConnectionPulse, StallWatchdog, WrittenWords

BATCH_BYTES = 1 << 20
# Most batches of reads that are posted at a time.
MAX_BATCHES_IN_FLIGHT = 8
# Seconds between two checks of a read in flight.
MIN_POLL_S, MAX_POLL_S = 50e-6, 1e-3
# The reads that measure a link: number of bytes, and number of repetitions.
PROBE_SIZES = ((4096, 9), (64 << 10, 3), (4 << 20, 3))
PROBE_BYTES = max(size for size, _ in PROBE_SIZES)
# If a read takes more seconds than this, larger sizes are not measured.
MAX_PROBE_S = 0.1


class NixlEndpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How pullers reach a source: the agent's metadata, the memory of each rank's pool, and the layer progress.

    `spans` say where the slabs of each KV class are; without them all slabs are of the puller's own first class.
    """

    metadata: Annotated[bytes, Meta(max_length=1 << 16)]
    # Shard, address and size in bytes of each rank's pool.
    shards: Annotated[list[tuple[Shard, int, int]], Meta(min_length=1)]
    # Address of the layer progress; 0 if there is none.
    board: int
    spans: tuple[ArenaSpan, ...] = ()
    version: Annotated[int, Meta(ge=3, le=3)] = 3


class NixlSource:
    """Prefill side: registers the pool and the layer progress; NIXL's own thread serves reads until `close`."""

    def __init__(
        self,
        shards: Sequence[tuple[Shard, SharedMemory]],
        name: str,
        progress_memory: SharedMemory | None = None,
        spans: Sequence[ArenaSpan] = (),
    ) -> None:
        self._shards, self._progress_memory, self._spans = shards, progress_memory, tuple(spans)
        regions = [memory.view for _, memory in shards] + (
            [progress_memory.view] if progress_memory is not None else []
        )
        self._agent = NixlAgent(f"{name}-{uuid.uuid4().hex}", regions, serve=True)

    def endpoint(self) -> bytes:
        """An encoded `NixlEndpoint`, with which pullers reach this source."""
        shards = [(shard, address_of(memory.view), memory.num_bytes) for shard, memory in self._shards]
        board = address_of(self._progress_memory.view) if self._progress_memory is not None else 0
        known = self._agent.agent.getLocalMD()
        return msgspec.msgpack.encode(NixlEndpoint(known, shards, board, self._spans))

    def close(self) -> None:
        """Stop serving reads."""
        self._agent.close()


class NixlConnection:
    """The connection to one life of one source. It has its own agent: ending the agent ends only this source's reads.

    Used by one thread at a time.
    """

    def __init__(
        self, own_pool: ShardedPool, scratch: memoryview, endpoint: NixlEndpoint, stall_s: Callable[[], float]
    ) -> None:
        self._own_pool, self._endpoint, self._stall_s, self._scratch = own_pool, endpoint, stall_s, scratch
        self._pools = PairedPools(
            own_pool, [(shard, num_bytes) for shard, _, num_bytes in endpoint.shards], endpoint.spans
        )
        self.layers, self.num_slabs = self._pools.layers, self._pools.num_slabs
        self._bases, self._targets = (
            [base for _, base, _ in endpoint.shards],
            [address_of(memory) for memory in own_pool.memories],
        )
        # The layer progress as last read.
        self._notes = memoryview(bytearray(self.num_slabs * ENTRY_BYTES))
        # Whether a task is reading the layer progress.
        self._progress_in_use = False
        self._pulse = ConnectionPulse()
        self._agent: NixlAgent | None = None
        self._joining: PeerConnector[NixlAgent] | None = None
        self._peer: Any = None

    def probe_parts(self) -> CoopTask[None]:
        """Read a little of every rank's pool, to check the connection. Raises TransferError."""
        here = address_of(self._scratch)
        yield from self._run_read(
            [(base, here, min(4096, size)) for _, base, size in self._endpoint.shards], None
        )

    def measure_speed(self) -> CoopTask[tuple[float, float]]:
        """Measure reads into scratch memory; returns (GB/s, µs for one page)."""
        _, base, num_bytes = self._endpoint.shards[0]
        speed, latency = 0.0, 0.0
        for size, times in PROBE_SIZES:
            size, taken = min(size, num_bytes), []
            for _ in range(times):
                began_s = time.perf_counter()
                yield from self._run_read([(base, address_of(self._scratch), size)], None)
                taken.append(time.perf_counter() - began_s)
            latency, speed = latency or sorted(taken)[times // 2], size / min(taken) / 1e9
            if min(taken) > MAX_PROBE_S:
                # A larger read would take long and would measure nothing new.
                break
        return speed, latency * 1e6

    def pull_chunks(
        self, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool] | None
    ) -> CoopTask[None]:
        """Read whole chunks, stage by stage of the own pool; `pairs` are (source slab, own slab)."""
        moves = [self._pools.moves_of(source, target) for source, target in pairs]
        segments = (
            segment
            for stage in range(max((len(one.stages) for one in moves), default=0))
            for (source, target), one in zip(pairs, moves, strict=True)
            for segment in self._read_segments(one, source, target, one.stages[stage].moves)
        )
        yield from self._run_read(segments, stop)

    def read_progress(self, slabs: Sequence[int]) -> CoopTask[ProgressEntries | None]:
        """The source's layer progress of these slabs, in one small read (see `SourceConnection`)."""
        if not self._endpoint.board:
            return None
        board, here = self._endpoint.board, address_of(self._notes)
        runs = [(first * ENTRY_BYTES, count * ENTRY_BYTES) for first, count in _adjacent_runs(slabs)]
        # Another pull of this connection uses the same memory for the result.
        while self._progress_in_use:
            yield MAX_POLL_S
        self._progress_in_use = True
        try:
            yield from self._run_read([(board + at, here + at, size) for at, size in runs], None)
            return view_entries(self._notes)[list(slabs)]
        finally:
            self._progress_in_use = False

    def copy_layers(self, copies: Sequence[LayerCopy], stop: Callable[[], bool]) -> CoopTask[None]:
        """Copy layers of chunks (see `SourceConnection`). The copies are hashed once all bytes have arrived."""
        moves = [self._pools.moves_of(copy.far, copy.own) for copy in copies]
        segments = (
            segment
            for copy, one in zip(copies, moves, strict=True)
            for run in one.layers[copy.first : copy.end]
            for segment in self._read_segments(one, copy.far, copy.own, run.moves)
        )
        yield from self._run_read(segments, stop)
        for copy in copies:
            self._own_pool.hash_layers(copy.payload, copy.own, copy.first, copy.end)
            yield RUN_NOW

    def close(self) -> None:
        """End the agent with all its reads. The next read makes a new agent, which connects to its peer again."""
        if self._agent is not None:
            self._agent.close()
        self._agent = None

    def _read_segments(
        self, moves: ArenaMoves, source: int, target: int, page_moves: Sequence[PageMove]
    ) -> Iterator[ReadSegment]:
        """The reads of the moves `page_moves` from slab `source` of the peer into the own slab `target`."""
        for move in page_moves:
            far = self._bases[move.source] + moves.source.offset_of(source, move.source) + move.far
            own = self._targets[move.target] + moves.own_arena.offset_of(target, move.target) + move.own
            yield far, own, move.num_bytes

    def _run_read(self, segments: Iterable[ReadSegment], stop: Callable[[], bool] | None) -> CoopTask[None]:
        """Run a read to its end, or end the agent: after this returns or raises, nothing writes to our memory.

        Ending the agent fails its other reads too, but not reads that have begun with a new agent since.
        """
        agent: NixlAgent | None = None
        try:
            agent = yield from self._started_agent()
            with self._pulse.watch_read(self._stall_s, time.monotonic()) as watchdog:
                yield from self._drive_batches(agent, cut_batches(segments), watchdog, stop)
        except HandoffAborted:
            raise  # raised only after all posted reads have arrived
        except TransferError:
            self._end_agent(agent)
            raise
        except GeneratorExit:
            self._end_agent(agent)
            raise
        except Exception as error:  # for example nixlRemoteDisconnectError
            self._end_agent(agent)
            raise TransferError("KV did not arrive", repr(error)) from error

    def _end_agent(self, agent: NixlAgent | None) -> None:
        """End the agent, unless a new agent has replaced it already."""
        if self._agent is agent:
            self.close()

    def _drive_batches(
        self,
        agent: NixlAgent,
        batches: Iterator[list[ReadSegment]],
        watchdog: StallWatchdog,
        stop: Callable[[], bool] | None,
    ) -> CoopTask[None]:
        """Keep `MAX_BATCHES_IN_FLIGHT` batches posted until all are done.

        When `stop` returns True no more batches are posted, and HandoffAborted is raised once the posted ones have
        arrived. NIXL has no call that waits, so the task polls: often while data flows, at most every millisecond when
        it does not. Polling without a pause would take the core from the decode step.
        """
        in_flight: dict[int, WrittenWords] = {}
        pause_s, stopped = MIN_POLL_S, False
        while True:
            stopped = stopped or (stop is not None and stop())
            while (
                not stopped
                and len(in_flight) < MAX_BATCHES_IN_FLIGHT
                and (batch := next(batches, None)) is not None
            ):
                words = WrittenWords(batch)
                in_flight[agent.post_read(self._peer, batch)] = words
            if not in_flight:
                break
            over = [handle for handle in in_flight if agent.is_done(handle)]
            for handle in over:
                del in_flight[handle]
            if over:
                pause_s = MIN_POLL_S
                watchdog.record_progress(time.monotonic())
                continue
            if watchdog.is_check_due(now_s := time.monotonic()):
                watchdog.check_progress(sum(words.count_reached() for words in in_flight.values()), now_s)
            yield pause_s
            pause_s = min(2 * pause_s, MAX_POLL_S)
        if stopped:
            raise HandoffAborted("the pull was stopped")

    def _started_agent(self) -> CoopTask[NixlAgent]:
        """The agent, connected to its peer. All callers wait for the same connection attempt."""
        if self._agent is not None:
            return self._agent
        if self._joining is None:
            regions = [*self._own_pool.memories, self._scratch, self._notes]
            name, metadata = f"pull-{uuid.uuid4().hex}", self._endpoint.metadata
            self._joining = PeerConnector(
                lambda: NixlAgent(name, regions, serve=False), lambda agent: agent.add_peer(metadata)
            )
        joining = self._joining
        try:
            agent = yield from joining.wait_task(self._stall_s())
        finally:
            mine = self._joining is joining
            if mine and joining.is_done:
                self._joining = None
        if mine:
            self._agent, self._peer = agent, joining.peer
        if self._agent is None:
            raise TransferError("a NIXL read failed", "its connection was ended")
        return self._agent


class NixlPuller(BlockingPuller):
    """Decode side: reads slabs of linked workers into the `own_pool` pool and hashes the copies.

    A read without a byte for `stall_s` seconds is given up; a slow read is not. One thread may link while another
    pulls: the linking thread uses an agent only until it is in the table, the pulling thread only afterwards.
    """

    name = "nixl"

    def __init__(self, own_pool: ShardedPool, algorithm: str = "xxh3", stall_s: float = 2.0) -> None:
        self._own_pool, self._algorithm, self._stall_s = own_pool, algorithm, stall_s
        self._scratch = memoryview(bytearray(PROBE_BYTES))
        self._table = threading.Lock()
        self._links: dict[str, tuple[str, NixlConnection]] = {}
        # Unlinked connections. A later `link_task` frees them, since its thread may block and ending an agent takes a
        # while.
        self._dropped_connections: list[NixlConnection] = []

    def link_task(self, worker: str, incarnation: str, endpoint: bytes) -> CoopTask[None]:
        """Connect to the source at `endpoint`; replaces a link to an earlier life of the worker.

        Raises:
            TransferError: NIXL is not usable here, the source cannot be reached, or its layout is not ours.
        """
        try:
            known = msgspec.msgpack.decode(endpoint, type=NixlEndpoint)
            connection = NixlConnection(self._own_pool, self._scratch, known, lambda: self._stall_s)
        except (
            ValueError,
            MemoryError,
            msgspec.MsgspecError,
        ) as error:  # MemoryError: an impossible number of slabs
            raise TransferError(f"no NIXL link to {worker}", f"malformed endpoint: {error}") from error
        yield from connection.probe_parts()
        with self._table:
            self._dropped_connections.clear()
            self._links[worker] = (incarnation, connection)

    def pull_task(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> CoopTask[list[bytes]]:
        """Read (source slab, own slab) pairs, as `shm.ShmPuller.pull_task`; returns the payload hash of every copy.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            TransferError: the source is dead, stalled or unreachable, or a slab does not exist.
            HandoffAborted: `stop` returned True; all posted reads have arrived.
        """
        yield from self.connection_to(worker, incarnation).pull_chunks(pairs, stop)
        payloads = []
        for _, own in pairs:
            payloads.append(self._own_pool.hash_slab(own, self._algorithm))
            yield RUN_NOW
        return payloads

    def measure_task(self, worker: str) -> CoopTask[tuple[float, float]]:
        """Measure reads from this worker into scratch memory; returns (GB/s, µs for one page)."""
        with self._table:
            connection = self._links[worker][1]
        return (yield from connection.measure_speed())

    def unlink(self, worker: str) -> None:
        """Forget a worker; its connection is freed after the last pull over it. Idempotent."""
        with self._table:
            if worker in self._links:
                self._dropped_connections.append(self._links.pop(worker)[1])

    def close(self) -> None:
        """End all connections. Call it when no pull runs any more."""
        with self._table:
            for _, connection in self._links.values():
                connection.close()
            self._links.clear()
            self._dropped_connections.clear()

    def connection_to(self, worker: str, incarnation: str) -> NixlConnection:
        """The connection to this life of the worker. Raises StaleTicket if it is not linked."""
        with self._table:
            linked, connection = self._links.get(worker, ("none", None))
        if connection is None or linked != incarnation:
            why = f"offered: {incarnation}\nlinked:  {linked}"
            raise StaleTicket(f"no link to this life of {worker}", why)
        return connection


def cut_batches(segments: Iterable[ReadSegment]) -> Iterator[list[ReadSegment]]:
    """Group segments into batches of at most `BATCH_BYTES`, and cut large segments."""
    batch: list[ReadSegment] = []
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


def _adjacent_runs(slabs: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of adjacent slab numbers, as (first, count)."""
    runs: list[tuple[int, int]] = []
    for slab in sorted(set(slabs)):
        if runs and sum(runs[-1]) == slab:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slab, 1))
    return runs
