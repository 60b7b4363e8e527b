"""A simulated fleet whose workers start, stop and change role while it runs; and the fleet that a steady rate needs.

`ElasticFleet` extends `planner.sim.fast.cluster` by these changes. A worker that is about to stop or change role
accepts no new requests, returns prompts that it has not begun, and finishes the rest. Until then it holds its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop
from math import inf

from planner.replan.attainment_cache import ROLES, AttainmentCache, FleetSize
from planner.replan.decide import (
    DRAINING,
    READY,
    STARTING,
    SWITCHING,
    FleetAction,
    FleetChooser,
    FleetSituation,
    FleetWorker,
    Flip,
    ReplanPolicy,
    Start,
    Stop,
)
from planner.replan.evaluate import FleetHardware
from planner.replan.traffic_windows import LengthMix
from planner.sim.fast.cluster import FastCluster
from planner.sim.fast.instance import FastInstance, FastRequest
from planner.types import BOTH, DECODE, PREFILL, Job, JobResult, Placement


def smallest_fleet(
    policy: ReplanPolicy,
    cache: AttainmentCache,
    mix: LengthMix,
    rate: float,
    cv: float = 1.0,
    colocated: bool = False,
) -> FleetSize:
    """The fleet of the fewest devices that reaches the target at `rate`; if none does, that of highest attainment."""
    present = FleetWorker("", BOTH) if colocated else FleetWorker("", PREFILL)
    chooser = FleetChooser(FleetSituation(0.0, (present,), mix, rate, rate, cv), policy, cache)
    options = {
        fleet: chooser.evaluate_fleet(fleet) for fleet in chooser.candidate_fleets() if fleet.can_serve
    }
    good = [option for option in options.values() if option.attainment >= chooser.aim]
    best = min(good, key=lambda o: (policy.held(o.fleet), -o.attainment, o.fleet), default=None)
    return (best or max(options.values(), key=lambda o: (o.attainment, o.fleet))).fleet


@dataclass(slots=True, eq=False)
class _FleetSeat:
    """A worker of the simulated fleet. `instance` is None while it starts or changes role."""

    name: str
    role: str
    state: str = READY
    instance: FastInstance | None = None
    then: str = ""  # the role after draining; "" if the worker then stops


@dataclass(frozen=True, slots=True)
class WorkerGauge:
    """The work on one ready worker, in tokens: waiting prompts, reserved KV, and KV that waits for memory.

    `rows` is the number of requests that decode there, including those that wait for memory.
    """

    role: str
    waiting: int
    rows: int
    kv: float
    queued_kv: float


class ElasticFleet(FastCluster):
    """A fleet in virtual time that carries out a replanner's actions; it reports each job when the job has ended."""

    def __init__(
        self,
        hardware: FleetHardware,
        fleet: FleetSize,
        jobs: Iterable[Job],
        *,
        arrived: Callable[[Job], None],
        served: Callable[[JobResult], None],
        flip_s: float,
        start_s: float,
        patience_s: float = inf,
    ) -> None:
        """`flip_s` passes between a worker's last request in one role and its first in the other; `start_s` until a
        new worker serves. A prompt that has waited longer than `patience_s` when `advance` ends fails as "late".
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
        self._hardware, self._on_served, self._on_arrived = hardware, served, arrived
        self._flip_s, self._start_s, self._patience_s = flip_s, start_s, patience_s
        self._jobs = iter(jobs)
        self._next = next(self._jobs, None)
        self._seats: dict[str, _FleetSeat] = {}
        self._number = 0
        self._held_s, self._since_s = 0.0, 0.0
        for role in ROLES:
            for _ in range(getattr(fleet, role)):
                self._start_serving(self._add_worker(role))

    # --- time ---

    def advance(self, until_s: float) -> None:
        """Processes all events before `until_s`."""
        heap = self.clock._heap
        while True:
            at_s = self._next.at_s if self._next else inf
            if heap and heap[0][0] < min(at_s, until_s):
                self.clock.now_s, _, _, call, what = heappop(heap)
                call(what)
            elif self._next is not None and at_s < until_s:
                self.clock.now_s = at_s
                self._accept_job(self._next)
                self._next = next(self._jobs, None)
            else:
                break
        self.clock.now_s = until_s
        for prefiller in self._prefillers:
            self._give_up_late(prefiller)

    def _give_up_late(self, prefiller: FastInstance) -> None:
        """Fails the queued prompts of an instance that have waited longer than `patience_s`."""
        since_s = self.clock.now_s - self._patience_s
        late = [one for one in prefiller.queue if one.job.at_s < since_s and not one.done]
        for one in late:  # the queue may be unordered: prompts of a retired instance were appended to it
            prefiller.queue.remove(one)
            prefiller.queued_tokens -= one.prompt
            self._results[one.index] = JobResult(one.job, inf, inf, self.clock.now_s, "late")
            self._report_ended(one)

    @property
    def idle(self) -> bool:
        """Whether no job is left to arrive and none is in progress."""
        return self._next is None and not self.clock._heap

    def _accept_job(self, job: Job) -> None:
        """Lets a job arrive: reports the arrival and sends the prompt to a prefill instance."""
        self._results.append(None)
        self._on_arrived(job)
        again = self.limits.first_again
        self._dispatch_prompt(
            FastRequest(len(self._results) - 1, job, job.output if again else job.output - 1)
        )

    def _dispatch_prompt(self, run: FastRequest) -> None:
        assert self._prefillers and self._decoders, "one worker of each role must keep serving"
        super()._dispatch_prompt(run)
        self._report_ended(run)

    def _end_request(self, run: FastRequest) -> None:
        super()._end_request(run)
        self._report_ended(run)

    def _report_ended(self, run: FastRequest) -> None:
        """Reports the result of a request, once, as soon as there is one."""
        served, self._results[run.index] = self._results[run.index], None
        if served is not None:
            self._on_served(served)

    # --- workers ---

    def workers(self) -> tuple[FleetWorker, ...]:
        """The workers and their states, as the replanner expects them."""
        return tuple(
            FleetWorker(
                seat.name, seat.then or seat.role, seat.state, seat.instance.seats + len(seat.instance.queue)
            )
            if seat.instance
            else FleetWorker(seat.name, seat.role, seat.state)
            for seat in self._seats.values()
        )

    def gauges(self) -> tuple[WorkerGauge, ...]:
        """The current work of each ready worker."""
        return tuple(
            WorkerGauge(
                seat.role,
                sum(run.prompt for run in one.queue),
                one.seats,
                one.capacity[0] - one.free[0] if one.capacity[0] < inf else 0.0,
                float(sum(run.total_tokens for run in one.pulls)),
            )
            for seat in self._seats.values()
            if seat.state == READY and (one := seat.instance) is not None
        )

    def device_s(self) -> float:
        """Device-seconds held by the fleet until now."""
        self._count_held()
        return self._held_s

    def act(self, actions: Iterable[FleetAction]) -> None:
        """Begins the actions of a replanner. An action on a worker that is not ready any more is ignored."""
        self._count_held()
        for action in actions:
            match action:
                case Flip(name, role):
                    self._retire_worker(name, SWITCHING, role)
                case Stop(name):
                    self._retire_worker(name, DRAINING, "")
                case Start(role, count):
                    for _ in range(count):
                        seat = self._add_worker(role, STARTING)
                        self.clock.schedule_at(self.clock.now_s + self._start_s, self._start_serving, seat)

    def _count_held(self) -> None:
        """Adds the device-seconds since the last call; to be called before the number of workers changes."""
        devices = sum(self._hardware.splits[seat.role].devices for seat in self._seats.values())
        self._held_s += devices * (self.clock.now_s - self._since_s)
        self._since_s = self.clock.now_s

    def _add_worker(self, role: str, state: str = READY) -> _FleetSeat:
        self._number += 1
        seat = _FleetSeat(f"worker-{self._number:03}", role, state)
        self._seats[seat.name] = seat
        return seat

    def _start_serving(self, seat: _FleetSeat) -> None:
        if seat.name not in self._seats:
            return  # the worker was stopped before it had started
        pool = self._hardware.pool(seat.role, 1)
        seat.instance, seat.state = (
            self._make_instances(pool, self._hardware.cost, self._hardware.room)[0],
            READY,
        )
        for role, group in ((PREFILL, self._prefillers), (DECODE, self._decoders)):
            if seat.role in (role, BOTH):
                group.append(seat.instance)

    def _retire_worker(self, name: str, state: str, then: str) -> None:
        """Starts to drain a worker; requests that it has not begun go to other workers."""
        seat = self._seats.get(name)
        if seat is not None and seat.state == STARTING and not then:
            del self._seats[name]
        if seat is None or seat.state != READY or seat.instance is None:
            return
        seat.state, seat.then, gone = state, then, seat.instance
        self._prefillers = [one for one in self._prefillers if one is not gone]
        self._decoders = [one for one in self._decoders if one is not gone]
        waiting = [one for one in gone.queue if not one.done]
        for one in waiting:
            gone.queue.remove(one)
            gone.queued_tokens -= one.prompt
        pulls, gone.pulls = list(gone.pulls), type(gone.pulls)()
        gone.seats -= len(pulls)
        for one in waiting:
            self._dispatch_prompt(one)
        for one in pulls:
            self._start_handoff(one)
        self._release_if_empty(gone)

    def _release_if_empty(self, gone: FastInstance) -> None:
        """If `gone` drains and has no work left, stops the worker or starts its change of role."""
        if gone in self._prefillers or gone in self._decoders or gone.seats or gone.queued_tokens:
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
            self.clock.schedule_at(self.clock.now_s + self._flip_s, self._start_serving, seat)
        else:
            del self._seats[seat.name]

    def on_prefilled(self, run: FastRequest, at: FastInstance) -> None:
        """A prompt was prefilled at `at`; releases the worker if it was draining and is now empty."""
        super().on_prefilled(run, at)
        self._release_if_empty(at)

    def on_finished(self, run: FastRequest, at: FastInstance) -> None:
        """A request has ended at `at`; releases the worker if it was draining and is now empty."""
        super().on_finished(run, at)
        self._release_if_empty(at)

    def _on_moved(self, what: tuple[FastRequest, FastInstance]) -> None:
        super()._on_moved(what)
        if what[0].source is not None:
            self._release_if_empty(what[0].source)
