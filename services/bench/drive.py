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

from planner.terms import Job, Served, Slo
from services.bench.events import Answer
from services.bench.prompts import Writer
from services.bench.target import Target

GRAIN_S = 0.002  # the event loop's timers count milliseconds
GIVEN_UP = "given up"  # the failure of a request that a hopeless run did not wait for
LOOK_S = 0.1  # between two looks at those that are late


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is done. Requests that are due within the first `warmup_s` are sent and not counted.

    With `hopeless`, it ends as soon as too few can attain `slo` whatever comes: then it says only that the rate is too
    high. `concurrency` bounds the requests that are open at a time; those that wait for it are late.
    """

    slo: Slo
    warmup_s: float = 0.0
    timeout_s: float = 600.0
    concurrency: int | None = None
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A request and what became of it. `tokens` and `prompt` as the server counted them (0: not told); `gaps_s` between
    its events with tokens; `late_s`, how long after it was due it was sent.
    """

    served: Served
    tokens: int
    prompt: int
    gaps_s: array[float]
    late_s: float
    told: str = ""


@dataclass(slots=True)
class Run:
    """What one run saw. `jobs` is how many requests it had to send, warm-up included.

    `hopeless` says that it was given up, `rested` that the server was at rest before; `wall_s` and `cpu_s` are the
    client's own.
    """

    rate: float
    seed: int
    jobs: int
    warmup_s: float
    seen: list[Seen] = field(default_factory=list)
    hopeless: bool = False
    rested: bool = True
    wall_s: float = 0.0
    cpu_s: float = 0.0
    sent: int = 0
    open_most: int = 0
    expected: int = 0  # requests that count

    @property
    def counted(self) -> list[Seen]:
        return [one for one in self.seen if one.served.job.at_s >= self.warmup_s]

    def attained(self, slo: Slo) -> tuple[int, int]:
        """How many requests kept `slo`, of how many. Of a hopeless run: how many could have, at most, for the objective
        that it was given up for.
        """
        counted = [one.served for one in self.counted]
        if self.hopeless:
            return self.expected - sum(not one.attains(slo) for one in counted), self.expected
        return sum(one.attains(slo) for one in counted), len(counted)


@dataclass(slots=True, eq=False)
class _Open:
    """A request on its way; `due_s` and the answer's stamps are on the monotonic clock."""

    job: Job
    due_s: float
    answer: Answer
    task: asyncio.Task[None] | None = None

    def lost(self, slo: Slo, now_s: float) -> bool:
        """It cannot attain `slo` any more."""
        if not self.answer.stamps_s:
            return now_s - self.due_s > slo.ttft_s
        first_s = self.answer.stamps_s[0]
        late = first_s - self.due_s > slo.ttft_s
        return late or now_s - first_s > slo.tpot_s * max(1, self.job.output - 1)


Watch = Callable[[Run, int], None]


class Drive:
    """One run against `target`. Texts are new in each, or a server would find them in its cache."""

    def __init__(
        self, target: Target, jobs: Sequence[Job], plan: Plan, run: Run, watch: Watch | None = None
    ) -> None:
        self._target, self._jobs, self._plan, self.run = target, jobs, plan, run
        self._watch = watch
        self._writer = Writer(target.vocabulary, f"{time.time_ns()} {run.seed}")
        self._open: set[_Open] = set()
        self._room = asyncio.Semaphore(plan.concurrency) if plan.concurrency else None
        self.run.expected = sum(job.at_s >= plan.warmup_s for job in jobs)
        self._missed = 0
        self._broken: BaseException | None = None  # our own fault, not the server's

    async def go(self) -> Run:
        """Send everything, wait for every answer."""
        began_s, cpu_s = time.monotonic(), time.process_time()
        looking = asyncio.create_task(self._look())
        try:
            await self._send_all(began_s)
            while self._open:
                await asyncio.wait([one.task for one in self._open if one.task is not None])
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
            body = self._target.body(self._writer.text(job), job.output)
            due_s = began_s + job.at_s
            while (left_s := due_s - time.monotonic()) > 0 and not self.run.hopeless:
                await asyncio.sleep(min(left_s, LOOK_S))
            if self.run.hopeless:
                return
            one = _Open(job, due_s, Answer())
            self._open.add(one)
            self.run.open_most = max(self.run.open_most, len(self._open))
            one.task = loop.create_task(self._follow(one, body))
            one.task.add_done_callback(lambda task, one=one: self._ended(one, task))  # type: ignore[misc]
            await asyncio.sleep(0)  # so that it is written before the next one's text is made

    async def _follow(self, one: _Open, body: bytes) -> None:
        if self._room is None:
            await self._ask(one, body)
        else:
            async with self._room:
                await self._ask(one, body)

    def _ended(self, one: _Open, task: asyncio.Task[None]) -> None:
        self._open.discard(one)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error

    async def _ask(self, one: _Open, body: bytes) -> None:
        late_s = time.monotonic() - one.due_s
        if self._room is None and late_s <= GRAIN_S:
            one.due_s += late_s
        self.run.sent += 1
        await self._target.client.ask(self._target.route, body, self._plan.timeout_s, one.answer)
        seen = _seen(one, late_s)
        self.run.seen.append(seen)
        if one.job.at_s >= self._plan.warmup_s and not seen.served.attains(self._plan.slo):
            self._missed += 1

    async def _look(self) -> None:
        """Tell whoever watches, and give up what is hopeless."""
        allowed = self.run.expected * (1.0 - self._plan.slo.attainment) + 1e-9
        while True:
            await asyncio.sleep(LOOK_S)
            if self._watch is not None:
                self._watch(self.run, len(self._open))
            if self._plan.hopeless and self._missed + len(lost := self._lost()) > allowed:
                self.run.hopeless = True
                self.run.seen += [_given_up(one) for one in lost]
                self._hang_up()
                return

    def _lost(self) -> list[_Open]:
        now_s, slo = time.monotonic(), self._plan.slo
        return [one for one in self._open if one.job.at_s >= self._plan.warmup_s and one.lost(slo, now_s)]

    def _hang_up(self) -> None:
        for one in self._open:
            if one.task is not None:
                one.task.cancel()


def _seen(one: _Open, late_s: float) -> Seen:
    answer = one.answer
    prompt = answer.usage.prompt_tokens if answer.usage is not None else 0
    stamps = answer.stamps_s
    gaps_s = array("d", [late - early for early, late in zip(stamps, stamps[1:], strict=False)])
    if answer.failed:
        ended_s = one.job.at_s + time.monotonic() - one.due_s
        served = Served(one.job, math.inf, math.inf, ended_s, answer.failed)
        return Seen(served, len(stamps), prompt, gaps_s, late_s, answer.told)
    last_s, tokens = max(answer.last_s, stamps[-1]), answer.tokens
    tpot_s = (last_s - stamps[0]) / (tokens - 1) if tokens > 1 else 0.0
    ended_s = one.job.at_s + last_s - one.due_s
    return Seen(Served(one.job, stamps[0] - one.due_s, tpot_s, ended_s), tokens, prompt, gaps_s, late_s)


def _given_up(one: _Open) -> Seen:
    served = Served(one.job, math.inf, math.inf, math.inf, GIVEN_UP)
    return Seen(served, len(one.answer.stamps_s), 0, array("d"), 0.0)
