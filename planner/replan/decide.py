"""Decides which fleet comes next, and the first actions that lead to it, by comparing costs in device-seconds.

Each possible fleet within the budget is charged, over a horizon, for three things: the devices that it holds; requests
that miss their SLO beyond what the target allows; and the transition. A worker that changes role serves nothing for
some seconds, and a new worker holds its devices for minutes before it serves. The present fleet is kept unless another
saves more than a margin. The attainment of a fleet comes from an evaluator, such as
`planner.replan.evaluate.SimulatedEvaluator`. This module is pure: it reads no clock and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from planner.replan.attainment_cache import ROLES, AttainmentCache
from planner.replan.attainment_cache import FleetSize as Fleet
from planner.replan.traffic_windows import LengthMix
from planner.types import BOTH, DECODE, PREFILL

READY, SWITCHING, STARTING, DRAINING = "ready", "turning", "starting", "draining"
# Added to the target attainment, since the simulated attainment may be this much too high.
EVALUATOR_MARGIN = 0.02


class FleetWorker(msgspec.Struct, frozen=True):
    """A worker and its state. `role` is the present role, or the next one while the worker changes role or starts.

    `load` grows with the worker's work, in any unit: if several workers could be moved, the least loaded is chosen.
    """

    name: str
    role: str
    state: str = READY
    load: float = 0.0


class Flip(msgspec.Struct, frozen=True, tag="flip"):
    """An action: change the role of a worker to `role`."""

    worker: str
    role: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """An action: start `count` more workers of `role`."""

    role: str
    count: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """An action: drain a worker, then stop it."""

    worker: str


FleetAction = Flip | Start | Stop


class ReplanPolicy(msgspec.Struct, frozen=True):
    """Settings of the replanner: its limits, and the costs that it assumes. Times are in seconds.

    `budget` is the most devices held at any time, those of starting and draining workers included. `floor` is the least
    number that is kept; if it equals the budget, only roles change. `devices` is the number of devices per worker by
    role; a worker can change only to a role with the same number. A request that misses its SLO, beyond what `target`
    allows, costs as much as one device for `miss_s` seconds. A new fleet must save at least `margin` devices on average
    over `horizon_s`.
    """

    budget: int
    floor: int = 0
    devices: dict[str, int] = {}
    target: float = 0.9
    window_s: float = 300.0
    bucket_s: float = 10.0
    false_alarms_per_day: float = 0.5
    flip_s: float = 5.0
    start_s: float = 180.0
    horizon_s: float = 1800.0
    # A smaller fleet must suffice for the busiest window within this many seconds.
    settle_s: float = 900.0
    miss_s: float = 20.0
    margin: float = 0.25
    # After a failed action its worker is left alone for this many seconds.
    back_off_s: float = 300.0
    # The fleet is sized for traffic that exceeds the forecast by this share.
    spare: float = 0.05

    def size(self, role: str) -> int:
        """Devices that one worker of `role` holds."""
        return self.devices.get(role, 1)

    def held(self, fleet: Fleet) -> int:
        """Number of devices that a fleet holds."""
        return sum(getattr(fleet, role) * self.size(role) for role in ROLES)


class FleetSituation(msgspec.Struct, frozen=True):
    """The inputs of a decision, apart from the policy and the evaluator.

    `rate` is the rate in requests/s forecast for when actions take effect; `busiest` is the highest recent rate, at
    least `rate`. `cv` is the burstiness of arrivals. Workers in `barred` are left alone. While `calm` is false the
    fleet has just grown and must not shrink.
    """

    at_s: float
    workers: tuple[FleetWorker, ...]
    mix: LengthMix
    rate: float
    busiest: float
    cv: float = 1.0
    barred: tuple[str, ...] = ()
    calm: bool = True


class FleetOption(msgspec.Struct, frozen=True):
    """A fleet that was considered: its attainment once in service, and its cost over the horizon in device-seconds."""

    fleet: Fleet
    attainment: float
    cost: float


class FleetDecision(msgspec.Struct, frozen=True):
    """The actions to take now, and why. `target` is the fleet that they lead to, perhaps after further decisions."""

    at_s: float
    trigger: str
    now: Fleet
    target: Fleet
    actions: tuple[FleetAction, ...] = ()
    reason: str = ""
    options: tuple[FleetOption, ...] = ()


def count_fleet(workers: tuple[FleetWorker, ...], *states: str) -> Fleet:
    """The number of workers of each role that are in one of `states`."""
    roles = [worker.role for worker in workers if worker.state in states]
    return Fleet(*(roles.count(role) for role in ROLES))


def decide_fleet(
    situation: FleetSituation, policy: ReplanPolicy, cache: AttainmentCache, trigger: str = ""
) -> FleetDecision:
    """Chooses the cheapest fleet over the horizon, and keeps the present one if that costs about as little.

    The result never holds more devices than the budget, and keeps at least one ready worker of each role serving. If no
    fleet reaches the target, the cost of missed requests selects the fleet that misses it least.
    """
    chooser = FleetChooser(situation, policy, cache)
    stay = chooser.evaluate_fleet(chooser.planned)
    options = {option.fleet: option for option in map(chooser.evaluate_fleet, chooser.candidate_fleets())}
    options[stay.fleet] = stay
    # If the fleet holds more than the budget, it must shrink in any case.
    over = policy.held(chooser.planned) > policy.budget
    allowed = [option for option in options.values() if over or chooser.is_allowed(option)]
    within = [option for option in allowed if policy.held(option.fleet) <= policy.budget] or [stay]
    best = min(within, key=lambda option: (option.cost, -option.attainment, option.fleet))
    saved = stay.cost - best.cost
    actions: tuple[FleetAction, ...] = ()
    if best.fleet == stay.fleet or (saved < policy.margin * policy.horizon_s and not over):
        reason = f"{stay.fleet} stays: attainment {stay.attainment:.3f}, {best.fleet} would save {saved:.0f} device-s"
        best = stay
    else:
        actions = chooser.actions(best.fleet)
        reason = (
            f"{best.fleet} for {stay.fleet}: attainment {best.attainment:.3f} for {stay.attainment:.3f}, "
            f"saves {saved:.0f} device-s in {policy.horizon_s:g} s"
        )
    ranked = tuple(sorted(options.values(), key=lambda option: (option.cost, option.fleet))[:8])
    return FleetDecision(situation.at_s, trigger, chooser.planned, best.fleet, actions, reason, ranked)


class FleetChooser:
    """Enumerates fleets, computes their costs, and derives the actions, for one decision."""

    def __init__(self, situation: FleetSituation, policy: ReplanPolicy, cache: AttainmentCache) -> None:
        self._now, self._policy, self._cache = situation, policy, cache
        self.aim = min(policy.target + EVALUATOR_MARGIN, 1.0)
        cache.set_mix(situation.mix, situation.cv)
        self.planned = count_fleet(situation.workers, READY, SWITCHING, STARTING)
        self._ready = count_fleet(situation.workers, READY)

    # --- which fleets are considered ---

    def candidate_fleets(self) -> Iterator[Fleet]:
        """The smallest fleets that reach the target, neighbours of the present one, and all full ones if none does."""
        floor = min(self._policy.floor, self._policy.held(self.planned))
        rates = sorted({self._now.rate, self._now.busiest})
        found = [fleet for rate in rates for fleet in self._sufficient_fleets(rate)] + list(
            self._neighbor_fleets()
        )
        if not any(self._reaches_target(fleet, rates[0]) for fleet in self._full_fleets()):
            found += self._full_fleets()
        if self._policy.floor:
            found += self._full_fleets(floor)
        yield from (fleet for fleet in found if self._policy.held(fleet) >= floor)

    def _neighbor_fleets(self) -> Iterator[Fleet]:
        """Fleets that differ from the planned one by one worker, or by one worker's role."""
        now, held = self.planned, self._policy
        steps = ((1, 0), (0, 1), (-1, 0), (0, -1), (-1, 1), (1, -1))
        for first, second in steps:
            fleet = (
                now.with_more(BOTH, first)
                if now.both
                else now.with_more(PREFILL, first).with_more(DECODE, second)
            )
            if (
                min(fleet.prefill, fleet.decode, fleet.both) >= 0
                and fleet.can_serve
                and held.held(fleet) <= held.budget
            ):
                yield fleet

    def _full_fleets(self, devices: int = 0) -> list[Fleet]:
        """Fleets that use up `devices` (by default the budget): no further decode or colocated worker would fit."""
        policy = self._policy
        devices = devices or policy.budget
        if self.planned.both:
            return [Fleet(both=n) for n in (devices // policy.size(BOTH),) if n]
        fleets = []
        for prefill in range(1, devices // policy.size(PREFILL) + 1):
            if (decode := (devices - prefill * policy.size(PREFILL)) // policy.size(DECODE)) > 0:
                fleets.append(Fleet(prefill, decode))
        return fleets

    def _sufficient_fleets(self, rate: float) -> Iterator[Fleet]:
        """For each number of prefill workers, the fleet with the fewest decode workers that reaches the target.

        More prefill workers never need more decode workers, so each result is an upper limit for the next.
        """
        second = BOTH if self.planned.both else DECODE
        least: int | None = None
        for fleet in self._full_fleets():
            if least is not None:
                fleet = msgspec.structs.replace(fleet, **{second: min(least, getattr(fleet, second))})
            if not self._reaches_target(fleet, rate):
                continue
            while getattr(fleet, second) > 1 and self._reaches_target(fleet.with_more(second, -1), rate):
                fleet = fleet.with_more(second, -1)
            least = getattr(fleet, second)
            yield fleet
            if least == 1:
                return

    def _reaches_target(self, fleet: Fleet, rate: float) -> bool:
        return self._cache.reaches_target(fleet, rate, self.aim)

    def _attainment_of(self, fleet: Fleet, rate: float) -> float:
        return self._cache.attainment(fleet, rate, self.aim)

    def is_allowed(self, option: FleetOption) -> bool:
        """Whether the fleet may be chosen: a smaller one must reach the target, and traffic must be calm."""
        shrinks = self._policy.held(option.fleet) < self._policy.held(self.planned)
        return not shrinks or (self._now.calm and option.attainment >= self.aim)

    # --- what a fleet costs ---

    def evaluate_fleet(self, fleet: Fleet) -> FleetOption:
        """Scores a fleet: its attainment, and its cost over the horizon in device-seconds, transition included.

        A fleet smaller than the planned one is evaluated at the busiest rate, all others at the forecast rate.
        """
        policy = self._policy
        shrinks = policy.held(fleet) < policy.held(self.planned)
        rate = self._now.busiest if shrinks else self._now.rate
        left_s, cost = policy.horizon_s, 0.0
        for phase, seconds in self._transition_phases(fleet):
            cost += seconds * (
                policy.held(fleet) + self._missed_devices(self._attainment_of(phase, self._now.rate))
            )
            left_s -= seconds
        attainment = self._attainment_of(fleet, rate)
        cost += max(left_s, 0.0) * (policy.held(fleet) + self._missed_devices(attainment))
        return FleetOption(fleet, round(attainment, 4), round(cost, 1))

    def _missed_devices(self, attainment: float) -> float:
        """The cost of missed SLOs, in devices: misses per second beyond the target, times `miss_s`."""
        return max(self.aim - attainment, 0.0) * self._now.rate * self._policy.miss_s

    def _transition_phases(self, fleet: Fleet) -> list[tuple[Fleet, float]]:
        """The fleets that serve during the transition to `fleet`, each with its duration in seconds.

        First, workers that change role do not serve; then new workers have not started yet.
        """
        policy, flips = self._policy, self._planned_flips(fleet)
        if fleet == self.planned:
            return []
        before = after = self._ready
        for source, role, count in flips:
            before = before.with_more(source, -count)
            after = after.with_more(source, -count).with_more(role, count)
        way = [(before, policy.flip_s)] if flips else []
        grows = any(getattr(fleet, role) > getattr(after, role) for role in ROLES)
        return [*way, (after, policy.start_s)] if grows else way

    def _planned_flips(self, fleet: Fleet) -> list[tuple[str, str, int]]:
        """(from role, to role, count): workers to move from a role with too many to one with too few.

        Roles can only be exchanged if their workers have the same number of devices.
        """
        excess = {role: getattr(self.planned, role) - getattr(fleet, role) for role in (PREFILL, DECODE)}
        if self._policy.size(PREFILL) != self._policy.size(DECODE):
            return []
        for source, role in ((PREFILL, DECODE), (DECODE, PREFILL)):
            # One worker of the role must keep serving.
            free = max(getattr(self._ready, source) - 1, 0)
            if (count := min(excess[source], -excess[role], free)) > 0:
                return [(source, role, count)]
        return []

    # --- which actions lead to a fleet ---

    def actions(self, fleet: Fleet) -> tuple[FleetAction, ...]:
        """Role changes, then stops, then as many starts as the budget allows while other workers still drain."""
        flips: list[FleetAction] = []
        reached = self.planned
        for source, role, count in self._planned_flips(fleet):
            for worker in self._movable_workers(source)[:count]:
                flips.append(Flip(worker.name, role))
                reached = reached.with_more(source, -1).with_more(role, 1)
        taken = {flip.worker for flip in flips if isinstance(flip, Flip)}
        stops = [Stop(name) for role in ROLES for name in self._workers_to_stop(role, reached, fleet, taken)]
        return (*flips, *stops, *self._workers_to_start(reached, fleet))

    def _movable_workers(self, role: str, *others: str) -> list[FleetWorker]:
        """Workers of a role that may be moved: first those that do not serve yet, then the least loaded."""
        barred = self._now.barred
        states = (READY, *others)
        found = [
            w for w in self._now.workers if w.role == role and w.state in states and w.name not in barred
        ]
        return sorted(found, key=lambda worker: (worker.state == READY, worker.load, worker.name))

    def _workers_to_stop(self, role: str, reached_fleet: Fleet, fleet: Fleet, taken: set[str]) -> list[str]:
        """Workers of a role that exceed the target fleet. One ready worker of each role is always kept."""
        surplus = getattr(reached_fleet, role) - getattr(fleet, role)
        spare = (
            getattr(self._ready, role)
            - 1
            - len([w for w in self._now.workers if w.role == role and w.name in taken])
        )
        able = [w for w in self._movable_workers(role, STARTING) if w.name not in taken]
        new, ready = ([w.name for w in able if (w.state == READY) is is_ready] for is_ready in (False, True))
        return [*new, *ready[: max(spare, 0)]][: max(surplus, 0)]

    def _workers_to_start(self, reached_fleet: Fleet, fleet: Fleet) -> Iterator[Start]:
        """Starts for the workers that are missing, as far as the budget has free devices."""
        policy = self._policy
        held = sum(policy.size(worker.role) for worker in self._now.workers)
        for role in ROLES:
            room = (policy.budget - held) // policy.size(role)
            if (count := min(getattr(fleet, role) - getattr(reached_fleet, role), room)) > 0:
                held += count * policy.size(role)
                yield Start(role, count)
