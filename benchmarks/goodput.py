"""Goodput of the same two cores, disaggregated and colocated, and of what the planner would choose.

    python -m benchmarks.goodput [--json] [--workloads sharegpt humaneval longbench] [--seconds 20] [--seeds 2]
                                 [--regimes tight_tpot tight_ttft balanced]
                                 [--columns disaggregated colocated unchunked auto]
                                 [--profile-seconds 40] [--shrink 4] [--rate 4] [--width 0.25]

Deployments of the embedded model with the same kernels, one compute thread a worker:

    disaggregated   `--prefill 1 --decode 1`
    colocated       `--colocated 2`, prompts cut so that steps stay within the TPOT objective
    unchunked       `--colocated 2 --no-enable-chunked-prefill`, the paper's baseline
    auto            what the simulator expects most of: one of these, or 1 + 1 whose decode worker may read prompts
                    too (`--local-prefill auto`); the simulator knows the machine by profiles, which are measured first
                    as `diptych profile` does it (`--profile-seconds`; with 0 there is no auto, and nothing predicted)

Lengths are like ShareGPT, HumanEval and LongBench, divided by `--shrink`. Objectives follow from what the machine does
when nothing else is asked: the 90th percentiles of TTFT and TPOT of single requests, times the factors in `REGIMES`.
Goodput is the largest rate at which 90 % of requests keep both, by binary search, for each seed by itself; the columns
of a cell take turns, seed by seed, so that all see the machine's moods.

    cells.WORKLOAD.REGIME.goodput.COLUMN    mean over seeds, and its 95 % interval (none of one seed)
    cells.WORKLOAD.REGIME.ratio             disaggregated over the better of the colocated, seed by seed: mean, interval
    cells.WORKLOAD.REGIME.auto_ratio        auto over the best of the others
    cells.WORKLOAD.REGIME.predicted         the same from the simulator, with what it would choose
    foreseen                                share of the cells in which the simulator names the better kind

The client takes part of the same cores; `client_cpu_share` is the most that it took. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

from benchmarks.serving import Deployment, serving
from planner.goodput import spread
from planner.profile import Profile
from planner.simulator import Deployment as Simulated
from planner.simulator import deployment, simulate
from planner.terms import BOTH, DECODE, PREFILL, Placement, Pool, Served, Slo, Split
from planner.workload import SYNTHETIC, Mix, synthetic
from services.bench import measure as profiling
from services.bench.drive import Plan
from services.bench.measure import Pools
from services.bench.report import percentile
from services.bench.study import Load, Search, Study
from services.bench.target import Target, meet

REGIMES = {  # factors of the unloaded 90th percentiles of TTFT and TPOT
    "tight_tpot": (20.0, 2.0),
    "tight_ttft": (3.0, 10.0),
    "balanced": (8.0, 4.0),
}
COLOCATED = ("colocated", "unchunked")
COLUMNS = ("disaggregated", *COLOCATED, "auto")
COMMON = ("--kv-cache-memory-bytes", "256MiB")
CONTEXT, HIGHEST, TARGET = 1900, 512.0, 0.9
ALONE = 24  # requests that are measured one by one
STEP_TOKENS, SEATS, BEAT_S = 512, 64, 0.5  # as `diptych serve` has them
LONG = 500  # requests of a simulated run

APART, TOGETHER = "apart", "together"
PLACEMENTS = {
    APART: Placement((Pool(PREFILL, Split()), Pool(DECODE, Split()))),
    TOGETHER: Placement((Pool(BOTH, Split(), 2),), affinity="none"),
}
POOLS = {APART: Pools(), TOGETHER: Pools(0, 0, 2)}


@dataclass(frozen=True, slots=True)
class Column:
    """A deployment: flags of `diptych serve`, its kind, and what the simulator has for the flags."""

    flags: tuple[str, ...]
    kind: str
    options: dict[str, Any]


def columns(slo: Slo) -> dict[str, Column]:
    """What can be deployed for an objective; `local` is what `auto` may choose beside the others."""
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


# ---- what the simulator expects


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a kind of deployment on this machine: its profile, and L_m of workers that only read."""

    profile: Profile
    saturation_tokens: int

    def model(self, column: Column) -> Simulated:
        return deployment(
            PLACEMENTS[column.kind],
            self.profile,
            prefix_caching=True,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=SEATS,
            saturation_tokens=self.saturation_tokens,
            beat_s=BEAT_S,
            **column.options,
        )


