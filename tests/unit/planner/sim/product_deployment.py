"""A deployment of the product's own parts on the simulator's clock: relay, shell, roles, engine, books, leases.

Each worker is the real loop on a thread of its own, of which one runs at a time: whoever waits, for a step of the model
or for a message, yields until that moment of virtual time. Only the model, the channel and the copying of
bytes are stand-ins.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import SimpleNamespace
from typing import Any

from decode_worker.kv_fetcher import KvArrival
from decode_worker.worker import DecodeWorker
from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.messages import Heartbeat, Hello, Linked, Peer, Unpeer
from diptych.request import TRAITS, Pooling, Request, RequestStage, SamplingParams
from engine.loop import Engine
from engine.prefix_restores import PrefixRestores
from engine.protocols import EvictionOrder, EvictionReport, SampledToken
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.sequence import EngineLimits, Sequence
from kvcache.layout import Shard
from kvtransfer.handoff import PullChunks, perform_effects
from kvtransfer.leases import LeaseLedger
from kvtransfer.resharding import ShardedPool, plan_spans, unsharded_pool
from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.sim.exact.engine import build_allocator
from planner.sim.exact.event_queue import ORDER_STEP, EventQueue
from planner.sim.exact.links import SimLinks
from planner.sim.exact.segments import Segments, count_bag_slabs, cut_segments
from planner.sim.exact.simulate import _engine_limits
from planner.sim.exact.tiers import SimTiers, SimTierStore
from planner.types import PREFILL, CostModel, Job, KvClassWork, KvKeep, StepBatch
from prefill_worker.worker import PrefillWorker, TicketIssuer
from router.effects import (
    DeliverTokens,
    FinishRequest,
    RelayEffect,
    RelayEvent,
    RequestArrived,
    SendMessage,
    WorkerSaid,
)
from router.requests.admission import Admission
from router.requests.relay import Relay
from router.routing.prefix_index import PrefixIndex
from router.workers.fleet import Fleet
from services.worker.traits import list_traits
from tests.simulation.virtual_model import LAYOUT, VirtualMemory, toy_layout
from worker.loop import LatestStats, WorkerLoop, WorkerRole

FINGERPRINT, KEY = "live", bytes(range(32))
WHOLE = Shard((0, LAYOUT.layers), (0, LAYOUT.kv_heads))
TOKEN_BYTES = LAYOUT.chunk_bytes / CHUNK_TOKENS


class Over(BaseException):
    """The test ends: threads leave."""


class Fiber:
    """A thread that runs only while nobody else does."""

    def __init__(self, agenda: EventQueue, body: Callable[[], None]) -> None:
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
        self.agenda.at(self.agenda.now_s + seconds, self.resume, order=ORDER_STEP)
        self.wait()

    def end(self) -> None:
        self._over = True
        self._own.release()
        self._thread.join(10)


class Line:
    """`worker.loop.GatewayLink`: waits in virtual time."""

    def __init__(self, say: Callable[[Any], None]) -> None:
        self.gateway_lost = self.is_congested = False
        self.fiber: Fiber | None = None
        self.send = say
        self._inbox: list[Any] = []
        self._waits = False
        # Until when it waits at most, in seconds of virtual time.
        self.deadline_s: Callable[[], float | None] = lambda: None

    def poll_messages(self, timeout_s: float) -> list[Any]:
        if not self._inbox and timeout_s > 0:
            self._waits = True
            assert self.fiber is not None
            if (deadline_s := self.deadline_s()) is not None:
                self.fiber.agenda.at(deadline_s, self.wake_poll)
            self.fiber.wait()
        inbox, self._inbox = self._inbox, []
        return inbox

    def wake_poll(self) -> None:
        if self._waits and self.fiber is not None:
            self._waits = False
            self.fiber.agenda.at(self.fiber.agenda.now_s, self.fiber.resume, order=ORDER_STEP)

    def deliver(self, message: Any) -> None:
        self._inbox.append(message)
        self.wake_poll()


class Model:
    """`StepRunner` and `StepSampler`: takes the time that a cost says, and writes token 0."""

    def __init__(
        self,
        cost: CostModel,
        sleep: Callable[[float], None],
        scheduler: Scheduler,
        work_on: Mapping[str, KvClassWork],
    ) -> None:
        self.cost, self.sleep, self.scheduler, self.work_on = cost, sleep, scheduler, work_on

    def run(self, batch: list[Any], done: Callable[[int], None] | None = None) -> list[list[int]]:
        running = self.scheduler.running.values()
        self.sleep(self.cost.step_s(batch_of(batch, running, self.work_on)))
        if done is not None:
            done(LAYOUT.layers)
        return [[0] for _ in batch]

    def expect(self, seq: Any) -> None:
        """Nothing here takes long."""

    def notify(self, wake: Callable[[], None]) -> None:
        """Nobody waits."""

    def open(self, seq: Any) -> Any:
        return SimpleNamespace(done=False, push=lambda token: None, cost_s=0.0)

    def sample(self, logits: list[Any], rows: list[Any]) -> list[SampledToken | Exception]:
        return [SampledToken(0) for _ in rows]

    def score(self, logits: Any, tokens: list[int], top: int) -> list[Any]:
        return []

    def pool(self, row: Any, pooling: Pooling, num_tokens: int) -> bytes:
        return b""


class EvictingModel(Model):
    """`engine.protocols.EvictingRunner`: every sequence keeps what a `KvKeep` says, and decides as fast."""

    can_evict = True

    def __init__(
        self,
        cost: CostModel,
        sleep: Callable[[float], None],
        scheduler: Scheduler,
        work_on: Mapping[str, KvClassWork],
    ) -> None:
        super().__init__(cost, sleep, scheduler, work_on)
        self.keep = KvKeep(0.5, 1.0)
        self._segments: dict[str, Segments] = {}

    @property
    def cuts_kept(self) -> bool:
        """Whether its rule makes segments."""
        return self.keep.spec.can_cut

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        tokens = len(order.tokens)
        self.sleep(tokens * (self.keep.prompt_s if tokens == order.prompt_tokens else self.keep.answer_s))
        kept = round(self.keep.share * tokens)
        first = tokens == order.prompt_tokens
        if first:
            cuts = order.cuts and self.cuts_kept
            self._segments[order.key] = cut_segments(self.keep, tokens) if cuts else ()
        segments = self._segments[order.key]
        bag_slabs = count_bag_slabs(self.keep, segments, tokens)
        return EvictionReport(bag_slabs, kept, tokens, {"": 1}, segments=segments if first else ())

    def apply_eviction(self, key: str, bag_slabs: list[int]) -> None:
        """Nothing is written here."""

    def load_kept(
        self,
        key: str,
        boundary: int,
        length: int,
        bag_slabs: list[int],
        segments: Segments = (),
    ) -> None:
        self._segments[key] = segments

    def forget_kept(self, key: str) -> None:
        self._segments.pop(key, None)


def batch_of(works: list[Any], running: Iterable[Sequence], work_on: Mapping[str, KvClassWork]) -> StepBatch:
    """The sums of a step of `running` sequences. `work_on` says what work on KV of a class costs; empty: the same."""
    owner, same = {id(seq.slabs): seq for seq in running}, KvClassWork()
    rows, context, tokens, squares = 0, 0.0, 0.0, 0.0
    for work in works:
        seq, count = owner[id(work.slabs)], len(work.tokens)
        cost = work_on.get(seq.kv_class, same)
        if seq.decoding:
            rows, context = rows + 1, context + cost.context * work.start
        else:
            tokens += cost.token * count
            squares += cost.square * ((work.start + count) ** 2 - work.start**2)
    return StepBatch(tokens, squares, rows, context)


class Courier:
    """Pulls over the simulator's links; every chunk is zeros, so every digest is that of zeros."""

    def __init__(
        self, name: str, links: SimLinks, parts: Any, say: Callable[[Any], None], wake: Callable[[], None]
    ):
        self.links = SimpleNamespace(route_to=lambda worker: None)
        self.landed: queue.SimpleQueue[KvArrival] = queue.SimpleQueue()
        self.error = None
        self._name, self._wires, self._say, self._wake = name, links, say, wake
        self._parts = parts
        self._payloads = {
            one.layout.kv_class: parts.hash_slab(one.span.first, "xxh3") for one in parts.arenas
        }

    def link_worker(self, peer: Peer) -> None:
        link = self._wires.link
        linked = Linked(
            peer.worker, peer.incarnation, "virtual", link.bytes_per_s / 1e9, link.latency_s * 1e6
        )
        self._say(linked)

    def unlink_worker(self, worker: str, incarnation: str) -> None:
        raise AssertionError("nobody is lost")

    def wake_fetches(self) -> None:
        """Nothing is pulled ahead."""

    def start_fetch(self, arrival: KvArrival) -> None:
        assert isinstance(arrival.effect, PullChunks)
        pull, steps = arrival.effect, arrival.handoff
        layout = self._parts.layout_of(arrival.seq.kv_class)
        payload, began_s = self._payloads[layout.kv_class], self._wires.events.now_s

        def there() -> None:
            assert steps is not None
            arrival.pull_s = self._wires.events.now_s - began_s
            arrival.effect = perform_effects(
                steps, {PullChunks: lambda effect: [payload] * len(effect.pairs)}, pull
            )
            self.landed.put(arrival)
            self._wake()

        self._wires.start(pull.ticket.worker, self._name, len(pull.pairs) * layout.chunk_bytes, there)


