"""What `diptych profile` does, once its options are read."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diptych.config import Config
from planner import profiler
from planner.cost import StepCost
from planner.profile import save
from planner.terms import Batch, Cost
from planner.workload import Workload, named
from services.bench.measure import Measured, Pools, Stage, deployed, measure
from services.cli.model import find
from services.cli.outputs import writable

SHOWN = (
    Batch(128, 128.0**2),
    Batch(512, 512.0**2),
    Batch(0, 0, 1, 256),
    Batch(0, 0, 8, 2048),
    Batch(0, 0, 32, 8192),
)


def run(
    model: str,
    out: Path,
    workload: str,
    shrink: float,
    colocated: int,
    seconds: float,
    depths: Sequence[int],
    seed: int,
    as_json: bool,
) -> int:
    """Measure, write, and say how well it fits. Returns the exit status.

    Raises:
        ConfigError: the workload, the model or the file is wrong.
        StartError: the deployment does not come up.
    """
    writable(out, "--out")
    console = Console(stderr=True)
    pools = Pools(0, 0, colocated) if colocated else Pools()
    source = named(workload)
    folder = asyncio.run(find(Config(model=model), 2)).path if model else ""
    with deployed(pools, folder) as live:
        most = live.target.context_tokens
        fitting: Workload = source.shrunk(shrink, most or 1 << 20)

        def say(told: str) -> None:
            console.print(told, highlight=False, markup=False)

        if most is not None and (long := source.longer(most, shrink)).longer:
            say(f"{workload}: {long} are longer than the {most:,} tokens that the model takes, and are cut")
        found = measure(live, fitting, seconds, depths, seed, say)
    save(found.profile, out)
    if as_json:
        print(json.dumps(told(found) | {"file": str(out)}))
    else:
        _show(Console(), found, out)
    return 0


def told(found: Measured) -> dict[str, Any]:
    """The figures of a measurement."""
    beside = found.profile.overheads
    errors = {name: round(error, 4) for name, error in found.profile.fit_error.items()}
    link = beside.link
    return {
        "fit_error": errors,
        "held_out_mean": max(error for name, error in errors.items() if name.endswith("held_out_mean")),
        "steps": found.counts,
        "gateway_ms": round(beside.gateway_s * 1e3, 3),
        "hop_ms": round(beside.hop_s * 1e3, 3),
        "step_ms": round(beside.step_s * 1e3, 4),
        "gateway_processor_ms": {
            "message": round(found.handling.message_s * 1e3, 4),
            "token": round(found.handling.token_s * 1e3, 4),
            "request": round(found.handling.request_s * 1e3, 4),
        },
        "link_gb_per_s": None if math.isinf(link.bytes_per_s) else round(link.bytes_per_s / 1e9, 3),
        "link_ms": round(link.latency_s * 1e3, 3),
        "saturation_tokens": found.saturation_tokens,
        "between_steps_ms": {
            life.worker: round(profiler.between_steps([life]) * 1e3, 4) for life in found.lives
        },
        "stages": [_stage(found, stage) for stage in found.stages],
    }


def _stage(found: Measured, stage: Stage) -> dict[str, Any]:
    """Its pace, and how its steps compare with the cost that was fitted to those of all stages."""
    (cost,) = found.profile.costs.values()
    assert isinstance(cost, StepCost)
    ratios = {}
    for kind in ("prefill", "decode", "mixed"):
        if some := [step for step in found.steps(stage) if profiler.kind_of(step.batch) == kind]:
            ratios[kind] = round(profiler.balance(cost, some), 3)
    return {
        "depth": stage.depth,
        "rate": stage.rate,
        "per_s": round(stage.pace, 3),
        "measured_over_cost": ratios,
    }


def _show(console: Console, found: Measured, out: Path) -> None:
    figures = told(found)
    (cost,) = found.profile.costs.values()
    grid = Table("step", "ms", box=None, padding=(0, 2, 0, 0))
    for batch in SHOWN:
        grid.add_row(_words(batch), _ms(cost, batch))
    console.print(grid)
    errors = figures["fit_error"]
    for kind in ("prefill", "decode", "mixed", "all"):
        if f"{kind}_held_out_mean" in errors:
            mean, most = errors[f"{kind}_held_out_mean"], errors[f"{kind}_held_out_max"]
            count = figures["steps"].get(kind) or sum(figures["steps"].values())
            console.print(
                f"{kind}: {count} steps; means of like ones are off by {mean:.1%} unseen (at most {most:.0%})",
                highlight=False,
            )
    console.print(
        f"beside: gateway {figures['gateway_ms']} ms, message {figures['hop_ms']} ms, step {figures['step_ms']} ms",
        highlight=False,
    )
    console.print(f"written to {out}", highlight=False, markup=False)


def _words(batch: Batch) -> str:
    if batch.tokens:
        return f"read {batch.tokens} tokens"
    return f"write for {batch.rows}, {batch.context // batch.rows} tokens before each"


def _ms(cost: Cost, batch: Batch) -> str:
    return f"{cost.step_s(batch) * 1e3:.3g}"
