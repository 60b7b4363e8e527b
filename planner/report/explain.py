"""Explains a plan: its goodput and latency, what limits it, where the time goes, and how alternatives compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diptych.chunks import RAW_CLASS
from planner.costs.kv.classes import format_classes
from planner.hardware import list_gpus, unserved_devices
from planner.placement.plan_file import (
    VERSION,
    PlanFile,
    PlanPrediction,
    PlanTraffic,
    plan_pools,
    plan_slo,
)
from planner.placement.problem import Problem
from planner.placement.solve import Candidate, Solution
from planner.placement.validate import step_limits

STAGE_WORDS = {
    "queue": "waiting to be read",
    "prefill": "being read (TTFT ends here)",
    "wait": "waiting for room to decode",
    "transfer": "moving KV",
    "decode": "being decoded",
}


def solution_headline(solution: Solution) -> list[str]:
    """The answer in three lines; in a fourth what the search's simulator had, where that has not the last word."""
    problem, best_candidate, fast = (
        solution.problem,
        solution.best_candidate,
        solution.best_candidate.fast_result,
    )
    where = {"low": ", KV within nodes", "high": ", KV between any two", "none": ""}[
        best_candidate.placement.affinity
    ]
    local = (
        ", decode instances prefill where that is sooner" if best_candidate.local_prefill == "auto" else ""
    )
    low, high = fast.interval_rps
    range_text = (
        f"{_format_rate(low)} to {_format_rate(high)} over {fast.seeds} seeds of {fast.requests} requests"
    )
    lines = [
        f"{best_candidate.placement}{where}{local}: {best_candidate.placement.devices} of {problem.hardware_text}",
        f"goodput {_format_rate(best_candidate.goodput_rps)} ({_validation_sentence(solution) or range_text}),"
        f" {best_candidate.per_device_rps:.3g} per device;"
        f" {best_candidate.attainment:.1%} meet both SLOs at {_format_rate(best_candidate.rate_rps)}",
        f"limited by {solution.binding.resource}; {best_candidate.cost_per_million:.3g} per million good tokens"
        f" ({best_candidate.price_per_hour:.3g} per hour)",
    ]
    searched = f"searched: {_format_rate(fast.goodput_rps)} ({range_text}), by the search's own simulator"
    return [*lines, searched] if best_candidate.validation else lines


def _validation_sentence(solution: Solution) -> str:
    """What the product's own decisions were asked, in words; nothing if they were not."""
    validation = solution.best_candidate.validation
    if validation is None:
        return ""
    run = f"by the product's scheduler and router, one run of {validation.requests} requests"
    if solution.problem.rate is not None:
        return f"as asked, more was not tried; {run}"
    return f"{run}; {_format_rate(validation.fails_rps)} is too much" if validation.fails_rps else run


def list_notes(solution: Solution) -> list[str]:
    """Sentences for the user; one of them says how `diptych serve` deploys the solution on GPUs, or that it cannot."""
    notes, gpus = list(solution.notes), " and ".join(list_gpus(_planned_devices(solution)))
    if why := _why_refused(solution):
        notes.append(f"{why}, so `diptych serve --plan` refuses this plan (docs/gpu.md)")
    elif gpus:
        notes.append(
            f"on {gpus} use `diptych serve --plan` with --device cuda; it never ran on a GPU (docs/gpu.md)"
        )
    return notes


def serve_command(solution: Solution, path: Path) -> str | None:
    """The command that deploys the solution, whose plan is in the file `path`; None: workers do not compute there."""
    if not is_deployable(solution):
        return None
    return f"diptych serve --plan {path}" + (
        " --device cuda" if list_gpus(_planned_devices(solution)) else ""
    )


def is_deployable(solution: Solution) -> bool:
    """Whether workers compute on the devices of the solution."""
    return not _why_refused(solution)


def _why_refused(solution: Solution) -> str:
    """Why the solution cannot be deployed, wherever its devices are; empty if it can."""
    names, pools = _planned_devices(solution), solution.best_candidate.placement.pools
    if other := " and ".join(unserved_devices(names)):
        return f"workers do not compute on {other}"
    if list_gpus(names) and any(pool.parallelism.devices > 1 for pool in pools):
        return "a worker computes on one GPU"
    return ""


def _planned_devices(solution: Solution) -> list[str]:
    """The devices of the solution's pools."""
    return [
        solution.problem.group(pool.device).device.name for pool in solution.best_candidate.placement.pools
    ]


