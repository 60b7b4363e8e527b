"""The gateway's end of the relay: real clock, real channel, and readers for what comes back.

One task hears the workers, one ticks; both, and every client's arrival and departure, go through `_handle`, one event
after the other, each with its effects done before the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from diptych.channel import Hub
from diptych.errors import RequestError
from diptych.messages import Step
from diptych.metrics import Books, LinkSpeed, Metrics
from diptych.request import Request
from router.effects import (
    Arrive,
    Cancelled,
    Choice,
    ClientGone,
    Deliver,
    Down,
    Durations,
    Effect,
    Event,
    Fail,
    Finish,
    FromWorker,
    Moved,
    Retried,
    Send,
    Stop,
    Tick,
    Unfit,
    Up,
    WorkerLost,
)
from router.relay import Relay
from services.gateway.generation import Reader

TICK_S = 0.1
SILENT_S = 2.0  # without a tick the loop is taken for dead

# What a client reads, by code; a worker's own words stay in the log. Other codes are the relay's, with its text.
TEXTS = {
    "internal_error": "the server failed on this request; its log has the details under the request id",
    "kv_transfer_failed": "the prompt's cache could not be moved to a decode worker",
    "out_of_memory": "a worker had no memory left for this request",
    "overloaded": "the workers have more to do than they can take",
    "invalid_grammar": "the grammar of 'response_format' cannot be served",
}
KINDS = {400: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}

log = logging.getLogger(__name__)


class RelayBackend:
    """Drives a `Relay` over a `Hub`. Implements `generation.Backend`."""

    def __init__(
        self, relay: Relay, hub: Hub, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.relay, self.hub, self.metrics, self.clock = relay, hub, metrics, clock
        self.unfit: dict[str, str] = {}  # worker -> why it cannot serve with the others
        self.proven_s: dict[tuple[str | None, str], float] = {}  # when KV last went this way
        self.heard_s: dict[str, float] = {}  # when a worker last sent tokens for a client's request
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

    def ways(self) -> list[tuple[str | None, str]]:
        """The (prefill, decode) pairs that can serve now; with no prefill pool, (None, decode)."""
        if self.relay.split:
            return list(self.relay.fleet.pairs())
        return [(None, member.name) for member in self.relay.fleet.role("decode") if not member.draining]

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
            self._handle(Tick())
            await asyncio.sleep(TICK_S)

    def _handle(self, event: Event) -> None:
        """Let the relay decide and do what it says; events that arise meanwhile wait their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                effects = self.relay.handle(self._events.popleft(), self.clock())
                come = {effect.worker for effect in effects if isinstance(effect, Up)}
                for effect in effects:
                    self._do(effect, come)
        finally:
            self._busy = False

    def _do(self, effect: Effect, come: set[str]) -> None:
        match effect:
            case Send(worker, message):
                if not self.hub.send(worker, message) and (member := self.relay.fleet.members.get(worker)):
                    self._events.append(WorkerLost(worker, member.hello.incarnation))
            case Deliver(request, output):
                if reader := self._readers.get(request):
                    reader.deliver(output, self.clock())
            case Finish(request, reason):
                if reader := self._readers.pop(request, None):
                    reader.finish(reason, self.clock())
            case Fail():
                self._fail(effect)
            case Cancelled(request):
                self._readers.pop(request, None)
            case _:
                self._note(effect, come)

    def _progressed(self, worker: str, step: Step) -> None:
        """Tokens of clients keep coming from a worker: it is busy, not stuck. What canaries get says nothing."""
        if worker in self.relay.fleet.members:
            live = (self.relay.live.get(output.request) for output in step.outputs)
            if any(one is not None and not one.pinned for one in live):
                self.heard_s[worker] = self.clock()

    def _fail(self, fail: Fail) -> None:
        log.warning("request %s failed: %s: %s", fail.request, fail.code, fail.message)
        if reader := self._readers.pop(fail.request, None):
            error = RequestError(
                TEXTS.get(fail.code, fail.message),
                status=fail.status,
                kind=KINDS.get(fail.status, "server_error"),
                code=fail.code,
                retry=fail.retry,
                retry_after_s=fail.retry_after_s,
            )
            reader.fail(error)

    def _note(self, effect: Effect, come: set[str]) -> None:
        """What only concerns books, logs and the channel."""
        match effect:
            case Durations(request, seconds):
                if reader := self._readers.get(request):
                    reader.measure(seconds)
            case Moved():
                self.metrics.transfer_seconds.labels(effect.transport).observe(effect.seconds)
                self.metrics.transfer_bytes.labels(effect.transport).inc(effect.num_bytes)
                self.proven_s[effect.source, effect.target] = self.clock()
            case Retried(request, code, epoch):
                self.metrics.retries.labels(code).inc()
                log.warning("request %s begins again (attempt %d): %s", request, epoch + 1, code)
            case Up(worker, role, incarnation):
                self.unfit.pop(worker, None)
                log.info("worker %s (%s, life %s) is up", worker, role, incarnation)
            case Down(worker, _, reason):
                self._down(worker, reason, again=worker in come)
            case Unfit(worker, text):
                self.unfit[worker] = text
                log.error("worker %s cannot serve with the others:\n%s", worker, text)

    def _down(self, worker: str, reason: str, again: bool) -> None:
        log.warning("worker %s is lost: %s", worker, reason)
        self.metrics.lost.inc()
        self.unfit.pop(worker, None)
        for way in [way for way in self.proven_s if worker in way]:
            del self.proven_s[way]
        self.heard_s.pop(worker, None)
        if not again:  # else the session is already that of its new life
            self.hub.forget(worker)
