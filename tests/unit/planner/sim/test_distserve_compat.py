"""The paper's own simulator, request by request (S1): what it gave, and what ours refuses.

Golden traces and coefficients are data of `../shared`; those tests skip without it. `distserve_compat.json` beside this
file holds further runs of the original: ties, more context than a step takes, many rows, stages.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ConfigError
from planner.sim.fast import cluster, distserve_compat
from planner.sim.fast.instance import InstanceLimits
from planner.types import BOTH, DECODE, PREFILL, InstancePool, Job, JobResult, Parallelism, Placement
from tests.unit.planner.paper_data import SHARED, distserve

GOLDEN = SHARED / "data" / "distserve" / "golden"
RUNS: dict[str, Any] = json.loads((Path(__file__).parent / "distserve_compat.json").read_text())
CASES = (
    "d13_sharegpt_r3",
    "d66_sharegpt_pp2_r4",
    "d66_sharegpt_r4",
    "v13_sharegpt_r1",
    "v66_longbench_r1",
)
NEAR_MS = 0.01

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden traces at {GOLDEN}")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def profile(backend: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        distserve(f"profile_data/profiler-a100-80g.{backend}.json").read_text()
    )
    return found


def fits(**changed: list[float]) -> dict[str, Any]:
    """Coefficients of which some are others, for both instances."""
    model = "facebook/opt-13b"
    return {model: {tp: one | changed for tp, one in RUNS["fits"]["distserve"][model].items()}}


def case(name: str) -> dict[str, str]:
    return next(row for row in rows(GOLDEN / "cases.csv") if row["case"] == name)


def splits(row: dict[str, str]) -> tuple[Parallelism, Parallelism]:
    """Of reading and of decoding; the vLLM back-end has one, and says 0 for the other."""
    read = Parallelism(int(row["tp_prefill"]), int(row["pp_prefill"]))
    return read, Parallelism(max(1, int(row["tp_decode"])), max(1, int(row["pp_decode"])))


def trace(name: str) -> list[Job]:
    return [
        Job(float(row["arrival_s"]), int(row["prompt_len"]), int(row["output_len"]))
        for row in rows(GOLDEN / f"{name}.csv")
    ]


def far_ms(name: str, served: list[JobResult]) -> float:
    """The largest difference from the golden file, of any time of any request."""
    return max(
        max(
            abs(one.ttft_s * 1e3 - float(row["ttft_ms"])),
            abs(one.tpot_s * 1e3 - float(row["tpot_ms"])),
            abs((one.ended_s - one.job.at_s) * 1e3 - float(row["total_ms"])),
        )
        for one, row in zip(served, rows(GOLDEN / f"{name}.csv"), strict=True)
    )


@pytest.mark.parametrize("run", RUNS["cases"], ids=lambda run: str(run["name"]))
def test_other_runs_of_the_original_come_out_the_same(run: dict[str, Any]) -> None:
    tp_read, pp_read, tp_write, pp_write = run["splits"]
    served = distserve_compat.simulate_distserve(
        [Job(at_s, prompt, output) for at_s, prompt, output, _, _ in run["rows"]],
        RUNS["fits"][run["backend"]],
        run["backend"],
        run["model"],
        Parallelism(tp_read, pp_read),
        Parallelism(tp_write, pp_write),
    )
    for one, (_, _, _, ttft_ms, tpot_ms) in zip(served, run["rows"], strict=True):
        assert one.ttft_s * 1e3 == pytest.approx(ttft_ms, abs=1e-4)
        assert one.tpot_s * 1e3 == pytest.approx(tpot_ms, abs=1e-4)


@needs_golden
def test_every_golden_trace_is_looked_at() -> None:
    assert {row["case"] for row in rows(GOLDEN / "cases.csv")} == set(CASES)


@needs_golden
@pytest.mark.parametrize("name", CASES)
def test_each_request_is_as_in_the_original(name: str) -> None:
    row = case(name)
    served = distserve_compat.simulate_distserve(
        trace(name), profile(row["backend"]), row["backend"], row["model"], *splits(row)
    )
    assert far_ms(name, served) <= NEAR_MS
    ttft, tpot = float(row["ttft_slo_ms"]) / 1e3, float(row["tpot_slo_ms"]) / 1e3
    kept = sum(one.ttft_s <= ttft and one.tpot_s <= tpot for one in served) / len(served)
    assert kept == pytest.approx(float(row["attain_both"]), abs=1e-4)


@needs_golden
@pytest.mark.parametrize("name", ["d13_sharegpt_r3", "v13_sharegpt_r1", "v66_longbench_r1"])
def test_steps_taken_together_are_the_same_steps(name: str) -> None:
    """The search's simulator, with the paper's costs, on placements without stages."""
    row = case(name)
    read, write = splits(row)
    colocated = row["backend"] == "vllm"
    pools = (
        (InstancePool(BOTH, read),)
        if colocated
        else (InstancePool(PREFILL, read), InstancePool(DECODE, write))
    )
    served = cluster.simulate_fast(
        Placement(pools),
        lambda pool: distserve_compat.distserve_cost(profile(row["backend"]), row["model"], pool.parallelism),
        trace(name),
        limits=InstanceLimits(first_again=True),
    )
    assert far_ms(name, served) <= NEAR_MS


def test_the_budget_of_a_step_is_the_artefact_s_table() -> None:
    for row in rows(distserve("profile_data/max_num_tokens.csv")):
        split = Parallelism(int(row["tp"]), int(row["pp"]))
        assert distserve_compat.distserve_kv_tokens(row["model"], split) == int(row["max_num_tokens"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "orca"}, "no backend"),
        ({"model": "facebook/opt-1b"}, "no model"),
        ({"prefill": Parallelism(8)}, "no TP 8"),
        ({"prefill": Parallelism(2, 3)}, "cannot be split"),
        ({"jobs": [Job(0.0, 60_000, 4)]}, "can never run"),
        ({"profile": {"facebook/opt-13b": {"1": {}, "2": {"prefill": [1]}}}}, "cannot be used"),
        ({"profile": []}, "no model"),
        ({"profile": fits(prefill=[math.nan, 0.1, 0.0])}, "gives nan ms"),
        ({"profile": fits(prefill=[-100.0, 0.1, 0.0])}, "ms for a step"),
        ({"profile": fits(decoding_smallbs=[1e308, 1e308, 1e308])}, "gives inf ms"),
    ],
)
def test_what_cannot_be_simulated_is_said(change: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {
        "jobs": [Job(0.0, 100, 4)],
        "profile": RUNS["fits"]["distserve"],
        "backend": "distserve",
        "model": "facebook/opt-13b",
        "prefill": Parallelism(2),
        "decode": Parallelism(1),
    } | change
    with pytest.raises(ConfigError, match=message) as caught:
        distserve_compat.simulate_distserve(**asked)
    assert len(caught.value.lines()) <= 6


def test_weights_without_room_for_kv_are_refused() -> None:
    with pytest.raises(ConfigError, match="no room"):
        distserve_compat.distserve_kv_tokens("facebook/opt-175b", Parallelism(2))
