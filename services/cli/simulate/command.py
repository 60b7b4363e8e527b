"""`diptych simulate`: simulates how a Diptych deployment serves a trace or a workload, in virtual time.

Diptych's own scheduler and router make the decisions. With `--compat simdistserve` a trace is simulated as DistServe's
own simulator does it.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from diptych.extras import require_extra
from planner.sim.fast import distserve_compat
from planner.types import JobResult, Parallelism
from planner.workload.traces import read_trace
from services.cli.option_fields import refuse_flags
from services.cli.simulate import bulk_flags, report
from services.cli.simulate.options import SimulateOptions
from services.host import output_paths
from services.host.exit_codes import OK

COLUMNS = ("req", "arrival_s", "prompt_len", "output_len", "ttft_ms", "tpot_ms", "total_ms")
SHARED_FLAGS = {"model", "profile", "trace", "out"}
COMPAT_FLAGS = {"compat", "backend", "tp_prefill", "pp_prefill", "tp_decode", "pp_decode"}


def run_simulate(options: SimulateOptions) -> int:
    """Simulate a Diptych deployment, print the figures, and return the exit status.

    With `--compat simdistserve` it simulates a trace as DistServe's own simulator does.

    Raises:
        ConfigError: a flag, a file or a row cannot be used.
    """
    if options.out is not None:
        output_paths.require_writable(options.out, "--out")
    if options.compat is None:
        compat = options.given & COMPAT_FLAGS
        why = "it is a flag of --compat simdistserve"
        refuse_flags(options, compat, " here", why, "add that, or use --placement")
        if (count := bulk_flags.count_bulk_workers(options.placement)) is not None:
            extra = options.given - bulk_flags.FLAGS
            why = "bulk workers serve no requests"
            refuse_flags(options, extra, " here", why, "leave it out, or simulate them apart")
            require_extra("plan", "simulating bulk workers")
            # Imported only here: the search for a block needs scipy.
            from services.cli.simulate.offload_workers import run_bulk_workers

            return run_bulk_workers(options, count)
        unused, why = options.given & {"bulk_memory", "bulk_disk"}, "it is a flag of bulk workers"
        refuse_flags(options, unused, " here", why, "use a placement such as 1B")
        results = report.simulate_samples(options)
    else:
        if options.compat != "simdistserve":
            why = "known: simdistserve"
            raise ConfigError(f"--compat {options.compat} is not known", why, "--compat simdistserve")
        extra = options.given - COMPAT_FLAGS - SHARED_FLAGS
        why = "the paper's simulator has nothing like it"
        refuse_flags(options, extra, " here", why, "leave it out, or leave out --compat")
        results = _run_simdistserve(options)
    if options.out is not None:
        _write_csv(options.out, requests_csv(results, kinds=bool(options.kind)))
    elif options.compat is not None:
        sys.stdout.write(requests_csv(results))
    return OK


def _run_simdistserve(options: SimulateOptions) -> list[JobResult]:
    if options.backend == "distserve" and not (options.tp_decode and options.pp_decode):
        why = "the distserve back-end decodes on an instance of its own"
        raise ConfigError("--tp-decode and --pp-decode are at least 1", why, "only --backend vllm takes 0")
    return distserve_compat.simulate_distserve(
        read_trace(_required_path(options.trace, "--trace")),
        _read_fits(_required_path(options.profile, "--profile")),
        options.backend,
        options.model,
        Parallelism(options.tp_prefill, options.pp_prefill),
        Parallelism(max(1, options.tp_decode), max(1, options.pp_decode)),
    )


def requests_csv(results: Iterable[JobResult], kinds: bool = False) -> str:
    """CSV, with the columns of the golden files: seconds of arrival, else milliseconds; and with `kinds` each one's."""
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow((*COLUMNS, "kind") if kinds else COLUMNS)
    for number, one in enumerate(results):
        job = one.job
        times = (one.ttft_s * 1e3, one.tpot_s * 1e3, (one.ended_s - job.at_s) * 1e3)
        cells = ["" if one.failed else f"{value:.4f}" for value in times]
        own = (job.kind,) if kinds else ()
        rows.writerow((number, f"{job.at_s:.6f}", job.prompt, job.output, *cells, *own))
    return text.getvalue()


def _required_path(path: Path | None, flag: str) -> Path:
    if path is None:
        raise ConfigError(f"{flag} is missing", "--compat simdistserve needs it", f"add {flag} FILE")
    return path


def _read_fits(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"the profile {path} cannot be read", why[:200], "give a JSON file of fits"
        ) from None


def _write_csv(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        fix = "give --out a place that can be written"
        raise ConfigError(f"{path} cannot be written", error.strerror or str(error), fix) from None
