"""`diptych simulate`: a trace or a workload through a deployment in virtual time, by the product's own decisions.

With --compat simdistserve, a trace as the paper's own simulator has it.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from planner import simdistserve
from planner.terms import Served, Split
from planner.traces import read_trace
from services.cli import outputs, simulate_real
from services.cli.stop import OK

COLUMNS = ("req", "arrival_s", "prompt_len", "output_len", "ttft_ms", "tpot_ms", "total_ms")
SHARED = {"model", "profile", "trace", "out"}
COMPAT = {"compat", "backend", "tp_prefill", "pp_prefill", "tp_decode", "pp_decode"}
# Where a flag is not called as its option.
TYPED = {
    "as_json": "json",
    "enable_chunked_prefill": "[no-]enable-chunked-prefill",
    "enable_prefix_caching": "[no-]enable-prefix-caching",
}


def simulate(options: Mapping[str, Any], given: Collection[str]) -> int:
    """`options` by the names of their flags, and which of them were `given`. Returns the exit status.

    Raises:
        ConfigError: a flag, a file or a row cannot be used.
    """
    if options["out"] is not None:
        outputs.writable(options["out"], "--out")
    if options["compat"] is None:
        _refuse(set(given) & COMPAT, "it is a flag of --compat simdistserve", "add that, or use --placement")
        served = simulate_real.run(options, given)
    else:
        if options["compat"] != "simdistserve":
            why = "known: simdistserve"
            raise ConfigError(f"--compat {options['compat']} is not known", why, "--compat simdistserve")
        extra = set(given) - COMPAT - SHARED
        _refuse(extra, "the paper's simulator has nothing like it", "leave it out, or leave out --compat")
        served = _compat(options)
    if options["out"] is not None:
        _write(options["out"], table(served, kinds=bool(options["kind"])))
    elif options["compat"] is not None:
        sys.stdout.write(table(served))
    return OK


def _refuse(flags: set[str], why: str, fix: str) -> None:
    if flags:
        name = min(flags)
        raise ConfigError(f"--{TYPED.get(name, name).replace('_', '-')} has no effect here", why, fix)


def _compat(options: Mapping[str, Any]) -> list[Served]:
    if options["backend"] == "distserve" and not (options["tp_decode"] and options["pp_decode"]):
        why = "the distserve back-end decodes on an instance of its own"
        raise ConfigError("--tp-decode and --pp-decode are at least 1", why, "only --backend vllm takes 0")
    return simdistserve.run(
        read_trace(_needed(options, "trace")),
        _json(_needed(options, "profile")),
        options["backend"],
        options["model"],
        Split(options["tp_prefill"], options["pp_prefill"]),
        Split(max(1, options["tp_decode"]), max(1, options["pp_decode"])),
    )


def table(served: Iterable[Served], kinds: bool = False) -> str:
    """CSV, with the columns of the golden files: seconds of arrival, else milliseconds; and with `kinds` each one's."""
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow((*COLUMNS, "kind") if kinds else COLUMNS)
    for number, one in enumerate(served):
        job = one.job
        times = (one.ttft_s * 1e3, one.tpot_s * 1e3, (one.ended_s - job.at_s) * 1e3)
        told = ["" if one.failed else f"{value:.4f}" for value in times]
        own = (job.kind,) if kinds else ()
        rows.writerow((number, f"{job.at_s:.6f}", job.prompt, job.output, *told, *own))
    return text.getvalue()


def _needed(options: Mapping[str, Any], name: str) -> Path:
    if options[name] is None:
        raise ConfigError(f"--{name} is missing", "--compat simdistserve needs it", f"add --{name} FILE")
    return Path(options[name])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"the profile {path} cannot be read", why[:200], "give a JSON file of fits"
        ) from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        fix = "give --out a place that can be written"
        raise ConfigError(f"{path} cannot be written", error.strerror or str(error), fix) from None