def predicted(known: Mapping[str, Known], loads: Load, slo: Slo, seeds: int) -> dict[str, float]:
    """Goodput of each deployment in simulation, with longer runs than can be measured: requests/s."""
    found = {}
    for name, column in columns(slo).items():
        model = known[column.kind].model(column)

        def attained(rate: float, seed: int, model: Simulated = model) -> float:
            jobs = loads.workload.sample(LONG, rate, seed)
            return _kept(simulate(model, jobs), slo, 0.1 * jobs[-1].at_s)

        found[name] = (
            Search(attained, TARGET).goodput(range(seeds), 4.0, HIGHEST, lambda rate: (LONG, 0)).rate
        )
    return found


def _kept(served: Sequence[Served], slo: Slo, after_s: float) -> float:
    kept = [one.attains(slo) for one in served if one.job.at_s >= after_s]
    return sum(kept) / len(kept)


def chosen(expected: Mapping[str, float]) -> str:
    """What `auto` is: the deployment that is expected to do most; a tie goes to the one that is named first."""
    return max(expected, key=lambda name: expected[name])


# ---- what is measured


@dataclass(slots=True)
class Cell:
    """A workload under an objective. Rates by column, one for each seed."""

    slo: Slo
    rates: dict[str, list[float]] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    client: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "slo_ms": {"ttft": round(self.slo.ttft_s * 1e3, 2), "tpot": round(self.slo.tpot_s * 1e3, 3)},
            "goodput": {name: _mean(rates) for name, rates in self.rates.items()},
            "requests": self.requests,
            "client_cpu_share": round(self.client, 3),
        }
        better = [self.rates[name] for name in COLOCATED if name in self.rates]
        if better and "disaggregated" in self.rates:
            found["ratio"] = _mean(ratios(self.rates["disaggregated"], better))
        others = [rates for name, rates in self.rates.items() if name != "auto"]
        if others and "auto" in self.rates:
            found["auto_ratio"] = _mean(ratios(self.rates["auto"], others))
        return found | ({"predicted": self._predicted()} if self.expected else {})

    def _predicted(self) -> dict[str, Any]:
        best = max(self.expected[name] for name in COLOCATED)
        return {
            "goodput": {name: round(rate, 3) for name, rate in self.expected.items()},
            "ratio": round(self.expected["disaggregated"] / best, 3) if best else None,
            "auto": chosen(self.expected),
        }

    @property
    def foreseen(self) -> bool | None:
        """Whether the simulator names the better of both kinds; None if one of them is not known."""
        if not self.expected or not {"disaggregated", *COLOCATED} <= set(self.rates):
            return None
        means = {name: statistics.fmean(rates) for name, rates in self.rates.items()}
        return _apart(means) == _apart(self.expected)


def _apart(goodput: Mapping[str, float]) -> bool:
    return goodput["disaggregated"] > max(goodput[name] for name in COLOCATED)


def ratios(rates: Sequence[float], others: Sequence[Sequence[float]]) -> list[float]:
    """`rates` over the best of `others` in the mean, seed by seed; without those where that one has no goodput."""
    best = max(others, key=statistics.fmean)
    return [one / other for one, other in zip(rates, best, strict=True) if other > 0]


def _mean(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"mean": None, "interval": None}
    low, high = spread(values)
    interval = [round(low, 3), round(high, 3)] if math.isfinite(low) else None
    return {
        "mean": round(statistics.fmean(values), 3),
        "interval": interval,
        "seeds": [round(one, 3) for one in values],
    }


class Bench:
    """Measures deployments that are up."""

    def __init__(self, runner: asyncio.Runner, options: argparse.Namespace) -> None:
        self._runner, self._options = runner, options

    def meet(self, up: Deployment) -> Target:
        return self._runner.run(meet(up.url, None, None, "completions"))

    def cell(self, targets: Mapping[str, Target], loads: Load, cell: Cell) -> None:
        """Search the goodput of every column; `cell.rates` grows by one seed at a time."""
        searches = {}
        for name, target in targets.items():
            study = Study(target, loads, Plan(cell.slo))
            self._runner.run(study.prepare())
            searches[name] = study, Search(self._attained(study), TARGET, self._options.width)
        for seed in range(self._options.seeds):
            for name, (study, search) in searches.items():
                begin = cell.rates[name][-1] if cell.rates.get(name) else self._options.rate
                found = search.goodput([seed], begin or self._options.rate, HIGHEST, study.size)
                cell.rates.setdefault(name, []).append(found.rate)
                cell.requests[name] = found.n
                say(f"  seed {seed}, {name}: {found.rate:.4g}/s")
                cell.client = max([cell.client, *(run.cpu_s / run.wall_s for run in study.runs)])

    def _attained(self, study: Study) -> Callable[[float, int], float]:
        return lambda rate, seed: self._runner.run(study.attained(rate, seed))


@contextlib.contextmanager
def deployed(names: Mapping[str, Column]) -> Iterator[dict[str, Deployment]]:
    """All of them at once, ready; those that are not measured are idle."""
    with contextlib.ExitStack() as stack:
        up = {name: stack.enter_context(serving(*one.flags, *COMMON)) for name, one in names.items()}
        for one in up.values():
            one.wait_ready()
        yield up


