"""Whether this version became slower or faster than an older one: the same requests, in turns.

    python -m benchmarks.against --rev REV [--json] [--short] [--rounds 7] [--seconds 10] [--rate 12] [--seeds 2]
                                 [-- OPTIONS OF diptych serve]

Two deployments of the embedded model are up, one prefill and one decode worker each unless options say otherwise: this
version, changes that are not committed included, and the one that git knows as REV, in a worktree of its own. Both run
with the same interpreter and packages. Options that the older one does not know are given to this one alone
(`left_out`).

One load generator, this version's, sends each the same requests, to one while the other is idle. An idle
deployment is not stopped: a stopped one counts as dead to its own gateway, and one that is started anew for each turn
would begin with cold caches, minutes after the turn that it is compared with. What idling costs the other one is
`idle_share`.

    tpot_ratio, ttft_ratio   medians of a run's requests, this version / the older one: the median over rounds, each at
                             `--rate` requests a second like ShareGPT's with lengths divided by 8
    *_p90_ratio              the same of the 90th percentiles
    cpu_ratio                the same of CPU seconds per request, of all processes of a deployment
    *_ratios                 of each round
    goodput_ratio            the rate at which 90 % of requests have TTFT <= 150 ms and TPOT <= 15 ms, this version /
                             the older one: the mean over seeds; `goodput_interval`: 95 %; `censored`: seeds whose
                             rates do not enclose it
    now, older               each version's milliseconds, goodput, and `idle_share`: cores that it takes while idle
    failed                   requests that were not answered

`--rounds 0` or `--seeds 0` leave out a part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.accuracy.goodput_columns import Traffic
from benchmarks.accuracy.goodput_knee import Goodput, Walk, counted
from benchmarks.load.deployment import ServedDeployment, serving_deployment
from benchmarks.load.measured_runs import MetServer, meet_server, run_jobs
from benchmarks.load.older_version import (
    ROOT,
    checked_out,
    find_commit,
    group_options,
    last_lines,
    list_flags,
    split_known,
)
from benchmarks.load.rounds import no_garbage_collection
from benchmarks.load.short_form import add_short_form
from benchmarks.startup import tree, tree_cpu_s
from diptych.errors import ConfigError, DiptychError, StartError
from diptych.slo import Slo
from planner.workload.workload import synthetic_workload
from services.bench.load_generator import LoadRun
from services.bench.report import percentile
from services.bench.signals import interrupt_on_sigterm

NOW, OLDER = "now", "older"
OPTIONS = ("--prefill", "1", "--decode", "1", "--kv-cache-memory-bytes", "256MiB")
SHRINK, CONTEXT = 8.0, 1900
SLO = Slo(0.150, 0.015)
# Powers of the grid's step around `--rate` at which a search for a goodput may run, and where it begins.
DOWN, UP, BEGIN = -12, 12, -4
TIMES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of one version. Times in milliseconds; `idle_share` in cores, of the other one meanwhile."""

    times: dict[str, float]
    cpu_ms: float
    idle_share: float
    failed: int
    client_share: float


def read_run(run: LoadRun, cpu_s: float, idle_s: float) -> RunFigures:
    """The figures of a run in which its deployment took `cpu_s` of the processors, and the other one `idle_s`."""
    results = counted([one.result for one in run.records])
    answered = [one for one in results if not one.failed]
    ttft = sorted(1e3 * one.ttft_s for one in answered)
    tpot = sorted(1e3 * one.tpot_s for one in answered if one.job.output > 1)
    values = (percentile(ttft, 50), percentile(ttft, 90), percentile(tpot, 50), percentile(tpot, 90))
    return RunFigures(
        times=dict(zip(TIMES, values, strict=True)),
        cpu_ms=1e3 * cpu_s / max(1, len(run.records)),
        idle_share=idle_s / run.wall_s,
        failed=sum(bool(one.result.failed) for one in run.records),
        client_share=run.cpu_s / run.wall_s,
    )


