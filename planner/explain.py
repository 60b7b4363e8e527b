"""Why this placement: what it does, what limits it, where the time goes, and what it costs to be elsewhere."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from planner.placement import Answer, Option
from planner.plan_file import VERSION, PlanFile, Predicted, Traffic, pools_of, slo_of
from planner.request import Request
from planner.verify import taken_on

STAGES = ("queue", "prefill", "wait", "transfer", "decode")
SAID = {
    "queue": "waiting to be read",
    "prefill": "being read (TTFT ends here)",
    "wait": "waiting for room to decode",
    "transfer": "moving KV",
    "decode": "being decoded",
}


def headline(answer: Answer) -> list[str]:
    """The answer in three lines; in a fourth what the search's simulator had, where that has not the last word."""
    request, best, fast = answer.request, answer.best, answer.best.fast
    where = {"low": ", KV within nodes", "high": ", KV between any two", "none": ""}[best.placement.affinity]
    reads = ", decode instances read prompts where that is sooner" if best.local_prefill == "auto" else ""
    low, high = fast.interval_rps
    seen = f"{_rate(low)} to {_rate(high)} over {fast.seeds} seeds of {fast.requests} requests"
    lines = [
        f"{best.placement}{where}{reads}: {best.placement.devices} of {request.hardware}",
        f"goodput {_rate(best.goodput_rps)} ({_judged(answer) or seen}), {best.per_device_rps:.3g} per device;"
        f" {best.attainment:.1%} keep both objectives at {_rate(best.rate_rps)}",
        f"limited by {answer.binding.resource}; {best.cost_per_million:.3g} per million good tokens"
        f" ({best.price_per_hour:.3g} per hour)",
    ]
    searched = f"searched: {_rate(fast.goodput_rps)} ({seen}), by the search's own simulator"
    return [*lines, searched] if best.verdict else lines


def _judged(answer: Answer) -> str:
    """What the product's own decisions were asked, in words; nothing if they were not."""
    verdict = answer.best.verdict
    if verdict is None:
        return ""
    run = f"by the product's scheduler and router, one run of {verdict.requests} requests"
    if answer.request.rate is not None:
        return f"as asked, more was not tried; {run}"
    return f"{run}; {_rate(verdict.fails_rps)} is too much" if verdict.fails_rps else run


def explain(answer: Answer) -> list[str]:
    """What binds, where the time goes, and what others would give, in lines."""
    fast = answer.best.fast
    at = f" at {_rate(fast.rate_rps)}, as searched" if answer.best.verdict else ""
    lines = ["", f"what limits it{at} (a quarter more of each, one by one):"]
    for use in sorted(answer.uses, key=lambda one: -one.gain):
        busy = f"{use.utilisation:4.0%} busy" if use.utilisation is not None else "         "
        lines.append(f"  {use.resource:<8} {busy}  goodput {use.gain:+.0%}")
    lines += ["", f"where the time goes{at}, mean and 90 % of requests (ms):"]
    for stage, (mean_s, most_s) in stages(answer.request, fast).items():
        lines.append(f"  {SAID[stage]:<28} {mean_s * 1e3:9.1f} {most_s * 1e3:9.1f}")
    lines += ["", *elsewhere(answer), "", disaggregate(answer)]
    lines += [f"as good, as far as the search can tell: {', '.join(answer.ties)}"] if answer.ties else []
    if answer.dropped:
        told = ", ".join(f"{count} by {why}" for why, count in sorted(answer.dropped.items()))
        lines.append(f"dropped without a full measurement: {told}")
    return lines + [f"note: {note}" for note in answer.notes]


def elsewhere(answer: Answer) -> list[str]:
    """What the runners-up cost, in goodput or in devices: by one judge for both, else by the search's simulator."""
    lines = ["elsewhere:"]
    for option in answer.others:
        best, one = _alike(answer.best, option)
        if answer.request.rate is None:
            change = f"goodput {_over(one.goodput_rps, best.goodput_rps)}"
        else:
            change = f"{one.weight - best.weight:+g} {'per hour' if answer.request.mixed else 'devices'}"
        cost = f"{_over(one.cost_per_million, best.cost_per_million)} per million good tokens"
        if not one.goodput_rps:
            cost = f"but {one.attainment:.1%} keep both objectives at {_rate(one.rate_rps)}, which is too few"
        by = " (as searched)" if answer.best.verdict and not one.verdict else ""
        lines.append(f"  {_named(option)}: {change}, {cost}{by}")
    return lines if answer.others else ["elsewhere: nothing else is possible"]


def _alike(one: Option, other: Option) -> tuple[Option, Option]:
    """Both by the product's own decisions, or else both by the search's simulator."""
    return (one, other) if one.verdict and other.verdict else (one.fast, other.fast)


