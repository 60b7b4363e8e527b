"""Whether calls of tools are valid, survive their workers, and cost no time.

python -m benchmarks.tools [--json] [--short] [--schemas 5000] [--kills 10] [--rounds 15] [--parts PART ...]

valid    random tools under `required` or a name: random answers that the grammar allows, by the product's sampler
         and reader. `tool_valid`: the share that calls a tool that it may, with arguments of its schema
check    `check_s`: seconds to validate a request with 128 tools of 8 arguments and compile its grammar;
         `check_cpu_s`: of them, those of the processor; `recheck_s`: for the same tools again, whose grammar is known
killed   streams within calls and thoughts whose decode worker is killed. `migrated_equal`: the share of those that
         went on elsewhere whose tokens and events are those of the undisturbed answer
tpot     16 streams, with a tool that they may call and without. `tool_tpot_ratio`: the median of both, in rounds
         that alternate
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import serving_deployment
from benchmarks.load.short_form import add_short_form
from benchmarks.tool_parts.killed import measure_kills
from benchmarks.tool_parts.paces import compare_paces
from benchmarks.tool_parts.walks import ToolWalks

NUM_TOOLS, NUM_ARGUMENTS = 128, 8


def measure_paces(rounds: int) -> dict[str, Any]:
    """The part `tpot`."""
    with serving_deployment("--prefill", "1", "--decode", "1") as deployment:
        deployment.wait_ready()
        return uvloop.run(compare_paces(deployment, rounds))


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "valid": lambda options: ToolWalks().check_validity(options.schemas, options.seed),
    "check": lambda options: ToolWalks().measure_check(NUM_TOOLS, NUM_ARGUMENTS),
    "killed": lambda options: measure_kills(options.kills),
    "tpot": lambda options: measure_paces(options.rounds),
}


def measure_parts(parts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the parts that are asked for, and the load before each."""
    fields, loads = dict[str, Any](), dict[str, float]()
    for part in parts:
        loads[part] = round(os.getloadavg()[0], 2)
        fields |= PARTS[part](options)
    return fields | {"load_before": loads}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--schemas", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_short_form(parser, schemas=300, kills=2, rounds=5)
    options = parser.parse_args()
    fields = measure_parts(options.parts, options)
    print(json.dumps(fields, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
