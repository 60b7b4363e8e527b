"""A deployment of the product's own parts on the simulator's clock: relay, shell, roles, engine, books, leases.

Each worker is the real loop on a thread of its own, of which one runs at a time: whoever waits, for a step of the model
or for a message, gives the turn back until that moment of virtual time. Only the model, the channel and the copying of
bytes are stand-ins.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from math import inf
from types import SimpleNamespace
from typing import Any

from decode_worker.courier import Arrival
from decode_worker.worker import Decoder
from diptych.messages import Beat, Hello, Linked, Peer, Unpeer
from diptych.request import Request, Sampling, Stage
from engine.loop import Engine
from engine.scheduler import Limits, Plan, Scheduler
from engine.seams import Picked
from kvcache.holdings import Holdings
from kvcache.prefix_tree import PrefixTree
from kvcache.slabs import Slabs
from kvtransfer.handoff import Pull, perform
from kvtransfer.leases import LeaseLedger
from kvtransfer.parts import whole
from planner.sim_agenda import TURN, Agenda
from planner.sim_wires import Wires
from planner.simulator import Deployment, Machine, _limits
from planner.terms import PREFILL, Batch, Cost, Job
from prefill_worker.worker import Issuer, Prefiller
from router.admission import Admission
from router.effects import Arrive, Deliver, Effect, Event, Finish, FromWorker, Send
from router.fleet import Fleet
from router.prefix_index import CHUNK_TOKENS, PrefixIndex
from router.relay import Relay
from tests.simulation.toy import LAYOUT, Memory
from worker.shell import Books, Role, Shell

FINGERPRINT, KEY = "live", bytes(range(32))
TOKEN_BYTES = LAYOUT.chunk_bytes / CHUNK_TOKENS


class Over(BaseException):
    """The test ends: threads leave."""


class Fiber:
    """A thread that runs only while nobody else does."""

    def __init__(self, agenda: Agenda, body: Callable[[], None]) -> None:
        self.agenda, self._body = agenda, body
        self._own, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._over = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._own.acquire()
        try:
            self._body()
        except Over:
            pass
        except BaseException as error:
            self.error = error
        self._theirs.release()

    def resume(self) -> None:
        """Let it run until it waits."""
        self._own.release()
        self._theirs.acquire()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Called by itself: until somebody resumes it."""
        self._theirs.release()
        self._own.acquire()
        if self._over:
            raise Over

    def sleep(self, seconds: float) -> None:
        self.agenda.at(self.agenda.now_s + seconds, self.resume, order=TURN)
        self.wait()

    def end(self) -> None:
        self._over = True
        self._own.release()
        self._thread.join(10)


class Line:
    """`worker.shell.Line`: waits in virtual time."""

    def __init__(self, say: Callable[[Any], None]) -> None:
        self.gateway_lost = False
        self.fiber: Fiber | None = None
        self.send = say
        self._inbox: list[Any] = []
        self._waits = False

    def poll(self, timeout_s: float) -> list[Any]:
        if not self._inbox and timeout_s > 0:
            self._waits = True
            assert self.fiber is not None
            self.fiber.wait()
        inbox, self._inbox = self._inbox, []
        return inbox

    def wake(self) -> None:
        if self._waits and self.fiber is not None:
            self._waits = False
            self.fiber.agenda.at(self.fiber.agenda.now_s, self.fiber.resume, order=TURN)

    def deliver(self, message: Any) -> None:
        self._inbox.append(message)
        self.wake()


class Model:
    """`StepRunner` and `StepSampler`: takes the time that a cost says, and writes token 0."""

    def __init__(self, cost: Cost, sleep: Callable[[float], None]) -> None:
        self.cost, self.sleep = cost, sleep

    def run(self, batch: list[Any], done: Callable[[int], None] | None = None) -> list[list[int]]:
        self.sleep(self.cost.step_s(batch_of(batch)))
        if done is not None:
            done(LAYOUT.layers)
        return [[0] for _ in batch]

    def open(self, seq: Any) -> Any:
        return SimpleNamespace(done=False, push=lambda token: None)

    def sample(self, logits: list[Any], rows: list[Any]) -> list[Picked | Exception]:
        return [Picked(0) for _ in rows]

    def score(self, logits: Any, tokens: list[int], top: int) -> list[Any]:
        return []


