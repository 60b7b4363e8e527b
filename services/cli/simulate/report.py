"""`diptych simulate` by the product's own decisions: how the samples fared."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError
from diptych.slo import Slo, slo_for, strictest_slo
from planner.attainment import AttainmentCounter
from planner.sim.exact.deployment import SimDeployment
from planner.sim.exact.simulate import ExactSimulation
from planner.types import JobResult, LinkSpec
from services.cli.simulate.bulk_use import BulkUse, format_bulk_use
from services.cli.simulate.deployment import codec_notes, simulated_deployment
from services.cli.simulate.kv_tiers import TierUse, format_tier_use
from services.cli.simulate.kv_use import KvClassUse
from services.cli.simulate.options import SimulateOptions
from services.cli.simulate.requests import (
    ALL_KINDS,
    SimulatedRequests,
    read_requests,
    slo_by_kind,
    with_kv_classes,
)

LATENCIES = ("ttft", "tpot", "e2e")
QUANTILES = (0.5, 0.9, 0.99)
OTHER_KINDS = "all others"


def simulate_samples(options: SimulateOptions) -> list[JobResult]:
    """Serve all samples, and print the figures. Returns the first sample's requests, by arrival.

    Raises:
        ConfigError: a flag cannot be used, the model does not fit, or there is no such device or trace.
    """
    slos = slo_by_kind(options)
    deployment = simulated_deployment(options, strictest_slo(slos.values()))
    whole, shares, paces, first = AttainmentCounter(slos), [], list[float](), list[JobResult]()
    requests = read_requests(options, slos, deployment.max_model_len)
    requests, mix = with_kv_classes(requests, options, deployment)
    requests = requests._replace(notes=(*requests.notes, *codec_notes(options, deployment, mix)))
    classes, bulk, tiers = KvClassUse(deployment), BulkUse(deployment), TierUse(deployment)
    deployment = replace(deployment, prefix_caching=deployment.prefix_caching and requests.prefixes)
    for jobs in requests.samples:
        results = list[JobResult]()
        simulation = ExactSimulation(deployment, results.append)
        simulation.run(jobs)
        classes.add(simulation, results)
        bulk.add(simulation)
        tiers.add(simulation)
        in_order = sorted(results, key=lambda one: one.job.at_s)
        counter = AttainmentCounter(slos, warmup_n=options.warmup)
        for one in in_order:
            counter.add(one)
        if not counter.count():
            why = f"{len(in_order)} came, and {options.warmup} are warm-up"
            raise ConfigError("no request is left to count", why, "give more --requests, or less --warmup")
        shares.append(counter.attainment())
        paces.append(counter.goodput_rps)
        whole.merge(counter)
        first = first or in_order
    figures = _report_figures(deployment, whole, shares, paces, requests)
    figures |= {"kv_classes": classes.figures(), "bulk": bulk.figures(), "tiers": tiers.figures()}
    if options.as_json:
        print(json.dumps(figures, indent=2))
    else:
        _print_report(figures, whole, requests, deployment.max_model_len)
    return first


# ---- the report


def _report_figures(
    deployment: SimDeployment,
    counter: AttainmentCounter,
    shares: list[float],
    paces: list[float],
    requests: SimulatedRequests,
) -> dict[str, Any]:
    # The mean is nan if all requests of a sample arrived at one moment.
    good_rps = statistics.fmean(paces)
    placement = deployment.placement
    figures = {
        "placement": str(placement),
        "devices": placement.devices,
        "link": None if placement.colocated else _link_figures(deployment.link),
        "failed": counter.reasons,
        **_kind_figures(counter, None),
        "attainment_by_seed": shares,
        "good_rps_per_device": good_rps / placement.devices if math.isfinite(good_rps) else None,
        "kinds": {kind: _kind_figures(counter, kind) for kind in _named_kinds(counter)},
        "notes": [*requests.notes],
    }
    for kind, left in requests.left_out.items():
        if left.longer:
            whose = figures if kind == ALL_KINDS else figures["kinds"][kind]
            whose["left_out"] = {**left._asdict(), "context_tokens": deployment.max_model_len}
    return figures


def _named_kinds(counter: AttainmentCounter) -> list[str]:
    """The kinds, if any has an SLO of its own."""
    return [*counter.slos] if any(counter.slos) else []


def _kind_figures(counter: AttainmentCounter, kind: str | None) -> dict[str, Any]:
    """Figures of one kind, or of all requests; each has the SLO of its kind, and there may be no default."""
    slo = None if kind is None and _named_kinds(counter) else slo_for(counter.slos, kind or "")
    count = counter.count(kind)
    return {
        "requests": count,
        "slo_ms": None if slo is None else {"ttft": _to_ms(slo.ttft_s), "tpot": _to_ms(slo.tpot_s)},
        "attainment": counter.attainment(kind) if count else None,
        "interval": [*counter.interval(kind)] if count else None,
        "ms": {
            name: {f"p{100 * share:.0f}": _to_ms(counter.quantile(name, share, kind)) for share in QUANTILES}
            for name in LATENCIES
        },
    }


def _link_figures(link: LinkSpec) -> dict[str, float | None]:
    """The figures of the KV link of each instance; infinite ones are None."""
    speed = link.bytes_per_s
    return {"gb_per_s": round(speed / 1e9, 4) if math.isfinite(speed) else None, "ms": _to_ms(link.latency_s)}


def _to_ms(time_s: float) -> float | None:
    return round(time_s * 1e3, 3) if math.isfinite(time_s) else None


def _print_report(
    figures: Mapping[str, Any], counter: AttainmentCounter, requests: SimulatedRequests, context: int
) -> None:
    console = Console(highlight=False, markup=False)
    low, high = figures["interval"]
    seeds = ", ".join(f"{share:.1%}" for share in figures["attainment_by_seed"])
    good = figures["good_rps_per_device"]
    pace = "" if good is None else f", {good:.3f} good requests/s per device"
    console.print(f"{figures['placement']}: {figures['devices']} devices, {figures['requests']:,} requests")
    console.print(
        f"joint attainment {figures['attainment']:.1%} ({low:.1%} to {high:.1%}; by seed {seeds}){pace}"
    )
    if figures["link"] is not None and figures["link"]["gb_per_s"] is not None:
        console.print(f"KV moves at {figures['link']['gb_per_s']:g} GB/s per instance")
    for kind, left in requests.left_out.items():
        if left.longer:
            whose = f"{kind}: " if kind else ""
            console.print(f"left out: {whose}{left} are longer than the context of {context:,} tokens")
    for note in requests.notes:
        console.print(note)
    for name, use in figures["kv_classes"].items():
        rooms = ", ".join(f"{slabs:,} of {pool}" for pool, slabs in use["slabs"].items())
        console.print(
            f"{name}: slabs of an instance: {rooms}; {use['requests']:,} requests, {use['moved_bytes']:,} bytes moved,"
            f" {use['preemptions']:,} preemptions"
        )
    for line in format_tier_use(figures["tiers"]):
        console.print(line)
    if figures["bulk"] is not None:
        console.print(format_bulk_use(figures["bulk"]), soft_wrap=True)
    for why, count in figures["failed"].items():
        console.print(f"failed: {count:,} × {why}")
    console.print(_times_table(counter, None))
    for kind, of_kind in figures["kinds"].items():
        if of_kind["requests"]:
            low, high = of_kind["interval"]
            share = f"{of_kind['attainment']:.1%} ({low:.1%} to {high:.1%})"
            console.print(f"{kind or OTHER_KINDS}: {of_kind['requests']:,} requests, {share}")
            console.print(_times_table(counter, kind))
        else:
            console.print(f"{kind or OTHER_KINDS}: none came that counts")


def _times_table(counter: AttainmentCounter, kind: str | None) -> Table:
    slo = Slo() if kind is None and _named_kinds(counter) else slo_for(counter.slos, kind or "")
    limits_s = {"ttft": slo.ttft_s, "tpot": slo.tpot_s}
    table = Table("ms", *(f"p{100 * share:.0f}" for share in QUANTILES), "SLO")
    for what in LATENCIES:
        cells = (_format_cell(counter.quantile(what, share, kind)) for share in QUANTILES)
        limit_s = limits_s.get(what, math.inf)
        table.add_row(what.upper(), *cells, f"{limit_s * 1e3:,.0f}" if limit_s < math.inf else "")
    return table


def _format_cell(time_s: float) -> str:
    """A time as text; empty if there is none, as the TPOT of answers of one token."""
    if math.isnan(time_s):
        return ""
    return f"{time_s * 1e3:,.1f}" if math.isfinite(time_s) else "never"
