"""`python -m benchmarks.bulk --only predictions`: which policies it runs, and what it says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bulk_predictions
from benchmarks.bulk_blocks import BlockTimes, BulkBench, BulkSettings
from benchmarks.bulk_predictions import CappedBench, compare_choice, run_predictions
from diptych.config.load import load_config
from diptych.config.options import Config
from diptych.specs import BulkPlan
from engine.model.checkpoint import Checkpoint
from engine.offload.policy import BlockPolicy, format_policy, parse_policy
from engine.offload.sizes import BlockModel
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile import analytic_profile
from planner.costs.profile_file import save_profile
from planner.types import BulkRates, LayerTime
from services.cli.serve.offload_plan import plan_bulk
from services.host.model_probe import ProbedModel, resolve_embedded

MODEL = Checkpoint.resolve(resolve_embedded("tiny"))
SETTINGS = BulkSettings(256, 6, 768, 8, 4, 4096, 16, 64, 16, 1e8, 1.0, 128)
RATES = BulkRates(1, 7.9e5, LayerTime(1e-4, 1e-5, 1e-4, 1e-5), 2e10, 2e10, 1e-5, 9e9, 8e8, 8e8)


# As of the prepared file of the embedded model.
SIZES = BlockModel([1_585_152] * 6, 6_311_936, 65_536, 1_024, 1_703_936, 40_960)


class FakeBench(BulkBench):
    """Blocks that take as long as predicted, times `slower`; nothing is run."""

    slower = 1.0

    def __init__(self, model: Checkpoint, settings: BulkSettings, rates: BulkRates, folder: Path) -> None:
        super().__init__(model, settings, rates, folder)
        self.ran = list[BlockPolicy]()

    def sizes(self, policy: BlockPolicy) -> BlockModel:
        return SIZES

    def run(self, policy: BlockPolicy, rate: float | None, count: int, capped: bool = True) -> BlockTimes:
        self.ran.append(policy)
        tokens = count * policy.output_tokens
        return BlockTimes(tokens, self.slower * tokens / self.predict(policy).tokens_per_s, tokens, 1.0)


def test_the_benchmark_chooses_and_predicts_what_serve_does(tmp_path: Path) -> None:
    """So that its figures say something of the product."""
    bench = FakeBench(MODEL, SETTINGS, RATES, tmp_path)
    file = tmp_path / "p.json"
    held = replace(RATES, disk_read=SETTINGS.disk_rate, disk_write=SETTINGS.disk_rate)
    save_profile(replace(analytic_profile(dims_on_cpu(find_model(str(MODEL.path))), "cpu"), bulk=held), file)
    lengths = "prompt_tokens=64,output_tokens=16,step_tokens=128"
    probed = ProbedModel(str(MODEL.path), "", True, SETTINGS.max_model_len, 0)
    given = {"bulk": 1, "prefill": 0, "decode": 0, "data_dir": tmp_path, "bulk_profile": file}

    def served(policy: str) -> BulkPlan:
        config: Config = load_config("serve", given | {"bulk_policy": policy}, {}).config
        return plan_bulk(config, probed, bench.memory_bytes, 1 << 43)

    chosen, _ = bench.blocks.search(bench.base_policy())
    found = served(lengths)
    assert (found.source, found.policy) == ("profile", format_policy(chosen))
    assert found.tokens_per_s == bench.predict(parse_policy(found.policy, bench.base_policy())).tokens_per_s
    policy = bench.choose_policy()
    assert served(format_policy(policy)).tokens_per_s == pytest.approx(bench.predict(policy).tokens_per_s)
    assert bench.fits(policy) and policy.sequences <= SETTINGS.prompts


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
    bench = FakeBench(MODEL, SETTINGS, RATES, Path())
    one = CappedBench(bench)
    chosen = bench.choose_policy()
    grid = list(one.grid(chosen))
    assert bench.fits(chosen) and all(map(bench.fits, grid))
    assert 9 < len(grid) <= 27 and len({policy.weights_in_memory for policy in grid}) > 2
    found = compare_choice(one, 1)
    assert set(grid) <= set(bench.ran) and found["policies_run"] == len({chosen, *grid})
    assert found["worst_tokens_per_s"] < found["best_tokens_per_s"]
    predicted = {policy: bench.predict(policy).tokens_per_s for policy in (chosen, *grid)}
    assert found["chosen_share"] == pytest.approx(min(1.0, predicted[chosen] / max(predicted.values())))
    assert found["chosen_is_near_best"] == (found["chosen_share"] >= 0.9)
