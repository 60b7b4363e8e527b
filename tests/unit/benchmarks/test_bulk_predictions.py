"""`python -m benchmarks.bulk --only predictions`: which policies it runs, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bulk_predictions
from benchmarks.bulk_blocks import BlockTimes, BulkSettings
from benchmarks.bulk_predictions import CappedBench, compare_choice, run_predictions
from engine.block.policy import BlockPolicy
from engine.model.checkpoint import Checkpoint
from planner.types import BulkRates, LayerTime
from services.host.model_probe import resolve_embedded

MODEL = Checkpoint.resolve(resolve_embedded("tiny"))
SETTINGS = BulkSettings(256, 6, 768, 8, 4, 4096, 16, 64, 16, 1e8, 1.0, 128)
RATES = BulkRates(1, 7.9e5, LayerTime(1e-4, 1e-5, 1e-4, 1e-5), 2e10, 2e10, 1e-5, 9e9, 8e8, 8e8)


class FakeBench:
    """Blocks that take as long as predicted, times `slower`; nothing is run."""

    slower = 1.0

    def __init__(self, model: Checkpoint, settings: BulkSettings, folder: Path) -> None:
        self.model, self.settings, self.ran = model, settings, list[BlockPolicy]()
        self.memory_bytes = int(settings.memory_share * 24e6)

    def base_policy(self) -> BlockPolicy:
        one = self.settings
        return BlockPolicy(1, 1, one.prompt_tokens, one.output_tokens, step_tokens=one.step_tokens)

    def fits(self, policy: BlockPolicy) -> bool:
        kv = policy.sequences * policy.kv_in_memory + 2 * policy.rows
        return 12e6 + 9e6 * policy.weights_in_memory + 8e5 * kv <= self.memory_bytes

    def run(self, policy: BlockPolicy, rate: float, count: int) -> BlockTimes:
        self.ran.append(policy)
        tokens = count * policy.output_tokens
        found = CappedBench(self, RATES).predict(policy)  # type: ignore[arg-type]
        return BlockTimes(tokens, self.slower * tokens / found, tokens, 1.0)


def test_right_predictions_are_near_and_slow_machines_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_predictions, "BulkBench", FakeBench)
    found = run_predictions(MODEL, SETTINGS, RATES, 1, Path())
    assert (found["near"], found["of"]) == (12, 12)
    assert {round(one["ratio"], 6) for one in found["predictions"]} == {1.0}
    assert {one["kind"] for one in found["predictions"]} == {"chosen", "drawn"}
    assert len({(one["memory_bytes"], one["disk_rate"]) for one in found["predictions"]}) == 6
    monkeypatch.setattr(FakeBench, "slower", 1.5)
    assert run_predictions(MODEL, SETTINGS, RATES, 1, Path())["near"] == 0


def test_the_choice_is_compared_with_a_grid_that_fits() -> None:
    bench: Any = FakeBench(MODEL, SETTINGS, Path())
    one = CappedBench(bench, RATES)
    chosen = one.choose()
    grid = list(one.grid(chosen))
    assert bench.fits(chosen) and all(map(bench.fits, grid))
    assert 9 < len(grid) <= 27 and len({policy.weights_in_memory for policy in grid}) > 2
    found = compare_choice(one, 1)
    assert set(grid) <= set(bench.ran) and found["policies_run"] == len({chosen, *grid})
    assert found["worst_tokens_per_s"] < found["best_tokens_per_s"]
    assert found["chosen_share"] == pytest.approx(min(1.0, one.predict(chosen) / max(map(one.predict, grid))))
    assert found["chosen_is_near_best"] == (found["chosen_share"] >= 0.9)
