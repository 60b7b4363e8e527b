"""One simulated day of a trace under several ways to size a fleet, and how a change of traffic is noticed.

    python -m benchmarks.replan [--json] [--parts day,shift,quiet] [--names NAMES] [--rate 10] [--begin 0] [--hours 24]
                                [--seed 1] [--trace FILE] [--shrink 1] [--quiet-days 3] [--jobs 2]

`stretch_over_day`: a trace (the hour of the Azure conversation trace, or `--trace`, with prompts divided by
`--shrink`), repeated and stretched over a working day, is served by OPT-13B on A100s (the paper's measured
costs), one device a worker, in the fast simulator with a fleet that changes: flips take `FLIP_S`, a new
worker `START_S`, and devices are paid from the order until they are empty. Whoever has waited for
`PATIENCE_S` goes away, and was not served well. `--seed` is where each round of the trace begins (and, below,
what is drawn). The fleet is sized by

    replanner      ours
    dynamo         Dynamo's rule, demand being the last interval's; also `dynamo_kalman`, with that predictor,
                   `dynamo_load`, with its reactive loop, and `dynamo_spare0.4`, given 1.4 times the demand: not in
                   the rule, but what an operator might set
    static_peak    a plan for the busiest hour, of our own search
    static_mean    one for the day's mean; the others begin with this one

All know the true costs and have the same budget, and none knows the day, nor that the trace is burstier than Poisson.
Lengths are cut to the model's 2,048 tokens; KV moves at `LINK`. Every hour of it is reported on stderr. Results:

    attainment            share of all requests that came that kept TTFT and TPOT
    good_per_device_hour  those requests, per hour of a device held
    worst_hour            attainment of the worst hour; hours_below_target: how many are
    ours_over_this        good_per_device_hour of the replanner over this one's

`shift`: lengths change from HumanEval's to some like LongBench's, at one rate: how long until the alarm, and what is
done. `quiet`: days of Poisson arrivals of one kind: alarms per day.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.replanning.baselines import (
    DynamoPlanner,
    FleetController,
    KalmanPredictor,
    LastValuePredictor,
    StaticFleet,
)
from benchmarks.replanning.day_trace import DAY_S, WORKDAY, stretch_over_day
from benchmarks.replanning.elastic_fleet import ElasticFleet, smallest_fleet
from diptych.slo import Slo
from planner.costs.profile_file import built_in_profile
from planner.replan.attainment_cache import AttainmentCache, FleetSize
from planner.replan.decide import READY, FleetWorker, ReplanPolicy, count_fleet
from planner.replan.evaluate import FleetHardware, SimulatedEvaluator
from planner.replan.journal import Journal, TrafficReview, read_journal
from planner.replan.replanner import Replanner, replay_decisions
from planner.replan.traffic_windows import LengthMix, TrafficWindows
from planner.sim.fast.instance import InstanceLimits
from planner.types import BOTH, DECODE, PREFILL, Job, JobResult, LinkSpec, Parallelism
from planner.workload.traces import read_trace
from planner.workload.workload import Workload, synthetic_workload

SHARED = Path(os.environ.get("DIPTYCH_SHARED", Path(__file__).resolve().parents[1] / ".." / "shared"))
AZURE = str(SHARED / "data" / "azure" / "AzureLLMInferenceTrace_conv.csv")
MODEL, DEVICE, SPLIT = "OPT-13B", "A100-80G", Parallelism(1, 1)
SLO = Slo(ttft_s=0.5, tpot_s=0.1, attainment=0.9)
LINK = LinkSpec(25e9, 1e-3)
MAX_PROMPT, MAX_OUTPUT = 1748, 300  # of the model's 2,048
FLIP_S, START_S, BUDGET = 5.0, 180.0, 16
HOUR_S = 3600.0
PATIENCE_S = 20 * SLO.ttft_s  # who has not been begun with by then goes; else a backlog might stay for a day
LATE_S = 60.0  # no request that is answered later has met its SLO
POLICY = ReplanPolicy(budget=BUDGET, flip_s=FLIP_S, start_s=START_S)
BATCH_TOKENS = 2048  # of a prefill batch


def hardware() -> FleetHardware:
    profile = built_in_profile(MODEL, DEVICE)
    roles = (PREFILL, DECODE, BOTH)
    room = float(profile.kv_tokens(SPLIT))
    return FleetHardware(
        dict.fromkeys(roles, SPLIT),
        dict.fromkeys(roles, profile.cost(SPLIT)),
        dict.fromkeys(roles, room),
        LINK,
        profile.model.kv_token_bytes,
        InstanceLimits(prefill_tokens=BATCH_TOKENS),
    )


def make_evaluator() -> SimulatedEvaluator:
    return SimulatedEvaluator(hardware(), {"": SLO}, about=f"{MODEL} {SPLIT} on {DEVICE}")


@dataclass(slots=True)
class Book:
    """What became of the requests of a run: by hour of arrival, [all, good]. One never answered is not good."""

    hours: dict[int, list[int]] = field(default_factory=dict)
    failed: int = 0

    def came(self, job: Job) -> None:
        self._hour(job)[0] += 1

    def ended(self, served: JobResult) -> None:
        self._hour(served.job)[1] += served.meets_slo(SLO)
        self.failed += bool(served.failed)

    def _hour(self, job: Job) -> list[int]:
        return self.hours.setdefault(int(job.at_s // HOUR_S), [0, 0])

    def by_hour(self) -> list[float]:
        """Attainment of each hour, in order."""
        return [good / came if came else 1.0 for _, (came, good) in sorted(self.hours.items())]

    def figures(self, device_s: float) -> dict[str, float]:
        came, good = (sum(count[at] for count in self.hours.values()) for at in (0, 1))
        return {
            "requests": came,
            "failed": self.failed,
            "attainment": round(good / came, 4) if came else 1.0,
            "worst_hour": round(min(self.by_hour(), default=1.0), 4),
            "hours_below_target": sum(share < SLO.attainment for share in self.by_hour()),
            "device_hours": round(device_s / HOUR_S, 2),
            "good_per_device_hour": round(good / (device_s / HOUR_S), 1),
        }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def live(
    controller: FleetController, jobs: Iterator[Job], fleet: FleetSize, until_s: float, name: str = ""
) -> tuple[dict[str, Any], FleetSize]:
    """Jobs are served by a fleet that the controller changes; (how they fared and what was done, the last fleet).

    With a name, every hour says how it has gone so far.
    """
    book, did = Book(), Counter[str]()

    def served(one: JobResult) -> None:
        book.ended(one)
        controller.ended(one.ended_s, one.job.prompt, one.job.output, one.job.kind, one.meets_slo(SLO))

    def arrived(job: Job) -> None:
        book.came(job)
        controller.arrived(job.at_s, job.prompt, job.kind)

    world = ElasticFleet(
        hardware(),
        fleet,
        jobs,
        arrived=arrived,
        served=served,
        flip_s=FLIP_S,
        start_s=START_S,
        patience_s=PATIENCE_S,
    )
    if isinstance(controller, DynamoPlanner):
        controller.gauges = world.gauges
    now_s = 0.0
    while now_s < until_s:
        now_s += POLICY.bucket_s
        world.advance(now_s)
        decision = controller.tick(now_s, world.workers())
        did.update(type(action).__name__.lower() for action in decision.actions)
        world.act(decision.actions)
        if name and now_s % HOUR_S == 0:
            say(f"{name}: hour {now_s / HOUR_S:g}: {json.dumps(book.figures(world.device_s()))}")
    device_s, last = world.device_s(), count_fleet(world.workers(), READY)
    world.advance(until_s + LATE_S)  # what came at the end is answered, or has missed
    return {"first_fleet": str(fleet), **book.figures(device_s), "actions": dict(did)}, last


# --- a day of the Azure trace ---


def trace(path: str = AZURE, shrink: float = 1.0) -> list[Job]:
    """The jobs of a trace, prompts divided by `shrink`, cut to the model's length; shared beginnings are ignored."""
    return [
        replace(
            job,
            prompt=min(max(1, round(job.prompt / shrink)), MAX_PROMPT),
            output=min(job.output, MAX_OUTPUT),
            prefix=(),
        )
        for job in read_trace(path)
    ]


