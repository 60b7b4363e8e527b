"""Whether workers whose pools are on a device keep the promises of CPU workers about tokens and KV.

    python -m benchmarks.device_pools [--json] [--short] [--only PART ...] [--share 1.0] [--out .run/device_pools]

The device is the emulated one: all that a GPU worker does, on the tensors of the CPU, so no figure here is one of a
GPU's speed. Workers run the embedded model in float32, and are driven over the channel. References are CPU workers.
Each part is a process of its own and writes each figure at once, as in `benchmarks.gpu_check`.

    same    greedy answers and others of every kind (`benchmarks/load/answer_checks.py`) from 1P1D, 2P2D, and 1P1D with
            coded pages (coded_*), beside one CPU worker: unexplained, failed: of 1,200 and 150 answers; same_held: what
            is held 3 s after the last answer; coded_near: how near two tokens of coded answers are for rounding to
            decide, measured on CPU workers (`benchmarks/device_parts/tokens.py`)
    late    late_handoffs between two workers in one process, whose copies happen as late as they may: late_wrong:
            tokens, chunks, and slabs that change owner or content during a copy; late_failed: of all tests of them;
            waits_proven: waits whose absence is noticed / waits; copy_flips_found: bytes that flip in the buffer of
            the decode worker, found / flipped
    faults  2P2D while workers are killed in every stage of a request, clients leave, a prefill worker stands still, and
            bits flip in the buffer of a prefill worker: kills, left, flipped; wrong, fault_failed: of all answers;
            corrupt_found: of the flips, by the attempt that was given up; kv_at_rest: what is held 3 s later
    buffer  32 open requests over a buffer for two of them: small_failed; buffer_peak_ratio: most slabs used / slabs;
            throughput_ratio: tokens per second / those with a large buffer, by turns; leased_device_slabs: slabs that
            a prefill worker holds on its device when all it has is under lease
    handoff handoff_ratio: from ticket to permission to decode, of prompts of 512 tokens one at a time, over that of
            CPU workers; offer_ratio: the same from first token to ticket; pull_ratio: pulling after the ticket;
            hidden_share: part of the pulling before the ticket, of prompts of eight steps, all pulled ahead. Medians

Exit status: 0 if every part ended and every promise is kept (aims `= 0` and `= 1`), else 1. Ratios that miss their aim
are named in `missed`, and change no status.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.gpu_check import SPARE_S, run_check
from benchmarks.gpu_parts.check_part import CheckPart, measure_here
from benchmarks.load.short_form import add_short_form

PARTS = (
    CheckPart(
        "same",
        "benchmarks.device_parts.tokens:measure_same",
        1200,
        {
            "unexplained": "= 0",
            "failed": "= 0",
            "coded_unexplained": "= 0",
            "coded_failed": "= 0",
            "same_held": "= 0",
        },
    ),
    CheckPart(
        "late",
        "benchmarks.device_parts.ordering:measure_late",
        300,
        {"late_wrong": "= 0", "late_failed": "= 0", "waits_proven": "= 1", "copy_flips_found": "= 1"},
    ),
    CheckPart(
        "faults",
        "benchmarks.device_parts.faults:measure_faults",
        1800,
        {"wrong": "= 0", "fault_failed": "= 0", "corrupt_found": "= 1", "kv_at_rest": "= 0"},
    ),
    CheckPart(
        "buffer",
        "benchmarks.device_parts.flow:measure_buffer",
        600,
        {
            "small_failed": "= 0",
            "leased_device_slabs": "= 0",
            "buffer_peak_ratio": "≤ 1",
            "throughput_ratio": "≥ 0.9",
        },
    ),
    CheckPart(
        "handoff",
        "benchmarks.device_parts.flow:measure_handoff",
        600,
        {"handoff_ratio": "≤ 2", "hidden_share": "≥ 0.7"},
    ),
)


def make_command(part: CheckPart, device: str, folder: Path, share: float) -> list[str]:
    """What measures a part in another process."""
    program = [sys.executable, "-m", "benchmarks.device_pools", "--part", part.name]
    return [*program, "--device", device, "--out", str(folder), "--share", str(share)]


def broken_promises(summary: Mapping[str, Any]) -> list[str]:
    """The promises among the figures of `benchmarks.gpu_check:summarize` that miss their aim or were not measured."""
    return [name for name in summary["missed"] if summary["aims"][name].startswith("=")]


def main() -> None:
    """Measure the parts, or one in this process; exit as the head of this file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="only these parts")
    parser.add_argument("--share", type=float, default=1.0, help="of all requests and kills")
    parser.add_argument("--out", type=Path, default=Path(".run/device_pools"), help="folder of all results")
    # For the processes of parts; and for tests of this program itself.
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("emulated", "cpu"), default="emulated", help=argparse.SUPPRESS)
    add_short_form(parser, share=0.1)
    arguments = parser.parse_args()
    parts, share = [part for part in PARTS if part.name in arguments.only], arguments.share
    if arguments.part:
        (part,) = (part for part in PARTS if part.name == arguments.part)
        raise SystemExit(measure_here(part, arguments.device, arguments.out, share))
    summary = run_check(
        parts,
        arguments.device,
        arguments.out,
        sum(part.limit_s for part in parts) + 2 * SPARE_S,
        partial(make_command, share=share),
        (lambda line: None) if arguments.json else print,
    )
    figures = summary["figures"] | {name: summary[name] for name in ("seconds", "broken", "missed")}
    print(
        json.dumps(
            {"device": arguments.device, "share": share} | figures, indent=None if arguments.json else 1
        )
    )
    raise SystemExit(1 if summary["broken"] or broken_promises(summary) else 0)


if __name__ == "__main__":
    main()
