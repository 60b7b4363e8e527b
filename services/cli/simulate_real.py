"""`diptych simulate` by the product's own decisions: the deployment, the samples, and how it went."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError
from planner import hardware
from planner.profile import Profile, built_in, load
from planner.shape import known
from planner.simulator import Deployment, deployment, simulate
from planner.tally import Tally
from planner.terms import BOTH, DECODE, PREFILL, Job, Placement, Pool, Served, Slo, Split
from planner.traces import read_trace
from planner.workload import Long, named, scaled, short_enough

ROLES = {"P": PREFILL, "D": DECODE, "C": BOTH}
POOL = re.compile(r"(\d+)\s*([PDC])((?:\s*(?:TP|PP)\d+)*)\s*(?:@\s*(\S+))?", re.IGNORECASE)
TIMES = ("ttft", "tpot", "e2e")
SHARES = (0.5, 0.9, 0.99)
MOST_DEVICES = 100_000  # of a placement
LEAST_RATE, MOST_RATE = 1e-6, 1e6  # requests a second: with fewer, or more, times fit no float


def run(options: Mapping[str, Any], given: Collection[str]) -> list[Served]:
    """Serve all samples, and print the figures. Returns the first sample's requests, by arrival.

    Raises:
        ConfigError: a flag cannot be used, the model does not fit, or there is no such device or trace.
    """
    deployed = _deployment(options, given)
    slo = Slo(_seconds(options["slo_ttft_ms"]), _seconds(options["slo_tpot_ms"]))
    whole, shares, paces, first = Tally({"": slo}), [], list[float](), list[Served]()
    samples, left_out = _samples(options, given, deployed.max_model_len)
    for jobs in samples:
        served = sorted(simulate(deployed, jobs), key=lambda one: one.job.at_s)
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
    told = _figures(deployed, whole, shares, paces, slo)
    if left_out.longer:
        told["left_out"] = {**left_out._asdict(), "context_tokens": deployed.max_model_len}
    if options["as_json"]:
        print(json.dumps(told, indent=2))
    else:
        _show(told, whole, left_out, deployed.max_model_len)
    return first


def _seconds(milliseconds: float | None) -> float:
    if milliseconds is not None and not milliseconds > 0:
        raise ConfigError(
            f"an objective of {milliseconds} ms cannot be kept", "times are positive", "give more"
        )
    return math.inf if milliseconds is None else milliseconds / 1e3


# ---- what is deployed


def parse(text: str, device: str) -> Placement:
    """A placement from words such as "2P TP2 + 1D TP1" or "4C TP2PP2 @H100"; `device` is that of pools without one.

    Raises:
        ConfigError: a part is not of that form.
    """
    pools = []
    for part in text.split("+"):
        found = POOL.fullmatch(part.strip())
        count = int(found[1]) if found else 0
        if found is None or not count:
            raise ConfigError(
                f"the placement's part {part.strip()!r} is not understood",
                "a part is a count, P (prefill), D (decode) or C (both), then TPn and PPn, then @DEVICE",
                'such as --placement "2P TP2 + 1D TP1"',
            )
        sizes = {
            name.upper(): int(size) for name, size in re.findall(r"(TP|PP)(\d+)", found[3], re.IGNORECASE)
        }
        if not all(sizes.values()):
            raise ConfigError(f"{part.strip()!r} has a size of 0", "TP and PP are at least 1", "leave it out")
        if len(re.findall("TP|PP", found[3], re.IGNORECASE)) > len(sizes):
            raise ConfigError(
                f"{part.strip()!r} has a size twice", "TP and PP are said once", "leave one out"
            )
        split = Split(sizes.get("TP", 1), sizes.get("PP", 1))
        pools.append(Pool(ROLES[found[2].upper()], split, count, found[4] or device))
    placement = Placement(tuple(pools))
    if placement.devices > MOST_DEVICES:
        why = f"the placement has {placement.devices:,}"
        raise ConfigError(f"at most {MOST_DEVICES:,} devices are simulated", why, "take fewer")
    return placement


def _deployment(options: Mapping[str, Any], given: Collection[str]) -> Deployment:
    shape = known(options["model"])
    profile = None
    device = options["device"]
    if options["profile"] is not None:
        profile = load(options["profile"], options["model"])
        if profile.model.name != shape.name:
            why = f"it is of {profile.model.name}, and --model is {shape.name}"
            raise ConfigError(f"the profile {options['profile']} is of another model", why, "name the same")
        device = device if "device" in given else profile.device.name
    if options["placement"] is None:
        raise ConfigError("--placement is missing", "it says what is simulated", '--placement "1P + 1D"')
    placement = parse(options["placement"], device)
    pools = tuple(replace(pool, device=hardware.device(pool.device).name) for pool in placement.pools)
    profiles: dict[str, Profile] = {pool.device: built_in(shape, pool.device) for pool in pools}
    if profile is not None and profile.device.name not in profiles:
        why = f"it is of {profile.device.name}, and the placement has {', '.join(sorted(profiles))}"
        fix = "leave it out, or leave out --device"
        raise ConfigError("--profile has no effect here", why, fix)
    if profile is not None:
        profiles[profile.device.name] = profile
    for pool in pools:
        if not shape.valid(pool.split):
            why = f"{shape.heads} heads are shared by TP devices, {shape.layers} layers by PP stages, evenly"
            raise ConfigError(f"{shape.name} cannot be spread as {pool.split}", why, "take others")
    budget_ms = options["tpot_budget_ms"]
    if budget_ms is not None and not options["chunked"]:
        why = "whole prompts take the time that they take"
        raise ConfigError("--tpot-budget-ms has no effect with --unchunked", why, "leave one out")
    budget_s = _seconds(options["slo_tpot_ms"] if budget_ms is None else budget_ms)
    return deployment(
        replace(placement, pools=pools),
        profiles,
        chunked_prefill=options["chunked"],
        tpot_s=budget_s if options["chunked"] and math.isfinite(budget_s) else None,
        max_num_batched_tokens=options["step_tokens"],
        prefix_caching=options["prefix_caching"],
    )


# ---- what comes


def _samples(
    options: Mapping[str, Any], given: Collection[str], context: int
) -> tuple[Iterable[list[Job]], Long]:
    """What is served, without requests of more than `context` tokens (a server refuses them), and how many those are.

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
        _named(options, any(job.prefix for job in jobs))
        left = Long(len(every) - len(jobs), len(every), False)
        return [jobs if rate is None else scaled(jobs, rate)], left
    if rate is None:
        raise ConfigError("--rate is missing", "a workload says what comes, not how often", "add --rate 4")
    asked = named(workload)
    source, pace = asked.within(context), float(rate)
    _named(options, source.shares)
    seeds = range(options["seeds"])
    samples = (source.sample(options["requests"], pace, seed, options["cv"]) for seed in seeds)
    return samples, asked.longer(context)