@dataclass(slots=True)
class Comparison:
    """Runs of versions that are up. `runs` are those of the rounds, by version; `others` those of the search."""

    runner: asyncio.Runner
    deployments: Mapping[str, ServedDeployment]
    servers: Mapping[str, MetServer]
    traffic: Traffic
    runs: dict[str, list[RunFigures]] = field(default_factory=dict)
    others: list[RunFigures] = field(default_factory=list)

    def run_rounds(self, rate: float, rounds: int) -> None:
        """Each round sends both the same requests, in an order that alternates. The first round does not count."""
        self.runs = {name: [] for name in self.servers}
        names = list(self.servers)
        for number in range(-1, rounds):
            for name in names:
                figures, _ = self._run(name, rate, seed=1000 + number)
                if number >= 0:
                    self.runs[name].append(figures)
                shown = ", ".join(f"{time_name} {value:.2f} ms" for time_name, value in figures.times.items())
                say(f"round {number + 1} of {rounds}, {name}: {shown}, {figures.cpu_ms:.1f} CPU ms a request")
            names.reverse()

    def find_goodputs(self, rate: float, seeds: int) -> dict[str, Goodput]:
        """The goodput of each version: they take turns, a run each, until the rates enclose what both serve."""
        walks: dict[str, list[Walk]] = {name: [] for name in self.servers}
        for seed in range(seeds):
            for found in walks.values():
                found.append(found[-1].again() if found else Walk({"slo": SLO}, rate, BEGIN, DOWN, UP))
            names = list(self.servers)[:: -1 if seed % 2 else 1]
            while waiting := [name for name in names if walks[name][-1].next() is not None]:
                for name in waiting:
                    self._walk_on(name, walks[name][-1], seed)
        return {name: Goodput.of([walk.fates("slo") for walk in found]) for name, found in walks.items()}

    def _walk_on(self, name: str, walk: Walk, seed: int) -> None:
        power = walk.next()
        assert power is not None
        figures, run = self._run(name, walk.rate(power), seed)
        self.others.append(figures)
        walk.runs[power] = counted([one.result for one in run.records])
        say(
            f"seed {seed}, {name}: {walk.rate(power):.3g}/s, {walk.attained(power)['slo']:.1%} within the SLO"
        )

    def _run(self, name: str, rate: float, seed: int) -> tuple[RunFigures, LoadRun]:
        """One run of one version while the other one is idle."""
        trees = {one: tree(deployment.process.pid) for one, deployment in self.deployments.items()}
        before = {one: tree_cpu_s(processes) for one, processes in trees.items()}
        with no_garbage_collection():
            jobs = self.traffic.jobs(rate, seed)
            run = self.runner.run(run_jobs(self.servers[name], jobs, rate, seed))
        used = {one: tree_cpu_s(processes) - before[one] for one, processes in trees.items()}
        idle_s = sum(seconds for one, seconds in used.items() if one != name)
        return read_run(run, used[name], idle_s), run


def summarize_runs(runs: Sequence[RunFigures]) -> dict[str, float]:
    """Medians over rounds."""
    found = {f"{name}_ms": round(median(one.times[name] for one in runs), 3) for name in TIMES}
    return found | {"cpu_ms": round(median(one.cpu_ms for one in runs), 2)}


def compare_runs(now: Sequence[RunFigures], older: Sequence[RunFigures]) -> dict[str, Any]:
    """Ratios of this version to the older one, round by round, and their medians."""
    pairs = list(zip(now, older, strict=True))
    ratios = {
        f"{name.removesuffix('_p50')}_ratio": [one.times[name] / other.times[name] for one, other in pairs]
        for name in TIMES
    }
    ratios["cpu_ratio"] = [one.cpu_ms / other.cpu_ms for one, other in pairs]
    every = {f"{name}s": [round(value, 3) for value in values] for name, values in ratios.items()}
    return {name: round(median(values), 3) for name, values in ratios.items()} | every


