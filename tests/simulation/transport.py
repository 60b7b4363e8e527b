"""KV that moves in virtual time: piece by piece between two pools, with stalls, deaths, and bytes that were altered.

Links, early pulling, hand-off and courier are the product's; only the wire (`VirtualConnection`) and the threads
(`VirtualTaskThread`) are not.
A piece is one layer of one chunk. It is copied when its moment comes, from whatever the source's memory holds then: a
slab that was given to somebody else meanwhile is read as it is, and the digests have to see that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from decode_worker.kv_fetcher import KvFetcher
from diptych.errors import StaleTicket, TransferError
from diptych.messages import ToGateway
from kvtransfer import cooperative
from kvtransfer.digests import STREAM_HASHERS, PayloadHasher
from kvtransfer.handoff import HandoffAborted
from kvtransfer.layer_progress import ProgressEntries, view_entries
from kvtransfer.pipelined_pull import LayerCopy
from kvtransfer.transports.links import TransportLinks
from tests.simulation.event_queue import ScheduledEvent, VirtualEventQueue
from tests.simulation.virtual_model import LAYERS

if TYPE_CHECKING:
    from tests.simulation.process import VirtualProcess

STALL_S = 3.0  # without a byte a pull is given up
LOOK_S = 0.05  # between two looks at a wire that stands still
LINK_S = 0.02
RATE = 2e6  # bytes per second: a chunk takes a millisecond
SOON_S = 1e-5  # a round takes at least so long


@dataclass(slots=True)
class VirtualPipe:
    """The wire from one worker to another. `corrupt` is the chance of a piece to arrive altered."""

    rate: float = RATE
    stalled: bool = False
    corrupt: float = 0.0


class VirtualPipes:
    """All pools and all wires. `shared`: memory stays readable when its owner is stopped or dead."""

    def __init__(self, agenda: VirtualEventQueue, rng: Random, shared: bool = True) -> None:
        self.agenda, self.rng, self.shared = agenda, rng, shared
        self.pieces = self.early = self.corrupted = 0
        self.rounds: list[VirtualTaskThread] = []
        self._ahead_s = 0.0
        self._pipes: dict[tuple[str, str], VirtualPipe] = {}
        self._lives: dict[str, VirtualProcess] = {}

    @property
    def moving(self) -> int:
        """Pulls that go on."""
        return sum(len(rounds.works) for rounds in self.rounds if rounds.name == "pull")

    @property
    def hurt(self) -> bool:
        """Does any wire stand still, or alter what it carries?"""
        return any(pipe.stalled or pipe.corrupt for pipe in self._pipes.values())

    def clock(self) -> float:
        """The time for whoever moves KV: in the middle of somebody's step it is later than the agenda's."""
        return max(self.agenda.now_s, self._ahead_s)

    def advance(self, now_s: float) -> None:
        """Let everything move that moves while somebody computes, up to `now_s`."""
        self._ahead_s = max(self._ahead_s, now_s)
        for rounds in list(self.rounds):
            rounds.catch_up(now_s)

    def pipe(self, source: str, target: str) -> VirtualPipe:
        return self._pipes.setdefault((source, target), VirtualPipe())

    def open(self, incarnation: str, process: VirtualProcess) -> None:
        self._lives[incarnation] = process

    def close(self, incarnation: str) -> None:
        """That life is over. Who is linked to it stays so, and may even read what it left."""
        self._lives.pop(incarnation, None)

    def reach(self, incarnation: str) -> VirtualProcess | None:
        """The process that lives as `incarnation`, if it does."""
        return self._lives.get(incarnation)


class VirtualTaskThread:
    """`worker.task_thread.TaskThread`: the same work, in rounds that the agenda schedules. Stands still
    with its process.
    """

    def __init__(self, pipes: VirtualPipes, own: VirtualProcess, name: str) -> None:
        self.pipes, self.own, self.name = pipes, own, name
        self.works: dict[cooperative.CoopTask[None], float] = {}  # when each is to run next
        self._due: ScheduledEvent | None = None
        pipes.rounds.append(self)

    def open(self) -> None:
        """There is no thread to start."""

    def add_task(self, work: cooperative.CoopTask[None]) -> None:
        self.works[work] = self.pipes.clock()
        self._plan()

    def wake_tasks(self) -> None:
        self.works = dict.fromkeys(self.works, self.pipes.clock())
        self._plan()

    def close(self) -> None:
        """Whoever closes has said "stop" to all pulls: let them end. Nobody needs links that are being made."""
        for work in list(self.works) if self.name != "link" else ():
            cooperative.run_to_end(work, self._at_once)
        self.end()

    def _at_once(self, pause_s: float) -> None:
        raise AssertionError("a pull that was stopped goes on")

    def end(self) -> None:
        """The process is gone, and all its work with it."""
        if self in self.pipes.rounds:
            self.pipes.rounds.remove(self)
        for work in list(self.works):
            work.close()
        self.works.clear()
        if self._due is not None:
            self._due.cancel()

    def catch_up(self, now_s: float) -> None:
        """Run whatever is due by `now_s`."""
        while not self.own.stopped:
            due = [work for work, due_s in self.works.items() if due_s <= now_s]
            if not due:
                break
            for work in due:
                self._resume_task(work)
        self._plan()

    def _resume_task(self, work: cooperative.CoopTask[None]) -> None:
        pause_s = next(work, None)
        if pause_s is None:
            self.works.pop(work, None)
        elif work in self.works:
            self.works[work] = self.pipes.clock() + max(pause_s, SOON_S)

    def _plan(self) -> None:
        due_s = min(self.works.values(), default=math.inf)
        if self._due is not None:
            self._due.cancel()
        if due_s < math.inf:
            due_s = max(due_s, self.pipes.agenda.now_s + (LOOK_S if self.own.stopped else SOON_S))
            self._due = self.pipes.agenda.schedule_at(due_s, self._come, self.name)

    def _come(self) -> None:
        self.catch_up(self.pipes.agenda.now_s)


class VirtualConnection:
    """`kvtransfer.pipelined_pull.SourceConnection`: the wire from one life of a worker."""

    layers = LAYERS

    def __init__(self, pipes: VirtualPipes, source: VirtualProcess, own: VirtualProcess) -> None:
        self.num_slabs = source.num_slabs
        self._pipes, self._source, self._own = pipes, source, own
        self._pipe = pipes.pipe(source.name, own.name)
        self._board: ProgressEntries = view_entries(source.board_memory)

    def read_progress(self, slabs: Sequence[int]) -> cooperative.CoopTask[ProgressEntries | None]:
        yield from self._wait(0.0, lambda: False)
        return self._board[list(slabs)]

    def copy_layers(
        self, copies: Sequence[LayerCopy], stop: Callable[[], bool]
    ) -> cooperative.CoopTask[None]:
        for one in copies:
            for layer in range(one.first, one.end):
                yield from self._piece(one.far, one.own, layer, one.payload, stop)
                self._pipes.early += 1

    def pull_chunks(
        self, pairs: Sequence[tuple[int, int]], stop: Callable[[], bool]
    ) -> cooperative.CoopTask[list[bytes]]:
        payloads = []
        for source, target in pairs:
            payload = STREAM_HASHERS["xxh3"]()
            for layer in range(self.layers):
                yield from self._piece(source, target, layer, payload, stop)
            payloads.append(payload.digest())
        return payloads

    def _piece(
        self, source: int, target: int, layer: int, payload: PayloadHasher, stop: Callable[[], bool]
    ) -> cooperative.CoopTask[None]:
        theirs, mine = self._source.memory_at(source), self._own.memory_at(target)
        if theirs is None or mine is None or theirs.layout != mine.layout:
            raise TransferError(f"slab {source} or {target} does not exist, or is of another class")
        yield from self._wait(theirs.layout.layer_bytes / self._pipe.rate, stop)
        own, dice = mine.layer_bytes(target, layer), self._pipes.rng
        own[:] = theirs.layer_bytes(source, layer)
        self._pipes.pieces += 1
        if dice.random() < self._pipe.corrupt:
            own[dice.randrange(len(own))] ^= 1 << dice.randrange(8)
            self._pipes.corrupted += 1
        payload.update(own)

    def _wait(self, seconds: float, stop: Callable[[], bool]) -> cooperative.CoopTask[None]:
        """Until so much time has passed on a wire that moves; who is stirred meanwhile looks and waits on."""
        began_s = last_s = self._pipes.clock()
        moved_s = 0.0
        while True:
            if stop():
                raise HandoffAborted("the pull was stopped")
            if not self._pipes.shared and not self._source.alive:
                raise TransferError("the peer is gone", "its connection was closed")
            now_s = self._pipes.clock()
            still = self._pipe.stalled or (not self._pipes.shared and self._source.stopped)
            if still and now_s - began_s > STALL_S + seconds:
                raise TransferError("the transfer stands still", f"no bytes for {STALL_S} s")
            moved_s, last_s = moved_s + (0.0 if still else now_s - last_s), now_s
            if moved_s >= seconds and not still:
                return
            yield LOOK_S if still else seconds - moved_s


class VirtualPuller:
    """`kvtransfer.transports.links.KvPuller` over virtual wires."""

    def __init__(self, pipes: VirtualPipes, own: VirtualProcess) -> None:
        self._pipes, self._own = pipes, own
        self._lanes: dict[str, tuple[str, VirtualConnection]] = {}

    def link_task(self, worker: str, incarnation: str, endpoint: bytes) -> cooperative.CoopTask[None]:
        until_s = self._pipes.clock() + LINK_S
        while (left_s := until_s - self._pipes.clock()) > 0:
            yield left_s
        source = self._pipes.reach(endpoint.decode())
        if source is None:
            raise TransferError(f"no wire to {worker}", "it is not there")
        if not source.memories.keys() & self._own.memories.keys():
            raise TransferError(f"no wire to {worker}", f"{source.kv_class} is not {self._own.kv_class}")
        self._lanes[worker] = incarnation, VirtualConnection(self._pipes, source, self._own)

    def measure_task(self, worker: str) -> cooperative.CoopTask[tuple[float, float]]:
        yield from ()
        return RATE / 1e9, 5.0

    def connection_to(self, worker: str, incarnation: str) -> VirtualConnection:
        linked, lane = self._lanes.get(worker, ("none", None))
        if lane is None or linked != incarnation:
            raise StaleTicket(
                f"no link to this life of {worker}", f"offered: {incarnation}\nlinked: {linked}"
            )
        return lane

    def pull_task(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> cooperative.CoopTask[list[bytes]]:
        lane = self.connection_to(worker, incarnation)
        return (yield from lane.pull_chunks(pairs, stop or (lambda: False)))

    def unlink(self, worker: str) -> None:
        self._lanes.pop(worker, None)

    def close(self) -> None:
        self._lanes.clear()


class VirtualKvFetcher(KvFetcher):
    """The courier, whose two threads are of this world."""

    def __init__(
        self,
        pipes: VirtualPipes,
        own: VirtualProcess,
        send: Callable[[ToGateway], None],
        wake: Callable[[], None],
    ) -> None:
        links = TransportLinks((), own.parts)
        links._pullers["virtual"] = VirtualPuller(pipes, own)
        super().__init__(links, send, wake, pipes.clock)
        rounds = partial(VirtualTaskThread, pipes, own)
        self._linking, self._pulling = rounds("link"), rounds("pull")  # type: ignore[assignment]

    def end(self) -> None:
        """The process is gone."""
        for rounds in (self._linking, self._pulling):
            assert isinstance(rounds, VirtualTaskThread)
            rounds.end()
