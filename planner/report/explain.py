"""Explains a plan: its goodput and latency, what limits it, where the time goes, and how alternatives compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from diptych.chunks import RAW_CLASS
from planner.costs.kv.classes import format_classes
from planner.hardware import unserved_devices
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

STAGES = ("queue", "prefill", "wait", "transfer", "decode")
STAGE_WORDS = {
    "queue": "waiting to be read",
    "prefill": "being read (TTFT ends here)",
    "wait": "waiting for room to decode",
    "transfer": "moving KV",
    "decode": "being decoded",
}


def solution_headline(answer: Solution) -> list[str]:
    """The answer in three lines; in a fourth what the search's simulator had, where that has not the last word."""
    request, best, fast = answer.request, answer.best, answer.best.fast_result
    where = {"low": ", KV within nodes", "high": ", KV between any two", "none": ""}[best.placement.affinity]
    local = ", decode instances prefill where that is sooner" if best.local_prefill == "auto" else ""
    low, high = fast.interval_rps
    range_text = (
        f"{_format_rate(low)} to {_format_rate(high)} over {fast.seeds} seeds of {fast.requests} requests"
    )
    lines = [
        f"{best.placement}{where}{local}: {best.placement.devices} of {request.hardware_text}",
        f"goodput {_format_rate(best.goodput_rps)} ({_validation_sentence(answer) or range_text}),"
        f" {best.per_device_rps:.3g} per device;"
        f" {best.attainment:.1%} meet both SLOs at {_format_rate(best.rate_rps)}",
        f"limited by {answer.binding.resource}; {best.cost_per_million:.3g} per million good tokens"
        f" ({best.price_per_hour:.3g} per hour)",
    ]
    searched = f"searched: {_format_rate(fast.goodput_rps)} ({range_text}), by the search's own simulator"
    return [*lines, searched] if best.verdict else lines


def _validation_sentence(answer: Solution) -> str:
    """What the product's own decisions were asked, in words; nothing if they were not."""
    verdict = answer.best.verdict
    if verdict is None:
        return ""
    run = f"by the product's scheduler and router, one run of {verdict.requests} requests"
    if answer.request.rate is not None:
        return f"as asked, more was not tried; {run}"
    return f"{run}; {_format_rate(verdict.fails_rps)} is too much" if verdict.fails_rps else run


def list_notes(answer: Solution) -> list[str]:
    """Sentences for the user; one of them says so if `diptych serve` cannot deploy the solution."""
    other = " and ".join(_unserved_devices(answer))
    refused = (
        f"workers do not compute on {other} yet, so `diptych serve --plan` refuses this plan (docs/gpu.md)"
    )
    return [*answer.notes, *([refused] if other else [])]


def is_deployable(answer: Solution) -> bool:
    """Whether workers compute on the devices of the solution."""
    return not _unserved_devices(answer)


def _unserved_devices(answer: Solution) -> list[str]:
    """The devices of the solution on which workers do not compute yet."""
    return unserved_devices(
        answer.request.stock(pool.device).device.name for pool in answer.best.placement.pools
    )


def explain_solution(answer: Solution) -> list[str]:
    """What binds, where the time goes, and what others would give, in lines."""
    fast = answer.best.fast_result
    at = f" at {_format_rate(fast.rate_rps)}, as searched" if answer.best.verdict else ""
    lines = ["", f"what limits it{at} (a quarter more of each, one by one):"]
    for use in sorted(answer.uses, key=lambda one: -one.gain):
        busy = f"{use.utilisation:4.0%} busy" if use.utilisation is not None else "         "
        lines.append(f"  {use.resource:<8} {busy}  goodput {use.gain:+.0%}")
    lines += ["", f"where the time goes{at}, mean and 90 % of requests (ms):"]
    for stage, (mean_s, most_s) in stage_seconds(answer.request, fast).items():
        lines.append(f"  {STAGE_WORDS[stage]:<28} {mean_s * 1e3:9.1f} {most_s * 1e3:9.1f}")
    lines += ["", *compare_others(answer), "", explain_disaggregation(answer)]
    lines += [f"as good, as far as the search can tell: {', '.join(answer.ties)}"] if answer.ties else []
    if answer.dropped:
        reasons = ", ".join(f"{count} by {why}" for why, count in sorted(answer.dropped.items()))
        lines.append(f"dropped without a full measurement: {reasons}")
    return lines + [f"note: {note}" for note in list_notes(answer)]