def known(jobs: list[Job]) -> LengthMix:
    """The lengths of jobs, as an operator would know them beforehand."""
    windows = TrafficWindows(HOUR_S, 2 * HOUR_S)
    for job in jobs:
        windows.arrived(job.at_s, job.prompt, job.kind)
        windows.ended(job.at_s, job.prompt, job.output, job.kind)
    windows.close(2 * HOUR_S)
    return windows.traffic(0.0, 2 * HOUR_S).mix()


@dataclass(frozen=True)
class Case:
    """One way to size the fleet, in one day."""

    name: str
    rate: float  # of the whole day's mean
    begin: int  # hour of the day
    hours: int
    journal: str = ""
    seed: int = 1
    trace: str = AZURE
    shrink: float = 1.0

    @property
    def shape(self) -> Sequence[float]:
        """Loads of the hours that are simulated, over the day's mean."""
        return WORKDAY[self.begin : self.begin + self.hours]


def dynamo(name: str) -> DynamoPlanner:
    """Dynamo's rule: `dynamo`, and what is set otherwise: `_kalman`, `_load`, `_spare0.4` (demand × 1.4)."""
    ways = name.split("_")[1:]
    spare = sum(float(way.removeprefix("spare")) for way in ways if way.startswith("spare"))
    predictor = KalmanPredictor if "kalman" in ways else LastValuePredictor
    return DynamoPlanner(hardware(), SLO, POLICY, predictor, "load" in ways, spare)


