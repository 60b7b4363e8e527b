"""Does the simulator say how this machine will fare?

    python -m benchmarks.sim_accuracy [--json] [--only 1P1D] [--seconds 36] [--profile-seconds 40] [--diagnose]

For one prefill and one decode worker, and for two colocated ones: the deployment is profiled, as `diptych profile` does
it, and the real mode of the simulator finds the knee. At each rate around it other requests are sent for a while, which
says how fast the machine is just then; the simulator predicts joint attainment with costs scaled to those steps and
spread like them, and the same requests at the same moments are then sent to the same deployment. Nothing is fitted to
what is compared. `--rates` are multiples of the predicted knee.

Figures: `mean_abs_points`, `max_abs_points` (predicted - measured attainment, in points, over all rows; the paper's
table 2: below 2 on A100s), `rows`, and by deployment the held-out error of step times (C9). `--diagnose` runs one rate
for each deployment and compares times and steps: `measured_over_cost` is of the steps that really ran, so a number
beside 1 there is the cost model's fault, or the machine's, and the rest is the simulator's. `hindsight` is what the
simulator says with the costs of those very steps afterwards: no prediction, but its own part of the error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.profile import Profile
from planner.profiler import Step, balance, kind_of
from planner.simulator import Deployment, deployment, simulate
from planner.tally import joint
from planner.terms import BOTH, DECODE, PREFILL, Job, Placement, Pool, Served, Slo, Split
from planner.workload import Workload, synthetic
from services.bench.drive import Plan, Run
from services.bench.measure import Live, Measured, Pools, deployed, measure
from services.bench.profiling import told
from services.bench.target import rest

RATES = (0.6, 0.8, 0.95, 1.05, 1.2, 1.4)  # times the predicted knee
WARMUP = 0.1  # of a run
SEQS, STEP_TOKENS, BEAT_S = 64, 512, 0.5  # what `diptych serve` does if it is told nothing else
KNEE_REQUESTS = 600
WIDTH = 0.03  # of the knee, relative
MOST = 64.0  # times the pace of one request at a time, beyond which no knee is looked for
QUIET = 0.2  # of the least measured pace: a rate at which nobody waits
TTFT_ROOM, TPOT_ROOM = 2.0, 2.0  # objectives, over the 90 % quantile of the quiet
SHARES = (0.5, 0.9, 0.99)
REST_S = 60.0
DEPLOYMENTS = {"1P1D": Pools(), "colocated": Pools(0, 0, 2)}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run: lengths, objectives (None: not chosen yet), and for how long."""

    workload: Workload
    slo: Slo | None
    rates: tuple[float, ...]
    seconds: float
    profile_seconds: float
    seed: int
    look_seconds: float = 12.0  # of other requests, before each rate

    def jobs(self, rate: float) -> list[Job]:
        return self.workload.sample(max(20, round(rate * self.seconds)), rate, self.seed)

    def others(self, rate: float) -> list[Job]:
        """Requests at the same rate that are compared with nothing."""
        return self.workload.sample(max(20, round(rate * self.look_seconds)), rate, self.seed + 3)


def predicted(pools: Pools, profile: Profile, busy: int, slo: Slo | None) -> Deployment:
    """What is simulated: the profile in the place of the deployment, with the settings of `diptych serve`."""
    if pools.colocated:
        placement = Placement((Pool(BOTH, Split(), pools.colocated),), affinity="none")
    else:
        placement = Placement((Pool(PREFILL, Split(), pools.prefill), Pool(DECODE, Split(), pools.decode)))
    tpot_s = slo.tpot_s if pools.colocated and slo is not None else None
    return deployment(
        placement,
        profile,
        max_num_seqs=SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        saturation_tokens=busy,
        tpot_s=tpot_s,
        beat_s=BEAT_S,
    )


def objectives(model: Deployment, setting: Setting, pace: float) -> Slo:
    """Some times what is predicted where nobody waits."""
    calm = simulate(model, setting.workload.sample(300, QUIET * pace, setting.seed))
    return Slo(
        TTFT_ROOM * quantile([one.ttft_s for one in calm], 0.9),
        TPOT_ROOM * quantile([one.tpot_s for one in calm], 0.9),
    )


