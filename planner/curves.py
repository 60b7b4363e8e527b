"""The figures behind the planner's plots: goodput by devices, attainment by rate, and where disaggregation pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.placement import Answer, Option
from planner.plots import Curve, Point, attainment, break_even, goodput
from planner.request import Request
from planner.search import Result, search
from planner.terms import Placement, Slo
from planner.trial import joint

AROUND = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0)  # of the goodput
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)  # of an objective
FEW_REQUESTS = 300  # of a run that only draws a line
FAMILIES = {"colocated": "colocated", "disaggregated": "low"}


def plots(answer: Answer, folder: Path) -> list[Path]:
    """Draws all three into `folder`; returns the PNGs and their JSONs."""
    request, slo = answer.request, next(iter(answer.request.slos.values()))
    return [
        *attainment(folder / "attainment.png", by_rate(answer), slo),
        *goodput(folder / "goodput.png", by_devices(request), request.rate),
        *break_even(folder / "break_even.png", by_objective(request), "objective, times the one asked for"),
    ]


def by_rate(answer: Answer) -> list[Curve]:
    """Joint attainment of the best of each family, around their goodputs; fresh seeds, lowest to highest."""
    chosen: dict[str, Option] = {}
    for option in (answer.best, *answer.others):
        chosen.setdefault(option.family, option)
    top = answer.best.goodput_rps
    return [
        Curve(
            f"{option.family}: {option.placement}",
            tuple(_attained(answer.request, option.placement, share * top) for share in AROUND),
        )
        for option in chosen.values()
    ]


def _attained(request: Request, placement: Placement, rate: float) -> Point:
    trial = request.trial(placement, fresh=True)
    alone = [replace(trial, samples=(sample,)) for sample in trial.samples]
    shares = [joint(one.shares(placement, rate), one.counted()) for one in alone]
    return Point(rate, sum(shares) / len(shares), min(shares), max(shares))


def by_devices(request: Request) -> list[Curve]:
    """Goodput of the best unit of each family, as often as it fits, for each number of devices up to all."""
    small = _small(request)
    curves = []
    for name, units in FAMILIES.items():
        found = _units(small, units, every=True)
        points = []
        for devices in range(1, request.devices + 1):
            rates = [devices // one.unit.devices * one.rate for one in found.scored]
            if max(rates, default=0.0) > 0.0:
                points.append(Point(float(devices), max(rates)))
        curves.append(Curve(name, tuple(points)))
    return curves


def by_objective(request: Request) -> list[Curve]:
    """Goodput per device, disaggregated over colocated, while one objective is scaled and the other stays."""
    small = _small(request)

    def ratio(slos: dict[str, Slo]) -> float | None:
        question = replace(small, slos=slos)
        apart, together = (_units(question, units).best for units in ("low", "colocated"))
        return apart.per_weight / together.per_weight if apart and together else None

    curves = []
    for name in ("TTFT", "TPOT"):
        points = []
        for scale in SCALES:
            found = ratio({kind: _scaled(slo, name, scale) for kind, slo in request.slos.items()})
            if found is not None:
                points.append(Point(scale, found))
        curves.append(Curve(f"{name} scaled", tuple(points)))
    return curves


def _scaled(slo: Slo, name: str, by: float) -> Slo:
    return replace(slo, ttft_s=slo.ttft_s * by) if name == "TTFT" else replace(slo, tpot_s=slo.tpot_s * by)


def _small(request: Request) -> Request:
    """Short runs of one seed: lines, not figures."""
    return replace(
        request, seeds=1, requests=min(FEW_REQUESTS, request.requests), span_s=min(20.0, request.span_s)
    )


def _units(request: Request, family: str, every: bool = False) -> Result:
    units: Sequence[Placement] = [unit for unit in request.units(family) if request.packs(unit)]
    return search(units, request.trial, request.bound, request.weight, exhaustive=every)
