"""One run: requests are sent when they are due, whether others are answered or not, and each is followed to its end.

Times count from when a request was due, so that a client or a limit that holds requests back does not make the server
look fast; only a delay within the grain of the timer is not held against it.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych.slo import Slo
from planner.types import Job, JobResult
from services.bench.prompts import PromptWriter
from services.bench.server import BenchServer
from services.bench.sse import StreamedAnswer

# Requests that are sent at most this many seconds late count as on time, since the event loop's timers count
# milliseconds.
TIMER_GRAIN_S = 0.002
# The failure of requests that were still open when a hopeless run was ended.
GIVEN_UP = "given up"
# Seconds between two checks of the run: they report progress, and end a run that is hopeless.
CHECK_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is done. Requests that are due within the first `warmup_s` are sent and not counted.

    With `give_up_hopeless`, it ends as soon as too few can attain `slo` whatever comes: then it says only that the rate
    is too high. `max_open` bounds the requests that are open at a time; those that wait for it are late.
    """

    slo: Slo
    warmup_s: float = 0.0
    timeout_s: float = 600.0
    max_open: int | None = None
    give_up_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request and its outcome. `tokens` and `prompt` as the server counted them (0: not reported); `gaps_s` between
    its events with tokens; `late_s`, how long after it was due it was sent.
    """

    result: JobResult
    tokens: int
    prompt: int
    gaps_s: array[float]
    late_s: float
    error_text: str = ""


@dataclass(slots=True)
class LoadRun:
    """The result of one run. `num_jobs` is how many requests it had to send, warm-up included.

    `began_idle` says that the server was at rest before; `wall_s` and `cpu_s` are the client's own. `max_open` is how
    many requests were open at once.
    """

    rate: float
    seed: int
    num_jobs: int
    warmup_s: float
    records: list[RequestRecord] = field(default_factory=list)
    given_up: bool = False
    began_idle: bool = True
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_sent: int = 0
    max_open: int = 0
    # Number of requests that arrive after the warm-up.
    num_expected: int = 0

    @property
    def counted_records(self) -> list[RequestRecord]:
        """The requests that were due after the warm-up; only these count."""
        return [one for one in self.records if one.result.job.at_s >= self.warmup_s]

    def count_attained(self, slo: Slo) -> tuple[int, int]:
        """How many requests met `slo`, of how many. Of a hopeless run: how many could have, at most, for the attainment
        that it was given up for.
        """
        counted = [one.result for one in self.counted_records]
        if self.given_up:
            return self.num_expected - sum(not one.meets_slo(slo) for one in counted), self.num_expected
        return sum(one.meets_slo(slo) for one in counted), len(counted)


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request that was sent and is not answered yet. `due_s` and the answer's stamps are monotonic clock seconds."""

    job: Job
    due_s: float
    answer: StreamedAnswer
    task: asyncio.Task[None] | None = None

    def has_missed_slo(self, slo: Slo, now_s: float) -> bool:
        """Whether the request can no longer meet `slo`."""
        if not self.answer.stamps_s:
            return not slo.is_met(now_s - self.due_s, None)
        first_s = self.answer.stamps_s[0]
        return not slo.is_met(first_s - self.due_s, (now_s - first_s) / max(1, self.job.output - 1))


OnProgress = Callable[[LoadRun, int], None]


