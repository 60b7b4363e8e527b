"""How long the placement search takes, what it finds, and how that compares with the paper.

    python -m benchmarks.planner [--json] [--only plans,search,paper,scales,equal,horizon] [--large] [--short]

The models are OPT on A100-80G with the costs of the paper's artefact (OPT-175B: scaled from OPT-66B), lengths synthetic
with the means of figure 7, joint attainment 90 %.

    first_answer_s, plan_s …     what a user waits for (`benchmarks.planner_parts.plan_time`)
    opt66b_1x8_s, opt66b_4x8_s   seconds of the whole search, all families: the first with runs of 300 requests as the
                                 paper's, single process; the second with --large, and runs of 30 s at least
    plan_opt66b_1x8_s            seconds of this question as `diptych plan` asks it: more seeds, longer runs, prompts
                                 cut beside decoding, the answer measured afresh and put to the product's own decisions
    requests_per_s               requests simulated per second of processor time of it (`cpu_s`, one process)
    paper                        for each row of table 3: our best pair within nodes by goodput per device, the paper's
                                 placement and how far it is from the best; goodput beside the crossing of figures 8, 9
    scales                       the other half of these figures: the least multiple of both SLOs that 90 % meet
                                 with the paper's placement at the paper's rate, one value for each seed, for runs as
                                 long as the paper's and long ones
    horizon                      goodput per device of two placements of the paper, by the length of the run
    equal                        colocated against disaggregated with equal costs, as the search and as the product's
                                 own scheduler and router have it

Seconds are this machine's; goodputs are simulated and the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.planner_parts.plan_time import plans
from diptych.slo import Slo
from planner.costs.profile_file import built_in_profile
from planner.hardware import find_device
from planner.placement.candidates import family_of, make_pair
from planner.placement.problem import NodeGroup, Problem
from planner.placement.search import (
    MIN_RUNG,
    RUNG_RATIO,
    SearchResult,
    climb_ladder,
    rung_of,
    search_units,
)
from planner.placement.solve import Candidate, solve_placement
from planner.placement.trial import EPSILON
from planner.placement.validate import product_limits
from planner.types import JobResult, Parallelism, Placement
from planner.workload.workload import synthetic_workload

DEVICE = "A100-80G"
# Table 1's SLOs, table 3's placements (tp, pp of prefill; tp, pp of decode; segments across nodes), and requests
# per second and device where figures 8 and 9 cross 90 % (DistServe, and vLLM as it was then).
PAPER: dict[str, tuple[str, str, Slo, tuple[int, int, int, int, int], float, float]] = {
    "13b_sharegpt": ("OPT-13B", "sharegpt", Slo(0.25, 0.1), (2, 1, 1, 1, 1), 2.3, 0.5),
    "66b_sharegpt": ("OPT-66B", "sharegpt", Slo(2.5, 0.15), (4, 1, 2, 2, 1), 0.955, 0.347),
    "66b_humaneval": ("OPT-66B", "humaneval", Slo(0.125, 0.2), (4, 1, 2, 2, 1), 1.144, 0.2),
    "66b_longbench": ("OPT-66B", "longbench", Slo(15.0, 0.15), (4, 1, 2, 2, 1), 0.53, 0.125),
    "175b_sharegpt": ("OPT-175B", "sharegpt", Slo(4.0, 0.2), (3, 3, 4, 3, 3), 0.2015, 0.1013),
}
# Figures 8 and 9 again: requests per second and device, requests of a run, and the multiple of the SLOs at which
# DistServe crosses 90 %, by straight lines between those that were tried (`plot.ipynb` of the artefact).
SCALES: dict[str, tuple[float, int, float]] = {
    "13b_sharegpt": (1.5, 300, 0.667),
    "66b_sharegpt": (0.75, 200, 0.732),
    "66b_humaneval": (0.875, 400, 0.879),
    "66b_longbench": (0.375, 200, 0.795),
    "175b_sharegpt": (0.125, 525, 0.761),
}
SEEDS = 5
NODES = {"OPT-13B": (1, 4), "OPT-66B": (1, 8), "OPT-175B": (3, 8)}
CHAT, TIGHT = Slo(2.5, 0.15), Slo(0.4, 0.1)
SHORT: dict[str, Any] = {"seeds": 1, "requests": 300, "span_s": 0.0}  # a run of the paper's
LONG = 2000  # requests of a run that shows what a rate comes to


def asked(model: str, workload: str, slo: Slo, nodes: int, per_node: int, **more: Any) -> Problem:
    """A question about the paper's hardware. By default runs are as short as the paper's."""
    a100 = find_device(DEVICE)
    profile = built_in_profile(model, a100)
    given: dict[str, Any] = SHORT | {"name": workload} | more
    stock = NodeGroup(a100, nodes, per_node)
    return Problem(
        profile.model, (stock,), {a100.name: profile}, synthetic_workload(workload), {"": slo}, **given
    )


def timed(nodes: int) -> dict[str, Any]:
    """The whole search for OPT-66B and ShareGPT on `nodes` of eight."""
    span_s = 0.0 if nodes == 1 else 30.0  # 300 requests say nothing of 32 devices: they last seconds
    return answered(asked("OPT-66B", "sharegpt", CHAT, nodes, 8, profiled_only=True, span_s=span_s))


def planned() -> dict[str, Any]:
    """What a user waits for: the same on one node, with the defaults of `diptych plan`."""
    given = {field.name: field.default for field in fields(Problem) if field.name in SHORT}
    return answered(
        asked("OPT-66B", "sharegpt", CHAT, 1, 8, limits=product_limits([CHAT]), verified=True, **given)
    )


def answered(request: Problem) -> dict[str, Any]:
    """How long an answer takes, and what it is."""
    begun_s, worked_s = time.perf_counter(), time.process_time()
    answer = solve_placement(request)
    took_s, worked_s = time.perf_counter() - begun_s, time.process_time() - worked_s
    units = sum(1 for family in ("low", "colocated") for _ in request.units(family))
    return {
        "seconds": round(took_s, 2), "cpu_s": round(worked_s, 2), "units": units, "runs": request.effort.runs,
        "requests_per_s": round(request.effort.requests / worked_s), "best": candidate_fields(answer.best_candidate),
        "others": [candidate_fields(one) for one in answer.others],
    }  # fmt: skip


def candidate_fields(option: Candidate) -> dict[str, Any]:
    """An option in a row."""
    return {
        "placement": str(option.placement), "family": option.family, "affinity": option.placement.affinity,
        "goodput_per_device": round(option.per_device_rps, 3), "searched": round(option.searched_rps, 3),
        "attainment": round(option.attainment, 4), "requests": option.requests,
    }  # fmt: skip


def best_pair(request: Problem, family: str = "low") -> SearchResult:
    """The best unit of a family, by goodput per device."""
    return search_units(request.units(family), request.trial, request.bound, request.weight)


def reached(request: Problem, unit: Placement, guess: float) -> float:
    """Goodput per device of one placement."""
    top = rung_of(float("inf"))
    rung = climb_ladder(request.trial(unit), unit, float(unit.devices), MIN_RUNG, top, rung_of(guess))
    return 0.0 if rung is None else RUNG_RATIO**rung


def papers(placement: tuple[int, int, int, int, int]) -> Placement:
    """A row of table 3."""
    tp_p, pp_p, tp_d, pp_d, cross = placement
    return make_pair(Parallelism(tp_p, pp_p), Parallelism(tp_d, pp_d), "low", cross, DEVICE, DEVICE)


def paper() -> dict[str, Any]:
    """Tables 1 and 3 and the crossings of figures 8 and 9, for both horizons."""
    rows = {}
    for name, (model, workload, slo, placement, crossing, vllm) in PAPER.items():
        row: dict[str, Any] = {
            "paper_goodput_per_device": crossing,
            "paper_vllm": vllm,
            "paper": str(papers(placement)),
        }
        for length, requests in (("short", 300), ("long", LONG)):
            request = asked(model, workload, slo, *NODES[model], requests=requests)
            found = best_pair(request)
            theirs = reached(request, papers(placement), found.best.per_weight if found.best else 1.0)
            best = found.best
            row[length] = {
                "requests": requests,
                "best": str(best.placement) if best else None,
                "cross": best.placement.cross if best else None,
                "goodput_per_device": round(best.per_weight, 3) if best else 0.0,
                "papers_placement": round(theirs, 3),
                "papers_of_best": round(theirs / best.per_weight, 3) if best else None,
                "ties": [str(one.placement) for one in found.ties],
            }
        rows[name] = row
    return rows


def scales() -> dict[str, Any]:
    """How tight the SLOs may be at the paper's rates, with the paper's placements."""
    rows: dict[str, Any] = {}
    for name, (rate, short, crossing) in SCALES.items():
        model, workload, slo, placement, _, _ = PAPER[name]
        unit = papers(placement)
        rows[name] = {"paper": crossing}
        for requests in (short, LONG):
            trial = asked(model, workload, slo, *NODES[model], requests=requests, seeds=SEEDS).trial(unit)
            runs = [trial.serve(unit, rate * unit.devices, seed) for seed in range(SEEDS)]
            found = [least_scale(run, slo) for run in runs]
            rows[name][str(requests)] = [round(one, 3) if math.isfinite(one) else None for one in found]
    return rows


def least_scale(served: Sequence[JobResult], slo: Slo) -> float:
    """The least multiple of both limits of `slo` that its share of the requests meet; infinite if too many fail."""
    needs = sorted(
        math.inf if one.failed else max(one.ttft_s / slo.ttft_s, one.tpot_s / slo.tpot_s) for one in served
    )
    return needs[math.ceil(slo.attainment * len(needs) - EPSILON) - 1]


def horizon() -> dict[str, Any]:
    """Goodput that short runs predict and long ones reach."""
    rows: dict[str, Any] = {}
    for name, lengths in (("13b_sharegpt", (300, 3000)), ("66b_sharegpt", (200, 2000))):
        model, workload, slo, placement, crossing, _ = PAPER[name]
        rows[name] = {"paper": crossing}
        for requests in lengths:
            values = []
            for seed in range(3):
                request = asked(model, workload, slo, *NODES[model], requests=requests, seeds=1 + seed)
                trial = request.trial(papers(placement))
                request_of_one = replace(trial, samples=trial.samples[-1:])
                top = rung_of(float("inf"))
                unit = papers(placement)
                rung = climb_ladder(
                    request_of_one, unit, float(unit.devices), MIN_RUNG, top, rung_of(crossing)
                )
                values.append(0.0 if rung is None else RUNG_RATIO**rung)
            rows[name][str(requests)] = [round(value, 3) for value in values]
    return rows


def equal(requests: int = 300, span_s: float = 20.0) -> dict[str, Any]:
    """S21: both modes with the same costs on eight devices, whole prompts first, and cut beside decoding."""
    rows = {}
    cases = {name: PAPER[name] for name in ("66b_sharegpt", "66b_humaneval", "66b_longbench")}
    cases["66b_sharegpt_tight"] = ("OPT-66B", "sharegpt", TIGHT, (4, 1, 2, 2, 1), 0.0, 0.0)
    for name, (model, workload, slo, *_) in cases.items():
        row: dict[str, Any] = {}
        for mode, chunk_tokens in (("whole", 0), ("chunked", 2048)):
            request = asked(
                model, workload, slo, 1, 8, requests=requests, span_s=span_s, profiled_only=True, verified=True,
                limits=product_limits([slo], chunk_tokens), families=("colocated", "disaggregated"),
            )  # fmt: skip
            answer = solve_placement(request)
            best: dict[str, float] = {}
            for one in (answer.best_candidate, *answer.others):
                best[one.family] = max(best.get(one.family, 0.0), one.fast_result.goodput_rps)
            row[mode] = {
                "goodput_rps": {key: round(value, 3) for key, value in best.items()},
                "disaggregated_over_colocated": round(best.get("disaggregated", 0.0) / best["colocated"], 3),
                "chosen": family_of(answer.best_candidate.placement),
                "best": str(answer.best_candidate.placement),
                "product_goodput_rps": round(answer.validation.goodput_rps, 3) if answer.validation else None,
            }
        rows[name] = row
    return rows


def measure(only: set[str], large: bool, short: bool) -> dict[str, Any]:
    """The parts asked for."""
    figures: dict[str, Any] = plans(short) if "plans" in only else {}
    if "search" in only:
        small = timed(1)
        figures |= {
            "opt66b_1x8_s": small["seconds"],
            "requests_per_s": small["requests_per_s"],
            "opt66b_1x8": small,
        }
        asked_for = planned()
        figures |= {"plan_opt66b_1x8_s": asked_for["seconds"], "plan_opt66b_1x8": asked_for}
        if large:
            four = timed(4)
            figures |= {"opt66b_4x8_s": four["seconds"], "opt66b_4x8": four}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "paper": paper,
        "scales": scales,
        "horizon": horizon,
        "equal": equal,
    }
    for name, part in parts.items():
        if name in only:
            figures[name] = part()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--large", action="store_true", help="4 × 8 devices too")
    parser.add_argument(
        "--only", default="plans,search,paper,scales,horizon,equal", help="parts, with commas between"
    )
    parser.add_argument("--short", action="store_true", help="fewer questions in `plans`")
    given = parser.parse_args()
    figures = measure(set(given.only.split(",")), given.large, given.short)
    if given.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}: {json.dumps(value, indent=2)}")


if __name__ == "__main__":
    main()
