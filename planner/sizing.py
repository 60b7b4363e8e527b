"""How many instances: DistServe's two algorithms as they are printed, and counts that hold with queueing.

The algorithms divide the wanted rate by the goodput of one unit and round up. With several instances behind one queue
fewer may do, and with unlucky ratios more are needed: `sized` asks the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from planner import candidates
from planner.bounds import bounds, ceiling, saturation
from planner.request import Request
from planner.search import Result, Scored, search
from planner.terms import BOTH, DECODE, PREFILL, Placement, Pool, Slo
from planner.trial import Trial

MOST_TRIED = 200  # counts that are tried before a size is given up
SHORTLIST = 4  # of each phase, whose pairs are simulated together
ASIDE = 0.25  # how far from the best a phase's instance may be, if it is of another size: sizes must add up


@dataclass(frozen=True, slots=True)
class Phases:
    """Prefill and decode instances, searched apart: best first."""

    prefill: Result
    decode: Result


def apart(request: Request, marginal: bool = False, near: float = ASIDE) -> Phases:
    """The first half of algorithm 1: each phase by itself, for its own objective.

    Two independent phases at the target each keep only its square of the promises together; so each is searched at the
    square root, unless `marginal` asks for the paper's.
    """
    reads = _phase_search(request, PREFILL, marginal, near, math.inf)
    most = max((one.per_weight for one in reads.scored), default=0.0) * _whole_weight(request)
    return Phases(reads, _phase_search(request, DECODE, marginal, near, most))


def _phase_search(request: Request, role: str, marginal: bool, near: float, most: float) -> Result:
    """Instances of one phase; none need carry more than `most` requests per second."""
    slos = {kind: _phase(slo, role, marginal) for kind, slo in request.slos.items()}
    units = (
        Placement((Pool(role, split, 1, stock.device.name),), "high")
        for stock in request.stocks
        for split in request.splits(stock)
    )

    def trial(unit: Placement) -> Trial:
        least = min(most, request.rate or most) * request.horizon_s
        return replace(request.trial(unit, least=least if math.isfinite(least) else 0.0), slos=slos)

    def bound(unit: Placement) -> dict[str, float]:
        return {"enough": most, "sustained": request.saturated_rps(unit) if request.open_ended else math.inf}

    return search(units, trial, bound, request.weight, near)


def _whole_weight(request: Request) -> float:
    """Of all the hardware."""
    if not request.mixed:
        return float(request.devices)
    return sum(stock.devices * stock.device.price_per_hour for stock in request.stocks)


def algorithm_1(request: Request, rate: float, marginal: bool = True) -> Placement | None:
    """DistServe's algorithm 1: the best instance of each phase, and as many as the rate needs by their goodput."""
    phases = apart(request, marginal, near=0.0)
    if phases.prefill.best is None or phases.decode.best is None:
        return None
    return together(phases.prefill.best, phases.decode.best, rate)


def algorithm_2(request: Request, rate: float) -> Placement | None:
    """DistServe's algorithm 2 (v3): the best pair whose KV stays within nodes, and as many as the rate needs."""
    found = search(request.units("low"), request.trial, request.bound, request.weight, near=0.0)
    return candidates.times(found.best.unit, needed(found.best, rate)) if found.best else None


def needed(one: Scored, rate: float) -> int:
    """ceil(R / goodput), at least one."""
    return max(1, math.ceil(rate / one.rate - 1e-9))


def together(reads: Scored, writes: Scored, rate: float) -> Placement:
    """n prefill and m decode instances for a rate, by the ceilings of algorithm 1."""
    (prefill,), (decode,) = reads.unit.pools, writes.unit.pools
    unit = Placement((prefill, decode), "high")
    return candidates.counted(unit, (needed(reads, rate), needed(writes, rate)))


def shortlist(found: Result) -> list[Scored]:
    """The best instance of each size."""
    sizes: dict[int, Scored] = {}
    for one in found.scored:
        sizes.setdefault(one.unit.devices, one)
    return list(sizes.values())[:SHORTLIST]


def ratios(request: Request, phases: Phases, kept: int = 6) -> list[Placement]:
    """Whole deployments of n prefill and m decode instances on all the hardware, those of most promise by the phases'
    own goodputs.
    """
    rated: list[tuple[float, Placement]] = []
    for reads in shortlist(phases.prefill):
        for writes in shortlist(phases.decode):
            rated += sorted(_ratios(request, reads, writes), key=lambda one: (-one[0], str(one[1])))[:3]
    rated.sort(key=lambda one: (-one[0], one[1].devices, str(one[1])))
    return [placement for _, placement in rated[:kept]]


