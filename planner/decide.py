"""Which fleet there should be, and the first steps towards it: a pure decision, in device-seconds.

Each fleet within the budget is charged, over a horizon, for the devices that it holds, for requests that miss their
objective beyond what the target forgives, and for the way to it: a worker that changes role serves nobody for some
seconds, one that is started holds its devices for minutes before it serves. The present fleet stays unless another
saves more than a margin. The attainment of a fleet comes from a judge, such as `planner.elastic.Simulated`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from planner.known import ROLES, Known
from planner.known import Fleet as Fleet
from planner.terms import BOTH, DECODE, PREFILL
from planner.windows import Mix

READY, TURNING, STARTING, DRAINING = "ready", "turning", "starting", "draining"
SURE = 0.02  # above the target: what a simulation may be wrong by


class Worker(msgspec.Struct, frozen=True):
    """A worker as it is now. `role` is the one it has, or will have once it has turned or started.

    `load` is anything that grows with its work: of two workers that could be moved, the lesser is.
    """

    name: str
    role: str
    state: str = READY
    load: float = 0.0


class Flip(msgspec.Struct, frozen=True, tag="flip"):
    """Let a worker change to `role`."""

    worker: str
    role: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start `count` workers more."""

    role: str
    count: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Let a worker end once its requests are done."""

    worker: str


Action = Flip | Start | Stop


class Policy(msgspec.Struct, frozen=True):
    """What the replanner may do, and what things cost. Times in seconds.

    `budget` is the most devices ever held, by workers that start or drain too, `floor` the least that are kept (as many
    as the budget: roles change, and nothing else). `devices` is how many a worker of each role has; it can change only
    to a role of as many. A request that misses its objective, beyond what `target`
    forgives, costs as much as a device for `miss_s`. Another fleet must save `margin` of a device over `horizon_s`.
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
    settle_s: float = 900.0  # a smaller fleet must do for the busiest window of as long
    miss_s: float = 20.0
    margin: float = 0.25
    back_off_s: float = 300.0  # a worker with which an action failed is left alone for so long
    spare: float = 0.05  # share of the rate for which there is room beyond the forecast

    def size(self, role: str) -> int:
        return self.devices.get(role, 1)

    def held(self, fleet: Fleet) -> int:
        """Devices of a fleet."""
        return sum(getattr(fleet, role) * self.size(role) for role in ROLES)


class Situation(msgspec.Struct, frozen=True):
    """What a decision is made from, but for the policy and the judge.

    `rate` is forecast for when actions have effect, requests per second; `busiest` is the highest of late, at least
    `rate`. `cv` is the burstiness of arrivals. Workers in `barred` are left alone. A fleet that has just grown is not
    `calm`, and does not shrink.
    """

    at_s: float
    workers: tuple[Worker, ...]
    mix: Mix
    rate: float
    busiest: float
    cv: float = 1.0
    barred: tuple[str, ...] = ()
    calm: bool = True


class Option(msgspec.Struct, frozen=True):
    """A fleet that was looked at: its attainment once it serves, and its cost over the horizon, in device-seconds."""

    fleet: Fleet
    attainment: float
    cost: float


class Decision(msgspec.Struct, frozen=True):
    """What to do now, and why. `target` is the fleet that this leads to; further steps may follow."""

    at_s: float
    trigger: str
    now: Fleet
    target: Fleet
    actions: tuple[Action, ...] = ()
    reason: str = ""
    options: tuple[Option, ...] = ()


def fleet_of(workers: tuple[Worker, ...], *states: str) -> Fleet:
    """Counts of the workers in one of `states`."""
    roles = [worker.role for worker in workers if worker.state in states]
    return Fleet(*(roles.count(role) for role in ROLES))


def decide(situation: Situation, policy: Policy, judge: Known, trigger: str = "") -> Decision:
    """The cheapest fleet over the horizon, unless staying costs about as little.

    Never holds more devices than the budget, and leaves at least one worker of each role that serves now. Where no
    fleet reaches the target, takes the one that misses it least.
    """
    desk = Desk(situation, policy, judge)
    stay = desk.option(desk.planned)
    options = {option.fleet: option for option in map(desk.option, desk.candidates())}
    options[stay.fleet] = stay
    over = policy.held(desk.planned) > policy.budget
    allowed = [option for option in options.values() if over or desk.allowed(option)]
    within = [option for option in allowed if policy.held(option.fleet) <= policy.budget] or [stay]
    best = min(within, key=lambda option: (option.cost, -option.attainment, option.fleet))
    saved = stay.cost - best.cost
    actions: tuple[Action, ...] = ()
    if best.fleet == stay.fleet or (saved < policy.margin * policy.horizon_s and not over):
        reason = f"{stay.fleet} stays: attainment {stay.attainment:.3f}, {best.fleet} would save {saved:.0f} device-s"
        best = stay
    else:
        actions = desk.actions(best.fleet)
        reason = (
            f"{best.fleet} for {stay.fleet}: attainment {best.attainment:.3f} for {stay.attainment:.3f}, "
            f"saves {saved:.0f} device-s in {policy.horizon_s:g} s"
        )
    ranked = tuple(sorted(options.values(), key=lambda option: (option.cost, option.fleet))[:8])
    return Decision(situation.at_s, trigger, desk.planned, best.fleet, actions, reason, ranked)