def compare_others(answer: Solution) -> list[str]:
    """What the runners-up cost, in goodput or in devices: from the same simulator for both."""
    lines = ["elsewhere:"]
    for option in answer.others:
        best, one = _comparable_pair(answer.best, option)
        if answer.request.rate is None:
            change = f"goodput {_format_ratio(one.goodput_rps, best.goodput_rps)}"
        else:
            change = (
                f"{one.weight - best.weight:+g} {'per hour' if answer.request.mixed_devices else 'devices'}"
            )
        cost = f"{_format_ratio(one.cost_per_million, best.cost_per_million)} per million good tokens"
        if not one.goodput_rps:
            cost = (
                f"but {one.attainment:.1%} meet both SLOs at {_format_rate(one.rate_rps)}, which is too few"
            )
        by = " (as searched)" if answer.best.verdict and not one.verdict else ""
        lines.append(f"  {_describe_candidate(option)}: {change}, {cost}{by}")
    return lines if answer.others else ["elsewhere: nothing else is possible"]


def _comparable_pair(one: Candidate, other: Candidate) -> tuple[Candidate, Candidate]:
    """Both by the product's own decisions, or else both by the search's simulator."""
    return (one, other) if one.verdict and other.verdict else (one.fast_result, other.fast_result)


def explain_disaggregation(answer: Solution) -> str:
    """Whether to disaggregate, in a sentence."""
    ratio = disaggregation_gain(answer)
    if ratio is None:
        return f"only {answer.best.family} is possible or asked for"
    apart = answer.best.family != "colocated"
    word = "disaggregate" if apart else "do not disaggregate"
    although = ", although" if apart != (ratio > 1) else ":"
    per = "price" if answer.request.mixed_devices else "device"
    sentence = (
        f"{word}{although} the best disaggregated placement gives {ratio:.2f} times the goodput per {per}"
        " of colocation"
    )
    if math.isinf(ratio):
        sentence = f"{word}{although} no colocated placement meets the SLOs at any rate"
    if although == ":":
        return sentence
    return f"{sentence}; {_why_not(answer, apart)}"


def _why_not(answer: Solution, apart: bool) -> str:
    """Why the kind that gives less per device is the answer."""
    others = [one for one in answer.others if (one.family != "colocated") != apart]
    best, other = _comparable_pair(
        answer.best, max(others, key=lambda one: one.fast_result.goodput_rps / one.weight)
    )
    if answer.request.rate is not None and best.weight < other.weight:
        return "for this rate it takes more"
    if answer.request.rate is None and best.goodput_rps > other.goodput_rps:
        return "of all that is on offer it carries less"
    return "more requests meet the SLOs this way with the product's scheduler and router"


def disaggregation_gain(answer: Solution) -> float | None:
    """Goodput per weight of the best disaggregated (or hybrid) option over that of the best colocated one.

    By the product's own decisions where they have judged both, and else by the search's simulator; so for a rate, too,
    which is all the goodput that they were asked about. None: one of the kinds is missing.
    """
    options = (answer.best, *answer.others)
    judged = [one for one in options if one.verdict and answer.request.rate is None]
    found = _goodput_ratio(judged)
    return _goodput_ratio([one.fast_result for one in options]) if found is None else found


def _goodput_ratio(options: Sequence[Candidate]) -> float | None:
    """Infinite if no colocated placement meets the SLOs; None if one of the kinds is missing, or neither does."""

    def best(*families: str) -> float | None:
        return max((one.goodput_rps / one.weight for one in options if one.family in families), default=None)

    apart, together = best("disaggregated", "hybrid"), best("colocated")
    if apart is None or together is None or not (apart or together):
        return None
    return apart / together if together else math.inf


def stage_seconds(request: Problem, option: Candidate) -> dict[str, tuple[float, float]]:
    """Seconds by stage at the option's rate, in the search's simulator: mean, and 90th percentile."""
    trial = request.trial(option.placement)
    served = [one for one in trial.serve(option.placement, option.rate_rps, 0) if not one.failed]
    found = {}
    for stage in STAGES:
        values = sorted(one.parts.get(stage, 0.0) for one in served)
        if values and values[-1] > 0.0:
            found[stage] = statistics.fmean(values), values[math.ceil(0.9 * len(values)) - 1]
    return found


