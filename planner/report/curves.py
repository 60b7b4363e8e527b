"""The figures behind the planner's plots: goodput by devices, attainment by rate, and where disaggregation pays.

Curves come from short runs in the fast simulator. They cover only the families and affinities that were asked for, on
at most the given hardware. The final answer is drawn as a separate mark, with its validated figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path

from diptych.slo import Slo
from planner.placement import candidates
from planner.placement.bounds import lowest_bound, saturation_rates
from planner.placement.families import FamilySearch
from planner.placement.problem import Problem
from planner.placement.search import (
    MIN_RUNG,
    RUNG_RATIO,
    ScoredUnit,
    SearchResult,
    climb_ladder,
    rung_of,
    search_units,
)
from planner.placement.sizing import search_phases
from planner.placement.solve import Candidate, Solution
from planner.report.explain import disaggregation_gain
from planner.report.plots import Curve, CurvePoint, plot_attainment, plot_break_even, plot_goodput
from planner.report.whatif import with_slos
from planner.types import Placement

# The rates that are simulated, as multiples of the goodput.
RATE_FACTORS = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0)
# The SLOs that are tried, as multiples of the SLO that was asked for.
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)
# Most requests, and most seconds of traffic, of a run that only draws a curve.
FEW_REQUESTS, FEW_S = 300, 20.0
# Most numbers of devices that are drawn.
DEVICE_STEPS = 16
# Instances stay candidates if they are within this share of the best per device: they may be the best that few
# devices take.
FAR_RATIO = 0.9
# Most whole deployments that are measured for each number of devices.
MAX_TRIED = 4

# Requests per second by the number of devices that carry them.
RateByDevices = dict[int, float]


def draw_plots(solution: Solution, folder: Path) -> list[Path]:
    """Draws the plots into `folder`; returns the paths of the PNGs and their JSON files.

    Where disaggregation pays is drawn if both it and colocation are asked for.
    """
    problem = solution.problem
    files = [
        *plot_attainment(folder / "attainment.png", attainment_by_rate(solution), problem.slos),
        *plot_goodput(folder / "goodput.png", goodput_by_devices(solution), problem.rate),
    ]
    if gains := gain_by_slo(solution):
        files += plot_break_even(folder / "break_even.png", gains, "SLO, times the one asked for")
    return files


# ---- attainment by rate


def attainment_by_rate(solution: Solution) -> list[Curve]:
    """Joint attainment of the best of each family, around the answer's goodput, for each kind of request; fresh seeds,
    lowest to highest. And of the answer what the product's own decisions make of it.
    """
    chosen: dict[str, Candidate] = {}
    for candidate in (solution.best_candidate, *solution.others):
        chosen.setdefault(_family_of(candidate.placement), candidate)
    top = solution.best_candidate.fast_result.goodput_rps or solution.best_candidate.rate_rps
    rates = [share * top for share in RATE_FACTORS]
    curves = [
        Curve(_curve_name(f"{family}: {option.placement}", kind, solution), tuple(points))
        for family, option in chosen.items()
        for kind, points in _attainment_points(solution.problem, option.placement, rates).items()
    ]
    if solution.validation is not None:
        name, rate = "the answer, by the product's scheduler and router", solution.validation.rate_rps
        curves += [
            Curve(_curve_name(name, kind, solution), (CurvePoint(rate, share),))
            for kind, share in sorted(solution.validation.shares.items())
        ]
    return curves


def _attainment_points(
    problem: Problem, placement: Placement, rates: Iterable[float]
) -> dict[str, list[CurvePoint]]:
    """The points of the attainment curve of each kind: mean, lowest and highest over the seeds."""
    trial = problem.trial(placement, fresh=True)
    alone = [replace(trial, samples=(sample,)) for sample in trial.samples]
    found: dict[str, list[CurvePoint]] = {kind: [] for kind in sorted(trial.counted())}
    for rate in rates:
        seeds = [one.shares(placement, rate) for one in alone]
        for kind, points in found.items():
            by_seed = [shares[kind] for shares in seeds if kind in shares]
            points.append(CurvePoint(rate, sum(by_seed) / len(by_seed), min(by_seed), max(by_seed)))
    return found


def _curve_name(name: str, kind: str, solution: Solution) -> str:
    return f"{kind or 'others'}, {name}" if len(solution.problem.slos) > 1 else name


# ---- goodput by devices


def goodput_by_devices(solution: Solution) -> list[Curve]:
    """The highest goodput of each family by number of devices, up to all that there are; and the answer's."""
    problem = replace(_small_problem(solution.problem), rate=None)
    search, steps = FamilySearch(problem), _device_steps(problem.devices)
    near, far = problem.affinity != "high", problem.affinity != "low"
    mixes = search.asked("hybrid") and near
    pairs = _scored_units(problem, "low") if mixes or (search.asked("disaggregated") and near) else ()
    alone = _scored_units(problem, "colocated") if mixes or search.asked("colocated") else ()
    lines: dict[str, RateByDevices] = {}
    if search.asked("colocated"):
        lines["colocated"] = _replicated_rates(problem, alone)
    if search.asked("disaggregated") and near:
        lines["disaggregated (low affinity)"] = _replicated_rates(problem, pairs)
    if search.asked("disaggregated") and far:
        lines["disaggregated (high affinity)"] = _measured_rates(problem, _pair_blends(problem), steps)
    if mixes:
        lines["hybrid"] = _measured_rates(problem, _hybrid_blends(pairs, alone), steps)
    best_candidate = solution.best_candidate
    own = CurvePoint(
        float(best_candidate.placement.devices), best_candidate.goodput_rps, *best_candidate.interval_rps
    )
    curves = [_goodput_curve(name, rates, steps) for name, rates in lines.items()]
    return [*curves, Curve(f"the answer: {best_candidate.placement}", (own,))]


