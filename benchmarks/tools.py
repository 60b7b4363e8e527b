"""Whether calls of tools are valid, and how long it takes to check a request with many tools.

python -m benchmarks.tools [--json] [--short] [--schemas 5000] [--seed 0] [--parts valid check]

valid    random tools under `required` or a name: random answers that the grammar allows, by the product's sampler
         and reader. `tool_valid`: the share that calls a tool that it may, with arguments of its schema
check    `check_s`: seconds to validate a request with 128 tools of 8 arguments and compile its grammar;
         `check_cpu_s`: of them, those of the processor
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import benchmarks.script_path  # noqa: F401
from benchmarks.load.short_form import add_short_form
from benchmarks.tool_parts.walks import ToolWalks

NUM_TOOLS, NUM_ARGUMENTS = 128, 8
PARTS = ("valid", "check")


def measure_parts(parts: Sequence[str], schemas: int, seed: int) -> dict[str, Any]:
    """The figures of the parts that are asked for."""
    walks, fields = ToolWalks(), dict[str, Any]()
    if "valid" in parts:
        fields |= walks.check_validity(schemas, seed)
    if "check" in parts:
        fields |= walks.measure_check(NUM_TOOLS, NUM_ARGUMENTS)
    return fields


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--schemas", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_short_form(parser, schemas=300)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    fields = measure_parts(options.parts, options.schemas, options.seed)
    print(json.dumps(fields | {"load_before": round(load, 2)}, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
