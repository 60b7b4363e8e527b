"""`diptych profile --bulk`: what blocks of bulk work cost on this machine, measured, fitted and kept in a profile."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from diptych.errors import ConfigError
from engine.model.checkpoint import Checkpoint
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile import CostProfile, analytic_profile
from planner.costs.profile_file import load_profile_of, save_profile
from planner.hardware import CPU
from planner.offload.rate_fit import RatePoints, fit_bulk_rates
from planner.types import BulkRates
from services.cli.profile.options import ProfileOptions
from services.host.exit_codes import OK
from services.host.model_probe import EMBEDDED_MODEL, resolve_embedded
from services.host.output_paths import require_writable

GB = 1e9


def run_bulk_profile(options: ProfileOptions) -> int:
    """Measure the rates of blocks of a model and write them to the profile `out`. Returns the exit status.

    If `out` is a profile of this model already, everything else in it stays. The disk is that of `bulk_folder`.

    Raises:
        ConfigError: the model or a file cannot be used, `out` is of another model, or there are too few cores.
        ModelError: the checkpoint does not match its config.
    """
    out, threads = options.out, options.bulk_threads
    require_writable(out, "--out")
    cores = len(os.sched_getaffinity(0))
    if threads > cores:
        raise ConfigError(
            f"--bulk-threads {threads} cannot be measured", f"there are {cores} cores", "use fewer"
        )
    checkpoint = Checkpoint.resolve(resolve_embedded(options.model or EMBEDDED_MODEL))
    profile = _known_profile(out, str(checkpoint.path))
    console = Console(stderr=True, highlight=False, markup=False)
    rates, errors = measure_bulk_rates(checkpoint, options.bulk_folder or out.parent, threads, console)
    kept = {name: error for name, error in profile.fit_error.items() if not name.startswith("bulk_")}
    save_profile(replace(profile, bulk=rates, fit_error=kept | errors), out)
    if options.as_json:
        print(json.dumps({"bulk": asdict(rates), "fit_error": errors, "file": str(out)}))
    else:
        print("\n".join([*rate_lines(rates, errors), f"written to {out}"]))
    return OK


def _known_profile(out: Path, path: str) -> CostProfile:
    """The profile that is to be completed, or a new one without other measurements. Raises ConfigError."""
    if out.exists() and out.stat().st_size:
        return load_profile_of(out, path)
    dims = find_model(path)
    return replace(analytic_profile(dims_on_cpu(dims), CPU), source="bulk work, measured on this machine")


def measure_bulk_rates(
    checkpoint: Checkpoint, folder: Path, threads: int, console: Console
) -> tuple[BulkRates, dict[str, float]]:
    """The rates of blocks of a model, and the errors of their fits; the disk is that of `folder`.

    Raises:
        ConfigError: `folder` cannot be used.
        ModelError: the checkpoint does not match its config.
    """
    # Imported only here, since torch is needed for nothing else.
    from engine.cpu.offload.rate_probe import measure_rates

    found = measure_rates(checkpoint, folder, threads, lambda line: console.print(f"{line} ..."))
    points = RatePoints(threads=threads, **{one.name: getattr(found, one.name) for one in fields(found)})
    return fit_bulk_rates(points)


def rate_lines(rates: BulkRates, errors: dict[str, float]) -> list[str]:
    """What was measured, for users."""
    lines = [f"a layer of {rates.layer_weights / 1e6:.3g} million weights, {rates.threads} thread(s):"]
    kinds: list[tuple[str, Any]] = [("exact", rates.exact), ("int4", rates.int4)]
    for name, layer in kinds:
        if layer is not None:
            off = errors.get(f"bulk_{name}_mean", 0.0)
            lines.append(
                f"{name:6} a pass {layer.pass_s * 1e3:.3g} ms, a decoding row {layer.row_s * 1e6:.3g} µs, "
                f"a prompt's row {layer.prompt_row_s * 1e6:.3g} µs; off by {off:.0%}"
            )
    coded = rates.coded_attention
    lines.append(
        f"attention: {rates.attention / GB:.3g} GB/s of KV, {rates.prompt_attention / 1e9:.3g} GFLOP/s in prompts"
        + ("" if coded is None else f"; KV of 4 bits {coded / GB:.3g} GB/s")
    )
    direct = "" if rates.disk_direct else ", through copies of the page cache"
    lines.append(
        f"copies {rates.copy / GB:.3g} GB/s; the disk reads {rates.disk_read / GB:.3g} GB/s, "
        f"writes {rates.disk_write / GB:.3g} GB/s{direct}"
    )
    lines.append(
        f"a step beside its layers: {rates.end_pass_s * 1e6:.3g} µs a batch, {rates.end_row_s * 1e6:.3g} µs a sequence"
    )
    return lines