def _device_steps(devices: int) -> list[int]:
    """The numbers of devices that are drawn: at even distances, up to all devices."""
    return sorted({-(-devices * step // DEVICE_STEPS) for step in range(1, DEVICE_STEPS + 1)})


def _goodput_curve(name: str, rates: Mapping[int, float], steps: Iterable[int]) -> Curve:
    """The curve through `rates`. It never falls, since devices may stay unused."""
    most = {
        step: max((rate for devices, rate in rates.items() if devices <= step), default=0.0) for step in steps
    }
    return Curve(name, tuple(CurvePoint(float(step), rate) for step, rate in most.items() if rate > 0.0))


def _scored_units(problem: Problem, family: str) -> Sequence[ScoredUnit]:
    """Every unit of the family that meets the SLOs, with its measured goodput."""
    units = (placement for placement in problem.units(family) if problem.fits_on_nodes(placement))
    return search_units(units, problem.trial, problem.bound, problem.weight, exhaustive=True).scored


def _replicated_rates(problem: Problem, scored: Iterable[ScoredUnit]) -> RateByDevices:
    """Goodput by number of devices, if each unit is replicated as often as the nodes have room."""
    rates: RateByDevices = {}
    for unit in scored:
        for count in range(1, problem.most(unit.placement) + 1):
            devices = count * unit.placement.devices
            rates[devices] = max(rates.get(devices, 0.0), count * unit.rate)
    return rates


def _measured_rates(problem: Problem, blends: Sequence[UnitBlend], steps: Iterable[int]) -> RateByDevices:
    """Goodput by number of devices: of the best of a few whole deployments that are measured for each number."""
    rates: dict[Placement, float] = {}
    for most in steps:
        for expected, placement in _best_blends(problem, blends, most):
            if placement not in rates:
                rates[placement] = _measure_goodput(problem, placement, expected)
    found: RateByDevices = {}
    for placement, rate in rates.items():
        found[placement.devices] = max(found.get(placement.devices, 0.0), rate)
    return found


@dataclass(frozen=True, slots=True)
class UnitBlend:
    """Deployments of n of one unit and m of another, of so many devices each, and what they should carry by means."""

    sizes: tuple[int, int]
    rate: Callable[[int, int], float]
    made: Callable[[int, int], Placement]


def _pair_blends(problem: Problem) -> list[UnitBlend]:
    """Prefill and decode instances sized apart, with the links between them; and those that the search proposes."""
    phases, found = search_phases(problem, near=FAR_RATIO), dict[Placement, UnitBlend]()
    whole = FamilySearch(replace(problem, families=("disaggregated",), affinity="high")).finalists()
    for finalist in whole:
        placement = candidates.with_counts(finalist.placement, (1, 1))
        found[placement] = UnitBlend(
            _pool_sizes(placement),
            partial(_sustained_rps, problem, placement),
            partial(_with_counts, placement),
        )
    jobs = [job for sample in problem.samples(problem.requests) for job in sample]
    for prefills in _best_by_size(phases.prefill):
        for decodes in _best_by_size(phases.decode):
            placement = Placement((*prefills.placement.pools, *decodes.placement.pools), "high")
            link = saturation_rates(problem.site, jobs, problem.slos, placement)["link"]
            rate = partial(_slowest_rate, prefills.rate, decodes.rate, link)
            found.setdefault(
                placement, UnitBlend(_pool_sizes(placement), rate, partial(_with_counts, placement))
            )
    return list(found.values())


def _best_by_size(result: SearchResult) -> Iterable[ScoredUnit]:
    """The best instance of each size. Small ones are kept, since few devices have room for no others."""
    sizes: dict[int, ScoredUnit] = {}
    for unit in result.scored:
        sizes.setdefault(unit.placement.devices, unit)
    return sizes.values()


def _pool_sizes(placement: Placement) -> tuple[int, int]:
    first, second = placement.pools
    return first.devices, second.devices


def _with_counts(placement: Placement, n: int, m: int) -> Placement:
    return candidates.with_counts(placement, (n, m))


def _sustained_rps(problem: Problem, placement: Placement, n: int, m: int) -> float:
    return problem.saturated_rps(_with_counts(placement, n, m))


def _slowest_rate(prefills: float, decodes: float, link: float, n: int, m: int) -> float:
    return min(n * prefills, m * decodes, min(n, m) * link)


def _hybrid_blends(pairs: Iterable[ScoredUnit], alone: Iterable[ScoredUnit]) -> list[UnitBlend]:
    """Blends of prefill-decode pairs with colocated instances."""
    own = {unit.placement.pools[0]: unit for unit in alone}
    likes = [(pair, candidates.colocated_companion(pair.placement)) for pair in pairs]
    return [_hybrid_blend(pair, own[like]) for pair, like in likes if like in own]


def _hybrid_blend(pair_unit: ScoredUnit, colocated_unit: ScoredUnit) -> UnitBlend:
    return UnitBlend(
        (pair_unit.placement.devices, colocated_unit.placement.devices),
        lambda n, m: n * pair_unit.rate + m * colocated_unit.rate,
        lambda n, m: candidates.combine_placements(
            (
                candidates.replicate_unit(pair_unit.placement, n),
                candidates.replicate_unit(colocated_unit.placement, m),
            )
        ),
    )


def _best_blends(
    problem: Problem, blends: Sequence[UnitBlend], most: int
) -> Iterator[tuple[float, Placement]]:
    """The few deployments on up to `most` devices that fit on the nodes and are expected to carry most."""
    waiting: list[tuple[float, int, int, int]] = []
    for index, blend in enumerate(blends):
        first, second = blend.sizes
        for n in range(1, (most - second) // first + 1):
            m = (most - n * first) // second
            heappush(waiting, (-blend.rate(n, m), index, n, m))
    left = MAX_TRIED
    while waiting and left:
        rate, index, n, m = heappop(waiting)
        placement = blends[index].made(n, m)
        if problem.fits_on_nodes(placement):
            left -= 1
            yield -rate, placement
        elif m > 1:
            heappush(waiting, (-blends[index].rate(n, m - 1), index, n, m - 1))


# ---- where disaggregation pays


def gain_by_slo(solution: Solution) -> list[Curve]:
    """Goodput per device (or price) of the best placement with prefill instances over the best one without, while one
    SLO is scaled and the other stays; and the answer's. Nothing if not both are asked for.
    """
    small = _small_problem(solution.problem)
    search = FamilySearch(small)
    if not (search.asked("colocated") and search.asked("disaggregated", "hybrid")):
        return []
    base, curves = _searched_gain(small), []
    for name in ("ttft_s", "tpot_s"):
        if all(math.isinf(getattr(slo, name)) for slo in small.slos.values()):
            continue
        gains = {
            scale: base
            if scale == 1.0
            else _searched_gain(with_slos(small, partial(_scale_slo, name=name, by=scale)))
            for scale in SCALES
        }
        points = (CurvePoint(scale, gain) for scale, gain in gains.items() if gain is not None)
        curves.append(Curve(f"{name[:4].upper()} scaled", tuple(points)))
    gain = disaggregation_gain(solution)
    return curves if gain is None else [*curves, Curve("the answer", (CurvePoint(1.0, gain),))]


def _scale_slo(slo: Slo, name: str, by: float) -> Slo:
    return replace(slo, ttft_s=slo.ttft_s * by) if name == "ttft_s" else replace(slo, tpot_s=slo.tpot_s * by)


def _searched_gain(problem: Problem) -> float | None:
    """As `planner.report.explain.disaggregation_gain`, of what the search proposes; None where one of both is
    not possible.
    """
    most = {True: 0.0, False: 0.0}
    for finalist in FamilySearch(problem).finalists():
        rate = _measure_goodput(problem, finalist.placement, finalist.expected_rps)
        together = finalist.placement.colocated
        most[together] = max(most[together], rate / problem.weight(finalist.placement))
    return most[False] / most[True] if min(most.values()) > 0.0 else None


def _small_problem(problem: Problem) -> Problem:
    """The problem with short runs of one seed, which suffice to draw a line."""
    return replace(
        problem,
        seeds=1,
        requests=min(FEW_REQUESTS, problem.requests),
        span_s=min(FEW_S, problem.span_s),
        verified=False,
    )


def _measure_goodput(problem: Problem, placement: Placement, guess: float) -> float:
    """Requests per second of a whole deployment, in the search's simulator; 0 if it meets the SLOs at no rate."""
    top = rung_of(lowest_bound(problem.bound(placement)))
    if top < MIN_RUNG:
        return 0.0
    rung = climb_ladder(problem.trial(placement), placement, 1.0, MIN_RUNG, top, rung_of(guess))
    return 0.0 if rung is None else RUNG_RATIO**rung


def _family_of(placement: Placement) -> str:
    name = candidates.family_of(placement)
    return f"{name} ({placement.affinity} affinity)" if name == "disaggregated" else name
