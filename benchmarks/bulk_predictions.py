"""Whether the programme predicts blocks well, and chooses well: its policies are run, and others beside them.

Caps are a share of the weights as memory, and a rate of the disk (token buckets, real files). For each of six caps two
policies are run: the programme's, and one drawn from a grid. For the first caps the whole grid is run: three shapes of
the block, with none, half or all of the weights that fit in memory, and of the KV that then fits.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bulk_blocks import BulkBench, BulkSettings
from engine.model.checkpoint import Checkpoint
from engine.offload.policy import BlockPolicy, format_policy
from planner.types import BulkRates

# Memory as shares of `memory_share`, and rates as shares of `disk_rate`.
MEMORY_STEPS, RATE_STEPS = (1.0, 1.5, 2.5), (1.0, 4.0)
SHARES = (0.0, 0.5, 1.0)
# Shares are fitted in steps of this size.
FIT_STEPS = 20
# The best policies of the grid that are run again beside the chosen one, since the best of many runs is a lucky one.
FINALISTS = 3
# Predictions count as right within this part of what was measured, the choice within that of the best policy.
NEAR, NEAR_BEST = 0.2, 0.1


@dataclass(frozen=True, slots=True)
class CappedBench:
    """Blocks under caps: the settings' memory and rate. Disk is not limited."""

    bench: BulkBench

    def measure(self, policy: BlockPolicy) -> float:
        """The new tokens per second of a whole block."""
        found = self.bench.run(policy, self.bench.settings.disk_rate, policy.sequences).tokens_per_s
        print(f"{found:8.2f} tokens/s  {format_policy(policy)}", file=sys.stderr)
        return found

    def fill(self, policy: BlockPolicy, name: str, most: float = 1.0) -> BlockPolicy | None:
        """A policy with as much of one kind in memory as fits, at most `most`; None if not even nothing fits."""
        every = (
            replace(policy, **{name: most * step / FIT_STEPS})  # type: ignore[arg-type]
            for step in range(FIT_STEPS, -1, -1)
        )
        return next(filter(self.bench.fits, every), None)

    def grid(self, chosen: BlockPolicy) -> Iterator[BlockPolicy]:
        """Policies that fit, at most 27: shapes around the chosen one, by weights and KV in memory."""
        rows, batches, most = chosen.rows, chosen.batches, self.bench.settings.prompts
        around = ((rows, batches), (rows // 2, 2 * batches), (rows, batches // 2), (2 * rows, batches // 2))
        # No more sequences than the programme may choose, or the comparison would not be fair.
        shapes = [one for one in dict.fromkeys(around) if min(one) and one[0] * one[1] <= most]
        for rows, batches in shapes[:3]:
            bare = replace(
                chosen, rows=rows, batches=batches, weights_in_memory=0.0, kv_in_memory=0.0, hidden_in_memory=0.0
            )  # fmt: skip
            if (bare_filled := self.fill(bare, "hidden_in_memory")) is None:
                continue
            full_weights = self.fill(bare_filled, "weights_in_memory")
            assert full_weights is not None
            for weights in SHARES:
                with_weights = replace(
                    bare_filled, weights_in_memory=weights * full_weights.weights_in_memory
                )
                full = self.fill(with_weights, "kv_in_memory")
                assert full is not None
                for kv in SHARES:
                    yield replace(with_weights, kv_in_memory=kv * full.kv_in_memory)


def run_predictions(
    model: Checkpoint, settings: BulkSettings, rates: BulkRates, rounds: int, folder: Path, seed: int = 0
) -> dict[str, Any]:
    """The figures: how many predictions are near, and how good the chosen policy is."""
    draw, rows = random.Random(seed), list[dict[str, Any]]()
    capped = [
        CappedBench(
            BulkBench(model, replace(settings, memory_share=share * settings.memory_share,
                                     disk_rate=rate * settings.disk_rate), rates, folder)
        )
        for share in MEMORY_STEPS
        for rate in RATE_STEPS
    ]  # fmt: skip
    capped[0].measure(capped[0].bench.choose_policy())
    for one in capped:
        chosen = one.bench.choose_policy()
        others = [policy for policy in dict.fromkeys(one.grid(chosen)) if policy != chosen]
        for kind, policy in (("chosen", chosen), ("drawn", draw.choice(others))):
            predicted = one.bench.predict(policy).tokens_per_s
            found = median(one.measure(policy) for _ in range(rounds))
            rows.append(
                {
                    "kind": kind,
                    "memory_bytes": one.bench.memory_bytes,
                    "disk_rate": one.bench.settings.disk_rate,
                    "policy": format_policy(policy),
                    "predicted_tokens_per_s": predicted,
                    "tokens_per_s": found,
                    "ratio": predicted / found,
                    "load_average": os.getloadavg()[0],
                }
            )
    near = sum(abs(one["ratio"] - 1) <= NEAR for one in rows)
    return {"near": near, "of": len(rows), **compare_choice(capped[0], rounds), "predictions": rows}


def compare_choice(one: CappedBench, rounds: int) -> dict[str, Any]:
    """The chosen policy beside the best of the grid; the best few are run again, interleaved with it."""
    chosen = one.bench.choose_policy()
    grid = [policy for policy in dict.fromkeys(one.grid(chosen)) if policy != chosen]
    first = {policy: one.measure(policy) for policy in grid}
    best = sorted(grid, key=lambda policy: -first[policy])[:FINALISTS]
    finals = [chosen, *best]
    rates: dict[BlockPolicy, list[float]] = {policy: [] for policy in finals}
    for number in range(max(2, rounds)):
        for policy in finals[number % len(finals) :] + finals[: number % len(finals)]:
            rates[policy].append(one.measure(policy))
    medians = {policy: median(found) for policy, found in rates.items()}
    top = max(medians, key=lambda policy: medians[policy])
    return {
        "chosen_share": medians[chosen] / medians[top],
        "chosen_is_near_best": medians[chosen] >= (1 - NEAR_BEST) * medians[top],
        "chosen_tokens_per_s": medians[chosen],
        "best_tokens_per_s": medians[top],
        "worst_tokens_per_s": min(first.values()),
        "best_policy": format_policy(top),
        "policies_run": len({chosen, *grid}),
    }