def explain_solution(solution: Solution) -> list[str]:
    """What binds, where the time goes, and what others would give, in lines."""
    fast = solution.best_candidate.fast_result
    at = f" at {_format_rate(fast.rate_rps)}, as searched" if solution.best_candidate.validation else ""
    lines = ["", f"what limits it{at} (a quarter more of each, one by one):"]
    for use in sorted(solution.uses, key=lambda one: -one.gain):
        busy = f"{use.utilisation:4.0%} busy" if use.utilisation is not None else "         "
        lines.append(f"  {use.resource:<8} {busy}  goodput {use.gain:+.0%}")
    lines += ["", f"where the time goes{at}, mean and 90 % of requests (ms):"]
    for stage, (mean_s, most_s) in stage_seconds(solution.problem, fast).items():
        lines.append(f"  {STAGE_WORDS[stage]:<28} {mean_s * 1e3:9.1f} {most_s * 1e3:9.1f}")
    lines += ["", *compare_others(solution), "", explain_disaggregation(solution)]
    lines += [f"as good, as far as the search can tell: {', '.join(solution.ties)}"] if solution.ties else []
    if solution.dropped:
        reasons = ", ".join(f"{count} by {why}" for why, count in sorted(solution.dropped.items()))
        lines.append(f"dropped without a full measurement: {reasons}")
    return lines + [f"note: {note}" for note in list_notes(solution)]


def compare_others(solution: Solution) -> list[str]:
    """What the runners-up cost, in goodput or in devices: from the same simulator for both."""
    lines = ["elsewhere:"]
    for candidate in solution.others:
        best_candidate, one = _comparable_pair(solution.best_candidate, candidate)
        if solution.problem.rate is None:
            change = f"goodput {_format_ratio(one.goodput_rps, best_candidate.goodput_rps)}"
        else:
            unit = "per hour" if solution.problem.mixed_devices else "devices"
            change = f"{one.weight - best_candidate.weight:+g} {unit}"
        cost = (
            f"{_format_ratio(one.cost_per_million, best_candidate.cost_per_million)} per million good tokens"
        )
        if not one.goodput_rps:
            cost = (
                f"but {one.attainment:.1%} meet both SLOs at {_format_rate(one.rate_rps)}, which is too few"
            )
        by = " (as searched)" if solution.best_candidate.validation and not one.validation else ""
        lines.append(f"  {_describe_candidate(candidate)}: {change}, {cost}{by}")
    return lines if solution.others else ["elsewhere: nothing else is possible"]


def _comparable_pair(candidate: Candidate, other: Candidate) -> tuple[Candidate, Candidate]:
    """Both by the product's own decisions, or else both by the search's simulator."""
    return (
        (candidate, other)
        if candidate.validation and other.validation
        else (candidate.fast_result, other.fast_result)
    )


def explain_disaggregation(solution: Solution) -> str:
    """Whether to disaggregate, in a sentence."""
    ratio = disaggregation_gain(solution)
    if ratio is None:
        return f"only {solution.best_candidate.family} is possible or asked for"
    apart = solution.best_candidate.family != "colocated"
    word = "disaggregate" if apart else "do not disaggregate"
    although = ", although" if apart != (ratio > 1) else ":"
    per = "price" if solution.problem.mixed_devices else "device"
    sentence = (
        f"{word}{although} the best disaggregated placement gives {ratio:.2f} times the goodput per {per}"
        " of colocation"
    )
    if math.isinf(ratio):
        sentence = f"{word}{although} no colocated placement meets the SLOs at any rate"
    if although == ":":
        return sentence
    return f"{sentence}; {_why_not(solution, apart)}"


def _why_not(solution: Solution, apart: bool) -> str:
    """Why the kind that gives less per device is the answer."""
    others = [candidate for candidate in solution.others if (candidate.family != "colocated") != apart]
    best_candidate, other = _comparable_pair(
        solution.best_candidate, max(others, key=lambda one: one.fast_result.goodput_rps / one.weight)
    )
    if solution.problem.rate is not None and best_candidate.weight < other.weight:
        return "for this rate it takes more"
    if solution.problem.rate is None and best_candidate.goodput_rps > other.goodput_rps:
        return "of all that is on offer it carries less"
    return "more requests meet the SLOs this way with the product's scheduler and router"


def disaggregation_gain(solution: Solution) -> float | None:
    """Goodput per weight of the best disaggregated (or hybrid) option over that of the best colocated one.

    By the product's own decisions where they measured both, and else by the search's simulator; so for a rate, too,
    which is all the goodput that they were asked about. None: one of the kinds is missing.
    """
    candidates = (solution.best_candidate, *solution.others)
    validated = [
        candidate for candidate in candidates if candidate.validation and solution.problem.rate is None
    ]
    found = _goodput_ratio(validated)
    return _goodput_ratio([one.fast_result for one in candidates]) if found is None else found


def _goodput_ratio(candidates: Sequence[Candidate]) -> float | None:
    """Infinite if no colocated placement meets the SLOs; None if one of the kinds is missing, or neither does."""

    def best(*families: str) -> float | None:
        return max(
            (
                candidate.goodput_rps / candidate.weight
                for candidate in candidates
                if candidate.family in families
            ),
            default=None,
        )

    apart, together = best("disaggregated", "hybrid"), best("colocated")
    if apart is None or together is None or not (apart or together):
        return None
    return apart / together if together else math.inf