def one_day(case: Case) -> dict[str, Any]:
    jobs = trace(case.trace, case.shrink)
    mix, peak = known(jobs), case.rate * max(case.shape)
    ours = make_evaluator()
    small = smallest_fleet(POLICY, AttainmentCache(ours), mix, case.rate * (1 + POLICY.spare))
    large = smallest_fleet(POLICY, AttainmentCache(ours), mix, peak * (1 + POLICY.spare))
    journal = Journal(case.journal) if case.journal else None
    controller: FleetController
    match case.name:
        case "replanner":
            controller = Replanner(POLICY, ours, journal)
        case "static_mean" | "static_peak":
            controller = StaticFleet()
        case _:
            controller = dynamo(case.name)
    began_s, until_s = time.perf_counter(), len(case.shape) * HOUR_S
    first = large if case.name == "static_peak" else small
    mean = case.rate * sum(case.shape) / len(case.shape)
    stream = stretch_over_day(jobs, mean, seed=case.seed, shape=case.shape, length_s=until_s)
    row, _ = live(controller, stream, first, until_s, case.name)
    seconds = time.perf_counter() - began_s
    if isinstance(controller, Replanner):
        row |= {"judged_runs": ours.runs}
    if journal:
        journal.close()
        row |= {"alarms": alarms(case.journal), "replay": replayed(case.journal)}
    row |= {"wall_s": round(seconds, 1)}
    say(f"{case.name}: {json.dumps(row)}")
    return row


def alarms(path: str) -> dict[str, int]:
    """How often a log has traffic change, by what of it did. A day's traffic does change."""
    return dict(
        Counter(
            line.shift.what for line in read_journal(path) if isinstance(line, TrafficReview) and line.shift
        )
    )


def replayed(path: str) -> dict[str, int]:
    """Decisions of a log, and how many come out again."""
    found = [again.same for again in replay_decisions(read_journal(path))]
    return {"decisions": len(found), "same": sum(found)}


def days(case: Case, processes: int, names: Sequence[str]) -> dict[str, Any]:
    """The day of `case` under each of `names`."""
    with TemporaryDirectory() as folder, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        journals = {"replanner": str(Path(folder) / "decisions.jsonl")}
        cases = [replace(case, name=name, journal=journals.get(name, "")) for name in names]
        rows: dict[str, Any] = dict(zip(names, pool.map(one_day, cases), strict=True))
    if "replanner" in rows:
        ours = rows["replanner"]["good_per_device_hour"]
        for name in names:
            theirs = rows[name]["good_per_device_hour"]
            rows[name]["ours_over_this"] = round(ours / theirs, 3) if theirs else None
    return rows


# --- a change of lengths, and none ---


def shifting_jobs(rate: float, at_s: float, until_s: float, seed: int) -> Iterator[Job]:
    """HumanEval-like requests until `at_s`, LongBench-like ones after."""
    for job in synthetic_workload("humaneval").stream(rate, seed):
        if job.at_s >= at_s:
            break
        yield replace(job, kind="")
    for job in synthetic_workload("longbench").stream(rate, seed + 1):
        if job.at_s >= until_s - at_s:
            return
        yield replace(job, at_s=job.at_s + at_s, kind="")


