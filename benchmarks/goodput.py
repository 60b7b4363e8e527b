"""Goodput of the same two cores, disaggregated and colocated, and of what the planner would choose.

    python -m benchmarks.goodput [--json] [--workloads sharegpt humaneval longbench] [--seconds 8] [--seeds 2]
                                 [--regimes tight_tpot tight_ttft balanced]
                                 [--columns disaggregated colocated unchunked auto]
                                 [--profile-seconds 30] [--shrink 4]

Deployments of the embedded model with the same kernels, one compute thread a worker:

    disaggregated   `--prefill 1 --decode 1`
    colocated       `--colocated 2`, prompts cut so that steps stay within the TPOT SLO
    unchunked       `--colocated 2 --no-enable-chunked-prefill`, the paper's baseline
    auto            what the simulator expects most of: one of these, or 1 + 1 whose decode worker may prefill
                    too (`--local-prefill auto`); the simulator knows the machine by profiles, which are measured before
                    as `diptych profile` does it (`--profile-seconds`, for each of two, with the same workload)

Lengths are like ShareGPT, HumanEval and LongBench, divided by `--shrink`. Objectives follow from what the machine does
when nothing else is asked: the 90th percentiles of TTFT and TPOT of single requests, times the factors in `REGIMES`.

One deployment is up at a time, all of them once for each seed. Each is sent `--seconds` of Poisson arrivals at rates of
one grid, from somewhat below where it is expected to fail until it has failed, first in steps of 1.44, then between
those that enclose its goodput; the same requests go to all. A run is judged by the SLOs of every regime that the
deployment serves. Goodput is where attainment, made to fall with the rate, crosses 90 %
(`benchmarks/accuracy/goodput_knee.py`).

    cells.WORKLOAD.REGIME.goodput.COLUMN    mean over seeds, its 95 % interval (seeds and requests drawn anew), and
                                            `censored`: seeds of which the rates did not enclose it
    cells.WORKLOAD.REGIME.ratio             disaggregated over the better of the colocated, seed by seed: mean, interval
    cells.WORKLOAD.REGIME.auto_ratio        auto over the best of the others
    cells.WORKLOAD.REGIME.auto_of_two       auto over the better of disaggregated and colocated
    cells.WORKLOAD.REGIME.predicted         the same from the simulator, with what it would choose
    cells.WORKLOAD.REGIME.foreseen          whether the simulator names the better kind
    foreseen, foreseen_clear                share of the cells in which it does; of those whose ratio is surely not 1
    loses                                   cells in which disaggregation has less
    auto_least, auto_of_two_least           the least `auto_ratio`, the least `auto_of_two`
    auto_surely_less                        cells in which the interval of `auto_of_two` is below 1

The client takes part of the same cores; `client_cpu_share` is the most that it took. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.accuracy.goodput_columns import (
    APART,
    COLOCATED,
    POOLS,
    Expected,
    Sites,
    Traffic,
    chosen,
    columns,
    predict_goodput,
    sites,
)
from benchmarks.accuracy.goodput_knee import TARGET, Goodput, Walk, counted
from benchmarks.load.deployment import serving_deployment
from benchmarks.load.measured_runs import MetServer, meet_server, run_jobs
from diptych.slo import Slo
from planner.workload.workload import SYNTHETIC, Workload, synthetic_workload
from services.bench import profile_run as profiling
from services.bench.load_generator import RunOptions
from services.bench.profile_run import Measurement
from services.bench.report import percentile
from services.bench.signals import interrupt_on_sigterm

REGIMES = {  # factors of the unloaded 90th percentiles of TTFT and TPOT
    "tight_tpot": (20.0, 2.0),
    "tight_ttft": (3.0, 10.0),
    "balanced": (8.0, 4.0),
}
COLUMNS = ("disaggregated", *COLOCATED, "auto")
TWO = ("disaggregated", "colocated")
COMMON = ("--kv-cache-memory-bytes", "256MiB")
CONTEXT = 1900
ALONE = 24  # requests that are measured one by one
LEARN = 2000  # the first seed of a profile: not the requests that are measured

DOWN, UP = -9, 12  # powers of STEP around the predicted goodputs that may be run

RUNS, LONGER = 5.0, 1.15  # usual runs of a deployment with one seed, and their length over `--seconds`
UP_S, START_S, FORETELL_S = 15.0, 25.0, 60.0  # of a deployment, of one to be profiled, and of a workload


@dataclass(slots=True)
class Cell:
    """A workload under an SLO. `requests` are those that count, of all runs."""

    slo: Slo
    expected: Expected
    goodput: dict[str, Goodput] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    client: float = 0.0

    def report_fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "slo_ms": {"ttft": round(self.slo.ttft_s * 1e3, 2), "tpot": round(self.slo.tpot_s * 1e3, 3)},
            "goodput": {name: one.report_fields() for name, one in self.goodput.items()},
            "requests": self.requests,
            "client_cpu_share": round(self.client, 3),
        }
        better = [self.goodput[name] for name in COLOCATED if name in self.goodput]
        if better and "disaggregated" in self.goodput:
            found["ratio"] = self.goodput["disaggregated"].over(better)
        others = [one for name, one in self.goodput.items() if name != "auto"]
        if others and "auto" in self.goodput:
            found["auto_ratio"] = self.goodput["auto"].over(others)
        if set(TWO) <= set(self.goodput) and "auto" in self.goodput:
            found["auto_of_two"] = self.goodput["auto"].over([self.goodput[name] for name in TWO])
        return found | {"predicted": self._predicted(), "foreseen": self.foreseen}

    def _predicted(self) -> dict[str, Any]:
        goodput, surely = self.expected.goodput, self.expected.surely
        return {
            "goodput": {name: round(rate, 3) for name, rate in goodput.items()},
            "surely": {name: round(rate, 3) for name, rate in surely.items()},
            "ratio": round(goodput["disaggregated"] / max(goodput[name] for name in COLOCATED), 3),
            "auto": chosen(surely),
        }

    @property
    def foreseen(self) -> bool | None:
        """Whether the simulator names the better of both kinds; None if one of them was not measured."""
        if not {"disaggregated", *COLOCATED} <= set(self.goodput):
            return None
        return _apart({name: one.mean for name, one in self.goodput.items()}) == _apart(self.expected.goodput)


def _apart(goodput: Mapping[str, float]) -> bool:
    return goodput["disaggregated"] > max(goodput[name] for name in COLOCATED)


class Bench:
    """Measures deployments that are up."""

    def __init__(self, runner: asyncio.Runner, seeds: int) -> None:
        self._runner, self._seeds = runner, seeds
        self.client = 0.0

    def walks(
        self, plans: Mapping[tuple[str, ...], Walk], traffic: Traffic
    ) -> dict[tuple[str, ...], list[Walk]]:
        """One walk of each deployment for each seed, each time in another order.

        Only the deployment that is measured is up: idle ones take a part of the cores as well.
        """
        done: dict[tuple[str, ...], list[Walk]] = {flags: [] for flags in plans}
        for seed in range(self._seeds):
            first = seed % len(plans)
            for flags in [*plans][first:] + [*plans][:first]:
                walk = done[flags][-1].again() if seed else plans[flags]
                with serving_deployment(*flags, *COMMON) as up:
                    up.wait_ready()
                    met = self._runner.run(meet_server(up.url))
                    while walk.next() is not None:
                        self._step(met, traffic, walk, seed, " ".join(flags))
                    met.server.client.close_idle()
                done[flags].append(walk)
        return done

    def _step(self, met: MetServer, traffic: Traffic, walk: Walk, seed: int, name: str) -> None:
        power = walk.next()
        assert power is not None
        rate = walk.rate(power)
        run = self._runner.run(run_jobs(met, traffic.jobs(rate, seed), rate, seed))
        walk.runs[power] = counted([one.result for one in run.records])
        self.client = max(self.client, run.cpu_s / run.wall_s)
        kept = ", ".join(f"{regime} {share:.1%}" for regime, share in walk.attained(power).items())
        unrest = "" if run.began_idle else ", began busy"
        say(f"  seed {seed}, {rate:.4g}/s, {name}: {kept} ({run.wall_s:.0f} s{unrest})")


def play(options: argparse.Namespace) -> dict[str, dict[str, Cell]]:
    """All cells that are asked for."""
    traffics = {
        name: Traffic(synthetic_workload(name).shrunk(options.shrink, CONTEXT), options.seconds)
        for name in options.workloads
    }
    found = {}
    for name, traffic in traffics.items():
        known, calm = learn(options, traffic)
        found[name] = cells(options, traffic, known, calm, name)
        for regime, cell in found[name].items():
            say(json.dumps({name: {regime: cell.report_fields()}}))  # of a long run nothing is lost
    return found


@dataclass(frozen=True, slots=True)
class Calm:
    """Requests that have the deployment to themselves: 90th percentiles, and how many of them a second."""

    ttft_s: float
    tpot_s: float
    pace: float


def learn(options: argparse.Namespace, traffic: Traffic) -> tuple[dict[str, Measurement], Calm]:
    """What the simulator needs to know of each kind, and the unloaded times on one of each role.

    With the workload itself, and just before it is measured: what workers do to each other depends on what they do, and
    the machine is shared. Colocated workers are profiled without an SLO: with one, the sizes of steps would tell
    of the machine's mood.
    """
    known = {}
    for kind, pools in POOLS.items():
        with profiling.running_deployment(pools, "", COMMON) as live:
            known[kind] = profiling.measure_profile(
                live, traffic.workload, options.profile_seconds, seed=LEARN
            )
            say(f"{pools}: profiled")
            if kind == APART:
                calm = alone(live, traffic.workload)
    return known, calm


def alone(live: profiling.LiveDeployment, workload: Workload) -> Calm:
    """Raises RuntimeError if a request failed."""
    ttft_s, tpot_s, took_s = [], [], 0.0
    for job in workload.sample(ALONE, 1.0, LEARN - 1):
        served = live.send_load([replace(job, at_s=0.0)], RunOptions(Slo())).records[0].result
        if served.failed:
            raise RuntimeError(f"a request that was alone failed: {served.failed}")
        ttft_s.append(served.ttft_s)
        tpot_s.append(served.tpot_s)
        took_s += served.ended_s
    return Calm(percentile(sorted(ttft_s), 90), percentile(sorted(tpot_s), 90), ALONE / took_s)


def cells(
    options: argparse.Namespace, traffic: Traffic, known: Mapping[str, Measurement], calm: Calm, name: str
) -> dict[str, Cell]:
    """All regimes of one workload."""
    slos = {regime: regime_slo(regime, calm.ttft_s, calm.tpot_s) for regime in options.regimes}
    expected = predict_goodput(known, traffic, slos, calm.pace)
    for regime, by in expected.items():
        rates = (f"{one} {rate:.4g} ({by.surely[one]:.4g})/s" for one, rate in by.goodput.items())
        say(f"{name}, {regime}: foretold (surely) " + ", ".join(rates))
    wanted = {regime: wants(options.columns, by.surely) for regime, by in expected.items()}
    needed = sites(slos, {regime: by.values() for regime, by in wanted.items()})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        bench = Bench(runner, options.seeds)
        walks = bench.walks(plans(needed, expected), traffic)
    found = {}
    for regime, slo in slos.items():
        cell = found[regime] = Cell(slo, expected[regime], client=bench.client)
        own = columns(slo)
        for column, site in wanted[regime].items():
            runs = [walk.fates(regime) for walk in walks[own[site].flags]]
            cell.goodput[column] = Goodput.of(runs)
            cell.requests[column] = sum(len(fate) for fates in runs for fate in fates.values())
    return found


def wants(names: Iterable[str], surely: Mapping[str, float]) -> dict[str, str]:
    """Which deployment each column is."""
    return {name: chosen(surely) if name == "auto" else name for name in names}


def plans(needed: Sites, expected: Mapping[str, Expected]) -> dict[tuple[str, ...], Walk]:
    """Where each deployment begins, on a grid that all of them have: around the geometric mean of what is expected."""
    own = {
        flags: [expected[regime].goodput[site.name] for regime in site.slos] for flags, site in needed.items()
    }
    centre = statistics.geometric_mean([rate for rates in own.values() for rate in rates])
    return {
        flags: Walk(needed[flags].slos, centre, 0, DOWN, UP).toward(rates) for flags, rates in own.items()
    }


def regime_slo(regime: str, ttft_s: float, tpot_s: float) -> Slo:
    """The SLO of a regime on a machine with these unloaded times."""
    of_ttft, of_tpot = REGIMES[regime]
    return Slo(of_ttft * ttft_s, of_tpot * tpot_s, TARGET)


def report(found: Mapping[str, Mapping[str, Cell]], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all cells."""
    cells = {
        name: {regime: cell.report_fields() for regime, cell in row.items()} for name, row in found.items()
    }
    flat = {f"{name}.{regime}": cell for name, row in cells.items() for regime, cell in row.items()}
    compared = {name: cell for name, cell in flat.items() if "ratio" in cell}
    known = [cell for cell in compared.values() if cell["foreseen"] is not None]
    clear = [
        cell for cell in known if not cell["ratio"]["interval"][0] <= 1.0 <= cell["ratio"]["interval"][1]
    ]
    sums: dict[str, Any] = {
        "cells": cells,
        "foreseen": _share(cell["foreseen"] for cell in known),
        "foreseen_clear": _share(cell["foreseen"] for cell in clear),
        "loses": [name for name, cell in compared.items() if cell["ratio"]["mean"] < 1.0],
        "auto_least": _least(flat.values(), "auto_ratio"),
        "auto_of_two_least": _least(flat.values(), "auto_of_two"),
        "auto_surely_less": [
            name
            for name, cell in flat.items()
            if "auto_of_two" in cell and cell["auto_of_two"]["interval"][1] < 1.0
        ],
    }
    return sums | {name: getattr(options, name) for name in ("seconds", "seeds", "shrink")}