def loads_of(options: argparse.Namespace) -> dict[str, Load]:
    return {
        name: Load(synthetic(name).shrunk(options.shrink, CONTEXT), seconds=options.seconds)
        for name in options.workloads
    }


def play(options: argparse.Namespace) -> dict[str, dict[str, Cell]]:
    """All cells that are asked for."""
    loads = loads_of(options)
    known, calm = learn(options, loads)
    cells: dict[str, dict[str, Cell]] = {name: {} for name in loads}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        bench = Bench(runner, options)
        for regime in options.regimes:
            for name, one in loads.items():
                cell = cells[name][regime] = Cell(objective(regime, *calm[name]))
                if known:
                    cell.expected = predicted(known, one, cell.slo, options.seeds)
                    told = ", ".join(f"{column} {rate:.4g}/s" for column, rate in cell.expected.items())
                    say(f"{name}, {regime}: foretold {told}")
                measure(bench, options, one, cell)
                say(json.dumps({name: {regime: cell.told()}}))  # of a long run nothing is lost
    return cells


def learn(
    options: argparse.Namespace, loads: Mapping[str, Load]
) -> tuple[dict[str, Known], dict[str, tuple[float, float]]]:
    """What the simulator needs to know of each kind, and the unloaded times of each workload on one of each role."""
    known, calm = {}, {}
    mix = Mix([(name, 1.0, one.workload, Slo()) for name, one in loads.items()])
    for kind in (APART, TOGETHER) if options.profile_seconds else (APART,):
        with profiling.deployed(POOLS[kind], "", COMMON) as live:
            if options.profile_seconds:
                found = profiling.measure(live, mix, options.profile_seconds)
                known[kind] = Known(found.profile, found.saturation_tokens)
                say(f"{kind}: profiled")
            if kind == APART:
                calm = {name: alone(live, one) for name, one in loads.items()}
    return known, calm


def alone(live: profiling.Live, loads: Load) -> tuple[float, float]:
    """90th percentiles of TTFT and TPOT, in seconds, of requests that have the deployment to themselves."""
    ttft_s, tpot_s = [], []
    for job in loads.workload.sample(ALONE, 1.0, 0):
        served = live.drive([replace(job, at_s=0.0)], Plan(Slo())).seen[0].served
        if served.failed:
            raise RuntimeError(f"a request that was alone failed: {served.failed}")
        ttft_s.append(served.ttft_s)
        tpot_s.append(served.tpot_s)
    return percentile(sorted(ttft_s), 90), percentile(sorted(tpot_s), 90)


def say(text: str) -> None:
    """What is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


def objective(regime: str, ttft_s: float, tpot_s: float) -> Slo:
    """The objective of a regime on a machine with these unloaded times."""
    of_ttft, of_tpot = REGIMES[regime]
    return Slo(of_ttft * ttft_s, of_tpot * tpot_s, TARGET)


def measure(bench: Bench, options: argparse.Namespace, loads: Load, cell: Cell) -> None:
    """One cell, with deployments of its own, since a TPOT objective is part of some."""
    known = columns(cell.slo)
    wanted = {name: known[name] for name in options.columns if name != "auto"}
    auto = chosen(cell.expected) if cell.expected and "auto" in options.columns else ""
    if auto and auto not in wanted:
        wanted["auto"] = known[auto]
    with deployed(wanted) as up:
        bench.cell({name: bench.meet(one) for name, one in up.items()}, loads, cell)
    if auto and "auto" not in cell.rates:  # it is one of the others, flag by flag
        cell.rates["auto"], cell.requests["auto"] = cell.rates[auto], cell.requests[auto]


def report(cells: Mapping[str, Mapping[str, Cell]], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all cells."""
    said = [cell.foreseen for row in cells.values() for cell in row.values() if cell.foreseen is not None]
    told: dict[str, Any] = {
        "cells": {name: {regime: cell.told() for regime, cell in row.items()} for name, row in cells.items()},
        "foreseen": round(sum(said) / len(said), 3) if said else None,
    }
    return told | {name: getattr(options, name) for name in ("seconds", "seeds", "shrink", "width")}


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--workloads", nargs="+", choices=SYNTHETIC, default=list(SYNTHETIC))
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument(
        "--profile-seconds", type=float, default=40.0, help="of load, for each of two profiles"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--shrink", type=float, default=4.0, help="lengths are divided by this")
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s where searches begin")
    parser.add_argument(
        "--width", type=float, default=None, help="requests/s; 5 %% of the goodput if not given"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = options_of()
    before = os.getloadavg()[0]
    told = report(play(options), options) | {"load_before": round(before, 2)}
    print(json.dumps(told, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