def batch_of(works: list[Any]) -> Batch:
    """The sums of a step. A piece of one token is a row that writes, unless it is the first of a prompt."""
    rows = [work for work in works if len(work.tokens) == 1 and work.start]
    reads = [work for work in works if len(work.tokens) > 1 or not work.start]
    squares = sum((work.start + len(work.tokens)) ** 2 - work.start**2 for work in reads)
    tokens = sum(len(work.tokens) for work in reads)
    return Batch(tokens, float(squares), len(rows), sum(work.start for work in rows))


class Courier:
    """Pulls over the simulator's wires; every chunk is zeros, so every digest is that of zeros."""

    def __init__(
        self, name: str, wires: Wires, parts: Any, say: Callable[[Any], None], wake: Callable[[], None]
    ):
        self.links = SimpleNamespace(route=lambda worker: None)
        self.landed: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.error = None
        self._name, self._wires, self._say, self._wake = name, wires, say, wake
        self._payload = parts.payload(0, "xxh3")

    def link(self, peer: Peer) -> None:
        link = self._wires.link
        told = Linked(peer.worker, peer.incarnation, "virtual", link.bytes_per_s / 1e9, link.latency_s * 1e6)
        self._say(told)

    def unlink(self, worker: str, incarnation: str) -> None:
        raise AssertionError("nobody is lost")

    def stir(self) -> None:
        """Nothing is pulled ahead."""

    def fetch(self, arrival: Arrival) -> None:
        assert isinstance(arrival.turn, Pull)
        pull, steps = arrival.turn, arrival.steps

        def there() -> None:
            assert steps is not None
            arrival.turn = perform(steps, {Pull: lambda effect: [self._payload] * len(effect.pairs)}, pull)
            self.landed.put(arrival)
            self._wake()

        self._wires.start(pull.ticket.worker, self._name, len(pull.pairs) * LAYOUT.chunk_bytes, there)


