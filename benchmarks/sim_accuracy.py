"""Does the simulator say how this machine will fare?

    python -m benchmarks.sim_accuracy [--json] [--only 1P1D] [--seconds 8] [--passes 12] [--profile-seconds 40]

For one prefill and one decode worker, and for two colocated ones: the deployment is profiled, as `diptych profile` does
it, and the real mode of the simulator finds the knee. At each rate around it the simulator predicts attainment from
what each worker did in the pass before, how fast and how unsteadily (in the first pass: since the profile began), and
the same requests at the same moments are then sent. Nothing is fitted to what is compared. All rates are gone through
`--passes` times, each time with other requests, and a row is the mean of its passes: the machine is shared and changes
from second to second and from minute to minute, so that many short passes say more of it than few long ones. `--rates`
are multiples of the predicted knee.

Colocated workers are profiled without a TPOT SLO and measured with one: with it the engine prefills fewer tokens in
a step when the machine is slow, so that the size of a step would tell of the machine as well.

Figures: `mean_abs_points`, `max_abs_points` (predicted - measured attainment, in points, over all rows; the paper's
table 2: below 2 on A100s), `mean_points` with its sign, `rows`, and by deployment the held-out error of step times
(C9). `of_medians` are the same figures of rows that are the median of their passes instead of the mean: some seconds in
which something else has the machine then count no more than others. `hindsight` is what the simulator says with the
rhythm of the very steps that ran, afterwards: no prediction, but its own part of the error. `spread` of a row is the
standard error of its points, from how its passes differ, as if they had nothing to do with each other.
`first_pass_mean_abs_points` is of the first passes alone, at the first of which only the profile is known.
`measured_over_cost` is of the steps that ran, by worker and kind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.accuracy.goodput_knee import WARMUP, counted
from benchmarks.accuracy.measured_deployment import (
    measured_deployment,
    start_later,
    undisturbed_costs,
)
from diptych.slo import Slo
from planner.attainment import joint_attainment
from planner.costs.profiler import WorkerTrace, measured_ratio, step_kind
from planner.costs.step import StepCost
from planner.sim.exact.simulate import simulate_exact
from planner.types import Job, JobResult
from planner.workload.workload import Workload, synthetic_workload
from services.bench.load_generator import RunOptions
from services.bench.profile_run import (
    LiveDeployment,
    Measurement,
    PoolSizes,
    measure_profile,
    running_deployment,
)
from services.bench.server import wait_for_rest
from services.cli.profile.command import measurement_figures

RATES = (0.6, 0.8, 0.95, 1.05, 1.2, 1.4)  # times the predicted knee
KNEE_REQUESTS = 400
# Places in what was noted of the steps, from where it is repeated: nobody knows when slow moments come.
STARTS = 5
WIDTH = 0.04  # of the knee, relative
MOST = 64.0  # times the pace of one request at a time, beyond which no knee is looked for
QUIET = 0.2  # of the least measured pace: a rate at which nobody waits
TTFT_ROOM, TPOT_ROOM = 2.0, 2.0  # SLOs, over the 90 % quantile of the quiet
SHARES = (0.5, 0.9, 0.99)
REST_S = 60.0
DEPLOYMENTS = {"1P1D": PoolSizes(), "colocated": PoolSizes(0, 0, 2)}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run: lengths, SLOs (None: not chosen yet), and for how long."""

    workload: Workload
    slo: Slo | None
    rates: tuple[float, ...]
    seconds: float  # of arrivals, at each rate in each pass
    passes: int
    profile_seconds: float
    seed: int

    def jobs(self, rate: float, round_number: int, other: bool = False) -> list[Job]:
        seed = self.seed + 10 * round_number + (5 if other else 0)
        return self.workload.sample(max(20, round(rate * self.seconds)), rate, seed)


