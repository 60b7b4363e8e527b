"""`diptych simulate` by the product's own decisions: how the samples fared."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from diptych.errors import ConfigError
from planner.simulator import Deployment, simulate
from planner.tally import Tally, slo_of
from planner.terms import Link, Served, Slo
from services.cli.coming import ALL, Coming, coming, promises
from services.cli.simulated import deployed

TIMES = ("ttft", "tpot", "e2e")
SHARES = (0.5, 0.9, 0.99)
OTHERS = "all others"


def run(options: Mapping[str, Any], given: Collection[str]) -> list[Served]:
    """Serve all samples, and print the figures. Returns the first sample's requests, by arrival.

    Raises:
        ConfigError: a flag cannot be used, the model does not fit, or there is no such device or trace.
    """
    slos = promises(options)
    what = deployed(options, given, min(slo.tpot_s for slo in slos.values()))
    whole, shares, paces, first = Tally(slos), [], list[float](), list[Served]()
    comes = coming(options, given, slos, what.max_model_len)
    what = replace(what, prefix_caching=what.prefix_caching and comes.prefixes)
    for jobs in comes.samples:
        served = sorted(simulate(what, jobs), key=lambda one: one.job.at_s)
        tally = Tally(slos, warmup_n=options["warmup"])
        for one in served:
            tally.add(one)
        if not tally.count():
            why = f"{len(served)} came, and {options['warmup']} are warm-up"
            raise ConfigError("no request is left to count", why, "give more --requests, or less --warmup")
        shares.append(tally.attainment())
        paces.append(tally.goodput_rps)
        whole.merge(tally)
        first = first or served
    told = _figures(what, whole, shares, paces, comes)
    if options["as_json"]:
        print(json.dumps(told, indent=2))
    else:
        _show(told, whole, comes, what.max_model_len)
    return first


# ---- what is told


def _figures(
    what: Deployment, tally: Tally, shares: list[float], paces: list[float], comes: Coming
) -> dict[str, Any]:
    good_rps = statistics.fmean(paces)  # nan if all came at one moment
    placement = what.placement
    told = {
        "placement": str(placement),
        "devices": placement.devices,
        "link": None if placement.colocated else _way(what.link),
        "failed": tally.reasons,
        **_fared(tally, None),
        "attainment_by_seed": shares,
        "good_rps_per_device": good_rps / placement.devices if math.isfinite(good_rps) else None,
        "kinds": {kind: _fared(tally, kind) for kind in _parted(tally)},
        "notes": [*comes.notes],
    }
    for kind, left in comes.left_out.items():
        if left.longer:
            whose = told if kind == ALL else told["kinds"][kind]
            whose["left_out"] = {**left._asdict(), "context_tokens": what.max_model_len}
    return told


def _parted(tally: Tally) -> list[str]:
    """The kinds, if any has a promise of its own."""
    return [*tally.slos] if any(tally.slos) else []


def _fared(tally: Tally, kind: str | None) -> dict[str, Any]:
    """How those of one kind fared, or all; each is under the promise of its kind, and there may be none for all."""
    slo = None if kind is None and _parted(tally) else slo_of(tally.slos, kind or "")
    count = tally.count(kind)
    return {
        "requests": count,
        "slo_ms": None if slo is None else {"ttft": _ms(slo.ttft_s), "tpot": _ms(slo.tpot_s)},
        "attainment": tally.attainment(kind) if count else None,
        "interval": [*tally.interval(kind)] if count else None,
        "ms": {
            name: {f"p{100 * share:.0f}": _ms(tally.quantile(name, share, kind)) for share in SHARES}
            for name in TIMES
        },
    }


def _way(link: Link) -> dict[str, float | None]:
    """A port of every instance; none of its figures is endless."""
    speed = link.bytes_per_s
    return {"gb_per_s": round(speed / 1e9, 4) if math.isfinite(speed) else None, "ms": _ms(link.latency_s)}


def _ms(time_s: float) -> float | None:
    return round(time_s * 1e3, 3) if math.isfinite(time_s) else None


def _show(told: Mapping[str, Any], tally: Tally, comes: Coming, context: int) -> None:
    console = Console(highlight=False, markup=False)
    low, high = told["interval"]
    seeds = ", ".join(f"{share:.1%}" for share in told["attainment_by_seed"])
    good = told["good_rps_per_device"]
    pace = "" if good is None else f", {good:.3f} good requests/s per device"
    console.print(f"{told['placement']}: {told['devices']} devices, {told['requests']:,} requests")
    console.print(
        f"joint attainment {told['attainment']:.1%} ({low:.1%} to {high:.1%}; by seed {seeds}){pace}"
    )
    if told["link"] is not None and told["link"]["gb_per_s"] is not None:
        console.print(f"KV moves at {told['link']['gb_per_s']:g} GB/s per instance")
    for kind, left in comes.left_out.items():
        if left.longer:
            whose = f"{kind}: " if kind else ""
            console.print(f"left out: {whose}{left} are longer than the context of {context:,} tokens")
    for note in comes.notes:
        console.print(note)
    for why, count in told["failed"].items():
        console.print(f"failed: {count:,} × {why}")
    console.print(_times(tally, None))
    for kind, fared in told["kinds"].items():
        if fared["requests"]:
            low, high = fared["interval"]
            share = f"{fared['attainment']:.1%} ({low:.1%} to {high:.1%})"
            console.print(f"{kind or OTHERS}: {fared['requests']:,} requests, {share}")
            console.print(_times(tally, kind))
        else:
            console.print(f"{kind or OTHERS}: none came that counts")


def _times(tally: Tally, kind: str | None) -> Table:
    slo = Slo() if kind is None and _parted(tally) else slo_of(tally.slos, kind or "")
    promises = {"ttft": slo.ttft_s, "tpot": slo.tpot_s}
    table = Table("ms", *(f"p{100 * share:.0f}" for share in SHARES), "promised")
    for what in TIMES:
        cells = (_cell(tally.quantile(what, share, kind)) for share in SHARES)
        promised_s = promises.get(what, math.inf)
        table.add_row(what.upper(), *cells, f"{promised_s * 1e3:,.0f}" if promised_s < math.inf else "")
    return table


def _cell(time_s: float) -> str:
    """Empty where there is no such time: of answers of one token, TPOT."""
    if math.isnan(time_s):
        return ""
    return f"{time_s * 1e3:,.1f}" if math.isfinite(time_s) else "never"