class Desk:
    """One decision: what there is, what may be, what it costs, and how to get there."""

    def __init__(self, situation: Situation, policy: Policy, judge: Known) -> None:
        self._now, self._policy, self._judge = situation, policy, judge
        self.aim = min(policy.target + SURE, 1.0)
        judge.about(situation.mix, situation.cv)
        self.planned = fleet_of(situation.workers, READY, TURNING, STARTING)
        self._ready = fleet_of(situation.workers, READY)

    # --- what may be ---

    def candidates(self) -> Iterator[Fleet]:
        """Fleets that just reach the target, those next to the present one, and, if none does, all allowed."""
        floor = min(self._policy.floor, self._policy.held(self.planned))
        rates = sorted({self._now.rate, self._now.busiest})
        found = [fleet for rate in rates for fleet in self._enough(rate)] + list(self._near())
        if not any(self._adequate(fleet, rates[0]) for fleet in self._full()):
            found += self._full()
        if self._policy.floor:
            found += self._full(floor)
        yield from (fleet for fleet in found if self._policy.held(fleet) >= floor)

    def _near(self) -> Iterator[Fleet]:
        now, held = self.planned, self._policy
        steps = ((1, 0), (0, 1), (-1, 0), (0, -1), (-1, 1), (1, -1))
        for first, second in steps:
            fleet = now.plus(BOTH, first) if now.both else now.plus(PREFILL, first).plus(DECODE, second)
            if (
                min(fleet.prefill, fleet.decode, fleet.both) >= 0
                and fleet.serves
                and held.held(fleet) <= held.budget
            ):
                yield fleet

    def _full(self, devices: int = 0) -> list[Fleet]:
        """Fleets that leave too little of so many devices (the budget) for another decode (or colocated) worker."""
        policy = self._policy
        devices = devices or policy.budget
        if self.planned.both:
            return [Fleet(both=n) for n in (devices // policy.size(BOTH),) if n]
        fleets = []
        for prefill in range(1, devices // policy.size(PREFILL) + 1):
            if (decode := (devices - prefill * policy.size(PREFILL)) // policy.size(DECODE)) > 0:
                fleets.append(Fleet(prefill, decode))
        return fleets

    def _enough(self, rate: float) -> Iterator[Fleet]:
        """The least fleets that reach the target: one more worker of a role never lets another role need more."""
        second = BOTH if self.planned.both else DECODE
        least: int | None = None
        for fleet in self._full():
            if least is not None:
                fleet = msgspec.structs.replace(fleet, **{second: min(least, getattr(fleet, second))})
            if not self._adequate(fleet, rate):
                continue
            while getattr(fleet, second) > 1 and self._adequate(fleet.plus(second, -1), rate):
                fleet = fleet.plus(second, -1)
            least = getattr(fleet, second)
            yield fleet
            if least == 1:
                return

    def _adequate(self, fleet: Fleet, rate: float) -> bool:
        return self._judge.enough(fleet, rate, self.aim)

    def _attains(self, fleet: Fleet, rate: float) -> float:
        return self._judge.attainment(fleet, rate, self.aim)

    def allowed(self, option: Option) -> bool:
        """A smaller fleet must do, and only when it is calm."""
        shrinks = self._policy.held(option.fleet) < self._policy.held(self.planned)
        return not shrinks or (self._now.calm and option.attainment >= self.aim)

    # --- what it costs ---

    def option(self, fleet: Fleet) -> Option:
        policy = self._policy
        shrinks = policy.held(fleet) < policy.held(self.planned)
        rate = self._now.busiest if shrinks else self._now.rate
        left_s, cost = policy.horizon_s, 0.0
        for phase, seconds in self._way(fleet):
            cost += seconds * (policy.held(fleet) + self._missed(self._attains(phase, self._now.rate)))
            left_s -= seconds
        attainment = self._attains(fleet, rate)
        cost += max(left_s, 0.0) * (policy.held(fleet) + self._missed(attainment))
        return Option(fleet, round(attainment, 4), round(cost, 1))

    def _missed(self, attainment: float) -> float:
        """Devices that a shortfall is worth: requests that miss beyond what is forgiven, per second, times `miss_s`."""
        return max(self.aim - attainment, 0.0) * self._now.rate * self._policy.miss_s

    def _way(self, fleet: Fleet) -> list[tuple[Fleet, float]]:
        """Who serves for how long until `fleet` does: first all but those that turn, then all but those started."""
        policy, flips = self._policy, self._flips(fleet)
        if fleet == self.planned:
            return []
        before = after = self._ready
        for source, role, count in flips:
            before = before.plus(source, -count)
            after = after.plus(source, -count).plus(role, count)
        way = [(before, policy.flip_s)] if flips else []
        grows = any(getattr(fleet, role) > getattr(after, role) for role in ROLES)
        return [*way, (after, policy.start_s)] if grows else way

    def _flips(self, fleet: Fleet) -> list[tuple[str, str, int]]:
        """(from, to, how many): what one role has too many of and another, with as many devices, too few."""
        excess = {role: getattr(self.planned, role) - getattr(fleet, role) for role in (PREFILL, DECODE)}
        if self._policy.size(PREFILL) != self._policy.size(DECODE):
            return []
        for source, role in ((PREFILL, DECODE), (DECODE, PREFILL)):
            free = max(getattr(self._ready, source) - 1, 0)  # one goes on serving
            if (count := min(excess[source], -excess[role], free)) > 0:
                return [(source, role, count)]
        return []

    # --- how to get there ---

    def actions(self, fleet: Fleet) -> tuple[Action, ...]:
        """Flips, then stops, then as many starts as there is room for while others still drain."""
        flips: list[Action] = []
        reached = self.planned
        for source, role, count in self._flips(fleet):
            for worker in self._movable(source)[:count]:
                flips.append(Flip(worker.name, role))
                reached = reached.plus(source, -1).plus(role, 1)
        taken = {flip.worker for flip in flips if isinstance(flip, Flip)}
        stops = [Stop(name) for role in ROLES for name in self._stops(role, reached, fleet, taken)]
        return (*flips, *stops, *self._starts(reached, fleet))

    def _movable(self, role: str, *others: str) -> list[Worker]:
        """Workers of a role that are not barred: those that do not serve yet, then the least loaded."""
        barred = self._now.barred
        states = (READY, *others)
        found = [
            w for w in self._now.workers if w.role == role and w.state in states and w.name not in barred
        ]
        return sorted(found, key=lambda worker: (worker.state == READY, worker.load, worker.name))

    def _stops(self, role: str, reached: Fleet, fleet: Fleet, taken: set[str]) -> list[str]:
        """What there is too much of; one of those that serve now goes on, even if others are on their way."""
        surplus = getattr(reached, role) - getattr(fleet, role)
        spare = (
            getattr(self._ready, role)
            - 1
            - len([w for w in self._now.workers if w.role == role and w.name in taken])
        )
        able = [w for w in self._movable(role, STARTING) if w.name not in taken]
        new, ready = ([w.name for w in able if (w.state == READY) is is_ready] for is_ready in (False, True))
        return [*new, *ready[: max(spare, 0)]][: max(surplus, 0)]

    def _starts(self, reached: Fleet, fleet: Fleet) -> Iterator[Start]:
        policy = self._policy
        held = sum(policy.size(worker.role) for worker in self._now.workers)
        for role in ROLES:
            room = (policy.budget - held) // policy.size(role)
            if (count := min(getattr(fleet, role) - getattr(reached, role), room)) > 0:
                held += count * policy.size(role)
                yield Start(role, count)


def least(
    policy: Policy, judge: Known, mix: Mix, rate: float, cv: float = 1.0, colocated: bool = False
) -> Fleet:
    """The fleet of the fewest devices that reaches the target at that rate; if none does, the closest to it."""
    present = Worker("", BOTH) if colocated else Worker("", PREFILL)
    desk = Desk(Situation(0.0, (present,), mix, rate, rate, cv), policy, judge)
    options = {fleet: desk.option(fleet) for fleet in desk.candidates() if fleet.serves}
    good = [option for option in options.values() if option.attainment >= desk.aim]
    best = min(good, key=lambda o: (policy.held(o.fleet), -o.attainment, o.fleet), default=None)
    return (best or max(options.values(), key=lambda o: (o.attainment, o.fleet))).fleet
