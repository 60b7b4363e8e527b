"""Checks on a machine with a GPU what no other machine can tell, within eight minutes.

    python -m benchmarks.gpu_check [--json] [--out .run/gpu_check] [--only PART ...]

It needs a CUDA device, no network, no Ray and no model. Each part is a process of its own with its own limit. It writes
each figure at once to `PART.json` in the folder `--out`, and all results go to `result.json` there after each part: a
part that hangs or fails loses nothing that was measured, and stops no other part.

    env        device and versions
    kernels    kernels_failed: of one test of each kind of kernel
    copies     copy_ratio: time of plain page-locked copies of chunks of Llama-3.1-8B / of a worker's copies to and from
               its transfer buffer, the lesser; handoff_ms_512, handoff_ms_2048: such tokens from device to device over
               two buffers, hashed twice; handoff_wrong: chunks that are not what was sent
    pair       one prefill and one decode worker on the GPU, the embedded model in float32, beside one worker on the
               CPU: unexplained, failed: of 300 answers (`benchmarks/load/answer_checks.py`); kv_at_rest: what is held
               3 s later; killed_*: the same while each worker is killed once
    load       such a pair with a random Llama of 1B's shape in bfloat16: host_ratio: tokens per second / those of the
               runner alone, the least of 1, 16 and 64 streams; interference: longest gap of four streams while a long
               prompt is prefilled / their median gap before
    sampling   sampler_different: rows of 2,000 that get another token than on the host; sampler_ratio: time of
               sampling 64 rows of 128,256 logits, by the slowest kind of request / of a decode step of Llama-3.1-8B's
               shape with 64 sequences
    decoding   attention_ratio, tpp_*, step_ratio, run_ratio: as in `benchmarks.gpu_decode`
    profile    profile_splits: splits in the measured `steps.json`, as `diptych plan` reads it
    vllm       only if TEST_VLLM_PYTHON names an interpreter with vLLM for CUDA, in two minutes more: vllm_unexplained,
               vllm_failed: of 150 answers of 1P1D in bfloat16 (0.1), vllm_held: 3 s later; vllm_host_ratio: tokens per
               second of one worker behind the gateway / of `vllm serve`, the lesser of 64 and 256 streams

Exit status: 0 if every part ended and every aim is met, 1 if not, 3 if there is no CUDA device, which takes less than
ten seconds to say.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.gpu_parts.check_part import (
    PYTHON_VARIABLE,
    CheckPart,
    PartResult,
    measure_here,
    part_command,
    run_part,
)
from benchmarks.results_tables import BOUND, BOUNDS
from diptych.errors import ConfigError
from services.host.gpus import find_gpus

NO_DEVICE = 3
TOTAL_S = 480.0
# What is added to it for vLLM, where it is.
VLLM_S = 120.0
# What is left for the summary, and for a part that must be killed.
SPARE_S = 6.0
# Without it, no other part can run.
FIRST_PART, VLLM_PART = "env", "vllm"
# A part that has less time than this is left out.
MIN_PART_S = 5.0
ROOT = Path(__file__).parents[1]

PARTS = (
    CheckPart("env", "benchmarks.gpu_parts.kernels:record_environment", 20),
    CheckPart("kernels", "benchmarks.gpu_parts.kernels:run_kernel_tests", 60, {"kernels_failed": "= 0"}),
    CheckPart(
        "copies",
        "benchmarks.gpu_parts.copies:measure_copies",
        40,
        {"copy_ratio": "≥ 0.8", "handoff_wrong": "= 0"},
    ),
    CheckPart(
        "pair",
        "benchmarks.gpu_parts.pair:measure_pair",
        100,
        {
            "unexplained": "= 0",
            "failed": "= 0",
            "kv_at_rest": "= 0",
            "killed_unexplained": "= 0",
            "killed_failed": "= 0",
            "killed_kv_at_rest": "= 0",
        },
    ),
    CheckPart("load", "benchmarks.gpu_parts.pair:measure_load", 100, {"host_ratio": "≥ 0.9"}),
    CheckPart(
        "sampling",
        "benchmarks.gpu_parts.speed:measure_sampling",
        60,
        {"sampler_different": "= 0", "sampler_ratio": "≤ 0.1"},
    ),
    CheckPart(
        "decoding",
        "benchmarks.gpu_parts.speed:measure_decoding",
        50,
        {"attention_ratio": "≥ 0.7", "step_ratio": "≤ 1.3"},
    ),
    CheckPart("profile", "benchmarks.gpu_parts.speed:measure_profile", 40, {"profile_splits": "≥ 1"}),
    CheckPart(
        "vllm",
        "benchmarks.gpu_parts.vllm_chain:measure_vllm",
        VLLM_S,
        {"vllm_unexplained": "= 0", "vllm_failed": "= 0", "vllm_held": "= 0", "vllm_host_ratio": "≥ 0.95"},
    ),
)


def run_check(
    parts: Sequence[CheckPart],
    device: str,
    folder: Path,
    total_s: float = TOTAL_S,
    command_of: Callable[[CheckPart, str, Path], list[str]] = part_command,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run all parts, one after the other, within `total_s`; returns the results, which are also in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    began_s, results = time.monotonic(), dict[str, PartResult]()
    for part in parts:
        left_s = total_s - SPARE_S - (time.monotonic() - began_s)
        if left_s < min(MIN_PART_S, part.limit_s):
            results[part.name] = PartResult("left out", 0.0, {}, "no time was left")
        else:
            limit_s = min(part.limit_s, left_s)
            results[part.name] = run_part(part, folder, limit_s, command_of(part, device, folder))
        summary = summarize(parts, results, device, time.monotonic() - began_s)
        (folder / "result.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        say(f"{part.name:<10} {results[part.name].state:<9} {results[part.name].seconds:6.1f} s")
        if part.name == FIRST_PART and results[part.name].state != "done":
            break
    return summary


def summarize(
    parts: Sequence[CheckPart], results: dict[str, PartResult], device: str, seconds: float
) -> dict[str, Any]:
    """All figures so far, what became of each part, and what is missing: `missed` and `broken` are empty if all is
    well.
    """
    figures: dict[str, Any] = {}
    for result in results.values():
        figures |= result.figures
    aims = {name: aim for part in parts for name, aim in part.aims.items()}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": find_commit(),
        "device": device,
        "seconds": round(seconds, 1),
        "parts": {name: result.report() for name, result in results.items()},
        "broken": [
            part.name for part in parts if part.name not in results or results[part.name].state != "done"
        ],
        "missed": [name for name, aim in aims.items() if not is_met(figures.get(name), aim)],
        "aims": aims,
        "figures": figures,
    }


def is_met(value: Any, aim: str) -> bool:
    """Whether a figure was measured and meets its aim."""
    bound = BOUND.fullmatch(aim)
    assert bound is not None, aim
    return isinstance(value, int | float) and BOUNDS[bound[1]](value, float(bound[2]))


def find_commit() -> str:
    """The commit of this checkout; empty if git does not know."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def usual_parts() -> list[str]:
    """The names of the parts that run if none are named: that of vLLM only where its interpreter is named."""
    has_vllm = bool(os.environ.get(PYTHON_VARIABLE))
    return [part.name for part in PARTS if has_vllm or part.name != VLLM_PART]