class LoadGenerator:
    """One run against `server`. Texts are new in each, or a server would find them in its cache."""

    def __init__(
        self,
        server: BenchServer,
        jobs: Sequence[Job],
        options: RunOptions,
        run: LoadRun,
        watch: OnProgress | None = None,
    ) -> None:
        self._server, self._jobs, self._options, self.run = server, jobs, options, run
        self._watch = watch
        self._writer = PromptWriter(server.vocabulary, f"{time.time_ns()} {run.seed}")
        self._open: set[_InFlight] = set()
        self._slots = asyncio.Semaphore(options.max_open) if options.max_open else None
        self.run.num_expected = sum(job.at_s >= options.warmup_s for job in jobs)
        self._missed = 0
        # An error of the load generator itself, not of the server.
        self._broken: BaseException | None = None

    async def run_load(self) -> LoadRun:
        """Send all requests when they are due, and wait for every answer."""
        began_s, cpu_s = time.monotonic(), time.process_time()
        looking = asyncio.create_task(self._watch_progress())
        try:
            await self._send_all(began_s)
            while self._open:
                await asyncio.wait([in_flight.task for in_flight in self._open if in_flight.task is not None])
        finally:
            looking.cancel()
            self._hang_up()
        if self._broken is not None:
            raise self._broken
        self.run.wall_s = time.monotonic() - began_s
        self.run.cpu_s = time.process_time() - cpu_s
        return self.run

    async def _send_all(self, began_s: float) -> None:
        loop = asyncio.get_running_loop()
        for job in self._jobs:
            body = self._server.request_body(self._writer.prompt_text(job), job.output, job.kv_class)
            due_s = began_s + job.at_s
            while (left_s := due_s - time.monotonic()) > 0 and not self.run.given_up:
                await asyncio.sleep(min(left_s, CHECK_INTERVAL_S))
            if self.run.given_up:
                return
            in_flight = _InFlight(job, due_s, StreamedAnswer())
            self._open.add(in_flight)
            self.run.max_open = max(self.run.max_open, len(self._open))
            in_flight.task = loop.create_task(self._send_when_room(in_flight, body))
            in_flight.task.add_done_callback(lambda task, one=in_flight: self._on_task_done(one, task))  # type: ignore[misc]
            # The request is written before the text of the next one is made.
            await asyncio.sleep(0)

    async def _send_when_room(self, in_flight: _InFlight, body: bytes) -> None:
        if self._slots is None:
            await self._send_request(in_flight, body)
        else:
            async with self._slots:
                await self._send_request(in_flight, body)

    def _on_task_done(self, in_flight: _InFlight, task: asyncio.Task[None]) -> None:
        self._open.discard(in_flight)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error

    async def _send_request(self, in_flight: _InFlight, body: bytes) -> None:
        late_s = time.monotonic() - in_flight.due_s
        if self._slots is None and late_s <= TIMER_GRAIN_S:
            in_flight.due_s += late_s
        self.run.num_sent += 1
        await self._server.client.post_stream(
            self._server.route, body, self._options.timeout_s, in_flight.answer
        )
        record = _record_of(in_flight, late_s)
        self.run.records.append(record)
        if in_flight.job.at_s >= self._options.warmup_s and not record.result.meets_slo(self._options.slo):
            self._missed += 1

    async def _watch_progress(self) -> None:
        """Report progress, and end a run that is hopeless."""
        allowed = self.run.num_expected * (1.0 - self._options.slo.attainment) + 1e-9
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._watch is not None:
                self._watch(self.run, len(self._open))
            if (
                self._options.give_up_hopeless
                and self._missed + len(lost := self._hopeless_requests()) > allowed
            ):
                self.run.given_up = True
                self.run.records += [_given_up_record(in_flight) for in_flight in lost]
                self._hang_up()
                return

    def _hopeless_requests(self) -> list[_InFlight]:
        now_s, slo = time.monotonic(), self._options.slo
        return [
            in_flight
            for in_flight in self._open
            if in_flight.job.at_s >= self._options.warmup_s and in_flight.has_missed_slo(slo, now_s)
        ]

    def _hang_up(self) -> None:
        for in_flight in self._open:
            if in_flight.task is not None:
                in_flight.task.cancel()


def _record_of(in_flight: _InFlight, late_s: float) -> RequestRecord:
    answer = in_flight.answer
    prompt = answer.usage.prompt_tokens if answer.usage is not None else 0
    stamps = answer.stamps_s
    gaps_s = array("d", [late - early for early, late in zip(stamps, stamps[1:], strict=False)])
    if answer.failed:
        ended_s = in_flight.job.at_s + time.monotonic() - in_flight.due_s
        result = JobResult(in_flight.job, math.inf, math.inf, ended_s, answer.failed)
        return RequestRecord(result, len(stamps), prompt, gaps_s, late_s, answer.error_text)
    last_s, tokens = max(answer.last_s, stamps[-1]), answer.tokens
    tpot_s = (last_s - stamps[0]) / (tokens - 1) if tokens > 1 else 0.0
    ended_s = in_flight.job.at_s + last_s - in_flight.due_s
    return RequestRecord(
        JobResult(in_flight.job, stamps[0] - in_flight.due_s, tpot_s, ended_s), tokens, prompt, gaps_s, late_s
    )


def _given_up_record(in_flight: _InFlight) -> RequestRecord:
    result = JobResult(in_flight.job, math.inf, math.inf, math.inf, GIVEN_UP)
    return RequestRecord(result, len(in_flight.answer.stamps_s), 0, array("d"), 0.0)
