"""The figures behind the planner's plots: goodput by devices, attainment by rate, and where disaggregation pays.

Curves are of short runs in the search's simulator, of those families and affinities that were asked for, on no more
than the hardware. The answer is a mark of its own, with the figures that it promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path

from planner import candidates
from planner.bounds import ceiling, saturation
from planner.explain import advantage
from planner.finalists import Found
from planner.placement import Answer, Option
from planner.plots import Curve, Point, attainment, break_even, goodput
from planner.request import Request
from planner.search import LOWEST, RATIO, Result, Scored, climb, rung_of, search
from planner.sizing import apart
from planner.terms import Placement, Slo
from planner.whatif import promising

AROUND = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0)  # of the goodput
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)  # of an objective
FEW_REQUESTS, FEW_S = 300, 20.0  # of a run that only draws a line, and the seconds of its traffic
STEPS = 16  # numbers of devices that are drawn, at most
FAR = 0.9  # below the best per device, and yet the best that few devices take
TRIED = 4  # whole deployments of each of them that are measured

Rates = dict[int, float]  # by the devices that carry them


def plots(answer: Answer, folder: Path) -> list[Path]:
    """Draws what there is to draw into `folder`; returns the PNGs and their JSONs.

    Where disaggregation pays is drawn if both it and colocation are asked for.
    """
    request = answer.request
    files = [
        *attainment(folder / "attainment.png", by_rate(answer), request.slos),
        *goodput(folder / "goodput.png", by_devices(answer), request.rate),
    ]
    if gains := by_objective(answer):
        files += break_even(folder / "break_even.png", gains, "objective, times the one asked for")
    return files


# ---- attainment by rate


def by_rate(answer: Answer) -> list[Curve]:
    """Joint attainment of the best of each family, around the answer's goodput, for each kind of request; fresh seeds,
    lowest to highest. And of the answer what the product's own decisions make of it.
    """
    chosen: dict[str, Option] = {}
    for option in (answer.best, *answer.others):
        chosen.setdefault(_family(option.placement), option)
    top = answer.best.fast.goodput_rps or answer.best.rate_rps
    rates = [share * top for share in AROUND]
    curves = [
        Curve(_of_kind(f"{family}: {option.placement}", kind, answer), tuple(points))
        for family, option in chosen.items()
        for kind, points in _attained(answer.request, option.placement, rates).items()
    ]
    if answer.verdict is not None:
        judged, rate = "the answer, by the product's scheduler and router", answer.verdict.rate_rps
        curves += [
            Curve(_of_kind(judged, kind, answer), (Point(rate, share),))
            for kind, share in sorted(answer.verdict.shares.items())
        ]
    return curves


def _attained(request: Request, placement: Placement, rates: Iterable[float]) -> dict[str, list[Point]]:
    """By kind: the mean over seeds, the lowest and the highest."""
    trial = request.trial(placement, fresh=True)
    alone = [replace(trial, samples=(sample,)) for sample in trial.samples]
    found: dict[str, list[Point]] = {kind: [] for kind in sorted(trial.counted())}
    for rate in rates:
        seeds = [one.shares(placement, rate) for one in alone]
        for kind, points in found.items():
            seen = [shares[kind] for shares in seeds if kind in shares]
            points.append(Point(rate, sum(seen) / len(seen), min(seen), max(seen)))
    return found


def _of_kind(name: str, kind: str, answer: Answer) -> str:
    return f"{kind or 'others'}, {name}" if len(answer.request.slos) > 1 else name


# ---- goodput by devices


def by_devices(answer: Answer) -> list[Curve]:
    """The highest goodput of each family with so many devices or fewer, up to all that there are; and the answer's."""
    request = replace(_small(answer.request), rate=None)
    found, steps = Found(request), _steps(request.devices)
    near, far = request.affinity != "high", request.affinity != "low"
    mixes = found.asked("hybrid") and near
    pairs = _scored(request, "low") if mixes or (found.asked("disaggregated") and near) else ()
    alone = _scored(request, "colocated") if mixes or found.asked("colocated") else ()
    lines: dict[str, Rates] = {}
    if found.asked("colocated"):
        lines["colocated"] = _multiplied(request, alone)
    if found.asked("disaggregated") and near:
        lines["disaggregated (low affinity)"] = _multiplied(request, pairs)
    if found.asked("disaggregated") and far:
        lines["disaggregated (high affinity)"] = _measured(request, _pairs(request), steps)
    if mixes:
        lines["hybrid"] = _measured(request, _hybrids(pairs, alone), steps)
    best = answer.best
    own = Point(float(best.placement.devices), best.goodput_rps, *best.interval_rps)
    curves = [_line(name, rates, steps) for name, rates in lines.items()]
    return [*curves, Curve(f"the answer: {best.placement}", (own,))]


