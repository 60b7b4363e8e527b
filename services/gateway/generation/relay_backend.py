"""Connects the relay, which only decides, to the outside: the clock, the channel to workers, and clients' sequences.

One task receives the workers' messages, another one ticks. Both, and every arrival and departure of a client, call
`_handle_event`, which handles one event after the other and applies all effects of an event before the next one.
`RelayTelemetry` gets each event and effect for metrics and logs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from diptych.channel.hub import ChannelHub
from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import SILENCE_S, Drain, Output, Step, SwitchRole
from diptych.request import Request
from router.effects import (
    AttemptBegan,
    ChosenPair,
    ClientGone,
    ClockTick,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    KvMoved,
    RejectSession,
    RelayEffect,
    RelayEvent,
    RequestArrived,
    RequestCancelled,
    SendMessage,
    StopFound,
    TelemetryEffect,
    WorkerCommand,
    WorkerDown,
    WorkerLost,
    WorkerSaid,
    WorkerUp,
)
from router.requests.relay import Relay
from router.routing.class_choice import ASKED, DEFAULT
from router.workers.kv_classes import pool_size, saved_chunk_bytes
from services.gateway.generation.generation import SequenceSink
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import FleetEvents
from services.gateway.metrics.request_log import RequestLog
from services.gateway.metrics.telemetry import RelayTelemetry
from services.gateway.metrics.workers import LinkSpeed, WorkerSnapshot
from services.gateway.openai.schemas.response_schema import KvDetails

TICK_S = 0.1

# What clients see in place of a worker's own text, which is only logged. For other reasons clients see the relay's
# text.
PUBLIC_TEXTS = {
    FailureReason.INTERNAL_ERROR: "the server failed on this request; its log has the details under the request id",
    FailureReason.KV_TRANSFER_FAILED: "the prompt's KV cache could not be moved to a decode worker",
    FailureReason.OUT_OF_MEMORY: "a worker had no memory left for this request",
    FailureReason.OVERLOADED: "the workers have more to do than they can take",
    FailureReason.INVALID_GRAMMAR: "the grammar of 'response_format' cannot be served",
    FailureReason.NO_TOKEN_LEFT: (
        "'allowed_token_ids', 'bad_words' and 'min_tokens' leave no token that may come next; ban less, or allow more"
    ),
    FailureReason.REQUEST_QUARANTINED: (
        "workers crashed whenever they worked on this request; it is refused for a while"
    ),
}

log = logging.getLogger(__name__)


class RelayBackend:
    """Runs a `Relay` over a `ChannelHub`. Implements `GenerationBackend`."""

    def __init__(
        self,
        relay: Relay,
        hub: ChannelHub,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
        request_log: RequestLog | None = None,
    ) -> None:
        self.relay, self.hub, self.metrics, self.clock = relay, hub, metrics, clock
        # The time at which KV of a class last moved to or from a worker, which proves that the worker works for this
        # class: (worker, KV class) -> seconds on the clock.
        self.proven_s: dict[tuple[str, str], float] = {}
        # The time at which each worker last sent tokens for a client's request.
        self.last_message_s: dict[str, float] = {}
        self._telemetry = RelayTelemetry(relay, metrics, request_log)
        self._sinks: dict[str, SequenceSink] = {}
        # The prompt log-probabilities of each request that have been received so far.
        self._pieces: dict[str, Output] = {}
        self._events: deque[RelayEvent] = deque()
        self._busy = False
        self._ticked_s = clock()
        # Number of ticks. The loop watchdog checks that it grows.
        self.ticks = 0

    async def run_tasks(self) -> None:
        """Receive messages and tick, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive_messages())
            tasks.create_task(self._tick_forever())

    @property
    def is_alive(self) -> bool:
        """Whether the ticking task ran within the last `SILENCE_S` seconds."""
        return self.clock() - self._ticked_s < SILENCE_S

    def submit_requests(self, asked_requests: Sequence[tuple[Request, SequenceSink]]) -> None:
        """Hand the sequences of one HTTP request, each with its sink, to the relay: all of them or none."""
        self._sinks.update((request.id, sink) for request, sink in asked_requests)
        requests = [request for request, _ in asked_requests]
        self._handle_event(RequestArrived(requests[0], others=tuple(requests[1:])))

    def submit_canary(self, request: Request, sink: SequenceSink, pair: tuple[str | None, str]) -> None:
        """Send a canary through exactly one (prefill, decode) pair of workers; the request names its KV class."""
        self._sinks[request.id] = sink
        self._handle_event(RequestArrived(request, ChosenPair(*pair)))

    def cancel_request(self, request: str, *others: str) -> None:
        """Report to the relay that the client of these sequences has left; the relay cancels them."""
        self._handle_event(ClientGone(request, others))

    def stop_request(self, request: str) -> None:
        """Report to the relay that the gateway found a stop string; the relay ends the sequence."""
        self._handle_event(StopFound(request))

    def send_order(self, worker: str, order: Drain | SwitchRole) -> None:
        """Pass an operator's order for a worker to the relay."""
        log.warning("worker %s gets the order %s", worker, order)
        self._handle_event(WorkerCommand(worker, order))

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        """Why `num_requests` requests of `tenant`, however short, would be refused now; None if they would not be."""
        return self.relay.admission.find_refusal(num_requests, 0, self.clock(), tenant)

    def mark_proven(self, pair: tuple[str | None, str], kv_class: str) -> None:
        """Record that KV of a class has just moved between this pair of workers, so both of them work for it."""
        members = self.relay.fleet.workers
        self.proven_s.update({(worker, kv_class): self.clock() for worker in pair if worker in members})

    def worker_pairs(self) -> list[tuple[str | None, str]]:
        """The (prefill, decode) pairs that can serve now; (None, decode) where one worker does both."""
        return self.relay.find_pairs()

    def classes_of_pair(self, pair: tuple[str | None, str]) -> list[str]:
        """The KV classes that a pair of `worker_pairs` can serve, the default one first."""
        return self.relay.capabilities.classes_of_pair(pair)

    @property
    def unfit_workers(self) -> dict[str, str]:
        """Workers that cannot serve with any other, and why."""
        return self.relay.fleet.find_mismatches()

    @property
    def bulk_report(self) -> dict[str, Any]:
        """Bulk work: open sequences, and tokens since the start."""
        return self._telemetry.bulk.report()

    @property
    def fleet_events(self) -> FleetEvents:
        """The latest workers that came up or were lost."""
        return self._telemetry.fleet_events

    def worker_stats(self) -> Iterable[WorkerSnapshot]:
        """The latest statistics of every worker, by name."""
        members = self.relay.fleet.workers
        return [
            WorkerSnapshot(
                name, one.role, one.stats, one.hello.kv_classes, one.hello.identity.get("device", "cpu")
            )
            for name, one in sorted(members.items())
        ]

    def link_speeds(self) -> Iterable[LinkSpeed]:
        """The measured speed of every link between a prefill and a decode worker, and the KV moved over it."""
        moved = self._telemetry.moved_bytes
        return [
            LinkSpeed(
                source,
                member.name,
                tie.transport,
                tie.gb_per_s,
                tie.latency_us,
                moved.get((source, member.name), 0),
            )
            for member in self.relay.fleet.workers_of("decode")
            for source, tie in sorted(member.links.items())
        ]

    async def _receive_messages(self) -> None:
        """Pass the workers' messages to the relay, for ever."""
        while True:
            worker, message = await self.hub.receive_message()
            if isinstance(message, Step):
                self._on_step(worker, message)
            self._handle_event(WorkerSaid(worker, message))

    async def _tick_forever(self) -> None:
        """Every `TICK_S`, report closed connections and the time to the relay, and update the gauges."""
        while True:
            self._ticked_s = self.clock()
            self.ticks += 1
            for worker in self.hub.take_ended():
                self._on_worker_lost(worker, "its connection is closed")
            self._handle_event(ClockTick())
            self._telemetry.update_gauges(self.clock())
            await asyncio.sleep(TICK_S)

    def _on_worker_lost(self, worker: str, reason: str) -> None:
        """Report a lost worker to the relay, unless the relay has removed it already."""
        if (member := self.relay.fleet.workers.get(worker)) is not None:
            self._handle_event(WorkerLost(worker, member.hello.incarnation, reason))

    def _handle_event(self, event: RelayEvent) -> None:
        """Pass an event to the relay and apply its effects. Events that arise meanwhile are queued."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event, now_s = self._events.popleft(), self.clock()
                self._telemetry.on_event(event)
                effects = self.relay.handle_event(event, now_s)
                for effect in effects:
                    self._record_effect(effect, now_s)
                    self._apply_effect(effect)
                    self._telemetry.on_effect(effect, now_s)
        finally:
            self._busy = False

    def _apply_effect(self, effect: RelayEffect) -> None:
        """Carry out one effect: send a message, pass output to a sink, or update what is known of a worker."""
        match effect:
            case SendMessage(worker, message):
                if not self.hub.send(worker, message):
                    self._on_worker_lost(worker, "it cannot be reached")
            case DeliverTokens(request, output):
                whole = self._join_prompt_logprobs(output)
                if whole is not None and (sink := self._sinks.get(request)):
                    sink.deliver_output(whole, self.clock())
            case AttemptBegan(request):
                if sink := self._sinks.get(request):
                    sink.record_kv_class(effect.kv_class, effect.kv_reason, self._kv_details(effect))
            case FinishRequest(request, reason):
                self._pieces.pop(request, None)
                if sink := self._sinks.pop(request, None):
                    sink.finish_sequence(reason, self.clock())
            case FailRequest(request, failure):
                self._pieces.pop(request, None)
                if sink := self._sinks.pop(request, None):
                    sink.fail_sequence(hide_worker_text(failure))
            case RequestCancelled(request):
                self._pieces.pop(request, None)
                self._sinks.pop(request, None)
            case KvMoved(_, source, target):
                self.mark_proven((source, target), effect.kv_class)
            case WorkerDown(worker):
                self._forget_worker(worker)
            case WorkerUp(worker):
                if not self.hub.accept_session(worker, effect.link):
                    self._on_worker_lost(worker, "its connection is closed")
            case RejectSession():
                self.hub.reject_session(effect.link, effect.why)

    def _record_effect(self, effect: RelayEffect, now_s: float) -> None:
        """Pass on to a sequence what the relay reports about it."""
        if isinstance(effect, TelemetryEffect) and (sink := self._sinks.get(effect.request)):
            sink.record_effect(effect, now_s)

    def _kv_details(self, began: AttemptBegan) -> KvDetails | None:
        """What an answer says about the KV of an attempt; None for `raw`, unless the router chose it or it evicts."""
        worker_state, state = (
            self.relay.fleet.workers.get(began.pair.decode),
            self.relay.live.get(began.request),
        )
        evicts = state is not None and state.request.keep.evicts
        plain = began.kv_class == RAW_CLASS and began.kv_reason in (ASKED, DEFAULT) and not evicts
        if plain or worker_state is None:
            return None
        coded = pool_size(worker_state.hello, began.kv_class).chunk_bytes
        saved = saved_chunk_bytes(worker_state.hello, began.kv_class) // CHUNK_TOKENS
        return KvDetails(began.kv_class, coded // CHUNK_TOKENS, saved, began.kv_reason)

    def _join_prompt_logprobs(self, output: Output) -> Output | None:
        """Join a prompt's log-probabilities, which a worker may send in several messages (`pack_pieces`).

        Returns None until the last part is there.
        """
        before = self._pieces.pop(output.request, None)
        if before is not None and before.epoch == output.epoch:
            scores = (before.prompt_logprobs or []) + (output.prompt_logprobs or [])
            output = structs.replace(output, prompt_logprobs=scores)
        if output.tokens or output.finish is not None or not output.prompt_logprobs:
            return output
        self._pieces[output.request] = output
        return None

    def _on_step(self, worker: str, step: Step) -> None:
        """Note that a worker still sends tokens to clients: it is busy, not stuck. Tokens of canaries do not count."""
        if worker in self.relay.fleet.workers:
            live = (self.relay.live.get(output.request) for output in step.outputs)
            if any(one is not None and not one.pinned for one in live):
                self.last_message_s[worker] = self.clock()

    def _forget_worker(self, worker: str) -> None:
        """Remove what is known of a worker, and end its session."""
        self.proven_s = {key: at for key, at in self.proven_s.items() if key[0] != worker}
        self.last_message_s.pop(worker, None)
        self.hub.end_session(worker)


def hide_worker_text(failure: RequestFailure) -> RequestFailure:
    """The failure as its client sees it: a worker's own text becomes its `cause`, which is only logged."""
    if failure.reason not in PUBLIC_TEXTS:
        return failure
    return replace(failure, message=PUBLIC_TEXTS[failure.reason], cause=failure.message)
