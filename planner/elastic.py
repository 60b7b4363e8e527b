"""The fast simulator with a fleet that changes while it runs, and how a fleet is judged with it.

`Elastic` is `planner.des` with workers that turn, start and end: one that is to turn or end takes nothing new, gives
back the prompts that it has not begun, and serves the rest first; it holds its devices until it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop
from math import inf
from typing import Any

from planner.decide import DRAINING, READY, STARTING, TURNING, Action, Flip, Start, Stop, Worker
from planner.des import Cluster, run
from planner.des_base import Instance, Limits, Run
from planner.known import ROLES, Fleet
from planner.tally import Slos, joint
from planner.terms import BOTH, DECODE, PREFILL, Batch, Cost, Job, Link, Placement, Pool, Served, Split
from planner.windows import Mix

LEAST_JOBS, MOST_JOBS = 300, 3000
WARMUP = 0.1  # share of the jobs that fill the fleet, and are not counted
HOPELESS = 1.05  # work that comes over the work that can be done, from which on nothing is simulated
LOST = 0.1  # attainment of a fleet as hopeless as that; less for one that is more so


@dataclass(frozen=True)
class Hardware:
    """What one worker of each role costs and holds: by role, its split, seconds per step and room for KV in tokens."""

    splits: Mapping[str, Split]
    costs: Mapping[str, Cost]
    kv_tokens: Mapping[str, float] = field(default_factory=dict)
    link: Link = Link()
    token_bytes: float = 0.0
    limits: Limits = Limits()

    def pool(self, role: str, count: int) -> Pool:
        return Pool(role, self.splits[role], count)

    def room(self, pool: Pool) -> float:
        return self.kv_tokens.get(pool.role, inf)

    def cost(self, pool: Pool) -> Cost:
        return self.costs[pool.role]

    def placement(self, fleet: Fleet) -> Placement:
        counts = ((role, getattr(fleet, role)) for role in ROLES)
        return Placement(tuple(self.pool(role, count) for role, count in counts if count))


class Simulated:
    """A judge that simulates: requests of the mix at that rate, for at least `span_s`, and joint attainment of it.

    The share of prompts that caches hold is taken off their length (and so, a little too kindly, off what is moved and
    attended to). Equal questions get equal answers.
    """

    def __init__(
        self, hardware: Hardware, slos: Slos, span_s: float = 60.0, seeds: int = 1, about: str = ""
    ) -> None:
        self._hardware, self._slos, self._span_s, self._seeds = hardware, slos, span_s, seeds
        self._about = about
        self.runs = 0

    def describe(self) -> dict[str, Any]:
        """For the head of a journal."""
        slos = {kind: [slo.ttft_s, slo.tpot_s, slo.attainment] for kind, slo in self._slos.items()}
        return {"what": "simulated", "about": self._about, "slos": slos, "span_s": self._span_s}

    def attainment(self, fleet: Fleet, mix: Mix, rate: float, cv: float) -> float:
        """See `planner.known.Judge`."""
        if not mix.weights:
            return 1.0
        if (load := self.overload(fleet, mix, rate)) > HOPELESS:
            return LOST * HOPELESS / load
        count = min(max(LEAST_JOBS, round(rate * self._span_s)), MOST_JOBS)
        found = [
            self._once(fleet, mix.jobs(count, rate, seed, cv), mix.cached_share)
            for seed in range(self._seeds)
        ]
        return sum(found) / len(found)

    def overload(self, fleet: Fleet, mix: Mix, rate: float) -> float:
        """A bound on work that comes over what can be done, of the busier role: prompts in endless batches, and as many
        rows as there is room for KV. Above 1 queues grow for ever, whatever a short simulation says."""
        hardware, prompt, output = self._hardware, mix.prompt * (1 - mix.cached_share), mix.output
        loads = dict.fromkeys(ROLES, 0.0)
        for role in ROLES:
            if not (count := getattr(fleet, role)):
                continue
            cost, most = hardware.costs[role], hardware.kv_tokens.get(role, inf) / (prompt + output)
            whole, stages = Batch(round(prompt), prompt**2), hardware.splits[role].pp
            if role != DECODE:
                twice = Batch(2 * whole.tokens, 2 * whole.squares)
                loads[role] += rate / count * (cost.step_s(twice) - cost.step_s(whole)) / stages
            if role != PREFILL and most < inf:
                rows = max(1, int(most))
                step_s = cost.step_s(Batch(rows=rows, context=round(rows * (prompt + output / 2)))) / stages
                loads[role] += rate / count * (output - 1) * step_s / rows
        return max(loads.values())

    def _once(self, fleet: Fleet, jobs: list[Job], cached: float) -> float:
        hardware = self._hardware
        self.runs += 1
        if cached:
            jobs = [replace(job, prompt=max(1, round(job.prompt * (1 - cached)))) for job in jobs]
        served = run(
            hardware.placement(fleet),
            hardware.cost,
            jobs,
            limits=hardware.limits,
            kv_tokens=hardware.room,
            link=hardware.link,
            token_bytes=hardware.token_bytes,
        )
        return joint(served[round(len(served) * WARMUP) :], self._slos)


@dataclass(slots=True, eq=False)
class _Seat:
    """A worker of the simulated fleet. `instance` is none while it starts or turns."""

    name: str
    role: str
    state: str = READY
    instance: Instance | None = None
    then: str = ""  # the role that it will have once it has drained; none: it ends


@dataclass(frozen=True, slots=True)
class Gauge:
    """What a worker that serves could be asked for, in tokens: prompts that wait, KV reserved, KV that has no room yet.

    `rows` are the requests that decode there, those without room too.
    """

    role: str
    waiting: int
    rows: int
    kv: float
    queued_kv: float


class Elastic(Cluster):
    """A fleet in virtual time that obeys a replanner's actions; jobs are taken as time passes, and told when served."""

    def __init__(
        self,
        hardware: Hardware,
        fleet: Fleet,
        jobs: Iterable[Job],
        *,
        arrived: Callable[[Job], None],
        served: Callable[[Served], None],
        flip_s: float,
        start_s: float,
        patience_s: float = inf,
    ) -> None:
        """`flip_s` from the end of a worker's last request to its first in the other role; `start_s` for a new one.

        A prompt that has waited for longer than `patience_s`, when `advance` ends, is given up, and failed: `"late"`.
        """
        super().__init__(
            Placement(()),
            hardware.cost,
            hardware.limits,
            hardware.room,
            hardware.link,
            hardware.token_bytes,
            False,
        )
        self._hardware, self._tell, self._hear = hardware, served, arrived
        self._flip_s, self._start_s, self._patience_s = flip_s, start_s, patience_s
        self._jobs = iter(jobs)
        self._next = next(self._jobs, None)
        self._seats: dict[str, _Seat] = {}
        self._number = 0
        self._held_s, self._since_s = 0.0, 0.0
        for role in ROLES:
            for _ in range(getattr(fleet, role)):
                self._serve(self._seat(role))

    # --- time ---

    def advance(self, until_s: float) -> None:
        """Everything that happens until then."""
        heap = self.clock._heap
        while True:
            at_s = self._next.at_s if self._next else inf
            if heap and heap[0][0] < min(at_s, until_s):
                self.clock.now_s, _, _, call, what = heappop(heap)
                call(what)
            elif self._next is not None and at_s < until_s:
                self.clock.now_s = at_s
                self._came(self._next)
                self._next = next(self._jobs, None)
            else:
                break
        self.clock.now_s = until_s
        for reader in self._readers:
            self._give_up(reader)

    def _give_up(self, reader: Instance) -> None:
        since_s = self.clock.now_s - self._patience_s
        late = [one for one in reader.queue if one.job.at_s < since_s and not one.done]
        for one in late:  # not always in order: those of an instance that left came last
            reader.queue.remove(one)
            reader.queued_tokens -= one.prompt
            self._served[one.index] = Served(one.job, inf, inf, self.clock.now_s, "late")
            self._said(one)

    @property
    def idle(self) -> bool:
        """No job comes any more, and none is under way."""
        return self._next is None and not self.clock._heap

    def _came(self, job: Job) -> None:
        self._served.append(None)
        self._hear(job)
        again = self.limits.first_again
        self._arrive(Run(len(self._served) - 1, job, job.output if again else job.output - 1))

    def _arrive(self, run: Run) -> None:
        assert self._readers and self._writers, "one of each role goes on serving"
        super()._arrive(run)
        self._said(run)

    def _end(self, run: Run) -> None:
        super()._end(run)
        self._said(run)

    def _said(self, run: Run) -> None:
        served, self._served[run.index] = self._served[run.index], None
        if served is not None:
            self._tell(served)

    # --- workers ---

    def workers(self) -> tuple[Worker, ...]:
        """As a replanner sees them."""
        return tuple(
            Worker(
                seat.name, seat.then or seat.role, seat.state, seat.instance.seats + len(seat.instance.queue)
            )
            if seat.instance
            else Worker(seat.name, seat.role, seat.state)
            for seat in self._seats.values()
        )

    def gauges(self) -> tuple[Gauge, ...]:
        """Of all workers that are ready."""
        return tuple(
            Gauge(
                seat.role,
                sum(run.prompt for run in one.queue),
                one.seats,
                one.capacity - one.free if one.capacity < inf else 0.0,
                float(sum(run.hold for run in one.pulls)),
            )
            for seat in self._seats.values()
            if seat.state == READY and (one := seat.instance) is not None
        )

    def device_s(self) -> float:
        """Seconds × devices that have been held until now."""
        self._count_held()
        return self._held_s

    def act(self, actions: Iterable[Action]) -> None:
        """Begin to do what a replanner says. A worker that is not ready any more is left as it is."""
        self._count_held()
        for action in actions:
            match action:
                case Flip(name, role):
                    self._leave(name, TURNING, role)
                case Stop(name):
                    self._leave(name, DRAINING, "")
                case Start(role, count):
                    for _ in range(count):
                        seat = self._seat(role, STARTING)
                        self.clock.at(self.clock.now_s + self._start_s, self._serve, seat)

    def _count_held(self) -> None:
        devices = sum(self._hardware.splits[seat.role].devices for seat in self._seats.values())
        self._held_s += devices * (self.clock.now_s - self._since_s)
        self._since_s = self.clock.now_s

    def _seat(self, role: str, state: str = READY) -> _Seat:
        self._number += 1
        seat = _Seat(f"worker-{self._number:03}", role, state)
        self._seats[seat.name] = seat
        return seat

    def _serve(self, seat: _Seat) -> None:
        if seat.name not in self._seats:
            return  # stopped before it had started
        pool = self._hardware.pool(seat.role, 1)
        seat.instance, seat.state = self._instances(pool, self._hardware.cost, self._hardware.room)[0], READY
        for role, group in ((PREFILL, self._readers), (DECODE, self._writers)):
            if seat.role in (role, BOTH):
                group.append(seat.instance)

    def _leave(self, name: str, state: str, then: str) -> None:
        """Take nothing new; what has not begun goes to others."""
        seat = self._seats.get(name)
        if seat is not None and seat.state == STARTING and not then:
            del self._seats[name]
        if seat is None or seat.state != READY or seat.instance is None:
            return
        seat.state, seat.then, gone = state, then, seat.instance
        self._readers = [one for one in self._readers if one is not gone]
        self._writers = [one for one in self._writers if one is not gone]
        waiting = [one for one in gone.queue if not one.done]
        for one in waiting:
            gone.queue.remove(one)
            gone.queued_tokens -= one.prompt
        pulls, gone.pulls = list(gone.pulls), type(gone.pulls)()
        gone.seats -= len(pulls)
        for one in waiting:
            self._arrive(one)
        for one in pulls:
            self._pass_on(one)
        self._left(gone)

    def _left(self, gone: Instance) -> None:
        """If `gone` is to leave, and nothing of it is needed any more, let it go."""
        if gone in self._readers or gone in self._writers or gone.seats or gone.queued_tokens:
            return
        if gone.free < gone.capacity:
            return
        self._count_held()
        seat = next((seat for seat in self._seats.values() if seat.instance is gone), None)
        if seat is None:
            return
        seat.instance = None
        if seat.then:
            seat.role, seat.then = seat.then, ""
            self.clock.at(self.clock.now_s + self._flip_s, self._serve, seat)
        else:
            del self._seats[seat.name]

    def prefilled(self, run: Run, at: Instance) -> None:
        super().prefilled(run, at)
        self._left(at)

    def finished(self, run: Run, at: Instance) -> None:
        super().finished(run, at)
        self._left(at)

    def _moved(self, what: tuple[Run, Instance]) -> None:
        super()._moved(what)
        if what[0].source is not None:
            self._left(what[0].source)