def solution_json(answer: Solution) -> dict[str, Any]:
    """The whole answer as plain data."""
    return {
        "best": candidate_json(answer.best),
        "others": [candidate_json(one) for one in answer.others],
        "binding": answer.binding.resource,
        "resources": [
            {
                "resource": one.resource,
                "utilisation": one.utilisation,
                "goodput_gain_of_quarter_more": one.gain,
            }
            for one in answer.uses
        ],
        "stages_s": {
            stage: {"mean": mean_s, "p90": most_s}
            for stage, (mean_s, most_s) in stage_seconds(answer.request, answer.best.fast_result).items()
        },
        "disaggregated_over_colocated": _finite_or_none(disaggregation_gain(answer)),
        "verified": None if answer.verdict is None else asdict(answer.verdict),
        "ties": list(answer.ties),
        "notes": list_notes(answer),
        "deployable": is_deployable(answer),
        "dropped": dict(answer.dropped),
        "simulated": {"runs": answer.request.effort.runs, "requests": answer.request.effort.requests},
    }


def candidate_json(option: Candidate) -> dict[str, Any]:
    """An option as plain data."""
    return {
        "placement": str(option.placement),
        "family": option.family,
        "affinity": option.placement.affinity,
        "cross": option.placement.cross,
        "devices": option.placement.devices,
        "goodput_rps": option.goodput_rps,
        "goodput_per_device_rps": option.per_device_rps,
        "interval_rps": list(option.interval_rps),
        "searched_rps": option.searched_rps,
        "rate_rps": option.rate_rps,
        "attainment": option.attainment,
        "attainment_by_kind": dict(option.shares),
        "price_per_hour": option.price_per_hour,
        "cost_per_million_good_tokens": _finite_or_none(option.cost_per_million),
        "requests": option.requests,
        "seeds": option.seeds,
        "local_prefill": option.local_prefill,
        "verified": None if option.verdict is None else asdict(option.verdict),
        "searched": None if option.searched is None else candidate_json(option.searched),
    }


def make_plan_file(answer: Solution, model: str) -> PlanFile:
    """The answer as `diptych serve --plan` reads it. `model` as the user named it."""
    request, best = answer.request, answer.best
    prompt, output = request.workload.mean()
    predicted = PlanPrediction(
        goodput_rps=best.goodput_rps,
        goodput_per_device_rps=best.per_device_rps,
        interval_rps=best.interval_rps,
        attainment=best.attainment,
        requests=best.requests,
        seeds=best.seeds,
        binding=answer.binding.resource,
        cost_per_million_good_tokens=_finite_or_none(best.cost_per_million),
        searched_rps=best.fast_result.goodput_rps if best.verdict else None,
    )
    traffic = PlanTraffic(
        name=request.name,
        prompt_mean=prompt,
        output_mean=output,
        rate_rps=request.rate,
        burstiness_cv=request.cv,
        kv_mix=dict(request.kv_mix),
    )
    return PlanFile(
        version=VERSION,
        model=model,
        layers=request.model.layers,
        kv_keep=1.0 if request.keep is None else request.keep.threshold,
        kv_cache_codec=format_classes(request.kv_classes) or request.model.kv_codec or RAW_CLASS,
        devices_per_node=max(stock.devices_per_node for stock in request.stocks),
        pools=plan_pools(best.placement),
        affinity=best.placement.affinity,
        cross=best.placement.cross,
        slos={kind: plan_slo(slo) for kind, slo in request.slos.items()},
        traffic=traffic,
        predicted=predicted,
        local_prefill=best.local_prefill,
        steps=step_limits(request, best.placement),
    )


def _describe_candidate(option: Candidate) -> str:
    affinity = option.placement.affinity
    return f"{option.placement}{'' if affinity == 'none' else f' ({affinity} affinity)'}"


def _format_rate(value: float) -> str:
    return f"{value:.3g} requests/s"


def _format_ratio(value: float, base: float) -> str:
    return f"{value / base - 1.0:+.0%}" if 0.0 < base < math.inf and value < math.inf else "not comparable"


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
