"""A gateway's life in virtual time: a real relay, driven as `services.gateway.backend` drives it, and its clients."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diptych.messages import ToGateway
from diptych.request import Origin, Request, Sampling
from router.effects import (
    Arrive,
    Cancelled,
    ClientGone,
    Deliver,
    Down,
    Effect,
    Event,
    Fail,
    Finish,
    FromWorker,
    Moved,
    Retried,
    Send,
    Tick,
    Up,
    WorkerLost,
)
from router.relay import Relay
from tests.simulation.agenda import Agenda
from tests.simulation.channel import Exchange, Network

TICK_S = 0.1


@dataclass(slots=True)
class Client:
    """Somebody who asked, what an undisturbed run would answer, and what has come. `end` is None while it waits."""

    name: str
    prompt: list[int]
    sampling: Sampling
    origin: Origin
    deadline_s: float
    wanted: tuple[list[int], str]
    asked_s: float
    got: list[int] = field(default_factory=list)
    end: str | None = None  # "stop", "length", "gone", "gateway", or the code of a failure
    ended_s: float = 0.0
    retried: list[str] = field(default_factory=list)
    retry: bool = False  # what a failure says about another try
    retry_after_s: float | None = None
    moved_on: bool = False  # its answer had begun when another attempt took over


class Gate:
    """The gateway's process: one relay, one end of the channel, and whoever is connected.

    Clients whose answer has ended are appended to `over`.
    """

    def __init__(self, agenda: Agenda, network: Network, relay: Relay, over: list[Client]) -> None:
        self.agenda, self.relay, self._over = agenda, relay, over
        self.exchange = network.exchange = Exchange(network, self._hear)
        self.clients: dict[str, Client] = {}
        self.alive = True
        self.moved = 0
        self.effects: list[Effect] = []  # of the last event, for whoever looks
        self._events: deque[Event] = deque()
        self._busy = False
        self._tick()

    def ask(self, client: Client) -> None:
        request = Request(
            client.name, list(client.prompt), client.sampling, client.deadline_s, origin=client.origin
        )
        self.clients[client.name] = client
        self.handle(Arrive(request))

    def leave(self, name: str) -> None:
        """The client hangs up."""
        if (client := self.clients.get(name)) is not None:
            self._ended(client, "gone")
            self.handle(ClientGone(name))

    def die(self) -> None:
        """SIGKILL: every connection is closed."""
        self.alive = False
        for client in list(self.clients.values()):
            self._ended(client, "gateway")

    def _hear(self, worker: str, message: ToGateway) -> None:
        self.handle(FromWorker(worker, message))

    def _tick(self) -> None:
        if not self.alive:
            return
        for name in self.exchange.gone():
            if (member := self.relay.fleet.members.get(name)) is not None:
                self.handle(WorkerLost(name, member.hello.incarnation))
        self.handle(Tick())
        self.agenda.after(TICK_S, self._tick, "tick")

    def handle(self, event: Event) -> None:
        """Let the relay decide and do what it says; events that arise meanwhile wait their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self.effects = self.relay.handle(self._events.popleft(), self.agenda.now_s)
                come = {effect.worker for effect in self.effects if isinstance(effect, Up)}
                for effect in self.effects:
                    self._do(effect, come)
        finally:
            self._busy = False

    def _do(self, effect: Effect, come: set[str]) -> None:
        match effect:
            case Send(worker, message):
                if not self.exchange.send(worker, message) and (
                    member := self.relay.fleet.members.get(worker)
                ):
                    self._events.append(WorkerLost(worker, member.hello.incarnation))
            case Deliver(request, output):
                if (client := self.clients.get(request)) is not None:
                    client.got += output.tokens
            case Finish(request, reason):
                self._end(request, reason)
            case Fail(request):
                if (client := self.clients.get(request)) is not None:
                    client.retry, client.retry_after_s = effect.retry, effect.retry_after_s
                self._end(request, effect.code)
            case Cancelled(request):
                assert request not in self.clients, "only its client cancels a request"
            case Retried(request=request, code=code):
                if (client := self.clients.get(request)) is not None:
                    client.retried.append(code)
                    client.moved_on = client.moved_on or bool(client.got)
            case Moved():
                self.moved += 1
            case Down(worker):
                if worker not in come:
                    self.exchange.forget(worker)

    def _end(self, request: str, how: str) -> None:
        assert request in self.clients, f"{request} ends as {how}, and has ended before"
        self._ended(self.clients[request], how)

    def _ended(self, client: Client, how: str) -> None:
        assert client.end is None, f"{client.name} ended as {client.end}, and again as {how}"
        client.end, client.ended_s = how, self.agenda.now_s
        del self.clients[client.name]
        self._over.append(client)
