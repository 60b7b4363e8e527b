"""What blocks of bulk work bring for a model that does not fit into memory.

    python -m benchmarks.bulk [--json] [--short] [--only predictions] [--rounds 3] [--prompts 256] [--layers 24] ...

A random Llama of some 300 M parameters in bfloat16. Bulk work may take a fifth of its weights, and the disk is held to
200 MB/s by a token bucket (files are real). All runs are in this process, with one thread; medians over interleaved
rounds, of new tokens per second.

    vs_naive           the programme's policy / all weights read for each batch, with the largest batch that fits
    overlap_gain       reading ahead / reading first, behind the first step, at a rate with which a step's reading takes
                       as long as its computing
    int4_gain          weights and KV in 4 bits / as they are, with everything on a disk with a quarter of the rate
    prediction_ratio   predicted / measured, of the programme's policy; rates, search and prediction are those of
                       `diptych profile --bulk` and `diptych serve --bulk-profile`
    resident_tokens_per_s    the resident engine, with all the memory that it wants
    recompute_tokens_per_s   no KV is kept, and every token computes its whole prefix again: from the time of the first
                             step of the programme's policy

`--only predictions` runs other policies too (`benchmarks/bulk_predictions.py`):

    near, of           predictions within 20 % of what was measured, of 12 (policy, caps)
    chosen_share       the programme's policy / the best of 27 policies for the same caps; `policies_run` says how many
                       of them differ and fit
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

import benchmarks.script_path  # noqa: F401
from benchmarks.bulk_blocks import BlockTimes, BulkBench, BulkSettings, make_model
from benchmarks.bulk_predictions import run_predictions
from benchmarks.load.short_form import add_short_form
from engine.model.checkpoint import Checkpoint
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import predict_needs
from planner.types import BulkRates
from services.cli.profile.offload import measure_bulk_rates


def run_bulk(settings: BulkSettings, rounds: int, folder: Path) -> dict[str, Any]:
    """The figures."""
    model = make_model(folder / "model", settings)
    bench = BulkBench(model, settings, measure_rates(model, folder), folder)
    bench.run(bench.base_policy(), None, 1, capped=False)
    policy = bench.choose_policy()
    predicted = bench.predict(policy)
    naive = bench.naive_policy()
    on_disk = replace(policy, weights_in_memory=0.0, kv_in_memory=0.0)
    dense = replace(on_disk, weight_kind="int4", kv_codec="int4")
    streamed = replace(policy, weights_in_memory=0.0, kv_in_memory=1.0, hidden_in_memory=1.0)
    balanced = balanced_rate(bench, streamed)
    count, rate = policy.sequences, settings.disk_rate
    runs: dict[str, Callable[[], BlockTimes]] = {
        "block": lambda: bench.run(policy, rate, count),
        "naive": lambda: bench.run(naive, rate, naive.rows),
        "ahead": lambda: bench.run(streamed, balanced, count, capped=False),
        "first": lambda: bench.run(replace(streamed, overlap=False), balanced, count, capped=False),
        "exact": lambda: bench.run(on_disk, rate / 4, count, capped=False),
        "int4": lambda: bench.run(dense, rate / 4, count, capped=False),
        "resident": lambda: bench.run_resident(count),
    }
    # The 4-bit kinds are prepared, and their kernels compiled, before anything counts.
    bench.run(replace(dense, rows=1, batches=1), None, 1, capped=False)
    times: dict[str, list[BlockTimes]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(runs[name]())
    rates = {name: median(one.tokens_per_s for one in found) for name, found in times.items()}
    decode = {name: median(one.decode_tokens_per_s for one in found) for name, found in times.items()}
    first_s = median(one.seconds - one.decode_s for one in times["block"])
    return {
        "vs_naive": rates["block"] / rates["naive"],
        "overlap_gain": decode["ahead"] / decode["first"],
        "int4_gain": rates["int4"] / rates["exact"],
        "prediction_ratio": predicted.tokens_per_s / rates["block"],
        "predicted_tokens_per_s": predicted.tokens_per_s,
        "waits_for": predicted.binding,
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
        "recompute_tokens_per_s": count / first_s,
        "weight_bytes": bench.weight_bytes,
        "memory_bytes": bench.memory_bytes,
        "balanced_rate": balanced,
        "policy": describe(bench, policy),
        "naive_policy": describe(bench, naive),
    }


def run_only_predictions(settings: BulkSettings, rounds: int, folder: Path) -> dict[str, Any]:
    """The figures of `--only predictions`."""
    model = make_model(folder / "model", settings)
    return run_predictions(model, settings, measure_rates(model, folder), rounds, folder)


def measure_rates(model: Checkpoint, folder: Path) -> BulkRates:
    """The rates that `diptych profile --bulk` measures and fits."""
    return measure_bulk_rates(model, folder, 1, Console(stderr=True))[0]


def balanced_rate(bench: BulkBench, streamed: BlockPolicy) -> float:
    """The bytes per second with which reading the weights takes as long as computing a decode step."""
    resident = replace(streamed, weights_in_memory=1.0)
    steps = resident.output_tokens - 1
    found = bench.run(resident, None, resident.sequences, capped=False)
    return sum(bench.sizes(streamed).layer_bytes) / (found.decode_s / steps)


def describe(bench: BulkBench, policy: BlockPolicy) -> dict[str, Any]:
    """A policy, and what it takes."""
    needs = predict_needs(bench.sizes(policy), policy)
    return {
        "rows": policy.rows,
        "batches": policy.batches,
        "weights_in_memory": policy.weights_in_memory,
        "kv_in_memory": policy.kv_in_memory,
        "hidden_in_memory": policy.hidden_in_memory,
        "memory_bytes": needs.memory_bytes,
        "disk_bytes": needs.disk_bytes,
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=["predictions"], help="what is run instead")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are medians taken of")
    sizes = {
        "hidden": 1024, "layers": 24, "ffn": 2816, "heads": 16, "kv-heads": 4, "vocab": 4096, "prompts": 256,
        "prompt-tokens": 256, "output-tokens": 32, "step-tokens": 512,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--disk-rate", type=float, default=200e6, help="bytes per second")
    parser.add_argument("--memory-share", type=float, default=0.2, help="of the weights")
    parser.add_argument("--folder", type=Path, help="where files are made (a temporary folder)")
    small = {"hidden": 384, "layers": 16, "ffn": 1024, "heads": 6, "kv_heads": 2, "vocab": 512, "prompts": 32}
    add_short_form(parser, rounds=2, prompt_tokens=64, output_tokens=16, step_tokens=128, **small)
    given = vars(parser.parse_args())
    del given["short"]
    as_json, rounds, parent = given.pop("json"), given.pop("rounds"), given.pop("folder")
    run_chosen = run_only_predictions if given.pop("only") else run_bulk
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        found = run_chosen(BulkSettings(**given), rounds, Path(folder))
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")


if __name__ == "__main__":
    main()