@dataclass(frozen=True, slots=True)
class Model:
    """What is simulated: a deployment that was profiled, with steps bounded by the TPOT SLO if it is colocated."""

    pools: PoolSizes
    found: Measurement
    own: StepCost
    slo: Slo | None = None

    def serve(
        self, jobs: Sequence[Job], traces: Sequence[WorkerTrace], starts: Sequence[float] = (0.0,)
    ) -> list[JobResult]:
        """How the requests would fare, once for each start."""
        tpot_s = self.slo.tpot_s if self.pools.colocated and self.slo is not None else None
        like = measured_deployment(self.pools, self.found, self.own, traces, tpot_s=tpot_s)
        return [one for start in starts for one in simulate_exact(start_later(like, start), jobs)]


def starts_of(seed: int) -> list[float]:
    """`STARTS` places, evenly spread from a random one."""
    first = random.Random(seed).random()
    return [(first + number / STARTS) % 1.0 for number in range(STARTS)]


def choose_slo(model: Model, setting: Setting, pace: float) -> Slo:
    """Some times what is predicted where nobody waits."""
    jobs = setting.workload.sample(300, QUIET * pace, setting.seed)
    calm = model.serve(jobs, model.found.traces, starts_of(0))
    return Slo(
        TTFT_ROOM * quantile([one.ttft_s for one in calm], 0.9),
        TPOT_ROOM * quantile([one.tpot_s for one in calm], 0.9),
    )


def predict_attainment(model: Model, setting: Setting, slo: Slo, rate: float) -> float:
    """Attainment that the profile alone predicts of runs as long as those that are measured, with other requests."""
    served: list[JobResult] = []
    round_number = 0
    while len(served) < KNEE_REQUESTS:
        jobs = setting.jobs(rate, round_number, other=True)
        served += counted(model.serve(jobs, model.found.traces, starts_of(round_number)[:1]))
        round_number += 1
    return joint_attainment(served, {"": slo})


def knee(model: Model, setting: Setting, slo: Slo, pace: float) -> float:
    """The predicted goodput, within a few per cent."""
    low = pace / 4.0
    while predict_attainment(model, setting, slo, 2.0 * low) >= slo.attainment and low < MOST * pace:
        low *= 2.0
    high = 2.0 * low
    while high / low > 1.0 + WIDTH:
        middle = math.sqrt(low * high)
        if predict_attainment(model, setting, slo, middle) >= slo.attainment:
            low = middle
        else:
            high = middle
    return low


def run_one(
    live: LiveDeployment,
    model: Model,
    setting: Setting,
    slo: Slo,
    rate: float,
    round_number: int,
    from_s: float | None,
) -> dict[str, Any]:
    """One rate in one pass: predicted and measured, with the same requests.

    What is remembered begins at `from_s`; None: with the profile.
    """
    jobs = setting.jobs(rate, round_number)
    known = remembered(model.found.traces, live.read_step_logs(), from_s)
    think_s = time.process_time()
    foreseen = counted(model.serve(jobs, known, starts_of(round_number)))
    think_s = time.process_time() - think_s
    live.runner.run(wait_for_rest(live.server, 0.05, REST_S))
    begun_s = time.monotonic()
    run = live.send_load(jobs, RunOptions(slo, warmup_s=WARMUP * jobs[-1].at_s))
    seen = [one.result for one in run.counted_records]
    ran = lives_since(live, begun_s)
    afterwards = counted(model.serve(jobs, ran))
    return {
        "deployment": str(live.pools),
        "rate": round(rate, 4),
        "requests": len(seen),
        "predicted": joint_attainment(foreseen, {"": slo}),
        "measured": joint_attainment(seen, {"": slo}),
        "hindsight": joint_attainment(afterwards, {"": slo}),
        "failed": sum(bool(one.failed) for one in seen),
        "ttft_ms": times(foreseen, seen, "ttft_s"),
        "tpot_ms": times(foreseen, seen, "tpot_s"),
        "client_cpu_share": round(run.cpu_s / run.wall_s, 3),
        "simulated_in_s": round(think_s, 3),
        "steps": steps(model.own, ran, run.wall_s),
    }


