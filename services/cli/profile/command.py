"""What `diptych profile` does, once its options are read."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diptych.chunks import RAW_CLASS
from diptych.config.load import load_config
from diptych.config.options import Config
from diptych.errors import ConfigError
from diptych.specs import ENGINES, VLLM
from planner.costs import profiler
from planner.costs.kv.classes import base_codec, read_classes
from planner.costs.kv.codec import with_kv_codec
from planner.costs.kv.eviction import check_threshold
from planner.costs.profile_file import save_profile
from planner.costs.step import StepCost
from planner.hardware import CPU, served_device
from planner.types import CostModel, StepBatch
from planner.workload.workload import Workload, find_workload
from services.bench.profile_run import (
    LiveDeployment,
    LoadStage,
    Measurement,
    PoolSizes,
    measure_profile,
    running_deployment,
)
from services.cli.profile.options import ProfileOptions
from services.host.device_settings import apply_device
from services.host.gpus import find_gpus
from services.host.model_probe import resolve_model
from services.host.output_paths import require_writable

SHOWN_BATCHES = (
    StepBatch(128, 128.0**2),
    StepBatch(512, 512.0**2),
    StepBatch(0, 0, 1, 256),
    StepBatch(0, 0, 8, 2048),
    StepBatch(0, 0, 32, 8192),
)


def run_profile(options: ProfileOptions) -> int:
    """Measure, write, and say how well it fits. Returns the exit status.

    The profile names the codec in which the measured workers keep KV. Of several codecs with shares, each is measured:
    costs are those of `raw` if that is one of them, else of the first, and `CostProfile.kv_classes` has the others.
    With a `kv_keep` below 1 requests that evict at this threshold are measured too (`CostProfile.kv_keep`). The profile
    names the device on which the workers say they compute.

    Raises:
        ConfigError: the workload, the model, the file, the device, the codec or the threshold is wrong, or workers
            cannot evict.
        StartError: the deployment does not come up.
    """
    codec, kv_keep, depths = options.kv_cache_codec, options.kv_keep, _parse_depths(options.depths)
    require_writable(options.out, "--out")
    base = base_codec(codec)
    names = [str(one.codec_id) for one in read_classes(codec)]
    classes = [base, *(name for name in names if name != base)] if names else []
    _check_keep(kv_keep, classes)
    console = Console(stderr=True)
    _check_workers(options)
    pools = PoolSizes(0, 0, options.colocated) if options.colocated else PoolSizes()
    source = find_workload(options.workload)
    asked = (
        Config(model=options.model, device=options.device, engine=options.engine) if options.model else None
    )
    folder = asyncio.run(resolve_model(asked, 2)).path if asked else ""
    with running_deployment(pools, folder, _serve_flags(options)) as live:
        _check_workers_evict(live, kv_keep, codec)
        most = live.server.max_model_len
        fitting: Workload = source.shrunk(options.shrink, most or 1 << 20)

        def say(line: str) -> None:
            console.print(line, highlight=False, markup=False)

        if most is not None and (long := source.longer(most, options.shrink)).longer:
            say(
                f"{options.workload}: {long} are longer than the {most:,} tokens that the model takes, and are cut"
            )
        seconds, seed = options.seconds, options.seed
        measurement = measure_profile(live, fitting, seconds, depths, seed, say, classes, kv_keep)
    profile = replace(measurement.profile, model=with_kv_codec(measurement.profile.model, base))
    measurement = replace(measurement, profile=profile)
    save_profile(profile, options.out)
    if options.as_json:
        print(json.dumps(measurement_figures(measurement) | {"file": str(options.out)}))
    else:
        _print_figures(Console(), measurement, options.out)
    return 0


def _serve_settings(options: ProfileOptions) -> dict[str, str]:
    """The settings of `diptych serve` for the workers that are measured; what vLLM does not have is left out."""
    given = {
        "kv_cache_codec": options.kv_cache_codec,
        "device": options.device,
        "engine": options.engine,
        "vllm_python": options.vllm_python,
        "vllm_args": options.vllm_args,
        "kv_cache_calibration": options.kv_cache_calibration,
    }
    defaults = {"device": CPU, "engine": ENGINES[0], "vllm_args": "", "vllm_python": None}
    if options.engine == VLLM:
        defaults["kv_cache_codec"] = RAW_CLASS
    return {
        name: str(value) for name, value in given.items() if value is not None and value != defaults.get(name)
    }


def _serve_flags(options: ProfileOptions) -> list[str]:
    """`_serve_settings` as flags."""
    flags = list[str]()
    for name, value in _serve_settings(options).items():
        flag = f"--{name.replace('_', '-')}"
        # The arguments of vLLM look like flags themselves.
        flags += [f"{flag}={value}"] if name == "vllm_args" else [flag, value]
    return flags


def _check_workers(options: ProfileOptions) -> None:
    """Raises ConfigError, before anything is started: there is no such device or engine, the planner does not know it,
    or its workers do not do what is to be measured.
    """
    given = _serve_settings(options) | ({"kv_keep": str(options.kv_keep)} if options.kv_keep < 1 else {})
    if apply_device(load_config("serve", given, {})).config.device == "cuda":
        served_device(gpu.name for gpu in find_gpus())


def _parse_depths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise ConfigError(
            f"--depths {text} cannot be used", "numbers of requests, at least 1", "--depths 1,4,16"
        )
    return found


def _check_keep(kv_keep: float, classes: Sequence[str]) -> None:
    """Raises ConfigError: the threshold is out of its range, or cannot be measured together with several classes."""
    check_threshold(kv_keep)
    if kv_keep < 1 and classes:
        raise ConfigError(
            "eviction is measured with KV of one class",
            f"--kv-keep {kv_keep}, and --kv-cache-codec names {len(classes)} classes",
            "measure them one after the other",
        )


def _check_workers_evict(live: LiveDeployment, kv_keep: float, kv_cache_codec: str) -> None:
    """Raises ConfigError: eviction is to be measured, and these workers keep everything."""
    if kv_keep < 1 and not live.get_status()["kv_keep"]["classes"]:
        raise ConfigError(
            f"--kv-keep {kv_keep} cannot be measured: these workers keep all KV",
            f"they cannot evict KV of the class {kv_cache_codec} (docs/eviction.md)",
            "use --kv-cache-codec raw, or leave out --kv-keep",
        )


def measurement_figures(measurement: Measurement) -> dict[str, Any]:
    """The figures of a measurement."""
    beside = measurement.profile.overheads
    errors = {name: round(error, 4) for name, error in measurement.profile.fit_error.items()}
    link = beside.link
    return {
        "fit_error": errors,
        "held_out_mean": max(error for name, error in errors.items() if name.endswith("held_out_mean")),
        "steps": measurement.counts,
        "gateway_ms": round(beside.gateway_s * 1e3, 3),
        "hop_ms": round(beside.hop_s * 1e3, 3),
        "step_ms": round(beside.step_s * 1e3, 4),
        "gateway_processor_ms": {
            "message": round(measurement.cpu_cost.message_s * 1e3, 4),
            "token": round(measurement.cpu_cost.token_s * 1e3, 4),
            "request": round(measurement.cpu_cost.request_s * 1e3, 4),
        },
        "link_gb_per_s": None if math.isinf(link.bytes_per_s) else round(link.bytes_per_s / 1e9, 3),
        "link_ms": round(link.latency_s * 1e3, 3),
        "saturation_tokens": measurement.saturation_tokens,
        "between_steps_ms": {
            life.worker: round(profiler.mean_step_gap_s([life]) * 1e3, 4) for life in measurement.traces
        },
        "kv_classes": {name: asdict(work) for name, work in measurement.profile.kv_classes.items()},
        "kv_keep": [asdict(one) for one in measurement.profile.kv_keep],
        "stages": [_stage_figures(measurement, stage) for stage in measurement.stages],
    }


def _stage_figures(measurement: Measurement, stage: LoadStage) -> dict[str, Any]:
    """Its pace, and how its steps compare with the cost that was fitted to those of all stages."""
    (cost,) = measurement.profile.costs.values()
    assert isinstance(cost, StepCost)
    ratios = {}
    for kind in ("prefill", "decode", "mixed"):
        if some := [step for step in measurement.steps_of(stage) if profiler.step_kind(step.batch) == kind]:
            ratios[kind] = round(profiler.measured_ratio(cost, some), 3)
    return {
        "depth": stage.depth,
        "rate": stage.rate,
        "per_s": round(stage.rate_rps, 3),
        "measured_over_cost": ratios,
    }


def _print_figures(console: Console, measurement: Measurement, out: Path) -> None:
    figures = measurement_figures(measurement)
    (cost,) = measurement.profile.costs.values()
    grid = Table("step", "ms", box=None, padding=(0, 2, 0, 0))
    for batch in SHOWN_BATCHES:
        grid.add_row(_batch_words(batch), _step_ms(cost, batch))
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
    for name, work in figures["kv_classes"].items():
        console.print(
            f"KV of the class {name}: a prompt's token takes {work['token']:.2f} times as long, its square"
            f" {work['square']:.2f} times, a token of context {work['context']:.2f} times;"
            f" off by {errors[f'kv_{name}_held_out_mean']:.1%} unseen",
            highlight=False,
        )
    for one in measurement.profile.kv_keep:
        console.print(
            f"eviction at {one.threshold}: {one.share:.0%} of the KV stays; a decision takes"
            f" {one.prompt_s * 1e6:.3g} µs for each token at the end of a prompt, {one.answer_s * 1e6:.3g} µs later;"
            f" a token of context takes {one.work.context:.2f} times as long;"
            f" off by {errors[f'keep_{one.threshold}_held_out_mean']:.1%} unseen",
            highlight=False,
        )
    console.print(
        f"beside: gateway {figures['gateway_ms']} ms, message {figures['hop_ms']} ms, step {figures['step_ms']} ms",
        highlight=False,
    )
    console.print(f"written to {out}", highlight=False, markup=False)


def _batch_words(batch: StepBatch) -> str:
    if batch.tokens:
        return f"read {batch.tokens} tokens"
    return f"write for {batch.rows}, {batch.context // batch.rows} tokens before each"


def _step_ms(cost: CostModel, batch: StepBatch) -> str:
    return f"{cost.step_s(batch) * 1e3:.3g}"
