"""What the programme of `planner.offload` predicts for the machine and the models of FlexGen's Table 1.

    python -m benchmarks.offload_table [--json]

    predicted       tokens per second of the best placement over blocks of 4 to 64 rows and 1 to 16 batches
    paper           tokens per second in Table 1, without compression, prompts of 512 tokens, 32 new ones
    ratio           predicted / paper
    search_s        seconds that the search took

The machine is a T4 with 16 GB, 208 GB of host memory, and a disk of 1.5 TB that reads 2 GB/s and writes 1 GB/s (§6.1).
Its other rates are the constants of FlexGen's released cost model, which were measured on such a machine.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import benchmarks.script_path  # noqa: F401
from planner.offload.machines import DeviceMachine
from planner.offload.programme import search_placement
from planner.offload.terms import BlockShape, OffloadModel, OffloadWorkload

T4_MACHINE = DeviceMachine(
    device_bytes=16e9,
    host_bytes=208e9,
    disk_bytes=1.5e12,
    upload=12.89e9,
    download_kv=0.97e9,
    download_hidden=4.82e9,
    disk_read=2e9,
    disk_write=1e9,
    prefill_products=21.24e12,
    decode_products=4.3e12,
    prefill_attention=9.97e12,
    decode_attention=0.079e12,
    host_attention=0.0123e12,
)
TABLE_MODELS = {
    "OPT-30B": OffloadModel(48, 7168, 56, 56, 128, 28672, 2),
    "OPT-175B": OffloadModel(96, 12288, 96, 96, 128, 49152, 2),
}
TABLE_TOKENS_PER_S = {"OPT-30B": 7.32, "OPT-175B": 0.69}
TABLE_WORKLOAD = OffloadWorkload(512, 32)
TABLE_BLOCKS = [
    BlockShape(rows, batches) for rows in (4, 8, 16, 24, 32, 48, 64) for batches in (1, 2, 3, 4, 6, 8, 12, 16)
]


def predict_table() -> dict[str, dict[str, Any]]:
    """The figures of each model, by its name."""
    figures = {}
    for name, model in TABLE_MODELS.items():
        began_s = time.perf_counter()
        found = search_placement(T4_MACHINE, [model], TABLE_WORKLOAD, TABLE_BLOCKS)
        search_s = time.perf_counter() - began_s
        paper = TABLE_TOKENS_PER_S[name]
        figures[name] = {
            "predicted": found.tokens_per_s,
            "paper": paper,
            "ratio": found.tokens_per_s / paper,
            "search_s": search_s,
            "rows": found.block.rows,
            "batches": found.block.batches,
            "shares": [round(float(share), 2) for share in found.shares],
            "binding": found.binding,
        }
    return figures


def main() -> None:
    """Print the figures, as a table or as JSON."""
    parser = argparse.ArgumentParser(description="FlexGen's Table 1, predicted")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    figures = predict_table()
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, one in figures.items():
        print(
            f"{name:9} {one['predicted']:6.2f} tok/s predicted, {one['paper']:5.2f} in the paper, "
            f"{one['rows']} x {one['batches']}, waits for: {one['binding']}"
        )


if __name__ == "__main__":
    main()
