"""Simulates a gateway: runs the real relay (router.requests.relay) and delays messages to and from workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from typing import Any, cast

from diptych.chunks import RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.messages import Heartbeat, Hello, Linked, Output, Prefill, Step
from diptych.request import TRAITS, Request, RequestStage, SamplingParams
from planner.sim.exact.cores import GatewayProcessor, SimCores
from planner.sim.exact.engine import SimOutput, SimSequence
from planner.sim.exact.event_queue import EventQueue
from planner.sim.exact.prompts import SimPrompt, chunk_names
from planner.sim.exact.worker import OrderMessage, SimOrder, SimWorker
from planner.types import GatewayCpuCost, Job, JobResult, LinkSpec
from router.effects import (
    ClockTick,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    KvMoved,
    RelayEffect,
    RelayEvent,
    RequestArrived,
    RequestCancelled,
    SendMessage,
    StageDurations,
    WorkerSaid,
)
from router.requests.relay import Relay
from router.routing.credits import round_up_to_chunks
from router.routing.prefix_index import ChunkNames

# Every simulated worker has this incarnation, since it never restarts.
INCARNATION = "1"
FINGERPRINT = "simulated"
TICK_S = 0.1


@cache
def _sampling_params(max_tokens: int) -> SamplingParams:
    """Sampling parameters with this limit; cached, since most requests have one of few limits."""
    return SamplingParams(max_tokens, 0)


def _class_pools(worker: SimWorker) -> dict[str, tuple[int, int]]:
    """The pool of each KV class, as a `Hello` names them; empty for a worker with one class."""
    slabs: Counter[str] = Counter()
    for engine in worker.engines:
        slabs.update(engine.limits.arena_slabs)
    return {name: (slabs[name], size) for name, size in worker.chunk_bytes.items() if name in slabs}


@dataclass(slots=True)
class _SimOpenRequest:
    """A request that has not ended: when its first token was delivered, its latency by stage, and its moved KV."""

    job: Job
    names: ChunkNames
    first_s: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SimGatewaySpec:
    """The delays and limits of a simulated gateway.

    A request takes `gateway_s` seconds until it reaches the relay; a message to or from a worker takes `hop_s`.
    Requests fail after `timeout_s`. `max_tokens` is what clients ask for (None: exactly the length of their answer).
    `beat_s` is the interval of workers' heartbeats. `cpu_cost` is the gateway's CPU cost; None: CPU work takes no time.
    With `several_classes`, requests ask for the KV class of their job; else the workers have one for all.
    """

    gateway_s: float = 0.0
    hop_s: float = 0.0
    timeout_s: float = inf
    max_tokens: int | None = None
    max_model_len: int = 1 << 20
    beat_s: float = 0.25
    caching: bool = False
    cpu_cost: GatewayCpuCost | None = None
    several_classes: bool = False
    # What all requests keep of their KV.
    keep: KeepSpec = KEEP_ALL


class SimGateway:
    """A relay with its simulated workers. `ended` is called once for every request."""

    def __init__(
        self,
        events: EventQueue,
        relay: Relay,
        spec: SimGatewaySpec,
        devices: int,
        ended: Callable[[JobResult], None],
        cores: SimCores,
    ) -> None:
        self.events, self.relay, self.spec, self.devices, self._ended = events, relay, spec, devices, ended
        self.workers: dict[str, SimWorker] = {}
        # Number of requests that were routed to this gateway and have not reached the relay yet.
        self.coming = 0
        self._processor = GatewayProcessor(cores)
        # Arrival time of the last message by direction ("to w" or "from w").
        self._last_s: dict[str, float] = {}
        self._open: dict[str, _SimOpenRequest] = {}
        self._beating = self._ticking = False

    @property
    def load(self) -> float:
        """Requests per device; the front sends each request to the gateway with the least."""
        return (len(self._open) + self.coming) / self.devices

    @property
    def open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    # ---- workers

    def add_worker(
        self, worker: SimWorker, num_slabs: int, max_model_len: int, traits: tuple[str, ...] = TRAITS
    ) -> None:
        """Registers a worker with the relay, as its `Hello` does."""
        self.workers[worker.name] = worker
        endpoints = {"simulated": b"1"} if worker.role == "prefill" else {}
        hello = Hello(
            worker.name,
            worker.role,
            INCARNATION,
            FINGERPRINT,
            {},
            "simulated",
            len(self.workers),
            num_slabs,
            next(iter(worker.chunk_bytes.values())),
            max_model_len,
            endpoints,
            kv_classes=_class_pools(worker),
            keep_classes=[RAW_CLASS] if self.spec.keep.evicts else [],
            traits=traits,
            keep_rules=(self.spec.keep.rule,),
        )
        self._handle_event(WorkerSaid(worker.name, hello))

    def add_link(self, source: str, target: str, link: LinkSpec) -> None:
        """Tells the relay that `target` can pull KV from `source`."""
        linked = Linked(source, INCARNATION, "simulated", link.bytes_per_s / 1e9, link.latency_s * 1e6)
        self._handle_event(WorkerSaid(target, linked))

    def on_message(self, worker: str, what: Any, at_s: float) -> None:
        """Schedules a message that `worker` sends at `at_s` (now or later); it arrives `hop_s` later."""
        call = self._handle_message if self.spec.cpu_cost is None else self._on_arrival
        self.events.at(at_s + self.spec.hop_s, call, worker, what)

    def _on_arrival(self, worker: str, what: Any) -> None:
        """A message would arrive now on an idle machine; busy cores delay it further."""
        self.events.at(
            self._arrival_time(f"from {worker}", self.spec.hop_s), self._queue_message, worker, what
        )

    def _queue_message(self, worker: str, what: Any) -> None:
        """A message has arrived; it is handled when the gateway's CPU has done all earlier work.

        Only lists of tokens cost CPU time; other messages are cheap.
        """
        cpu_cost = self.spec.cpu_cost
        assert cpu_cost is not None, "messages are queued only if CPU work is simulated"
        work_s = cpu_cost.message_s + len(what) * cpu_cost.token_s if isinstance(what, list) else 0.0
        self.events.at(self._processor.done_s(self.events.now_s, work_s), self._handle_message, worker, what)

    def _arrival_time(self, whose: str, way_s: float) -> float:
        """When a message with delay `way_s` arrives, given busy cores. Messages of one direction keep their order."""
        now_s = self.events.now_s
        at_s = now_s + way_s * (self._processor.cores.stretch(now_s) - 1.0)
        at_s = self._last_s[whose] = max(at_s, self._last_s.get(whose, at_s))
        return at_s

    def _handle_message(self, worker: str, what: Any) -> None:
        """Passes a worker's message to the relay. A callable gives its message now; a list holds step outputs."""
        if callable(what):
            what = what()
        if isinstance(what, list):
            if outputs := [output for one in what if (output := self._make_output(one)) is not None]:
                self._handle_event(WorkerSaid(worker, Step(outputs)))
        else:
            self._handle_event(WorkerSaid(worker, what))

    def _make_output(self, output: SimOutput) -> Output | None:
        """The relay's message for tokens since the last one; None if there is nothing new."""
        seq = output.seq
        state = self.relay.live.get(seq.id)
        known = len(state.request.output) if state is not None else output.output
        if output.output == known and not output.finish and not output.held:
            return None
        tokens = [0] * (output.output - known)
        return Output(
            seq.id, seq.epoch, tokens, finish=output.finish, seconds=output.seconds, kept=output.kept
        )

    def _send_heartbeats(self) -> None:
        """Delivers a heartbeat of every worker, and schedules the next ones while requests are open."""
        now_s = self.events.now_s
        for worker in self.workers.values():
            self._handle_event(WorkerSaid(worker.name, Heartbeat(worker.name, INCARNATION, worker.stats)))
        self._beating = bool(self._open)
        if self._beating:
            self.events.at(now_s + self.spec.beat_s, self._send_heartbeats)

    def _on_tick(self) -> None:
        """Lets the relay check timeouts, and schedules the next check while requests are open."""
        self._handle_event(ClockTick())
        self._ticking = bool(self._open)
        if self._ticking:
            self.events.at(self.events.now_s + TICK_S, self._on_tick)

    # ---- requests

    def arrive(self, job: Job, number: int) -> None:
        """A request would enter the relay now on an idle machine; busy cores and the CPU's queue delay it."""
        cpu_cost = self.spec.cpu_cost
        if cpu_cost is None:
            self._enter_request(job, number)
            return
        now_s = self.events.now_s
        at_s = now_s + self.spec.gateway_s * (self._processor.cores.stretch(now_s) - 1.0)
        self.events.at(at_s, self._wait_for_cpu, job, number)

    def _wait_for_cpu(self, job: Job, number: int) -> None:
        """Queues the CPU work of an arriving request; the request enters the relay when that is done."""
        cpu_cost = self.spec.cpu_cost
        assert cpu_cost is not None, "requests are queued only if CPU work is simulated"
        at_s = self._processor.done_s(self.events.now_s, cpu_cost.request_s / 2.0)
        self.events.at(at_s, self._enter_request, job, number)

    def _enter_request(self, job: Job, number: int) -> None:
        """Hands the request to the relay, or fails it if it does not fit the context length."""
        spec, now_s, name = self.spec, self.events.now_s, str(number)
        self.coming -= 1
        asked = job.output if spec.max_tokens is None else max(job.output, spec.max_tokens)
        most = min(asked, spec.max_model_len - job.prompt)
        if most < job.output or job.prompt < 1:
            self._ended(JobResult(job, inf, inf, now_s, "context_length_exceeded"))
            return
        open_request = self._open[name] = _SimOpenRequest(
            job, chunk_names(job, number) if spec.caching else ()
        )
        prompt = cast(list[int], SimPrompt(job.prompt))
        output = cast(list[int], SimPrompt(0))
        request = Request(name, prompt, _sampling_params(most), job.at_s + spec.timeout_s, output)
        request.keep, request.chunks = spec.keep, open_request.names
        if spec.several_classes:
            request.kv_class = job.kv_class or None
        request.entered_s[RequestStage.ADMITTED] = job.at_s
        self._handle_event(RequestArrived(request))
        self._keep_time()

    def _keep_time(self) -> None:
        """Starts heartbeats and timeout checks, which stop by themselves when no request is open."""
        if not self._open:
            return
        if not self._beating:
            self._beating = True
            self.events.at(self.events.now_s + self.spec.beat_s, self._send_heartbeats)
        if not self._ticking and self.spec.timeout_s < inf:
            self._ticking = True
            self.events.at(self.events.now_s + TICK_S, self._on_tick)

    def _make_order(self, order: OrderMessage) -> SimOrder:
        """Wraps a relay's order for a simulated worker, which needs lengths and chunk names in place of tokens."""
        open_request, state = self._open[order.request], self.relay.live.get(order.request)
        quiet = round_up_to_chunks(open_request.job.prompt + (state.expected_tokens if state else 0))
        return SimOrder(order, partial(self._make_sequence, order, open_request, quiet))

    def _make_sequence(self, order: OrderMessage, open_request: _SimOpenRequest, quiet: int) -> SimSequence:
        """The sequence that an order asks for, made at the moment when the worker receives the order."""
        job = open_request.job
        return SimSequence(
            order.request,
            order.epoch,
            cast(list[int], range(job.prompt)),
            order.sampling,
            self.events.now_s + order.remaining_s,
            output=cast(list[int], range(len(order.output))),
            hold_kv=isinstance(order, Prefill),
            stage=isinstance(order, Prefill) and order.stage,
            defer_first=isinstance(order, Prefill) and order.defer_first,
            tenancy=order.tenancy,
            keys=list(open_request.names),
            max_output=job.output,
            size=job.prompt,
            quiet=quiet,
            kv_class=order.kv_class,
            keep=order.keep,
            cuts_kept=isinstance(order, Prefill) and order.cuts_kept,
        )

    # ---- the relay

    def _handle_event(self, event: RelayEvent) -> None:
        """Passes an event to the relay and carries out the effects that it returns."""
        now_s = self.events.now_s
        for effect in self.relay.handle_event(event, now_s):
            if (act := EFFECT_HANDLERS.get(type(effect))) is not None:
                act(self, effect, now_s)

    def _send_to_worker(self, effect: SendMessage, now_s: float) -> None:
        """Schedules the delivery of a relay's message to a worker."""
        message = effect.message
        sent = self._make_order(message) if isinstance(message, OrderMessage) else message
        receive = self.workers[effect.worker].receive
        if self.spec.cpu_cost is None:
            self.events.at(now_s + self.spec.hop_s, receive, sent)
        else:
            self.events.at(now_s + self.spec.hop_s, self._reach_worker, effect.worker, sent)

    def _reach_worker(self, worker: str, message: Any) -> None:
        """Delivers a message that an idle machine would deliver now; a busy one delays it."""
        self.events.at(
            self._arrival_time(f"to {worker}", self.spec.hop_s), self.workers[worker].receive, message
        )

    def _on_deliver(self, effect: DeliverTokens, now_s: float) -> None:
        """Notes when the first token is delivered."""
        open_request = self._open[effect.request]
        if open_request.first_s is None and effect.output.tokens:
            open_request.first_s = now_s

    def _on_durations(self, effect: StageDurations, _now_s: float) -> None:
        """Notes how long the stages of the request took."""
        self._open[effect.request].parts.update(effect.seconds)

    def _on_moved(self, effect: KvMoved, _now_s: float) -> None:
        """Notes how much KV of the request was moved."""
        if (open_request := self._open.get(effect.request)) is not None:
            open_request.moved_bytes += effect.num_bytes

    def _on_end(self, effect: FinishRequest | FailRequest | RequestCancelled, now_s: float) -> None:
        """Ends a request that has finished, failed or been cancelled."""
        code = effect.failure.code if isinstance(effect, FailRequest) else ""
        self._close_request(
            effect.request, now_s, "cancelled" if isinstance(effect, RequestCancelled) else code
        )

    def _close_request(self, request: str, now_s: float, failed: str) -> None:
        """Reports the request's result; `failed` is the reason ("" for success)."""
        open_request = self._open.pop(request)
        job = open_request.job
        if (cpu_cost := self.spec.cpu_cost) is not None:
            self._processor.done_s(now_s, cpu_cost.request_s / 2.0)
        if failed:
            self._ended(JobResult(job, inf, inf, now_s, failed, open_request.parts, open_request.moved_bytes))
            return
        first_s = now_s if open_request.first_s is None else open_request.first_s
        tpot_s = (now_s - first_s) / (job.output - 1) if job.output > 1 else 0.0
        self._ended(
            JobResult(
                job, first_s - job.at_s, tpot_s, now_s, "", open_request.parts, open_request.moved_bytes
            )
        )


# Effects that are not listed (logs, metrics) are ignored.
EFFECT_HANDLERS: dict[type[RelayEffect], Callable[..., None]] = {
    SendMessage: SimGateway._send_to_worker,
    DeliverTokens: SimGateway._on_deliver,
    StageDurations: SimGateway._on_durations,
    KvMoved: SimGateway._on_moved,
    FinishRequest: SimGateway._on_end,
    FailRequest: SimGateway._on_end,
    RequestCancelled: SimGateway._on_end,
}