def merged(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of one rate: means over its passes, which are reported as well."""
    row: dict[str, Any] = {name: passes[0][name] for name in ("deployment", "rate")}
    for name in ("requests", "failed"):
        row[name] = sum(one[name] for one in passes)
    for name in ("predicted", "measured", "hindsight"):
        row[name] = round(statistics.fmean(one[name] for one in passes), 4)
    row["points"] = round(100.0 * (row["predicted"] - row["measured"]), 2)
    row["median_points"] = round(
        100.0 * statistics.median(one["predicted"] - one["measured"] for one in passes), 2
    )
    return row | {"spread": spread(passes), "passes": list(passes)}


def spread(passes: Sequence[dict[str, Any]]) -> float | None:
    """Standard error of a row's points, from how its passes differ; None of a single one."""
    if len(passes) < 2:
        return None
    off: list[float] = [100.0 * (one["predicted"] - one["measured"]) for one in passes]
    return round(statistics.stdev(off) / math.sqrt(len(off)), 2)


def remembered(
    before: Sequence[WorkerTrace], since: Sequence[WorkerTrace], from_s: float | None = None
) -> list[WorkerTrace]:
    """What each worker of a profile did, and what the one in its place has done since; or that from `from_s` on."""
    later = {life.worker: life for life in since}
    if from_s is not None:
        return [later[life.worker].between(from_s, math.inf) for life in before]
    return [replace(later[life.worker], steps=life.steps + later[life.worker].steps) for life in before]


def lives_since(live: LiveDeployment, begun_s: float) -> list[WorkerTrace]:
    """What each worker did from that moment on."""
    now_s = time.monotonic()
    return [life.between(begun_s, now_s) for life in live.read_step_logs()]


def times(foreseen: Sequence[JobResult], seen: Sequence[JobResult], name: str) -> dict[str, list[float]]:
    """[predicted, measured] milliseconds by quantile."""
    return {
        f"p{round(100 * share)}": [
            round(1e3 * quantile([getattr(one, name) for one in side], share), 3) for side in (foreseen, seen)
        ]
        for share in SHARES
    }


def steps(cost: StepCost, traces: Sequence[WorkerTrace], wall_s: float) -> dict[str, Any]:
    """How the steps that ran compare with the cost model, by worker and kind, and how busy each worker was."""
    ratios: dict[str, Any] = {}
    for life in traces:
        ratios[life.worker] = {"busy": round(sum(step.seconds for step in life.steps) / wall_s, 3)}
        for kind in ("prefill", "decode", "mixed"):
            if some := [step for step in life.steps if step_kind(step.batch) == kind]:
                rows = round(statistics.fmean(step.batch.rows for step in some), 1)
                ratio = round(measured_ratio(cost, some), 3)
                ratios[life.worker][kind] = {"measured_over_cost": ratio, "count": len(some), "rows": rows}
    return ratios


def study(name: str, setting: Setting) -> tuple[list[dict[str, Any]], dict[str, Any], Slo]:
    """Profile, predict, measure one deployment."""
    pools = DEPLOYMENTS[name]
    with running_deployment(pools) as live:
        found = measure_profile(
            live, setting.workload, setting.profile_seconds, seed=setting.seed + 2, say=say
        )
    own = undisturbed_costs(found)
    pace = min(stage.rate_rps for stage in found.stages if stage.depth is not None)
    slo = setting.slo or choose_slo(Model(pools, found, own.cost), setting, pace)
    model = Model(pools, found, own.cost, slo)
    at = knee(model, setting, slo, pace)
    say(
        f"{name}: knee predicted at {at:.4g}/s, TTFT {slo.ttft_s * 1e3:.4g} ms, TPOT {slo.tpot_s * 1e3:.4g} ms"
    )
    options = ["--slo-tpot-ms", f"{1e3 * slo.tpot_s:.3f}"] if pools.colocated else []
    seen: dict[float, list[dict[str, Any]]] = {factor: [] for factor in setting.rates}
    begins: list[float] = []
    with running_deployment(pools, "", options) as live:
        for round_number in range(setting.passes):
            for factor in setting.rates:
                last_s = begins[-len(setting.rates)] if round_number else None  # one pass ago
                begins.append(time.monotonic())
                row = run_one(live, model, setting, slo, factor * at, round_number, last_s)
                seen[factor].append(row)
                shares = f"foretold {row['predicted']:.1%}, measured {row['measured']:.1%}"
                say(f"{name}: {row['rate']:.4g}/s {shares}, in hindsight {row['hindsight']:.1%}")
    return (
        [merged(passes) for passes in seen.values()],
        measurement_figures(found) | {"own_error": own.relative_errors, "knee": round(at, 4)},
        slo,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many do not exceed; inf if there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(DEPLOYMENTS), default=list(DEPLOYMENTS))
    parser.add_argument("--workload", default="sharegpt")
    parser.add_argument("--shrink", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals, at each rate in each pass")
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--profile-seconds", type=float, default=40.0)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--slo-ttft-ms", type=float, help="default: chosen from the first deployment's profile"
    )
    parser.add_argument("--slo-tpot-ms", type=float)
    options = parser.parse_args()
    slo = None
    if options.slo_ttft_ms and options.slo_tpot_ms:
        slo = Slo(options.slo_ttft_ms / 1e3, options.slo_tpot_ms / 1e3)
    workload = synthetic_workload(options.workload).shrunk(options.shrink, 2048)
    setting = Setting(
        workload,
        slo,
        tuple(options.rates),
        options.seconds,
        options.passes,
        options.profile_seconds,
        options.seed,
    )
    begun_s, rows, profiles = time.monotonic(), [], {}
    for name in options.only:
        some, profiles[name], slo = study(name, setting)
        setting = replace(setting, slo=slo)
        rows += some
    report = summary(rows) | {"profiles": profiles, "rows": rows}
    report |= {
        "seconds": round(time.monotonic() - begun_s),
        "load": [round(one, 2) for one in os.getloadavg()],
    }
    report["slo_ms"] = (
        [round(1e3 * setting.slo.ttft_s, 3), round(1e3 * setting.slo.tpot_s, 3)] if setting.slo else None
    )
    print(json.dumps(report) if options.json else show(report))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures, over all rows and by deployment."""
    off = [abs(row["points"]) for row in rows]
    middle = [abs(row["median_points"]) for row in rows]
    behind = [100.0 * abs(row["hindsight"] - row["measured"]) for row in rows]
    first = [100.0 * abs(row["passes"][0]["predicted"] - row["passes"][0]["measured"]) for row in rows]
    by = {
        name: round(statistics.fmean(abs(row["points"]) for row in rows if row["deployment"] == name), 2)
        for name in dict.fromkeys(row["deployment"] for row in rows)
    }
    return {
        "mean_abs_points": round(statistics.fmean(off), 2),
        "max_abs_points": max(off),
        "of_medians": {"mean_abs_points": round(statistics.fmean(middle), 2), "max_abs_points": max(middle)},
        "mean_points": round(statistics.fmean(row["points"] for row in rows), 2),
        "mean_abs_points_by_deployment": by,
        "first_pass_mean_abs_points": round(statistics.fmean(first), 2),
        "hindsight_mean_abs_points": round(statistics.fmean(behind), 2),
        "hindsight_max_abs_points": round(max(behind), 2),
    }


def show(report: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'':14}{'rate':>8}{'predicted':>11}{'measured':>10}{'points':>8}{'hindsight':>11}"]
    for row in report["rows"]:
        kept = f"{row['predicted']:11.1%}{row['measured']:10.1%}{row['points']:8.2f}{row['hindsight']:11.1%}"
        lines.append(f"{row['deployment']:14}{row['rate']:8.4g}{kept}")
    lines += [f"{name}: {json.dumps(figures)}" for name, figures in report["profiles"].items()]
    lines.append(f"mean {report['mean_abs_points']} points, at most {report['max_abs_points']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
