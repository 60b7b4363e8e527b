"""A gateway in virtual time: the real relay, its workers, and how each request fares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from typing import Any, cast

from diptych.messages import Beat, Hello, Linked, Output, Prefill, Step
from diptych.request import Request, Sampling, Stage
from planner.sim_agenda import Agenda
from planner.sim_cores import Cores, Processor
from planner.sim_engine import Task, Told
from planner.sim_text import Text, names
from planner.sim_worker import Given, Order, Worker
from planner.terms import Handling, Job, Link, Served
from router.credits import whole_chunks
from router.effects import (
    Arrive,
    Cancelled,
    Deliver,
    Durations,
    Effect,
    Event,
    Fail,
    Finish,
    FromWorker,
    Send,
    Tick,
)
from router.prefix_index import Chunks
from router.relay import Relay

LIFE = "1"  # nobody dies here
FINGERPRINT = "simulated"
TICK_S = 0.1


@cache
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens, 0)


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and what its client has seen."""

    job: Job
    names: Chunks
    first_s: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a gateway is like: seconds that a request takes before it is there, and that a message to or from a worker
    takes; seconds that a request may take in all; and `max_tokens` that clients ask for (None: as many as they get).
    `handling` is the work of its processor; None: it does everything at once, and nothing slows a message down.
    """

    gateway_s: float = 0.0
    hop_s: float = 0.0
    timeout_s: float = inf
    max_tokens: int | None = None
    max_model_len: int = 1 << 20
    beat_s: float = 0.25
    caching: bool = False
    handling: Handling | None = None


class Gate:
    """One relay with its workers. `ended` is told of every request once."""

    def __init__(
        self,
        agenda: Agenda,
        relay: Relay,
        terms: Terms,
        devices: int,
        ended: Callable[[Served], None],
        cores: Cores,
    ) -> None:
        self.agenda, self.relay, self.terms, self.devices, self._ended = agenda, relay, terms, devices, ended
        self.workers: dict[str, Worker] = {}
        self.coming = 0  # that have not reached the relay yet
        self._processor = Processor(cores)
        self._last_s: dict[str, float] = {}  # when the last message of each way is there
        self._open: dict[str, _Open] = {}
        self._beating = self._ticking = False

    @property
    def load(self) -> float:
        """Requests per device."""
        return (len(self._open) + self.coming) / self.devices

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    # ---- workers

    def meet(self, worker: Worker, num_slabs: int, max_model_len: int) -> None:
        """A worker introduces itself."""
        self.workers[worker.name] = worker
        endpoints = {"simulated": b"1"} if worker.role == "prefill" else {}
        hello = Hello(
            worker.name,
            worker.role,
            LIFE,
            FINGERPRINT,
            {},
            "simulated",
            len(self.workers),
            num_slabs,
            worker.chunk_bytes,
            max_model_len,
            endpoints,
        )
        self._handle(FromWorker(worker.name, hello))

    def tie(self, source: str, target: str, link: Link) -> None:
        """`target` may pull from `source`."""
        linked = Linked(source, LIFE, "simulated", link.bytes_per_s / 1e9, link.latency_s * 1e6)
        self._handle(FromWorker(target, linked))

    def hear(self, worker: str, what: Any, at_s: float) -> None:
        """A worker says something at a moment that may be to come."""
        call = self._heard if self.terms.handling is None else self._come
        self.agenda.at(at_s + self.terms.hop_s, call, worker, what)

    def _come(self, worker: str, what: Any) -> None:
        """A message would be here if the machine were at rest."""
        self.agenda.at(self._way(f"from {worker}", self.terms.hop_s), self._queue, worker, what)

    def _queue(self, worker: str, what: Any) -> None:
        """A message is here: it is heard when the processor has done all before it. What is no step is cheap."""
        handling = self.terms.handling
        assert handling is not None, "without work nothing waits"
        work_s = handling.message_s + len(what) * handling.token_s if isinstance(what, list) else 0.0
        self.agenda.at(self._processor.done_s(self.agenda.now_s, work_s), self._heard, worker, what)

    def _way(self, whose: str, way_s: float) -> float:
        """When a message is there that has come a way of `way_s` as at rest. None overtakes another of `whose`."""
        now_s = self.agenda.now_s
        at_s = now_s + way_s * (self._processor.cores.stretch(now_s) - 1.0)
        at_s = self._last_s[whose] = max(at_s, self._last_s.get(whose, at_s))
        return at_s

    def _heard(self, worker: str, what: Any) -> None:
        if callable(what):
            what = what()
        if isinstance(what, list):
            if outputs := [output for told in what if (output := self._output(told)) is not None]:
                self._handle(FromWorker(worker, Step(outputs)))
        else:
            self._handle(FromWorker(worker, what))

    def _output(self, told: Told) -> Output | None:
        """What the relay is told: all tokens since the last time."""
        task = told.task
        live = self.relay.live.get(task.id)
        known = len(live.request.output) if live is not None else told.output
        if told.output == known and not told.finish:
            return None
        tokens = [0] * (told.output - known)
        return Output(task.id, task.epoch, tokens, finish=told.finish, seconds=told.seconds)

    def _beat(self) -> None:
        now_s = self.agenda.now_s
        for worker in self.workers.values():
            self._handle(FromWorker(worker.name, Beat(worker.name, LIFE, worker.stats)))
        self._beating = bool(self._open)
        if self._beating:
            self.agenda.at(now_s + self.terms.beat_s, self._beat)

    def _tick(self) -> None:
        self._handle(Tick())
        self._ticking = bool(self._open)
        if self._ticking:
            self.agenda.at(self.agenda.now_s + TICK_S, self._tick)

    # ---- requests

    def arrive(self, job: Job, number: int) -> None:
        """A request has come in, if the machine is at rest."""
        handling = self.terms.handling
        if handling is None:
            self._enter(job, number)
            return
        now_s = self.agenda.now_s
        at_s = now_s + self.terms.gateway_s * (self._processor.cores.stretch(now_s) - 1.0)
        self.agenda.at(at_s, self._wait, job, number)

    def _wait(self, job: Job, number: int) -> None:
        handling = self.terms.handling
        assert handling is not None, "without work nothing waits"
        at_s = self._processor.done_s(self.agenda.now_s, handling.request_s / 2.0)
        self.agenda.at(at_s, self._enter, job, number)

    def _enter(self, job: Job, number: int) -> None:
        terms, now_s, name = self.terms, self.agenda.now_s, str(number)
        self.coming -= 1
        asked = job.output if terms.max_tokens is None else max(job.output, terms.max_tokens)
        most = min(asked, terms.max_model_len - job.prompt)
        if most < job.output or job.prompt < 1:
            self._ended(Served(job, inf, inf, now_s, "context_length_exceeded"))
            return
        entry = self._open[name] = _Open(job, names(job, number) if terms.caching else ())
        prompt = cast(list[int], Text(job.prompt, entry.names))
        output = cast(list[int], Text(0))
        request = Request(name, prompt, _sampling(most), job.at_s + terms.timeout_s, output)
        request.entered_s[Stage.ADMITTED] = job.at_s
        self._handle(Arrive(request))
        self._keep_time()

    def _keep_time(self) -> None:
        if not self._open:
            return
        if not self._beating:
            self._beating = True
            self.agenda.at(self.agenda.now_s + self.terms.beat_s, self._beat)
        if not self._ticking and self.terms.timeout_s < inf:
            self._ticking = True
            self.agenda.at(self.agenda.now_s + TICK_S, self._tick)

    def _order(self, order: Order) -> Given:
        """An order as a worker gets it."""
        entry, live = self._open[order.request], self.relay.live.get(order.request)
        quiet = whole_chunks(entry.job.prompt + (live.expected_tokens if live else 0))
        return Given(order, partial(self._task, order, entry, quiet))

    def _task(self, order: Order, entry: _Open, quiet: int) -> Task:
        """The sequence that an order asks for, from now on."""
        job = entry.job
        return Task(
            order.request,
            order.epoch,
            cast(list[int], range(job.prompt)),
            order.sampling,
            self.agenda.now_s + order.remaining_s,
            output=cast(list[int], range(len(order.output))),
            hold=isinstance(order, Prefill),
            stage=isinstance(order, Prefill) and order.stage,
            origin=order.origin,
            keys=list(entry.names),
            writes=job.output,
            size=job.prompt,
            quiet=quiet,
        )

    # ---- the relay

    def _handle(self, event: Event) -> None:
        now_s = self.agenda.now_s
        for effect in self.relay.handle(event, now_s):
            if (act := EFFECTS.get(type(effect))) is not None:
                act(self, effect, now_s)

    def _send(self, effect: Send, now_s: float) -> None:
        message = effect.message
        told = self._order(message) if isinstance(message, Order) else message
        receive = self.workers[effect.worker].receive
        if self.terms.handling is None:
            self.agenda.at(now_s + self.terms.hop_s, receive, told)
        else:
            self.agenda.at(now_s + self.terms.hop_s, self._reach, effect.worker, told)

    def _reach(self, worker: str, told: Any) -> None:
        """A message would be with a worker if the machine were at rest."""
        self.agenda.at(self._way(f"to {worker}", self.terms.hop_s), self.workers[worker].receive, told)

    def _deliver(self, effect: Deliver, now_s: float) -> None:
        entry = self._open[effect.request]
        if entry.first_s is None and effect.output.tokens:
            entry.first_s = now_s

    def _durations(self, effect: Durations, _now_s: float) -> None:
        self._open[effect.request].parts.update(effect.seconds)

    def _ends(self, effect: Finish | Fail | Cancelled, now_s: float) -> None:
        code = effect.code if isinstance(effect, Fail) else ""
        self._close(effect.request, now_s, "cancelled" if isinstance(effect, Cancelled) else code)

    def _close(self, request: str, now_s: float, failed: str) -> None:
        entry = self._open.pop(request)
        job = entry.job
        if (handling := self.terms.handling) is not None:
            self._processor.done_s(now_s, handling.request_s / 2.0)
        if failed:
            self._ended(Served(job, inf, inf, now_s, failed, entry.parts))
            return
        first_s = now_s if entry.first_s is None else entry.first_s
        tpot_s = (now_s - first_s) / (job.output - 1) if job.output > 1 else 0.0
        self._ended(Served(job, first_s - job.at_s, tpot_s, now_s, "", entry.parts))


EFFECTS: dict[type[Effect], Callable[..., None]] = {  # nobody is told of the others
    Send: Gate._send,
    Deliver: Gate._deliver,
    Durations: Gate._durations,
    Finish: Gate._ends,
    Fail: Gate._ends,
    Cancelled: Gate._ends,
}