def knee(model: Callable[[float], Deployment], setting: Setting, slo: Slo, pace: float) -> float:
    """The predicted goodput, within a few per cent: it only says where to look."""

    def attains(rate: float) -> bool:
        jobs = setting.workload.sample(KNEE_REQUESTS, rate, setting.seed + 1)
        return joint(simulate(model(rate), jobs), {"": slo}) >= slo.attainment

    low = pace / 4.0
    while attains(2.0 * low) and low < MOST * pace:
        low *= 2.0
    high = 2.0 * low
    while high / low > 1.0 + WIDTH:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if attains(middle) else (low, middle)
    return low


def run_one(live: Live, found: Measured, setting: Setting, slo: Slo, rate: float) -> dict[str, Any]:
    """One rate: predicted and measured, with the same requests."""
    jobs = setting.jobs(rate)
    warmup_s = WARMUP * jobs[-1].at_s

    def simulated(profile: Profile) -> list[Served]:
        model = predicted(live.pools, profile, found.saturation_tokens, setting.slo)
        return [one for one in simulate(model, jobs) if one.job.at_s >= warmup_s]

    looked_s = time.monotonic()
    live.drive(setting.others(rate), Plan(slo))
    profile = found.like(steps_since(live, looked_s))
    think_s = time.process_time()
    foreseen = simulated(profile)
    think_s = time.process_time() - think_s
    live.runner.run(rest(live.target, 0.05, REST_S))
    begun_s = time.monotonic()
    run = live.drive(jobs, Plan(slo, warmup_s=warmup_s))
    seen = [one.served for one in run.counted]
    afterwards = simulated(found.like(steps_since(live, begun_s)))
    row = {
        "deployment": str(live.pools),
        "rate": round(rate, 4),
        "requests": len(seen),
        "predicted": round(joint(foreseen, {"": slo}), 4),
        "measured": round(joint(seen, {"": slo}), 4),
        "hindsight": round(joint(afterwards, {"": slo}), 4),
        "failed": sum(bool(one.failed) for one in seen),
        "ttft_ms": times(foreseen, seen, "ttft_s"),
        "tpot_ms": times(foreseen, seen, "tpot_s"),
        "client_cpu_share": round(run.cpu_s / run.wall_s, 3),
        "simulated_in_s": round(think_s, 3),
    }
    row["points"] = round(100.0 * (row["predicted"] - row["measured"]), 2)  # type: ignore[operator]
    return row | steps(live, profile, run, begun_s)


def steps_since(live: Live, begun_s: float) -> list[Step]:
    """What all workers did from that moment on."""
    now_s = time.monotonic()
    return [step for life in live.lives() for step in life.between(begun_s, now_s).steps]


def times(foreseen: Sequence[Served], seen: Sequence[Served], name: str) -> dict[str, list[float]]:
    """[predicted, measured] milliseconds by quantile."""
    return {
        f"p{round(100 * share)}": [
            round(1e3 * quantile([getattr(one, name) for one in side], share), 3) for side in (foreseen, seen)
        ]
        for share in SHARES
    }


def steps(live: Live, profile: Profile, run: Run, begun_s: float) -> dict[str, Any]:
    """How the steps that ran compare with the cost model, by worker and kind, and how busy each worker was."""
    (cost,) = profile.costs.values()
    told: dict[str, Any] = {"steps": {}, "busy": {}}
    for life in live.lives():
        part = life.between(begun_s, begun_s + run.wall_s)
        told["busy"][life.worker] = round(sum(step.seconds for step in part.steps) / run.wall_s, 3)
        kinds: dict[str, Any] = {}
        for kind in ("prefill", "decode", "mixed"):
            some = [step for step in part.steps if kind_of(step.batch) == kind]
            if some:
                ratio = round(balance(cost, some), 3)  # type: ignore[arg-type]
                rows = round(statistics.fmean(step.batch.rows for step in some), 1)
                kinds[kind] = {"measured_over_cost": ratio, "count": len(some), "rows": rows}
        told["steps"][life.worker] = kinds
    return told