def build_report(
    runs: Mapping[str, Sequence[RunFigures]],
    goodputs: Mapping[str, Goodput],
    others: Sequence[RunFigures] = (),
) -> dict[str, Any]:
    """All figures; those of a part that was left out are missing."""
    report: dict[str, Any] = {NOW: {}, OLDER: {}}
    if runs.get(NOW):
        report |= compare_runs(runs[NOW], runs[OLDER])
        for name, other in ((NOW, OLDER), (OLDER, NOW)):
            report[name] |= summarize_runs(runs[name])
            report[name]["idle_share"] = round(median(one.idle_share for one in runs[other]), 4)
    if goodputs:
        ratio = goodputs[NOW].over([goodputs[OLDER]])
        report |= {
            "goodput_ratio": ratio["mean"],
            "goodput_interval": ratio["interval"],
            "censored": ratio["censored"],
        }
        for name, goodput in goodputs.items():
            report[name]["goodput"] = round(goodput.mean, 3)
    every = [*runs.get(NOW, ()), *runs.get(OLDER, ()), *others]
    report["failed"] = sum(one.failed for one in every)
    report["client_cpu_share"] = round(max((one.client_share for one in every), default=math.nan), 3)
    return report


@contextlib.contextmanager
def both_served(older: Path, flags: Mapping[str, Sequence[str]]) -> Iterator[dict[str, ServedDeployment]]:
    """Both versions, ready. Raises StartError if one does not start."""
    with contextlib.ExitStack() as stack:
        deployments = {}
        for name, checkout in ((NOW, ROOT), (OLDER, older)):
            deployment = stack.enter_context(serving_deployment(*flags[name], checkout=checkout))
            try:
                deployment.wait_ready()
            except RuntimeError as error:
                what = "this version" if name == NOW else "the older version"
                fix = "name another with --rev, or other options behind --"
                raise StartError(f"{what} does not start", last_lines(str(error)), fix) from None
            deployments[name] = deployment
        yield deployments


def compare_versions(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and report. Raises ConfigError and StartError."""
    given = group_options([*OPTIONS, *options.options])
    with checked_out(options.rev) as older:
        known, left_out = split_known(given, list_flags(older))
        flags = {NOW: [word for option in given for word in option], OLDER: known}
        with (
            both_served(older, flags) as deployments,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            servers = {name: runner.run(meet_server(one.url)) for name, one in deployments.items()}
            if len({met.server.length_fields for met in servers.values()}) > 1:
                raise ConfigError(
                    "the older version takes no such requests", "", "name a newer one with --rev"
                )
            traffic = Traffic(synthetic_workload("sharegpt").shrunk(SHRINK, CONTEXT), options.seconds)
            comparison = Comparison(runner, deployments, servers, traffic)
            if options.rounds:
                comparison.run_rounds(options.rate, options.rounds)
            goodputs = comparison.find_goodputs(options.rate, options.seeds) if options.seeds else {}
            for met in servers.values():
                met.server.client.close_idle()
    return build_report(comparison.runs, goodputs, comparison.others) | {"left_out": left_out}


def say(text: str) -> None:
    """What is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", required=True, help="the older version: a commit, tag or branch")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals in a run")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second in the rounds")
    parser.add_argument("--seeds", type=int, default=2, help="of the search for the goodputs")
    parser.add_argument("options", nargs="*", help="of `diptych serve`, after --")
    add_short_form(parser, rounds=3, seconds=6.0, seeds=1)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = read_options()
    load, began_s = os.getloadavg()[0], time.monotonic()
    try:
        with interrupt_on_sigterm():
            report = compare_versions(options)
    except DiptychError as error:
        sys.exit("\n".join(error.lines()))
    report |= {name: getattr(options, name) for name in ("rounds", "seconds", "rate", "seeds")}
    report |= {"rev": find_commit(options.rev)[:7], "took_s": round(time.monotonic() - began_s)}
    report["load_before"] = round(load, 2)
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
