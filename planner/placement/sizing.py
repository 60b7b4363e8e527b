"""Computes how many instances a rate needs: by DistServe's rule, and by simulation with queueing.

DistServe's Algorithms 1 and 2 divide the wanted rate by the goodput of one unit and round up. Queueing changes the
result: several instances behind one queue may need fewer, and unbalanced ratios need more. `size_deployment`
therefore simulates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from diptych.slo import Slo
from planner.placement import candidates
from planner.placement.bounds import lowest_bound, rate_bounds, saturation_rates
from planner.placement.problem import Problem
from planner.placement.search import ScoredUnit, SearchResult, search_units
from planner.placement.trial import Trial
from planner.types import BOTH, DECODE, PREFILL, InstancePool, Placement

# Most instances that are added before a deployment is given up.
MAX_TRIED = 200
# Number of best instances of each phase that are combined to pairs and simulated.
SHORTLIST = 4
# Instances of other sizes stay candidates if they are within this share of the best, since the sizes must add up to
# the hardware.
NEAR_PHASE_BEST = 0.25


@dataclass(frozen=True, slots=True)
class PhaseUnits:
    """Prefill and decode instances, each searched by themselves; best first."""

    prefill: SearchResult
    decode: SearchResult


def search_phases(problem: Problem, marginal: bool = False, near: float = NEAR_PHASE_BEST) -> PhaseUnits:
    """The first half of algorithm 1: searches each phase by itself, for its own SLO (TTFT or TPOT).

    If both phases met their SLOs independently with attainment p, both together would only reach p². So each phase is
    searched at the square root of the target, unless `marginal` asks for the paper's rule (p for each).
    """
    prefill = _search_phase(problem, PREFILL, marginal, near, math.inf)
    most = max((unit.per_weight for unit in prefill.scored), default=0.0) * _whole_weight(problem)
    return PhaseUnits(prefill, _search_phase(problem, DECODE, marginal, near, most))


def _search_phase(problem: Problem, role: str, marginal: bool, near: float, most: float) -> SearchResult:
    """Searches the instances of one phase. A rate above `most` requests/s brings no advantage and is not tried."""
    slos = {kind: _phase_slo(slo, role, marginal) for kind, slo in problem.slos.items()}
    units = (
        Placement((InstancePool(role, parallelism, 1, group.device.name),), "high")
        for group in problem.groups
        for parallelism in problem.splits(group)
    )

    def trial(placement: Placement) -> Trial:
        least = min(most, problem.rate or most) * problem.horizon_s
        return replace(problem.trial(placement, least=least if math.isfinite(least) else 0.0), slos=slos)

    def bound(placement: Placement) -> dict[str, float]:
        return {
            "enough": most,
            "sustained": problem.saturated_rps(placement) if problem.is_open_ended else math.inf,
        }

    return search_units(units, trial, bound, problem.weight, near)


def _whole_weight(problem: Problem) -> float:
    """Weight of all the hardware: its devices, or their price per hour if types differ."""
    if not problem.mixed_devices:
        return float(problem.devices)
    return sum(group.devices * group.device.price_per_hour for group in problem.groups)


def instances_needed(unit: ScoredUnit, rate: float) -> int:
    """The number of units for a rate: ceil(rate / goodput), at least one."""
    return max(1, math.ceil(rate / unit.rate - 1e-9))


def combine_phases(prefill_unit: ScoredUnit, decode_unit: ScoredUnit, rate: float) -> Placement:
    """A placement of n prefill and m decode instances for a rate, rounded up as in algorithm 1."""
    (prefill,), (decode,) = prefill_unit.placement.pools, decode_unit.placement.pools
    placement = Placement((prefill, decode), "high")
    return candidates.with_counts(
        placement, (instances_needed(prefill_unit, rate), instances_needed(decode_unit, rate))
    )


def best_per_size(result: SearchResult) -> list[ScoredUnit]:
    """The best instance for each number of devices, at most `SHORTLIST` of them."""
    sizes: dict[int, ScoredUnit] = {}
    for unit in result.scored:
        sizes.setdefault(unit.placement.devices, unit)
    return list(sizes.values())[:SHORTLIST]


def ratio_deployments(problem: Problem, phases: PhaseUnits, kept: int = 6) -> list[Placement]:
    """Deployments of n prefill and m decode instances on all the hardware, by the goodput of the weaker phase.

    The `kept` best are returned.
    """
    rated_placements: list[tuple[float, Placement]] = []
    for prefill_unit in best_per_size(phases.prefill):
        for decode_unit in best_per_size(phases.decode):
            rated_placements += sorted(
                _instance_ratios(problem, prefill_unit, decode_unit), key=lambda one: (-one[0], str(one[1]))
            )[:3]
    rated_placements.sort(key=lambda one: (-one[0], one[1].devices, str(one[1])))
    return [placement for _, placement in rated_placements[:kept]]


def _instance_ratios(
    problem: Problem, prefill_unit: ScoredUnit, decode_unit: ScoredUnit
) -> list[tuple[float, Placement]]:
    """For each number of prefill instances, the most decode instances that fit beside them, with the joint goodput."""
    (prefill,), (decode,) = prefill_unit.placement.pools, decode_unit.placement.pools
    unit = Placement((prefill, decode), "high")
    found = []
    for n in range(1, problem.devices // prefill.devices + 1):
        left = problem.devices - n * prefill.devices
        fitting = (
            placement
            for m in range(left // decode.devices, 0, -1)
            if problem.fits_on_nodes(placement := candidates.with_counts(unit, (n, m)))
        )
        for placement in islice(fitting, 1):
            m = placement.pools[1].count
            found.append((min(n * prefill_unit.rate, m * decode_unit.rate), placement))
    return found


def lightest_deployments(
    problem: Problem, placements: Iterable[Placement], rate: float, kept: int = 2, below: float = math.inf
) -> list[Placement]:
    """The `kept` lightest deployments that carry `rate`, each of copies of one unit, all lighter than `below`.

    For each unit the largest count is tried first that is still lighter than the deployments found. If that count
    fails, the unit is dropped after a single run.
    """
    found: list[tuple[float, str, Placement]] = []
    for placement in _by_ideal_weight(problem, placements, rate):
        limit = found[kept - 1][0] if len(found) >= kept else below
        weight = problem.weight(placement)
        most = problem.most(placement)
        if math.isfinite(limit):
            most = min(most, math.ceil(limit / weight - 1e-9) - 1)
        count = _fewest_units(problem, placement, most, rate)
        if count:
            whole = candidates.replicate_unit(placement, count)
            found = sorted([*found, (count * weight, str(whole), whole)], key=lambda one: one[:2])[:kept]
    return [whole for _, _, whole in found]


def _by_ideal_weight(problem: Problem, placements: Iterable[Placement], rate: float) -> list[Placement]:
    """Sorts units by the weight that they would need for `rate` at 100 % utilisation."""
    jobs = [job for sample in problem.samples(problem.requests) for job in sample]

    def need(placement: Placement) -> tuple[float, str]:
        most = min(saturation_rates(problem.site, jobs, problem.slos, placement).values())
        return math.ceil(rate / most) * problem.weight(placement), str(placement)

    return sorted(placements, key=need)


def _fewest_units(problem: Problem, placement: Placement, most: int, rate: float) -> int:
    """The smallest count of `placement`, up to `most`, that carries `rate`; 0 if even `most` does not."""
    if most < 1 or not carries_rate(problem, candidates.replicate_unit(placement, most), rate):
        return 0
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if carries_rate(problem, candidates.replicate_unit(placement, middle), rate)
            else (middle, high)
        )
    return high


def carries_rate(problem: Problem, placement: Placement, rate: float, trial: Trial | None = None) -> bool:
    """Whether `placement` meets the SLOs at `rate`: no upper bound excludes it, and a simulation confirms it."""
    trial = trial or problem.trial(placement, least=rate * problem.horizon_s)
    return lowest_bound(rate_bounds(trial, problem.site, placement)) >= rate and trial.passes(placement, rate)


def size_deployment(problem: Problem, trial: Trial, placement: Placement, rate: float) -> Placement | None:
    """The lightest instance counts near those of `placement` that carry `rate`; None if there is no room for them.

    With low affinity, prefill and decode pools change together, by whole units. Otherwise pools grow one instance at a
    time, where it helps most for its weight, and then shrink again while the SLOs are met.
    """
    found = grow_deployment(problem, trial, placement, rate)
    return None if found is None else shrink_deployment(problem, trial, found, rate)


def shrink_deployment(problem: Problem, trial: Trial, placement: Placement, rate: float) -> Placement:
    """Removes instances from `placement`, one by one and the heaviest first, as long as it still carries `rate`."""
    steps, shrinking = _count_steps(placement), True
    while shrinking:
        less = [one for one in (_move_counts(placement, step, -1) for step in steps) if one]
        less.sort(key=lambda one: (problem.weight(one), str(one)))
        kept = next((one for one in less if trial.passes(one, rate)), None)
        placement, shrinking = kept or placement, kept is not None
    return placement


def grow_deployment(
    problem: Problem,
    trial: Trial,
    placement: Placement,
    rate: float,
    most: int = MAX_TRIED,
    below: float = math.inf,
) -> Placement | None:
    """Adds instances to `placement` until it carries `rate`, each time where one helps most for its weight.

    Returns None if `most` instances more are not enough, if the result would not be lighter than `below`, or if the
    hardware has no room.
    """
    steps = _count_steps(placement)
    for added in range(most + 1):
        if trial.passes(placement, rate):
            return placement
        larger = [
            one
            for one in (_move_counts(placement, step, 1) for step in steps)
            if one and problem.fits_on_nodes(one)
        ]
        larger = [one for one in larger if problem.weight(one) < below]
        if not larger or added == most:
            return None
        now = placement
        placement = max(larger, key=lambda one: _growth_gain(problem, trial, now, one, rate))
    return None


def _growth_gain(
    problem: Problem, trial: Trial, now: Placement, then: Placement, rate: float
) -> tuple[bool, float, str]:
    """Sort key of a grown deployment: first those that carry the rate, lightest first; else by gain per weight."""
    added = problem.weight(then) - problem.weight(now)
    if trial.passes(then, rate):
        return True, -added, str(then)
    return False, min(trial.shares(then, rate).values()) / added, str(then)


def _count_steps(placement: Placement) -> Sequence[tuple[int, ...]]:
    """The steps in which instance counts may change: one instance of a pool, or one unit of pools that share nodes."""
    counts = [pool.count for pool in placement.pools]
    moving = [index for index, pool in enumerate(placement.pools) if pool.role != BOTH]
    if placement.affinity != "low" or len(moving) < 2:
        return [tuple(int(index == chosen) for index in range(len(counts))) for chosen in range(len(counts))]
    units = math.gcd(*(counts[index] for index in moving))
    whole = tuple(counts[index] // units if index in moving else 0 for index in range(len(counts)))
    others = [index for index in range(len(counts)) if index not in moving]
    return [whole, *(tuple(int(index == one) for index in range(len(counts))) for one in others)]


def _move_counts(placement: Placement, step: tuple[int, ...], by: int) -> Placement | None:
    """The placement with `by` times `step` added to its counts; None if a pool would have no instance."""
    counts = tuple(pool.count + by * more for pool, more in zip(placement.pools, step, strict=True))
    return candidates.with_counts(placement, counts) if min(counts) >= 1 else None


def _phase_slo(slo: Slo, role: str, marginal: bool) -> Slo:
    """The SLO of one phase: TTFT for prefill, TPOT for decode; see `search_phases` for its attainment."""
    attainment = slo.attainment if marginal else math.sqrt(slo.attainment)
    return Slo(slo.ttft_s, math.inf, attainment) if role == PREFILL else Slo(math.inf, slo.tpot_s, attainment)