class NotedRelay(Relay):
    """A relay whose orders to workers are noted."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.noted: list[tuple[float, str, str, str, int]] = []

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        effects = super().handle_event(event, now_s)
        for effect in effects:
            if isinstance(effect, SendMessage) and not isinstance(effect.message, Peer | Unpeer):
                word: Any = effect.message
                self.noted.append((now_s, effect.worker, type(word).__name__, word.request, word.epoch))
        return effects


class Noted(Scheduler):
    """A scheduler whose plans are noted."""

    def __init__(self, limits: EngineLimits, note: Callable[[StepPlan], None]) -> None:
        super().__init__(limits)
        self._note = note

    def schedule(self, stock: Any) -> StepPlan:
        plan = super().schedule(stock)
        if plan != StepPlan():
            self._note(plan)
        return plan


class Station:
    """One worker: the shell, a role, an engine."""

    def __init__(self, world: World, name: str, role: str, machine: InstanceSpec) -> None:
        deployment = world.deployment
        self.name, self.role, self.line = name, role, Line(lambda message: world.hear(name, message))
        limits = _engine_limits(machine, 1, deployment)
        self.holdings, self.books = build_allocator(limits, deployment.prefix_caching), LatestStats()
        self.arenas = dict(limits.arena_slabs)
        work_on = {one.name: one.work for one in deployment.kv_classes}
        self.fiber = Fiber(world.agenda, self._live)
        self.line.fiber = self.fiber
        parts = pool_of(self.arenas, limits.num_slabs)
        scheduler = Noted(limits, lambda plan: world.plans.append((name, world.agenda.now_s, plan)))
        self.keep, runner = deployment.keep, Model
        if self.keep is not None:
            work_on, runner = {RAW_CLASS: self.keep.work}, EvictingModel
        model = runner(machine.cost, self.fiber.sleep, scheduler, work_on)
        if self.keep is not None:
            model.keep = self.keep  # type: ignore[attr-defined]
        self.engine = Engine(model, scheduler, self.holdings, model)
        extra = set(list_traits(self.engine, [] if self.keep is None else [RAW_CLASS])) - set(TRAITS)
        self.traits = (*deployment.traits, *extra)
        if world.stores:
            sizes = {name: toy_layout(name).chunk_bytes for name in self.arenas or (RAW_CLASS,)}
            reader = SimTiers(world.agenda, world.stores, self.holdings, sizes)
            restores = self.engine.restores = PrefixRestores(
                self.holdings, reader, sizes, self.engine.prefill_rate, self.engine.note_taken
            )
            self.line.deadline_s = lambda: restores.deadline_s
        self.part: WorkerRole
        if role == PREFILL:
            issuer = TicketIssuer(KEY, name, "1", FINGERPRINT, "xxh3")
            self.part = PrefillWorker(self.line, self.engine, self.holdings, parts, LeaseLedger(1e9), issuer)
        else:
            courier: Any = Courier(name, world.links, parts, self.line.send, self.line.wake_poll)
            self.part = DecodeWorker(
                self.line, self.engine, self.holdings, parts.layout_of, courier, KEY, FINGERPRINT
            )
        caching = FINGERPRINT if deployment.prefix_caching else ""
        clock = lambda: world.agenda.now_s  # noqa: E731
        codecs = {name: "" if name == RAW_CLASS else name for name in self.arenas or (RAW_CLASS,)}
        self.shell = WorkerLoop(
            self.line,
            self.engine,
            self.part,
            self.holdings,
            self.books,
            fingerprint=caching,
            codecs=codecs,
            clock=clock,
        )
        self.slabs = limits.num_slabs

    def _live(self) -> None:
        while True:
            self.shell.run_once()

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
            kv_classes={name: (count, toy_layout(name).chunk_bytes) for name, count in self.arenas.items()},
            keep_classes=[] if self.keep is None else [RAW_CLASS],
            traits=self.traits,
            keep_rules=() if self.keep is None else (self.keep.rule,),
        )


def pool_of(arenas: Mapping[str, int], num_slabs: int) -> ShardedPool:
    """The pool of a worker, with an arena for each class if it has several; the bytes are zeros."""
    if not arenas:
        return unsharded_pool(LAYOUT, VirtualMemory(num_slabs).bytes)
    classes = [(toy_layout(name), count) for name, count in arenas.items()]
    (_, (size,)) = plan_spans(classes, [WHOLE])
    return ShardedPool(classes[0][0], [(WHOLE, memoryview(bytearray(size)))], classes)


class World:
    """A deployment of one cell, served by real parts. `plans` and `relay.noted` say who decided what, and when."""

    def __init__(self, deployment: SimDeployment) -> None:
        self.deployment, self.agenda = deployment, EventQueue()
        self.agenda.now_s = 0.0
        self.links = SimLinks(self.agenda, deployment.link)
        self.stores = [SimTierStore(tier) for tier in deployment.tiers]
        self.plans: list[tuple[str, float, StepPlan]] = []
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
            overdraft=deployment.overdraft,
        )
        self.stations: dict[str, Station] = {}
        for pool, machine in zip(deployment.placement.pools, deployment.instances, strict=True):
            role = PREFILL if pool.role == PREFILL else "decode"
            for _ in range(pool.count):
                name = f"{role}-{sum(one.role == role for one in self.stations.values())}"
                self.stations[name] = Station(self, name, role, machine)
        self._beating = False

    def run(self, jobs: Iterable[Job]) -> None:
        """Serve all of them."""
        for station in self.stations.values():
            self._handle(WorkerSaid(station.name, station.hello))
        for target in [one for one in self.stations.values() if one.role != PREFILL]:
            for source in [one for one in self.stations.values() if one.role == PREFILL]:
                link = self.deployment.link
                said = Linked(source.name, "1", "virtual", link.bytes_per_s / 1e9, link.latency_s * 1e6)
                self._handle(WorkerSaid(target.name, said))
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
        self.agenda.at(self.agenda.now_s + self.deployment.hop_s, self._handle, WorkerSaid(worker, message))

    def _arrive(self, job: Job, number: int) -> None:
        request = Request(str(number), tokens_of(job, number), SamplingParams(job.output, 0), inf)
        request.entered_s[RequestStage.ADMITTED] = job.at_s
        request.kv_class = job.kv_class or None
        if self.deployment.keep is not None:
            request.keep = self.deployment.keep.spec
        self._handle(RequestArrived(request))
        if not self._beating:
            self._beating = True
            self.agenda.at(self.agenda.now_s + self.deployment.beat_s, self._beat)

    def _beat(self) -> None:
        for station in self.stations.values():
            self._handle(WorkerSaid(station.name, Heartbeat(station.name, "1", station.books.read_stats())))
        self._beating = bool(self.relay.live)
        if self._beating:
            self.agenda.at(self.agenda.now_s + self.deployment.beat_s, self._beat)

    def _handle(self, event: RelayEvent) -> None:
        now_s = self.agenda.now_s
        for effect in self.relay.handle_event(event, now_s):
            match effect:
                case SendMessage(worker, message):
                    if isinstance(message, Peer | Unpeer):
                        continue
                    self.agenda.at(now_s + self.deployment.hop_s, self.stations[worker].line.deliver, message)
                case DeliverTokens(request, output):
                    if output.tokens:
                        self.first_s.setdefault(request, now_s)
                case FinishRequest(request):
                    self.ended_s[request] = now_s


def tokens_of(job: Job, number: int) -> list[int]:
    """A prompt that shares with others what its job's `prefix` says, and no more."""
    blocks = [(1000 + name, place) for name in job.prefix for place in range(job.block_tokens)]
    own = [(10**6 + number, place) for place in range(job.prompt - len(blocks))]
    return [name * 1000 + place for name, place in (blocks + own)[: job.prompt]]
