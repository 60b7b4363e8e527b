"""What `benchmarks/goodput.py` compares: deployments by name, what is sent to them, and what the simulator expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.accuracy.goodput_knee import TARGET, Walk, counted, knee_of
from benchmarks.accuracy.measured_deployment import (
    measured_deployment,
    start_later,
    undisturbed_costs,
)
from diptych.slo import Slo, Slos
from planner.sim.exact.deployment import SimDeployment as Simulated
from planner.sim.exact.simulate import simulate_exact
from planner.types import Job, JobResult
from planner.workload.workload import Workload
from services.bench.profile_run import Measurement, PoolSizes

APART, TOGETHER = "apart", "together"
POOLS = {APART: PoolSizes(), TOGETHER: PoolSizes(0, 0, 2)}
COLOCATED = ("colocated", "unchunked")
FEWEST = 24  # requests of a run
# Of a predicted goodput: closer ones are a tie. About how far predictions of a deployment are off; what is named first
# is simpler, and what is less simple is to be worth more than the error.
SAME = 0.1
# Of attainment: about how far the simulator is off (`benchmarks/sim_accuracy.py`). Where attainment hardly falls with
# the rate, so much more or less is twice the goodput; a choice rests on rates at which it is above the target by that.
ERROR = 0.03
# Of the steps that were noted, where simulated runs begin to repeat them, one after the other.
STARTS = tuple(5 * number % 8 / 8 for number in range(8))
SIMULATED = 400  # requests at a simulated rate, at least
OTHER = 1000  # the first seed of those: not the requests that are measured
FAR_DOWN, FAR_UP = -14, 24  # powers of `STEP` around the pace of one request at a time that may be simulated


@dataclass(frozen=True, slots=True)
class Column:
    """A deployment: flags of `diptych serve`, its kind, and what the simulator has for the flags."""

    flags: tuple[str, ...]
    kind: str
    options: dict[str, Any]


def columns(slo: Slo) -> dict[str, Column]:
    """What can be deployed for an SLO; `local` is what `auto` may choose beside the others."""
    tpot = ("--slo-tpot-ms", f"{slo.tpot_s * 1e3:.6g}")
    apart = ("--prefill", "1", "--decode", "1")
    within = {"tpot_s": slo.tpot_s}
    whole = ("--colocated", "2", "--no-enable-chunked-prefill")
    return {
        "disaggregated": Column(apart, APART, {}),
        "colocated": Column(("--colocated", "2", *tpot), TOGETHER, within),
        "unchunked": Column(whole, TOGETHER, {"chunked_prefill": False}),
        "local": Column(
            (*apart, "--local-prefill", "auto", *tpot), APART, within | {"local_prefill": "auto"}
        ),
    }


@dataclass(frozen=True, slots=True)
class Site:
    """A deployment, and the SLOs by which its runs are judged, by regime."""

    name: str
    column: Column
    slos: dict[str, Slo]


Sites = dict[tuple[str, ...], Site]  # by flags


def sites(slos: Slos, wanted: Mapping[str, Iterable[str]]) -> Sites:
    """Every deployment that is needed, once: one that is given no SLO serves all regimes."""
    found: Sites = {}
    for regime, names in wanted.items():
        known = columns(slos[regime])
        for name in names:
            site = found.setdefault(known[name].flags, Site(name, known[name], {}))
            site.slos[regime] = slos[regime]
    return found


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent in a run."""

    workload: Workload
    seconds: float

    def jobs(self, rate: float, seed: int) -> list[Job]:
        return self.workload.sample(max(FEWEST, round(self.seconds * rate)), rate, seed)


# ---- what the simulator expects


@dataclass(frozen=True, slots=True)
class Expected:
    """By deployment, requests a second: up to which the target is attained, and up to which it surely is."""

    goodput: dict[str, float] = field(default_factory=dict)
    surely: dict[str, float] = field(default_factory=dict)


def predict_goodput(
    known: Mapping[str, Measurement], traffic: Traffic, slos: Slos, pace: float
) -> dict[str, Expected]:
    """What each deployment does in simulation, by regime: runs as long as those that are measured, but more of them.

    `pace` is where it begins to look: requests a second of one at a time.
    """
    expected = {regime: Expected() for regime in slos}
    own = {kind: undisturbed_costs(found).cost for kind, found in known.items()}
    for site in sites(slos, {regime: columns(slo) for regime, slo in slos.items()}).values():
        found, pools = known[site.column.kind], POOLS[site.column.kind]
        first = measured_deployment(
            pools, found, own[site.column.kind], found.traces, prefix_caching=True, **site.column.options
        )
        twins = [start_later(first, start) for start in STARTS]
        walk = Walk(site.slos, pace, 0, FAR_DOWN, FAR_UP)
        while (power := walk.next()) is not None:
            walk.runs[power] = _simulated(twins, traffic, walk.rate(power))
        for regime in site.slos:
            fates = walk.fates(regime)
            expected[regime].goodput[site.name] = knee_of(fates).rate
            expected[regime].surely[site.name] = knee_of(fates, TARGET + ERROR).rate
    return expected


def _simulated(twins: Sequence[Simulated], traffic: Traffic, rate: float) -> list[JobResult]:
    served: list[JobResult] = []
    number = 0
    while len(served) < SIMULATED:
        served += counted(simulate_exact(twins[number % len(twins)], traffic.jobs(rate, OTHER + number)))
        number += 1
    return served


def chosen(surely: Mapping[str, float]) -> str:
    """What `auto` is: the deployment that surely does most; of those that tie, the one that is named first."""
    least = (1.0 - SAME) * max(surely.values())
    return next(name for name in columns(Slo()) if surely.get(name, -1.0) >= least)