class NotedRelay(Relay):
    """A relay whose orders to workers are noted."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.noted: list[tuple[float, str, str, str, int]] = []

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        effects = super().handle(event, now_s)
        for effect in effects:
            if isinstance(effect, Send) and not isinstance(effect.message, Peer | Unpeer):
                word: Any = effect.message
                self.noted.append((now_s, effect.worker, type(word).__name__, word.request, word.epoch))
        return effects


class Noted(Scheduler):
    """A scheduler whose plans are noted."""

    def __init__(self, limits: Limits, note: Callable[[Plan], None]) -> None:
        super().__init__(limits)
        self._note = note

    def schedule(self, stock: Any) -> Plan:
        plan = super().schedule(stock)
        if plan != Plan():
            self._note(plan)
        return plan


class Station:
    """One worker: the shell, a role, an engine."""

    def __init__(self, world: World, name: str, role: str, machine: Machine) -> None:
        deployment = world.deployment
        self.name, self.role, self.line = name, role, Line(lambda message: world.hear(name, message))
        limits = _limits(machine, 1, deployment.max_model_len)
        tree = PrefixTree() if deployment.prefix_caching else None
        self.holdings, self.books = Holdings(Slabs(limits.num_slabs), tree), Books()
        self.fiber = Fiber(world.agenda, self._live)
        self.line.fiber = self.fiber
        model = Model(machine.cost, self.fiber.sleep)
        scheduler = Noted(limits, lambda plan: world.plans.append((name, world.agenda.now_s, plan)))
        self.engine = Engine(model, scheduler, self.holdings, model)
        parts = whole(LAYOUT, Memory(limits.num_slabs).bytes)
        self.part: Role
        if role == PREFILL:
            issuer = Issuer(KEY, name, "1", FINGERPRINT, "xxh3")
            self.part = Prefiller(self.line, self.engine, self.holdings, parts, LeaseLedger(1e9), issuer)
        else:
            courier: Any = Courier(name, world.wires, parts, self.line.send, self.line.wake)
            self.part = Decoder(self.line, self.engine, self.holdings, LAYOUT, courier, KEY, FINGERPRINT)
        caching = FINGERPRINT if deployment.prefix_caching else ""
        clock = lambda: world.agenda.now_s  # noqa: E731
        self.shell = Shell(
            self.line, self.engine, self.part, self.holdings, self.books, fingerprint=caching, clock=clock
        )
        self.slabs = limits.num_slabs

    def _live(self) -> None:
        while True:
            self.shell.turn()

    @property
    def hello(self) -> Hello:
        endpoints = {"virtual": b"1"} if self.role == PREFILL else {}
        length = self.engine.scheduler.limits.max_model_len
        identity: dict[str, str] = {}
        chunk_bytes = LAYOUT.chunk_bytes
        return Hello(
            self.name,
            self.role,
            "1",
            FINGERPRINT,
            identity,
            "live",
            1,
            self.slabs,
            chunk_bytes,
            length,
            endpoints,
        )


class World:
    """A deployment of one cell, served by real parts. `plans` and `relay.noted` say who decided what, and when."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.agenda = deployment, Agenda()
        self.agenda.now_s = 0.0
        self.wires = Wires(self.agenda, deployment.link)
        self.plans: list[tuple[str, float, Plan]] = []
        self.first_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        roles = {pool.role for pool in deployment.placement.pools}
        self.relay = NotedRelay(
            Fleet(lost_s=inf, stuck_s=inf),
            Admission(deployment.bounds),
            split=PREFILL in roles,
            index=PrefixIndex() if deployment.prefix_caching else None,
            pipelined=False,
            recovery_s=inf,
        )
        self.stations: dict[str, Station] = {}
        for pool, machine in zip(deployment.placement.pools, deployment.machines, strict=True):
            role = PREFILL if pool.role == PREFILL else "decode"
            for _ in range(pool.count):
                name = f"{role}-{sum(one.role == role for one in self.stations.values())}"
                self.stations[name] = Station(self, name, role, machine)
        self._beating = False

    def run(self, jobs: Iterable[Job]) -> None:
        """Serve all of them."""
        for station in self.stations.values():
            self._handle(FromWorker(station.name, station.hello))
        for target in [one for one in self.stations.values() if one.role != PREFILL]:
            for source in [one for one in self.stations.values() if one.role == PREFILL]:
                link = self.deployment.link
                said = Linked(source.name, "1", "virtual", link.bytes_per_s / 1e9, link.latency_s * 1e6)
                self._handle(FromWorker(target.name, said))
        for station in self.stations.values():
            station.fiber.resume()
        for number, job in enumerate(jobs):
            self.agenda.at(job.at_s + self.deployment.gateway_s, self._arrive, job, number)
        try:
            self.agenda.run()
        finally:
            for station in self.stations.values():
                station.fiber.end()

    def hear(self, worker: str, message: Any) -> None:
        self.agenda.at(self.agenda.now_s + self.deployment.hop_s, self._handle, FromWorker(worker, message))

    def _arrive(self, job: Job, number: int) -> None:
        request = Request(str(number), tokens_of(job, number), Sampling(job.output, 0), inf)
        request.entered_s[Stage.ADMITTED] = job.at_s
        self._handle(Arrive(request))
        if not self._beating:
            self._beating = True
            self.agenda.at(self.agenda.now_s + self.deployment.beat_s, self._beat)

    def _beat(self) -> None:
        for station in self.stations.values():
            self._handle(FromWorker(station.name, Beat(station.name, "1", station.books.read())))
        self._beating = bool(self.relay.live)
        if self._beating:
            self.agenda.at(self.agenda.now_s + self.deployment.beat_s, self._beat)

    def _handle(self, event: Event) -> None:
        now_s = self.agenda.now_s
        for effect in self.relay.handle(event, now_s):
            match effect:
                case Send(worker, message):
                    if isinstance(message, Peer | Unpeer):
                        continue
                    self.agenda.at(now_s + self.deployment.hop_s, self.stations[worker].line.deliver, message)
                case Deliver(request, output):
                    if output.tokens:
                        self.first_s.setdefault(request, now_s)
                case Finish(request):
                    self.ended_s[request] = now_s


def tokens_of(job: Job, number: int) -> list[int]:
    """A prompt that shares with others what its job's `prefix` says, and no more."""
    blocks = [(1000 + name, place) for name in job.prefix for place in range(job.block_tokens)]
    own = [(10**6 + number, place) for place in range(job.prompt - len(blocks))]
    return [name * 1000 + place for name, place in (blocks + own)[: job.prompt]]