def disaggregate(answer: Answer) -> str:
    """Whether to disaggregate, in a sentence."""
    ratio = advantage(answer)
    if ratio is None:
        return f"only {answer.best.family} is possible or asked for"
    apart = answer.best.family != "colocated"
    word = "disaggregate" if apart else "do not disaggregate"
    although = ", although" if apart != (ratio > 1) else ":"
    per = "price" if answer.request.mixed else "device"
    told = (
        f"{word}{although} the best disaggregated placement gives {ratio:.2f} times the goodput per {per}"
        " of colocation"
    )
    if math.isinf(ratio):
        told = f"{word}{although} no colocated placement keeps the objectives at any rate"
    if although == ":":
        return told
    return f"{told}; {_why_not(answer, apart)}"


def _why_not(answer: Answer, apart: bool) -> str:
    """Why the kind that gives less per device is the answer."""
    others = [one for one in answer.others if (one.family != "colocated") != apart]
    best, other = _alike(answer.best, max(others, key=lambda one: one.fast.goodput_rps / one.weight))
    if answer.request.rate is not None and best.weight < other.weight:
        return "for this rate it takes more"
    if answer.request.rate is None and best.goodput_rps > other.goodput_rps:
        return "of all that is on offer it carries less"
    return "the product's scheduler and router keep more this way"


def advantage(answer: Answer) -> float | None:
    """Goodput per weight of the best disaggregated (or hybrid) option over that of the best colocated one.

    By the product's own decisions where they have judged both, and else by the search's simulator; so for a rate, too,
    which is all the goodput that they were asked about. None: one of the kinds is missing.
    """
    options = (answer.best, *answer.others)
    judged = [one for one in options if one.verdict and answer.request.rate is None]
    found = _ratio(judged)
    return _ratio([one.fast for one in options]) if found is None else found


def _ratio(options: Sequence[Option]) -> float | None:
    """Infinite where nothing colocated keeps the promises; none where one of the kinds is missing, or neither does."""

    def best(*families: str) -> float | None:
        return max((one.goodput_rps / one.weight for one in options if one.family in families), default=None)

    apart, together = best("disaggregated", "hybrid"), best("colocated")
    if apart is None or together is None or not (apart or together):
        return None
    return apart / together if together else math.inf


def stages(request: Request, option: Option) -> dict[str, tuple[float, float]]:
    """Seconds by stage at the option's rate, in the search's simulator: mean, and 90th percentile."""
    trial = request.trial(option.placement)
    served = [one for one in trial.serve(option.placement, option.rate_rps, 0) if not one.failed]
    found = {}
    for stage in STAGES:
        values = sorted(one.parts.get(stage, 0.0) for one in served)
        if values and values[-1] > 0.0:
            found[stage] = statistics.fmean(values), values[math.ceil(0.9 * len(values)) - 1]
    return found


def told(answer: Answer) -> dict[str, Any]:
    """The whole answer as plain data."""
    return {
        "best": plain(answer.best),
        "others": [plain(one) for one in answer.others],
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
            for stage, (mean_s, most_s) in stages(answer.request, answer.best.fast).items()
        },
        "disaggregated_over_colocated": _finite(advantage(answer)),
        "verified": None if answer.verdict is None else asdict(answer.verdict),
        "ties": list(answer.ties),
        "notes": list(answer.notes),
        "dropped": dict(answer.dropped),
        "simulated": {"runs": answer.request.effort.runs, "requests": answer.request.effort.requests},
    }


def plain(option: Option) -> dict[str, Any]:
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
        "cost_per_million_good_tokens": _finite(option.cost_per_million),
        "requests": option.requests,
        "seeds": option.seeds,
        "local_prefill": option.local_prefill,
        "verified": None if option.verdict is None else asdict(option.verdict),
        "searched": None if option.searched is None else plain(option.searched),
    }


def plan_file(answer: Answer, model: str) -> PlanFile:
    """The answer as `diptych serve --plan` reads it. `model` as the user named it."""
    request, best = answer.request, answer.best
    prompt, output = request.workload.mean()
    predicted = Predicted(
        best.goodput_rps, best.per_device_rps, best.interval_rps, best.attainment, best.requests, best.seeds,
        answer.binding.resource, _finite(best.cost_per_million), best.fast.goodput_rps if best.verdict else None,
    )  # fmt: skip
    slos: Mapping[str, Any] = {kind: slo_of(slo) for kind, slo in request.slos.items()}
    return PlanFile(
        VERSION, model, request.model.layers, max(stock.devices_per_node for stock in request.stocks),
        pools_of(best.placement), best.placement.affinity, best.placement.cross, dict(slos),
        Traffic(request.name, prompt, output, request.rate, request.cv), predicted,
        best.local_prefill, taken_on(request, best.placement),
    )  # fmt: skip


def _named(option: Option) -> str:
    affinity = option.placement.affinity
    return f"{option.placement}{'' if affinity == 'none' else f' ({affinity} affinity)'}"


def _rate(value: float) -> str:
    return f"{value:.3g} requests/s"


def _over(value: float, base: float) -> str:
    return f"{value / base - 1.0:+.0%}" if 0.0 < base < math.inf and value < math.inf else "not comparable"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
