"""The gateway's end of the relay: real clock, real channel, and readers for what comes back.

One task hears the workers, one ticks; both, and every client's arrival and departure, go through `_handle`, one event
after the other, each with its effects done before the next. What only metrics and logs want to know is told to
`chronicle.Chronicle`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from diptych.books import Books, LinkSpeed
from diptych.channel import Hub
from diptych.errors import RequestError
from diptych.messages import Drain, Step, Turn
from diptych.metrics import Metrics
from diptych.request import Request
from router.effects import (
    Arrive,
    Cancelled,
    Choice,
    ClientGone,
    Command,
    Deliver,
    Down,
    Durations,
    Effect,
    Event,
    Fail,
    Finish,
    FromWorker,
    Moved,
    Send,
    Stop,
    Tick,
    Up,
    WorkerLost,
)
from router.relay import Relay
from router.verdicts import refused
from services.gateway.chronicle import Chronicle
from services.gateway.generation import Reader
from services.gateway.request_log import RequestLog

TICK_S = 0.1
SILENT_S = 2.0  # without a tick the loop is taken for dead

# What a client reads, by code; a worker's own words stay in the log. Other codes are the relay's, with its text.
TEXTS = {
    "internal_error": "the server failed on this request; its log has the details under the request id",
    "kv_transfer_failed": "the prompt's cache could not be moved to a decode worker",
    "out_of_memory": "a worker had no memory left for this request",
    "overloaded": "the workers have more to do than they can take",
    "invalid_grammar": "the grammar of 'response_format' cannot be served",
    "request_quarantined": "workers crashed whenever they worked on this request; it is refused for a while",
}
KINDS = {400: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}

log = logging.getLogger(__name__)


class RelayBackend:
    """Drives a `Relay` over a `Hub`. Implements `generation.Backend`."""

    def __init__(
        self,
        relay: Relay,
        hub: Hub,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        request_log: RequestLog | None = None,
    ) -> None:
        self.relay, self.hub, self.metrics, self.clock = relay, hub, metrics, clock
        self.proven_s: dict[tuple[str | None, str], float] = {}  # when KV last went this way
        self.heard_s: dict[str, float] = {}  # when a worker last sent tokens for a client's request
        self._chronicle = Chronicle(relay, metrics, request_log)
        self._readers: dict[str, Reader] = {}
        self._events: deque[Event] = deque()
        self._busy = False
        self._ticked_s = clock()

    async def run(self) -> None:
        """Hear and tick until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear())
            tasks.create_task(self._tick())

    @property
    def alive(self) -> bool:
        return self.clock() - self._ticked_s < SILENT_S

    def arrive(self, request: Request, reader: Reader) -> None:
        self._readers[request.id] = reader
        self._handle(Arrive(request))

    def probe(self, request: Request, reader: Reader, way: tuple[str | None, str]) -> None:
        """A canary through exactly these workers."""
        self._readers[request.id] = reader
        self._handle(Arrive(request, Choice(*way)))

    def leave(self, request: str) -> None:
        self._handle(ClientGone(request))

    def stop(self, request: str) -> None:
        self._handle(Stop(request))

    def command(self, worker: str, order: Drain | Turn) -> None:
        """An operator's order for a worker."""
        log.warning("worker %s is told to %s", worker, order)
        self._handle(Command(worker, order))

    def refusal(self, num_requests: int) -> RequestError | None:
        """Why so many requests would be refused now, whatever they ask for; None if that depends."""
        refusal = self.relay.admission.refusal(num_requests, 0, self.clock())
        if refusal is None:
            return None
        verdict = refused(refusal)
        return _error(Fail("", verdict.status, verdict.code, refusal.message, True, verdict.retry_after_s))

    def ways(self) -> list[tuple[str | None, str]]:
        """The (prefill, decode) pairs that can serve now; (None, decode) where one worker does both."""
        return self.relay.ways()

    @property
    def unfit(self) -> dict[str, str]:
        """Workers that cannot serve with any other, and why."""
        return self.relay.fleet.misfits()

    def books(self) -> Iterable[Books]:
        members = self.relay.fleet.members
        return [Books(name, members[name].role, members[name].stats) for name in sorted(members)]

    def links(self) -> Iterable[LinkSpeed]:
        return [
            LinkSpeed(source, member.name, tie.transport, tie.gb_per_s, tie.latency_us)
            for member in self.relay.fleet.role("decode")
            for source, tie in sorted(member.ties.items())
        ]

    async def _hear(self) -> None:
        while True:
            worker, message = await self.hub.recv()
            if isinstance(message, Step):
                self._progressed(worker, message)
            self._handle(FromWorker(worker, message))

    async def _tick(self) -> None:
        while True:
            self._ticked_s = self.clock()
            for worker in self.hub.gone():
                self._lost(worker, "its connection is closed")
            self._handle(Tick())
            self._chronicle.look(self.clock())
            await asyncio.sleep(TICK_S)

    def _lost(self, worker: str, reason: str) -> None:
        if (member := self.relay.fleet.members.get(worker)) is not None:
            self._handle(WorkerLost(worker, member.hello.incarnation, reason))

    def _handle(self, event: Event) -> None:
        """Let the relay decide and do what it says; events that arise meanwhile wait their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event, now_s = self._events.popleft(), self.clock()
                self._chronicle.happens(event)
                effects = self.relay.handle(event, now_s)
                come = {effect.worker for effect in effects if isinstance(effect, Up)}
                for effect in effects:
                    self._do(effect, come)
                    self._chronicle.note(effect, now_s)
        finally:
            self._busy = False

    def _do(self, effect: Effect, come: set[str]) -> None:
        match effect:
            case Send(worker, message):
                if not self.hub.send(worker, message):
                    self._lost(worker, "it cannot be reached")
            case Deliver(request, output):
                if reader := self._readers.get(request):
                    reader.deliver(output, self.clock())
            case Durations(request, seconds):
                if reader := self._readers.get(request):
                    reader.measure(seconds)
            case Finish(request, reason):
                if reader := self._readers.pop(request, None):
                    reader.finish(reason, self.clock())
            case Fail():
                if reader := self._readers.pop(effect.request, None):
                    reader.fail(_error(effect))
            case Cancelled(request):
                self._readers.pop(request, None)
            case Moved(_, source, target):
                self.proven_s[source, target] = self.clock()
            case Down(worker):
                self._down(worker, again=worker in come)

    def _progressed(self, worker: str, step: Step) -> None:
        """Tokens of clients keep coming from a worker: it is busy, not stuck. What canaries get says nothing."""
        if worker in self.relay.fleet.members:
            live = (self.relay.live.get(output.request) for output in step.outputs)
            if any(one is not None and not one.pinned for one in live):
                self.heard_s[worker] = self.clock()

    def _down(self, worker: str, again: bool) -> None:
        for way in [way for way in self.proven_s if worker in way]:
            del self.proven_s[way]
        self.heard_s.pop(worker, None)
        if not again:  # else the session is already that of its new life
            self.hub.forget(worker)


def _error(fail: Fail) -> RequestError:
    return RequestError(
        TEXTS.get(fail.code, fail.message),
        status=fail.status,
        kind=KINDS.get(fail.status, "server_error"),
        code=fail.code,
        retry=fail.retry,
        retry_after_s=fail.retry_after_s,
    )
