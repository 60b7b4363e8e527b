"""`diptych simulate` by the product's own decisions: the samples, and how they fared."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError
from planner.simulator import Deployment, simulate
from planner.tally import Tally
from planner.terms import Job, Link, Served, Slo
from planner.traces import read_trace
from planner.workload import Long, named, scaled, short_enough
from services.cli.simulated import deployed, seconds

TIMES = ("ttft", "tpot", "e2e")
SHARES = (0.5, 0.9, 0.99)
LEAST_RATE, MOST_RATE = 1e-6, 1e6  # requests a second: with fewer, or more, times fit no float


def run(options: Mapping[str, Any], given: Collection[str]) -> list[Served]:
    """Serve all samples, and print the figures. Returns the first sample's requests, by arrival.

    Raises:
        ConfigError: a flag cannot be used, the model does not fit, or there is no such device or trace.
    """
    what = deployed(options, given)
    slo = Slo(seconds(options["slo_ttft_ms"]), seconds(options["slo_tpot_ms"]))
    whole, shares, paces, first = Tally({"": slo}), [], list[float](), list[Served]()
    samples, left_out, named_prefixes = _samples(options, given, what.max_model_len)
    what = replace(what, prefix_caching=what.prefix_caching and named_prefixes)
    for jobs in samples:
        served = sorted(simulate(what, jobs), key=lambda one: one.job.at_s)
        tally = Tally({"": slo}, warmup_n=options["warmup"])
        for one in served:
            tally.add(one)
        if not tally.count():
            why = f"{len(served)} came, and {options['warmup']} are warm-up"
            raise ConfigError("no request is left to count", why, "give more --requests, or less --warmup")
        shares.append(tally.attainment())
        paces.append(tally.goodput_rps)
        whole.merge(tally)
        first = first or served
    told = _figures(what, whole, shares, paces, slo)
    if left_out.longer:
        told["left_out"] = {**left_out._asdict(), "context_tokens": what.max_model_len}
    if options["as_json"]:
        print(json.dumps(told, indent=2))
    else:
        _show(told, whole, left_out, what.max_model_len)
    return first


# ---- what comes


class Coming(NamedTuple):
    """What is served, how many requests were left out of it, and whether prompts name what they begin with."""

    samples: Iterable[list[Job]]
    left_out: Long
    prefixes: bool


def _samples(options: Mapping[str, Any], given: Collection[str], context: int) -> Coming:
    """What is served, without requests of more than `context` tokens: a server refuses them.

    Raises:
        ConfigError: flags contradict each other, a trace or a workload cannot be used, or nothing of it fits.
    """
    trace, workload, rate = options["trace"], options["workload"], options["rate"]
    if (trace is None) == (workload is None):
        why = "requests come from a trace as they were, or are drawn from a workload"
        raise ConfigError("give --trace or --workload", why, "--workload sharegpt --rate 4")
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        why = f"rates are from {LEAST_RATE:.0e} to {MOST_RATE:.0e}"
        raise ConfigError(f"a rate of {rate} requests a second", why, "give another")
    if trace is not None:
        if unused := sorted({"cv", "requests", "seeds"} & set(given)):
            why = "a trace is replayed once, as it was"
            raise ConfigError(
                f"--{unused[0]} has no effect with --trace", why, "use --workload FILE to draw from it"
            )
        every = read_trace(trace)
        jobs = short_enough(every, context)
        left = Long(len(every) - len(jobs), len(every), False)
        shared = _shared(given, any(job.prefix for job in jobs))
        return Coming([jobs if rate is None else scaled(jobs, rate)], left, shared)
    if rate is None:
        raise ConfigError("--rate is missing", "a workload says what comes, not how often", "add --rate 4")
    asked = named(workload)
    source, pace = asked.within(context), float(rate)
    seeds = range(options["seeds"])
    samples = (source.sample(options["requests"], pace, seed, options["cv"]) for seed in seeds)
    return Coming(samples, asked.longer(context), _shared(given, source.shares))


def _shared(given: Collection[str], prefixes: bool) -> bool:
    """`prefixes`. Raises ConfigError: there are none, and the flag that is about them was typed."""
    if "enable_prefix_caching" in given and not prefixes:
        why = "no request says which text it begins with"
        fix = "leave it out, or take a trace that names prefixes (Mooncake's, or a request log)"
        raise ConfigError("--[no-]enable-prefix-caching has no effect here", why, fix)
    return prefixes


# ---- what is told


def _figures(
    what: Deployment, tally: Tally, shares: list[float], paces: list[float], slo: Slo
) -> dict[str, Any]:
    low, high = tally.interval()
    good_rps = statistics.fmean(paces)  # nan if all came at one moment
    placement = what.placement
    return {
        "placement": str(placement),
        "devices": placement.devices,
        "link": None if placement.colocated else _way(what.link),
        "requests": tally.count(),
        "failed": tally.reasons,
        "slo_ms": {
            name: value * 1e3 if math.isfinite(value) else None
            for name, value in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s))
        },
        "attainment": tally.attainment(),
        "interval": [low, high],
        "attainment_by_seed": shares,
        "good_rps_per_device": good_rps / placement.devices if math.isfinite(good_rps) else None,
        "ms": {
            name: {f"p{100 * share:.0f}": _ms(tally.quantile(name, share)) for share in SHARES}
            for name in TIMES
        },
    }


def _way(link: Link) -> dict[str, float | None]:
    """A port of every instance; none of its figures is endless."""
    speed = link.bytes_per_s
    return {"gb_per_s": round(speed / 1e9, 4) if math.isfinite(speed) else None, "ms": _ms(link.latency_s)}


def _ms(time_s: float) -> float | None:
    return round(time_s * 1e3, 3) if math.isfinite(time_s) else None


def _show(told: Mapping[str, Any], tally: Tally, left_out: Long, context: int) -> None:
    console = Console()
    low, high = told["interval"]
    seeds = ", ".join(f"{share:.1%}" for share in told["attainment_by_seed"])
    good = told["good_rps_per_device"]
    pace = "" if good is None else f", {good:.3f} good requests/s per device"
    console.print(
        f"{told['placement']}: {told['devices']} devices, {told['requests']:,} requests", highlight=False
    )
    console.print(
        f"joint attainment {told['attainment']:.1%} ({low:.1%} to {high:.1%}; by seed {seeds}){pace}",
        highlight=False,
    )
    if told["link"] is not None and told["link"]["gb_per_s"] is not None:
        console.print(f"KV moves at {told['link']['gb_per_s']:g} GB/s per instance", highlight=False)
    if left_out.longer:
        console.print(
            f"left out: {left_out} are longer than the context of {context:,} tokens", highlight=False
        )
    for why, count in told["failed"].items():
        console.print(f"failed: {count:,} × {why}", highlight=False)
    table = Table("ms", *(f"p{100 * share:.0f}" for share in SHARES), "promised")
    for what in TIMES:
        cells = ["never" if value is None else f"{value:,.1f}" for value in told["ms"][what].values()]
        promised = told["slo_ms"].get(what)
        table.add_row(what.upper(), *cells, f"{promised:,.0f}" if promised else "")
    console.print(table)