def shift(seed: int, rate: float = 6.0, at_s: float = 1800.0, until_s: float = 5400.0) -> dict[str, Any]:
    """The alarm's delay after the change, and what follows, with flips and with a fleet that stays."""
    rows: dict[str, Any] = {}
    for name, controller in (("replanner", Replanner(POLICY, make_evaluator())), ("static", StaticFleet())):
        jobs = (
            replace(job, prompt=min(job.prompt, MAX_PROMPT))
            for job in shifting_jobs(rate, at_s, until_s, seed)
        )
        start = smallest_fleet(
            POLICY,
            AttainmentCache(make_evaluator()),
            known(synthetic_workload("humaneval").sample(2000, rate, seed)),
            rate,
        )
        start = max(start, FleetSize(2, 4))
        rows[name], last = live(controller, jobs, start, until_s)
        if isinstance(controller, Replanner):
            late = [alarm for alarm in controller.alarms if alarm.at_s > at_s]
            rows[name] |= {
                "false_alarms_before": len(controller.alarms) - len(late),
                "detected_after_s": late[0].at_s - at_s if late else None,
                "window_s": POLICY.window_s,
                "alarm": str(late[0]) if late else "",
                "last_fleet": str(last),
            }
    return rows


class Sure:
    """An evaluator that finds every fleet good enough: only alarms matter."""

    def attainment(self, fleet: FleetSize, mix: LengthMix, rate: float, cv: float) -> float:
        return 1.0


def quiet(days_: int, seed: int, rate: float = 5.0) -> dict[str, Any]:
    """Stationary Poisson traffic with Azure's lengths: alarms per day."""
    lengths = Workload.of(trace())
    alarms = 0
    for number in range(days_):
        replanner, next_s = Replanner(POLICY, Sure()), POLICY.bucket_s
        there = (FleetWorker("p", PREFILL), FleetWorker("d", DECODE))
        for job in lengths.stream(rate, seed + number):
            while job.at_s >= next_s:
                replanner.tick(next_s, there)
                next_s += POLICY.bucket_s
            if job.at_s >= DAY_S:
                break
            replanner.arrived(job.at_s, job.prompt)
            replanner.ended(job.at_s, job.prompt, job.output)
        alarms += len(replanner.alarms)
    return {"days": days_, "rate": rate, "alarms": alarms, "allowed_per_day": POLICY.false_alarms_per_day}


NAMES = ("replanner", "dynamo", "dynamo_kalman", "dynamo_load", "static_mean", "static_peak")
DYNAMO = re.compile(r"dynamo(_kalman|_load|_spare\d+(\.\d+)?)*")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--parts", default="day,shift,quiet", help="some of day, shift, quiet")
    parser.add_argument(
        "--names", default=",".join(NAMES), help="who serves the day; dynamo_load_spare0.4 plans for 1.4 x"
    )
    parser.add_argument("--rate", type=float, default=10.0, help="mean requests per second of the day")
    parser.add_argument("--begin", type=int, default=0, help="first hour of the day that is simulated")
    parser.add_argument("--hours", type=int, default=24, help="how many hours of it")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn")
    parser.add_argument("--trace", default=AZURE, help="another trace, in any layout that the planner reads")
    parser.add_argument("--shrink", type=float, default=1.0, help="divide the trace's prompt lengths by it")
    parser.add_argument("--quiet-days", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    parts, found = args.parts.split(","), dict[str, Any]()
    for name in args.names.split(","):
        if name not in NAMES and not DYNAMO.fullmatch(name):
            parser.error(
                f"nobody is called {name!r}: {', '.join(NAMES)}, or dynamo with _kalman, _load, _spare0.4"
            )
    if "shift" in parts:
        found["shift"] = shift(args.seed)
    if "quiet" in parts:
        found["quiet"] = quiet(args.quiet_days, args.seed)
    if "day" in parts:
        case = Case("", args.rate, args.begin, args.hours, "", args.seed, args.trace, args.shrink)
        found["day"] = days(case, args.jobs, args.names.split(","))
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
