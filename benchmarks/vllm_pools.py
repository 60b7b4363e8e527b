"""Whether pools of vLLM workers keep the promises of Diptych about tokens and KV. Needs an interpreter with vLLM.

    python -m benchmarks.vllm_pools [--json] [--short] [--only PART ...] [--share 1.0] [--vllm-python PATH]

Workers run the embedded model in float32 on CPUs. References are those of one vLLM worker alone. Each part is a process
of its own and writes each figure at once, as in `benchmarks.gpu_check`. "Explained" is a token that differs where the
reference's two best log-probabilities lie within 1e-3.

    same      greedy answers and others of every kind (`benchmarks/load/answer_checks.py`) from 2P2D: unexplained,
              failed: of 600 answers; ranks_*: of 50 from 1P1D with two ranks per worker; held: 3 s later
    tampered  between two vLLM processes, 1,000 each: bytes flipped in the buffer; tickets altered, replayed, of a life
              that is over, signed with another key; and sound ones among them. wrong: answers that should not be, or
              with other tokens; engine_ends; sound_failed; ended: how each kind has ended; waiting_percent: of a core,
              the busier process while prompts wait for the buffer
    faults    2P2D while workers are killed in every stage of a request, clients leave, and a prefill worker stands
              still: kills, left; fault_wrong; fault_failed: requests that could be continued, or whose error cannot
              be retried; fault_ended: the others by code; kv_at_rest: what is held 3 s later; left_behind: processes
    roles     2P2D whose workers change roles both ways under 8 streams: role_changes; role_failed; role_unexplained;
              reloads; role_held; idle_percent: of a core, the busiest worker at rest
    served    one worker that does both beside `vllm serve` with the same flags, 16 streams, by turns: served_ratio:
              output tokens per second; served_cpu_ratio: per CPU second of all processes

Exit status: 0 if every part ended and every aim is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

import benchmarks.script_path  # noqa: F401
from benchmarks.gpu_check import SPARE_S, run_check
from benchmarks.gpu_parts.check_part import PYTHON_VARIABLE, CheckPart, measure_here
from benchmarks.load.short_form import add_short_form

PARTS = (
    CheckPart(
        "same",
        "benchmarks.vllm_parts.tokens:measure_same",
        3600,
        {
            "unexplained": "= 0",
            "failed": "= 0",
            "held": "= 0",
            "ranks_unexplained": "= 0",
            "ranks_failed": "= 0",
            "ranks_held": "= 0",
        },
    ),
    CheckPart(
        "tampered",
        "benchmarks.vllm_parts.tampering:measure_tampered",
        3600,
        {
            "wrong": "= 0",
            "engine_ends": "= 0",
            "sound_failed": "= 0",
            "tampered_held": "= 0",
            "waiting_percent": "≤ 2",
        },
    ),
    CheckPart(
        "faults",
        "benchmarks.vllm_parts.faults:measure_faults",
        7200,
        {"fault_wrong": "= 0", "fault_failed": "= 0", "kv_at_rest": "= 0", "left_behind": "= 0"},
    ),
    CheckPart(
        "roles",
        "benchmarks.vllm_parts.roles:measure_roles",
        1800,
        {
            "role_failed": "= 0",
            "role_unexplained": "= 0",
            "role_held": "= 0",
            "reloads": "= 0",
            "idle_percent": "≤ 2",
        },
    ),
    CheckPart("served", "benchmarks.vllm_parts.served:measure_served", 1800, {"served_ratio": "≥ 0.95"}),
)


def make_command(part: CheckPart, device: str, folder: Path, share: float) -> list[str]:
    """What measures a part in another process."""
    program = [sys.executable, "-m", "benchmarks.vllm_pools", "--part", part.name]
    return [*program, "--out", str(folder), "--share", str(share)]


def main() -> None:
    """Measure the parts, or one in this process; exit as the head of this file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="only these parts")
    parser.add_argument("--share", type=float, default=1.0, help="of all requests and faults")
    parser.add_argument("--out", type=Path, default=Path(".run/vllm_pools"), help="folder of all results")
    parser.add_argument("--vllm-python", default=os.environ.get(PYTHON_VARIABLE, ".vllm/bin/python"))
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    add_short_form(parser, share=0.02)
    arguments = parser.parse_args()
    os.environ[PYTHON_VARIABLE] = str(Path(arguments.vllm_python).absolute())
    if arguments.part:
        (part,) = (part for part in PARTS if part.name == arguments.part)
        raise SystemExit(measure_here(part, "cpu", arguments.out, arguments.share))
    parts = [part for part in PARTS if part.name in arguments.only]
    summary = run_check(
        parts,
        "cpu",
        arguments.out,
        sum(part.limit_s for part in parts) + 2 * SPARE_S,
        partial(make_command, share=arguments.share),
        (lambda line: None) if arguments.json else print,
    )
    figures = summary["figures"] | {name: summary[name] for name in ("seconds", "broken", "missed")}
    print(json.dumps({"share": arguments.share} | figures, indent=None if arguments.json else 1))
    raise SystemExit(1 if summary["broken"] or summary["missed"] else 0)


if __name__ == "__main__":
    main()