def main() -> None:
    """Run the check, or one part in this process; exit as the head of this file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--out", type=Path, default=Path(".run/gpu_check"), help="folder of all results")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="only these parts")
    # For tests of the check itself; and for the processes of parts.
    parser.add_argument(
        "--device", choices=("cuda", "emulated", "cpu"), default="cuda", help=argparse.SUPPRESS
    )
    parser.add_argument("--part", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = [part for part in PARTS if part.name in (arguments.only or usual_parts())]
    if arguments.part:
        (part,) = (part for part in PARTS if part.name == arguments.part)
        raise SystemExit(measure_here(part, arguments.device, arguments.out))
    if arguments.device == "cuda":
        try:
            find_gpus()
        except ConfigError as error:
            print("\n".join(error.lines()), file=sys.stderr)
            raise SystemExit(NO_DEVICE) from None
    say = (lambda line: None) if arguments.json else print
    total_s = TOTAL_S + sum(VLLM_S for part in chosen if part.name == VLLM_PART)
    summary = run_check(chosen, arguments.device, arguments.out, total_s, say=say)
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(json.dumps(summary["figures"], indent=1))
        for name in ("broken", "missed"):
            print(f"{name}: {', '.join(summary[name]) or 'nothing'}")
    unusable = summary["parts"].get(FIRST_PART, {}).get("state", "done") != "done"
    raise SystemExit(NO_DEVICE if unusable else 1 if summary["broken"] or summary["missed"] else 0)


if __name__ == "__main__":
    main()