def stage_seconds(problem: Problem, candidate: Candidate) -> dict[str, tuple[float, float]]:
    """Seconds by stage at the option's rate, in the search's simulator: mean, and 90th percentile."""
    trial = problem.trial(candidate.placement)
    found = {}
    for stage, seconds in trial.stages(candidate.placement, candidate.rate_rps, 0).items():
        values = sorted(seconds)
        if values and values[-1] > 0.0:
            found[stage] = statistics.fmean(values), values[math.ceil(0.9 * len(values)) - 1]
    return found


def solution_json(solution: Solution) -> dict[str, Any]:
    """The whole answer as plain data."""
    return {
        "best": candidate_json(solution.best_candidate),
        "others": [candidate_json(candidate) for candidate in solution.others],
        "binding": solution.binding.resource,
        "resources": [
            {
                "resource": one.resource,
                "utilisation": one.utilisation,
                "goodput_gain_of_quarter_more": one.gain,
            }
            for one in solution.uses
        ],
        "stages_s": {
            stage: {"mean": mean_s, "p90": most_s}
            for stage, (mean_s, most_s) in stage_seconds(
                solution.problem, solution.best_candidate.fast_result
            ).items()
        },
        "disaggregated_over_colocated": _finite_or_none(disaggregation_gain(solution)),
        "verified": None if solution.validation is None else asdict(solution.validation),
        "ties": list(solution.ties),
        "notes": list_notes(solution),
        "deployable": is_deployable(solution),
        "dropped": dict(solution.dropped),
        "simulated": {"runs": solution.problem.effort.runs, "requests": solution.problem.effort.requests},
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """An option as plain data."""
    return {
        "placement": str(candidate.placement),
        "family": candidate.family,
        "affinity": candidate.placement.affinity,
        "cross": candidate.placement.cross,
        "devices": candidate.placement.devices,
        "goodput_rps": candidate.goodput_rps,
        "goodput_per_device_rps": candidate.per_device_rps,
        "interval_rps": list(candidate.interval_rps),
        "searched_rps": candidate.searched_rps,
        "rate_rps": candidate.rate_rps,
        "attainment": candidate.attainment,
        "attainment_by_kind": dict(candidate.shares),
        "price_per_hour": candidate.price_per_hour,
        "cost_per_million_good_tokens": _finite_or_none(candidate.cost_per_million),
        "requests": candidate.requests,
        "seeds": candidate.seeds,
        "local_prefill": candidate.local_prefill,
        "verified": None if candidate.validation is None else asdict(candidate.validation),
        "searched": None if candidate.searched is None else candidate_json(candidate.searched),
    }


def make_plan_file(solution: Solution, model: str) -> PlanFile:
    """The answer as `diptych serve --plan` reads it. `model` as the user named it."""
    problem, best_candidate = solution.problem, solution.best_candidate
    prompt, output = problem.source.mean()
    predicted = PlanPrediction(
        goodput_rps=best_candidate.goodput_rps,
        goodput_per_device_rps=best_candidate.per_device_rps,
        interval_rps=best_candidate.interval_rps,
        attainment=best_candidate.attainment,
        requests=best_candidate.requests,
        seeds=best_candidate.seeds,
        binding=solution.binding.resource,
        cost_per_million_good_tokens=_finite_or_none(best_candidate.cost_per_million),
        searched_rps=best_candidate.fast_result.goodput_rps if best_candidate.validation else None,
    )
    traffic = PlanTraffic(
        name=problem.name,
        prompt_mean=prompt,
        output_mean=output,
        rate_rps=problem.rate,
        burstiness_cv=problem.cv,
        kv_mix=dict(problem.kv_mix),
    )
    return PlanFile(
        version=VERSION,
        model=model,
        layers=problem.model.layers,
        kv_keep=1.0 if problem.keep is None else problem.keep.threshold,
        kv_cache_codec=format_classes(problem.kv_classes) or problem.model.kv_codec or RAW_CLASS,
        devices_per_node=max(group.devices_per_node for group in problem.groups),
        pools=plan_pools(best_candidate.placement),
        affinity=best_candidate.placement.affinity,
        cross=best_candidate.placement.cross,
        slos={kind: plan_slo(slo) for kind, slo in problem.slos.items()},
        traffic=traffic,
        predicted=predicted,
        local_prefill=best_candidate.local_prefill,
        steps=step_limits(problem, best_candidate.placement),
    )


def _describe_candidate(candidate: Candidate) -> str:
    affinity = candidate.placement.affinity
    return f"{candidate.placement}{'' if affinity == 'none' else f' ({affinity} affinity)'}"


def _format_rate(value: float) -> str:
    return f"{value:.3g} requests/s"


def _format_ratio(value: float, base: float) -> str:
    return f"{value / base - 1.0:+.0%}" if 0.0 < base < math.inf and value < math.inf else "not comparable"


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