def _ratios(request: Request, reads: Scored, writes: Scored) -> list[tuple[float, Placement]]:
    """For each number of prefill instances the most decode instances that fit with it."""
    (prefill,), (decode,) = reads.unit.pools, writes.unit.pools
    unit = Placement((prefill, decode), "high")
    found = []
    for n in range(1, request.devices // prefill.devices + 1):
        left = request.devices - n * prefill.devices
        fitting = (
            placement
            for m in range(left // decode.devices, 0, -1)
            if request.packs(placement := candidates.counted(unit, (n, m)))
        )
        for placement in islice(fitting, 1):
            m = placement.pools[1].count
            found.append((min(n * reads.rate, m * writes.rate), placement))
    return found


def lightest(
    request: Request, units: Iterable[Placement], rate: float, kept: int = 2, below: float = math.inf
) -> list[Placement]:
    """The `kept` lightest deployments of one kind of unit each that carry `rate`; all lighter than `below`.

    A unit is put to the largest count that is still lighter than those known, and dropped if that fails: one run.
    """
    found: list[tuple[float, str, Placement]] = []
    for unit in _promising(request, units, rate):
        limit = found[kept - 1][0] if len(found) >= kept else below
        weight = request.weight(unit)
        most = request.most(unit)
        if math.isfinite(limit):
            most = min(most, math.ceil(limit / weight - 1e-9) - 1)
        count = _fewest(request, unit, most, rate)
        if count:
            whole = candidates.times(unit, count)
            found = sorted([*found, (count * weight, str(whole), whole)], key=lambda one: one[:2])[:kept]
    return [whole for _, _, whole in found]


def _promising(request: Request, units: Iterable[Placement], rate: float) -> list[Placement]:
    """In the order of the weight that they would need if each resource could be busy all the time."""
    jobs = [job for sample in request.samples(request.requests) for job in sample]

    def need(unit: Placement) -> tuple[float, str]:
        most = min(saturation(request.site, jobs, request.slos, unit).values())
        return math.ceil(rate / most) * request.weight(unit), str(unit)

    return sorted(units, key=need)


def _fewest(request: Request, unit: Placement, most: int, rate: float) -> int:
    """The smallest count of `unit`, up to `most`, that carries `rate`; 0 if `most` does not."""
    if most < 1 or not carries(request, candidates.times(unit, most), rate):
        return 0
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if carries(request, candidates.times(unit, middle), rate) else (middle, high)
        )
    return high


def carries(request: Request, placement: Placement, rate: float, trial: Trial | None = None) -> bool:
    """Whether `placement` keeps its promises at `rate`: no bound forbids it, and a run shows it."""
    trial = trial or request.trial(placement, least=rate * request.horizon_s)
    return ceiling(bounds(trial, request.site, placement)) >= rate and trial.passes(placement, rate)


def sized(request: Request, trial: Trial, start: Placement, rate: float) -> Placement | None:
    """The lightest counts of `start`'s pools, near its own, that carry `rate`; None if the hardware does not take them.

    Low affinity multiplies all pools at once: its units are whole. Else pools grow one by one, each time the one that
    helps most for its weight, and shrink again while the promises are kept.
    """
    found = grown(request, trial, start, rate)
    return None if found is None else shrunk(request, trial, found, rate)


def shrunk(request: Request, trial: Trial, start: Placement, rate: float) -> Placement:
    """`start`, which carries `rate`, without the instances that it can do without, one by one: the heaviest last."""
    steps, shrinking = _steps(start), True
    while shrinking:
        less = [one for one in (_moved(start, step, -1) for step in steps) if one]
        less.sort(key=lambda one: (request.weight(one), str(one)))
        kept = next((one for one in less if trial.passes(one, rate)), None)
        start, shrinking = kept or start, kept is not None
    return start


def grown(
    request: Request,
    trial: Trial,
    start: Placement,
    rate: float,
    most: int = MOST_TRIED,
    below: float = math.inf,
) -> Placement | None:
    """`start` with instances added until it carries `rate`, each time where one helps most for its weight.

    None if so many as `most` do not do, if it would not be lighter than `below`, or if the hardware takes no more.
    """
    steps = _steps(start)
    for added in range(most + 1):
        if trial.passes(start, rate):
            return start
        larger = [one for one in (_moved(start, step, 1) for step in steps) if one and request.packs(one)]
        larger = [one for one in larger if request.weight(one) < below]
        if not larger or added == most:
            return None
        now = start
        start = max(larger, key=lambda one: _gain(request, trial, now, one, rate))
    return None


def _gain(
    request: Request, trial: Trial, now: Placement, then: Placement, rate: float
) -> tuple[bool, float, str]:
    """Those that pass first, the lightest of them; else by what they bring for their weight."""
    added = request.weight(then) - request.weight(now)
    if trial.passes(then, rate):
        return True, -added, str(then)
    return False, min(trial.shares(then, rate).values()) / added, str(then)


def _steps(placement: Placement) -> Sequence[tuple[int, ...]]:
    """How counts may move, one step: by pool, or those of a pair that shares nodes by its least ratio."""
    counts = [pool.count for pool in placement.pools]
    moving = [index for index, pool in enumerate(placement.pools) if pool.role != BOTH]
    if placement.affinity != "low" or len(moving) < 2:
        return [tuple(int(index == chosen) for index in range(len(counts))) for chosen in range(len(counts))]
    units = math.gcd(*(counts[index] for index in moving))
    whole = tuple(counts[index] // units if index in moving else 0 for index in range(len(counts)))
    others = [index for index in range(len(counts)) if index not in moving]
    return [whole, *(tuple(int(index == one) for index in range(len(counts))) for one in others)]


def _moved(placement: Placement, step: tuple[int, ...], by: int) -> Placement | None:
    counts = tuple(pool.count + by * more for pool, more in zip(placement.pools, step, strict=True))
    return candidates.counted(placement, counts) if min(counts) >= 1 else None


def _phase(slo: Slo, role: str, marginal: bool) -> Slo:
    attainment = slo.attainment if marginal else math.sqrt(slo.attainment)
    return Slo(slo.ttft_s, math.inf, attainment) if role == PREFILL else Slo(math.inf, slo.tpot_s, attainment)