def _steps(devices: int) -> list[int]:
    """Numbers of devices, evenly, up to all."""
    return sorted({-(-devices * step // STEPS) for step in range(1, STEPS + 1)})


def _line(name: str, rates: Mapping[int, float], steps: Iterable[int]) -> Curve:
    """What is not used costs no goodput: more devices never give less."""
    most = {
        step: max((rate for devices, rate in rates.items() if devices <= step), default=0.0) for step in steps
    }
    return Curve(name, tuple(Point(float(step), rate) for step, rate in most.items() if rate > 0.0))


def _scored(request: Request, family: str) -> Sequence[Scored]:
    """Every unit that keeps the promises, measured."""
    units = (unit for unit in request.units(family) if request.packs(unit))
    return search(units, request.trial, request.bound, request.weight, exhaustive=True).scored


def _multiplied(request: Request, scored: Iterable[Scored]) -> Rates:
    """Of the best unit, as often as the nodes take it."""
    rates: Rates = {}
    for one in scored:
        for count in range(1, request.most(one.unit) + 1):
            devices = count * one.unit.devices
            rates[devices] = max(rates.get(devices, 0.0), count * one.rate)
    return rates


def _measured(request: Request, blends: Sequence[Blend], steps: Iterable[int]) -> Rates:
    """Of the best of a few whole deployments for each number of devices."""
    rates: dict[Placement, float] = {}
    for most in steps:
        for expected, placement in _blended(request, blends, most):
            if placement not in rates:
                rates[placement] = _goodput(request, placement, expected)
    found: Rates = {}
    for placement, rate in rates.items():
        found[placement.devices] = max(found.get(placement.devices, 0.0), rate)
    return found


@dataclass(frozen=True, slots=True)
class Blend:
    """Deployments of n of one unit and m of another, of so many devices each, and what they should carry by means."""

    sizes: tuple[int, int]
    rate: Callable[[int, int], float]
    made: Callable[[int, int], Placement]


def _pairs(request: Request) -> list[Blend]:
    """Prefill and decode instances sized apart, with the links between them; and those that the search proposes."""
    phases, found = apart(request, near=FAR), dict[Placement, Blend]()
    whole = Found(replace(request, families=("disaggregated",), affinity="high")).finalists()
    for one in whole:
        unit = candidates.counted(one.placement, (1, 1))
        found[unit] = Blend(_sizes(unit), partial(_sustained, request, unit), partial(_counted, unit))
    jobs = [job for sample in request.samples(request.requests) for job in sample]
    for reads in _by_size(phases.prefill):
        for writes in _by_size(phases.decode):
            unit = Placement((*reads.unit.pools, *writes.unit.pools), "high")
            link = saturation(request.site, jobs, request.slos, unit)["link"]
            rate = partial(_slowest, reads.rate, writes.rate, link)
            found.setdefault(unit, Blend(_sizes(unit), rate, partial(_counted, unit)))
    return list(found.values())


def _by_size(found: Result) -> Iterable[Scored]:
    """The best instance of each size: small ones are all that few devices take."""
    sizes: dict[int, Scored] = {}
    for one in found.scored:
        sizes.setdefault(one.unit.devices, one)
    return sizes.values()


def _sizes(unit: Placement) -> tuple[int, int]:
    first, second = unit.pools
    return first.devices, second.devices


def _counted(unit: Placement, n: int, m: int) -> Placement:
    return candidates.counted(unit, (n, m))


def _sustained(request: Request, unit: Placement, n: int, m: int) -> float:
    return request.saturated_rps(_counted(unit, n, m))


def _slowest(reads: float, writes: float, link: float, n: int, m: int) -> float:
    return min(n * reads, m * writes, min(n, m) * link)


def _hybrids(pairs: Iterable[Scored], alone: Iterable[Scored]) -> list[Blend]:
    """Pairs, and their companions."""
    own = {one.unit.pools[0]: one for one in alone}
    likes = [(pair, candidates.companion(pair.unit)) for pair in pairs]
    return [_hybrid(pair, own[like]) for pair, like in likes if like in own]


def _hybrid(pair: Scored, beside: Scored) -> Blend:
    return Blend(
        (pair.unit.devices, beside.unit.devices),
        lambda n, m: n * pair.rate + m * beside.rate,
        lambda n, m: candidates.both((candidates.times(pair.unit, n), candidates.times(beside.unit, m))),
    )


def _blended(request: Request, blends: Sequence[Blend], most: int) -> Iterator[tuple[float, Placement]]:
    """The few deployments on up to `most` devices that should carry most, of those that the nodes take."""
    waiting: list[tuple[float, int, int, int]] = []
    for index, blend in enumerate(blends):
        first, second = blend.sizes
        for n in range(1, (most - second) // first + 1):
            m = (most - n * first) // second
            heappush(waiting, (-blend.rate(n, m), index, n, m))
    left = TRIED
    while waiting and left:
        rate, index, n, m = heappop(waiting)
        placement = blends[index].made(n, m)
        if request.packs(placement):
            left -= 1
            yield -rate, placement
        elif m > 1:
            heappush(waiting, (-blends[index].rate(n, m - 1), index, n, m - 1))


# ---- where disaggregation pays


def by_objective(answer: Answer) -> list[Curve]:
    """Goodput per device (or price) of the best placement with prefill instances over the best one without, while one
    objective is scaled and the other stays; and the answer's. Nothing if not both are asked for.
    """
    small = _small(answer.request)
    found = Found(small)
    if not (found.asked("colocated") and found.asked("disaggregated", "hybrid")):
        return []
    base, curves = _gain(small), []
    for name in ("ttft_s", "tpot_s"):
        if all(math.isinf(getattr(slo, name)) for slo in small.slos.values()):
            continue
        gains = {
            scale: base if scale == 1.0 else _gain(promising(small, partial(_scaled, name=name, by=scale)))
            for scale in SCALES
        }
        points = (Point(scale, gain) for scale, gain in gains.items() if gain is not None)
        curves.append(Curve(f"{name[:4].upper()} scaled", tuple(points)))
    told = advantage(answer)
    return curves if told is None else [*curves, Curve("the answer", (Point(1.0, told),))]


def _scaled(slo: Slo, name: str, by: float) -> Slo:
    return replace(slo, ttft_s=slo.ttft_s * by) if name == "ttft_s" else replace(slo, tpot_s=slo.tpot_s * by)


def _gain(request: Request) -> float | None:
    """As `planner.explain.advantage`, of what the search proposes; None where one of both is not possible."""
    most = {True: 0.0, False: 0.0}
    for one in Found(request).finalists():
        rate = _goodput(request, one.placement, one.expected_rps)
        together = one.placement.colocated
        most[together] = max(most[together], rate / request.weight(one.placement))
    return most[False] / most[True] if min(most.values()) > 0.0 else None


def _small(request: Request) -> Request:
    """Short runs of one seed: lines, not figures."""
    return replace(
        request,
        seeds=1,
        requests=min(FEW_REQUESTS, request.requests),
        span_s=min(FEW_S, request.span_s),
        verified=False,
    )


def _goodput(request: Request, placement: Placement, guess: float) -> float:
    """Requests per second of a whole deployment, in the search's simulator; 0 if it keeps the promises at none."""
    top = rung_of(ceiling(request.bound(placement)))
    if top < LOWEST:
        return 0.0
    rung = climb(request.trial(placement), placement, 1.0, LOWEST, top, rung_of(guess))
    return 0.0 if rung is None else RATIO**rung


def _family(placement: Placement) -> str:
    name = candidates.family(placement)
    return f"{name} ({placement.affinity} affinity)" if name == "disaggregated" else name