def study(name: str, setting: Setting) -> tuple[list[dict[str, Any]], dict[str, Any], Slo]:
    """Profile, predict, measure one deployment."""
    pools = DEPLOYMENTS[name]
    options = []
    if pools.colocated and setting.slo is not None:
        options = ["--slo-tpot-ms", f"{1e3 * setting.slo.tpot_s:.3f}"]
    with deployed(pools, "", options) as live:
        found = measure(live, setting.workload, setting.profile_seconds, seed=setting.seed + 2, say=say)
        pace = min(stage.pace for stage in found.stages)

        def model(rate: float) -> Deployment:
            return predicted(pools, found.at(rate), found.saturation_tokens, setting.slo)

        slo = setting.slo or objectives(model(pace), setting, pace)
        at = knee(model, setting, slo, pace)
        say(
            f"{name}: knee predicted at {at:.4g}/s, TTFT {slo.ttft_s * 1e3:.4g} ms, TPOT {slo.tpot_s * 1e3:.4g} ms"
        )
        rows = []
        for factor in setting.rates:
            rows.append(run_one(live, found, setting, slo, factor * at))
            row = rows[-1]
            say(
                f"{name}: {row['rate']:.4g}/s foretold {row['predicted']:.1%}, measured {row['measured']:.1%}"
            )
    return rows, told(found) | {"knee": round(at, 4)}, slo


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
    parser.add_argument("--seconds", type=float, default=36.0, help="of arrivals, at each rate")
    parser.add_argument("--profile-seconds", type=float, default=40.0)
    parser.add_argument("--look-seconds", type=float, default=12.0, help="of other requests before each rate")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--slo-ttft-ms", type=float, help="default: chosen from the first deployment's profile"
    )
    parser.add_argument("--slo-tpot-ms", type=float)
    parser.add_argument("--diagnose", action="store_true", help="one rate only, the predicted knee")
    options = parser.parse_args()
    slo = None
    if options.slo_ttft_ms and options.slo_tpot_ms:
        slo = Slo(options.slo_ttft_ms / 1e3, options.slo_tpot_ms / 1e3)
    workload = synthetic(options.workload).shrunk(options.shrink, 2048)
    rates = (1.0,) if options.diagnose else tuple(options.rates)
    setting = Setting(
        workload, slo, rates, options.seconds, options.profile_seconds, options.seed, options.look_seconds
    )
    begun_s, rows, profiles = time.monotonic(), [], {}
    for name in options.only:
        some, profiles[name], slo = study(name, setting)
        setting = replace(setting, slo=slo)
        rows += some
    told = summary(rows) | {"profiles": profiles, "rows": rows}
    told |= {"seconds": round(time.monotonic() - begun_s), "load": [round(one, 2) for one in os.getloadavg()]}
    told["slo_ms"] = (
        [round(1e3 * setting.slo.ttft_s, 3), round(1e3 * setting.slo.tpot_s, 3)] if setting.slo else None
    )
    print(json.dumps(told) if options.json else show(told))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures, over all rows and by deployment."""
    off = [abs(row["points"]) for row in rows]
    behind = [100.0 * abs(row["hindsight"] - row["measured"]) for row in rows]
    by = {
        name: round(statistics.fmean(abs(row["points"]) for row in rows if row["deployment"] == name), 2)
        for name in dict.fromkeys(row["deployment"] for row in rows)
    }
    return {
        "mean_abs_points": round(statistics.fmean(off), 2),
        "max_abs_points": max(off),
        "mean_abs_points_by_deployment": by,
        "hindsight_mean_abs_points": round(statistics.fmean(behind), 2),
        "hindsight_max_abs_points": round(max(behind), 2),
    }


def show(told: dict[str, Any]) -> str:
    """For a reader."""
    head = f"{'':14}{'rate':>8}{'predicted':>11}{'measured':>10}{'points':>8}"
    lines = [f"{head}   TTFT p50, p90   TPOT p50, p90 (predicted/measured, ms)"]
    for row in told["rows"]:
        shown = (
            f"{a:.4g}/{b:.4g}"
            for name in ("ttft_ms", "tpot_ms")
            for a, b in (row[name]["p50"], row[name]["p90"])
        )
        kept = f"{row['predicted']:11.1%}{row['measured']:10.1%}{row['points']:8.2f}"
        line = f"{row['deployment']:14}{row['rate']:8.4g}{kept}"
        lines.append(f"{line}   {'  '.join(shown)}")
        lines.append(f"{'':14}steps {json.dumps(row['steps'])} busy {json.dumps(row['busy'])}")
    lines += [f"{name}: {json.dumps(figures)}" for name, figures in told["profiles"].items()]
    lines.append(f"mean {told['mean_abs_points']} points, at most {told['max_abs_points']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