def _named(options: Mapping[str, Any], shares: bool) -> None:
    if options["prefix_caching"] and not shares:
        why = "no request says which text it begins with"
        fix = "leave it out, or take a trace that names prefixes (Mooncake's, or a request log)"
        raise ConfigError("--prefix-caching has no effect here", why, fix)


# ---- what is told


def _figures(
    deployed: Deployment, tally: Tally, shares: list[float], paces: list[float], slo: Slo
) -> dict[str, Any]:
    low, high = tally.interval()
    good_rps = statistics.fmean(paces)  # nan if all came at one moment
    return {
        "placement": str(deployed.placement),
        "devices": deployed.placement.devices,
        "requests": tally.count(),
        "failed": tally.reasons,
        "slo_ms": {
            name: value * 1e3 if math.isfinite(value) else None
            for name, value in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s))
        },
        "attainment": tally.attainment(),
        "interval": [low, high],
        "attainment_by_seed": shares,
        "good_rps_per_device": good_rps / deployed.placement.devices if math.isfinite(good_rps) else None,
        "ms": {
            what: {f"p{100 * share:.0f}": _ms(tally.quantile(what, share)) for share in SHARES}
            for what in TIMES
        },
    }


def _ms(seconds: float) -> float | None:
    return round(seconds * 1e3, 3) if math.isfinite(seconds) else None


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
