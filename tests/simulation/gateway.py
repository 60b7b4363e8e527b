"""A gateway's life in virtual time: a real relay, driven as `services.gateway.generation.relay_backend`
drives it, and its clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from diptych.chunks import RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.messages import Prefill, ToGateway
from diptych.request import Request, SamplingParams, Tenancy
from router.effects import (
    AttemptBegan,
    AttemptRetried,
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
    WorkerDown,
    WorkerLost,
    WorkerSaid,
    WorkerUp,
)
from router.requests.relay import Relay
from tests.simulation.channel import VirtualHub, VirtualNetwork
from tests.simulation.event_queue import ScheduledEvent, VirtualEventQueue

TICK_S = 0.1


@dataclass(slots=True)
class VirtualClient:
    """Somebody who asked, what an undisturbed run would answer, and what has come. `end` is None while it waits."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    origin: Tenancy
    deadline_s: float
    wanted: tuple[list[int], str]
    asked_s: float
    got: list[int] = field(default_factory=list)
    end: str | None = None  # "stop", "length", "gone", "gateway", or the code of a failure
    ended_s: float = 0.0
    retried: list[str] = field(default_factory=list)
    retry: bool = False  # what a failure says about another try
    retry_after_s: float | None = None
    kv_class: str = RAW_CLASS
    asked_class: str | None = None  # the KV class that it asks for
    keep: KeepSpec = KEEP_ALL  # what may be dropped of its KV
    moved_on: bool = False  # its answer had begun when another attempt took over
    deferred: int = 0  # attempts whose first token was left to the decode worker


class VirtualGateway:
    """The gateway's process: one relay, one end of the channel, and whoever is connected.

    Clients whose answer has ended are appended to `over`.
    """

    def __init__(
        self,
        agenda: VirtualEventQueue,
        network: VirtualNetwork,
        relay: Relay,
        over: list[VirtualClient],
        wanted: Callable[[list[int], SamplingParams, str, KeepSpec], tuple[list[int], str]],
    ) -> None:
        """`wanted` tells what an undisturbed run would answer with KV of one class."""
        self._wanted = wanted
        self.agenda, self.relay, self._over = agenda, relay, over
        self.exchange = network.exchange = VirtualHub(network, self._hear)
        self.clients: dict[str, VirtualClient] = {}
        self.alive = True
        self.moved = 0
        self.effects: list[RelayEffect] = []  # of the last event, for whoever looks
        self._events: deque[RelayEvent] = deque()
        self._leaving: list[str] = []  # while the loop stands still
        self._busy = self.blocked = False
        self.went_on_s = agenda.now_s  # when the loop last went on after it had stood still
        self._ticking: ScheduledEvent | None = None
        self._tick()

    def ask(self, client: VirtualClient) -> None:
        request = Request(
            client.name, list(client.prompt), client.sampling, client.deadline_s,
            tenancy=client.origin, kv_class=client.asked_class, keep=client.keep,
        )  # fmt: skip
        self.clients[client.name] = client
        self.handle(RequestArrived(request))

    def leave(self, name: str) -> None:
        """The client hangs up."""
        if self.blocked:
            self._leaving.append(name)
        elif (client := self.clients.get(name)) is not None:
            self._ended(client, "gone")
            self.handle(ClientGone(name))

    def die(self) -> None:
        """SIGKILL: every connection is closed."""
        self.alive = False
        for client in list(self.clients.values()):
            self._ended(client, "gateway")

    def stop(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self.exchange.freeze()
        self.block(for_s, self.exchange.thaw)

    def block(self, for_s: float, after: Callable[[], None] = lambda: None) -> None:
        """The event loop stands still; the channel's I/O thread does not."""
        self.blocked = True
        self.exchange.block(True)
        self.agenda.schedule_after(for_s, partial(self._go_on, after), "the loop goes on")

    def _go_on(self, after: Callable[[], None]) -> None:
        if self.alive:
            self.blocked, self.went_on_s = False, self.agenda.now_s
            self._work()
            leaving, self._leaving = self._leaving, []
            for name in leaving:
                self.leave(name)
            self._tick()  # a timer that is due comes before what has arrived
            self.exchange.block(False)
            after()

    def _hear(self, worker: str, message: ToGateway) -> None:
        self.handle(WorkerSaid(worker, message))

    def _tick(self) -> None:
        if not self.alive or self.blocked:
            return
        for name in self.exchange.take_ended():
            if (member := self.relay.fleet.workers.get(name)) is not None:
                self.handle(WorkerLost(name, member.hello.incarnation))
        self.handle(ClockTick())
        if self._ticking is not None:
            self._ticking.cancel()
        self._ticking = self.agenda.schedule_after(TICK_S, self._tick, "tick")

    def handle(self, event: RelayEvent) -> None:
        """Let the relay decide and do what it says; events that arise meanwhile are queued."""
        self._events.append(event)
        if self._busy or self.blocked:
            return
        self._work()

    def _work(self) -> None:
        self._busy = True
        try:
            while self._events:
                self.effects = self.relay.handle_event(self._events.popleft(), self.agenda.now_s)
                for effect in self.effects:
                    self._do(effect)
        finally:
            self._busy = False

    def _lost(self, worker: str) -> None:
        if (member := self.relay.fleet.workers.get(worker)) is not None:
            self._events.append(WorkerLost(worker, member.hello.incarnation))

    def _do(self, effect: RelayEffect) -> None:
        match effect:
            case SendMessage(worker, message):
                if isinstance(message, Prefill) and message.request in self.clients:
                    self.clients[message.request].deferred += message.defer_first
                if not self.exchange.send(worker, message):
                    self._lost(worker)
            case DeliverTokens(request, output):
                if (client := self.clients.get(request)) is not None:
                    client.got += output.tokens or list(output.pooled)
            case FinishRequest(request, reason):
                self._end(request, reason)
            case FailRequest(request):
                if (client := self.clients.get(request)) is not None:
                    client.retry, client.retry_after_s = (
                        effect.failure.client_may_retry,
                        effect.failure.retry_after_s,
                    )
                self._end(request, effect.failure.code)
            case RequestCancelled(request):
                assert request not in self.clients, "only its client cancels a request"
            case AttemptRetried(request=request, code=code):
                if (client := self.clients.get(request)) is not None:
                    client.retried.append(code)
                    client.moved_on = client.moved_on or bool(client.got)
            case AttemptBegan(request=request):
                client, state = self.clients.get(request), self.relay.live.get(request)
                if (
                    client is not None
                    and state is not None
                    and state.attempt_version is not None
                    and not client.got
                ):
                    # With its first token an answer is bound to the class of this attempt.
                    client.kv_class = state.attempt_version.kv_class
                    client.wanted = self._wanted(client.prompt, client.sampling, client.kv_class, client.keep)
            case KvMoved():
                self.moved += 1
            case WorkerDown(worker):
                self.exchange.end_session(worker)
            case WorkerUp(worker):
                if not self.exchange.accept_session(worker, effect.link):
                    self._lost(worker)
            case RejectSession(worker, link, why):
                self.exchange.reject_session(worker, link, why)

    def _end(self, request: str, how: str) -> None:
        assert request in self.clients, f"{request} ends as {how}, and has ended before"
        self._ended(self.clients[request], how)

    def _ended(self, client: VirtualClient, how: str) -> None:
        assert client.end is None, f"{client.name} ended as {client.end}, and again as {how}"
        client.end, client.ended_s = how, self.agenda.now_s
        del self.clients[client.name]
        self._over.append(client)