def _share(said: Iterable[bool]) -> float | None:
    values = list(said)
    return round(sum(values) / len(values), 3) if values else None


def _least(cells: Iterable[Mapping[str, Any]], ratio: str) -> float | None:
    return min((cell[ratio]["mean"] for cell in cells if ratio in cell), default=None)


def estimate_s(options: argparse.Namespace) -> float:
    """About how long it takes, if every second `auto` is a deployment of its own."""
    own = [name for name in options.columns if name in ("disaggregated", "unchunked")]
    each = [0.5 if name == "auto" else 1.0 for name in options.columns if name not in own]
    deployments = len(own) + sum(each) * len(options.regimes)
    each_s: float = options.seeds * (RUNS * (LONGER * options.seconds + 1.5) + UP_S)
    profiles_s: float = len(POOLS) * (options.profile_seconds + START_S)
    return len(options.workloads) * (profiles_s + FORETELL_S + deployments * each_s)


def say(text: str) -> None:
    """What is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--workloads", nargs="+", choices=SYNTHETIC, default=list(SYNTHETIC))
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--profile-seconds", type=float, default=30.0, help="of load, for each profile")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals in a run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--shrink", type=float, default=4.0, help="lengths are divided by this")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = options_of()
    before, begun_s = os.getloadavg()[0], time.monotonic()
    say(f"this takes about {estimate_s(options) / 60:.0f} minutes")
    with interrupt_on_sigterm():
        fields = report(play(options), options)
    fields |= {"took_s": round(time.monotonic() - begun_s), "load_before": round(before, 2)}
    print(json.dumps(fields, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
