"""Profiles: written and read again, the artefact's format, splits that nobody measured, and files that are none."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from planner.costs.distserve_fits import distserve_decode_s
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile import CostProfile, Overheads, analytic_profile
from planner.costs.profile_file import (
    PROFILE_FOLDER,
    built_in_profile,
    load_profile,
    load_profile_of,
    save_profile,
)
from planner.costs.roofline import RooflineCost
from planner.costs.step import StepCost
from planner.types import LinkSpec, Parallelism, StepBatch
from tests.unit.planner.paper_data import distserve

BATCHES = (
    StepBatch(512, 512.0**2),
    StepBatch(2048, 2048.0**2),
    StepBatch(rows=1, context=800),
    StepBatch(rows=64, context=51200),
)


def off(one: CostProfile, other: CostProfile, split: Parallelism) -> float:
    """The largest relative difference of two profiles' costs."""
    return max(abs(one.cost(split).step_s(batch) / other.cost(split).step_s(batch) - 1) for batch in BATCHES)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    overheads = Overheads(0.001, 0.0002, 0.0005, LinkSpec(2e9, 1e-4))
    built = built_in_profile("OPT-13B", "A100-80G")
    profile = replace(
        built, rooms={Parallelism(2): 1000}, overheads=overheads, fit_error={"prefill_mean": 0.01}
    )
    save_profile(profile, tmp_path / "p.json")
    again = load_profile(tmp_path / "p.json")
    assert again == profile and again.kv_tokens(Parallelism(2)) == 1000
    endless = replace(profile, overheads=Overheads())
    save_profile(endless, tmp_path / "q.json")
    assert load_profile(tmp_path / "q.json").overheads.link.bytes_per_s == math.inf


def test_an_analytic_profile_stays_analytic(tmp_path: Path) -> None:
    profile = analytic_profile("Llama-3.1-8B", "H100")
    save_profile(profile, tmp_path / "p.json")
    assert isinstance(load_profile(tmp_path / "p.json").cost(Parallelism(2)), RooflineCost)
    assert "analytic" in profile.cost_source(Parallelism(2))


@pytest.mark.parametrize("backend", ["distserve", "vllm"])
@pytest.mark.parametrize("model", ["facebook/opt-13b", "facebook/opt-66b"])
def test_the_artefact_is_read_and_its_error_reported(backend: str, model: str) -> None:
    file = distserve(f"profile_data/profiler-a100-80g.{backend}.json")
    profile, raw = load_profile(file, model), json.loads(file.read_text())[model]
    assert {str(split.tp) for split in profile.costs} == set(raw)
    for split, cost in profile.costs.items():
        fits = raw[str(split.tp)]
        a, b, c = fits["prefill"]
        for tokens in (64, 512, 2020):
            wanted = (a + b * tokens + c * tokens**2) / 1e3
            assert cost.step_s(StepBatch(tokens, tokens**2)) == pytest.approx(wanted, rel=0.035)
        for rows in (1, 16, 64):
            wanted = distserve_decode_s(fits, 256 * rows, rows)
            assert cost.step_s(StepBatch(rows=rows, context=256 * rows)) == pytest.approx(wanted, rel=0.15)
    assert 0 < profile.fit_error["decode_mean"] < 0.03 < profile.fit_error["decode_max"] < 0.3


def test_built_in_profiles_are_the_artefacts() -> None:
    file = distserve("profile_data/profiler-a100-80g.distserve.json")
    for name in ("OPT-13B", "OPT-66B"):
        kept, fitted = built_in_profile(name, "A100-80G").costs, load_profile(file, name).costs
        assert kept.keys() == fitted.keys()
        for split, cost in kept.items():
            other = fitted[split]
            assert isinstance(cost, StepCost) and isinstance(other, StepCost)
            # Not to the last bit: how sums are rounded is the processor's affair.
            assert (cost.pp, len(cost.decode)) == (other.pp, len(other.decode))
            assert cost.prefill == pytest.approx(other.prefill, rel=1e-9)
            for one, another in zip(cost.decode, other.decode, strict=True):
                assert one == pytest.approx(another, rel=1e-9)


def test_more_stages_divide_what_was_measured() -> None:
    profile = built_in_profile("OPT-66B", "A100-80G")
    one, two = profile.cost(Parallelism(4)), profile.cost(Parallelism(4, 2))
    for batch in BATCHES:
        assert two.stage_s(batch) == pytest.approx(one.step_s(batch) / 2, rel=0.01)
        assert two.step_s(batch) == pytest.approx(one.step_s(batch), rel=0.01)
    assert "divided" in profile.cost_source(Parallelism(4, 2))


@pytest.mark.parametrize(
    "profile", [built_in_profile("OPT-66B", "A100-80G"), analytic_profile("OPT-66B", "A100-80G")]
)
def test_stages_on_other_nodes_hand_their_states_over_the_slow_link(profile: CostProfile) -> None:
    within, across = profile.cost(Parallelism(2, 2)), profile.cost(Parallelism(2, 2), cross=2)
    more_s = across.step_s(StepBatch(1000, 1e6)) - within.step_s(StepBatch(1000, 1e6))
    inter = profile.device.node.inter
    assert more_s == pytest.approx(1000 * 9216 * 2 / inter.bytes_per_s + inter.latency_s, rel=0.01)
    assert across.step_s(StepBatch(rows=10, context=10)) > within.step_s(StepBatch(rows=10, context=10))


def test_a_split_left_out_is_scaled_from_its_neighbour() -> None:
    whole = built_in_profile("OPT-66B", "A100-80G")
    for left, limit in ((Parallelism(3), 0.1), (Parallelism(4), 0.15), (Parallelism(8), 0.35)):
        rest = replace(whole, costs={split: cost for split, cost in whole.costs.items() if split != left})
        assert off(rest, whole, left) < limit
        assert "scaled" in rest.cost_source(left)
        assert isinstance(rest.cost(left), StepCost)


def test_a_model_left_out_is_scaled_from_the_other() -> None:
    huge, large = built_in_profile("OPT-175B", "A100-80G"), built_in_profile("OPT-66B", "A100-80G")
    assert "OPT-66B" in huge.source
    ratio = huge.model.parameters / large.model.parameters
    for batch in BATCHES:
        grown = huge.cost(Parallelism(8)).step_s(batch) / large.cost(Parallelism(8)).step_s(batch)
        assert 0.8 * ratio < grown < 1.1 * ratio
    assert huge.kv_tokens(Parallelism(3, 3)) == 76192


def test_measured_steps_become_a_profile(tmp_path: Path) -> None:
    wanted = analytic_profile("Llama-3.1-8B", "H200").cost(Parallelism())
    raw = {
        "device": "NVIDIA H200", "dtype": "bfloat16", "tp": 1, "pp": 1,
        "decode": [
            {"batch": n, "context": m, "seconds": wanted.step_s(StepBatch(rows=n, context=n * m))}
            for n in (1, 8, 32, 64)
            for m in (256, 1024, 4096)
        ],
        "prefill": [{"tokens": n, "seconds": wanted.step_s(StepBatch(n, n * n))} for n in (128, 512, 2048, 4096)],
    }  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(raw))
    profile = load_profile(tmp_path / "p.json", "meta-llama/Llama-3.1-8B")
    assert profile.device.name == "H200" and profile.fit_error["decode_held_out"] < 0.1
    for batch in (StepBatch(rows=16, context=16 * 2048), StepBatch(1024, 1024**2)):
        assert profile.cost(Parallelism()).step_s(batch) == pytest.approx(wanted.step_s(batch), rel=0.15)
    del raw["prefill"]
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError):
        load_profile(tmp_path / "p.json", "Llama-3.1-8B")


def test_the_steps_that_an_h200_took_are_fitted() -> None:
    """`planner/costs/profiles/llama-3.1-8b.h200.json`, which `benchmarks.gpu_decode --profile` saved there."""
    profile = load_profile(PROFILE_FOLDER / "llama-3.1-8b.h200.json", "Llama-3.1-8B")
    assert profile.device.name == "H200" and profile.fit_error["decode_max"] < 0.06
    step_s = profile.cost(Parallelism()).step_s(StepBatch(rows=32, context=32 * 1024))
    assert step_s == pytest.approx(6.54e-3, rel=0.06)


def test_files_that_are_no_profiles_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    wrong = [
        "{", "[]", json.dumps({"version": 2}), json.dumps({"version": 1, "splits": []}),
        json.dumps({"facebook/opt-13b": {"1": {}}}), json.dumps({"a": {}, "b": {}}), "[" * 100_000,
        json.dumps({"facebook/opt-13b": [1]}), json.dumps({"decode": [], "prefill": []}),
    ]  # fmt: skip
    for text in wrong:
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load_profile(file)
        assert len(error.value.lines()) <= 6
    with pytest.raises(ConfigError):
        load_profile(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("version",), True),
        (("version",), 1.0),
        (("model", "layers"), 0),
        (("model", "kv_bytes"), 0.0),
        (("device", "flops"), 0.0),
        (("device", "memory_bytes"), 1e300),
        (("device", "gets", "attention"), 1e300),
        (("device", "node", "intra", "latency_s"), 1e300),
        (("overheads", "hop_s"), -1.0),
        (("splits", 0, "tp"), 0),
        (("splits", 0, "kv_tokens"), -1),
        (("splits", 0, "decode", 0, 0), 1e300),
    ],
)
def test_numbers_that_no_machine_has_are_refused(
    place: tuple[str | int, ...], value: float, tmp_path: Path
) -> None:
    save_profile(
        replace(built_in_profile("OPT-13B", "A100-80G"), overheads=Overheads(0.001, 0.0002)),
        tmp_path / "p.json",
    )
    raw = part = json.loads((tmp_path / "p.json").read_text())
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="is not valid") as caught:
        load_profile(tmp_path / "p.json")
    shown = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")
    assert caught.value.why.startswith(f"{shown}: should be ") and len(caught.value.lines()) <= 6


def test_a_profile_whose_cost_could_fall_is_refused(tmp_path: Path) -> None:
    save_profile(built_in_profile("OPT-13B", "A100-80G"), tmp_path / "p.json")
    raw = json.loads((tmp_path / "p.json").read_text())
    raw["splits"][0]["prefill"][2] = -1
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as error:
        load_profile(tmp_path / "p.json")
    assert error.value.why == "splits[0].prefill[2]: should be at least 0, not -1"


def test_how_well_costs_were_fitted_is_reported() -> None:
    bare = replace(built_in_profile("OPT-13B", "A100-80G"), fit_error={}, source="here")
    assert bare.cost_source(Parallelism()) == "TP1: here"
    fits = {"prefill_mean": 0.01, "prefill_held_out_mean": 0.034, "decode_held_out": 0.012, "all_mean": 0.2}
    note = "here; off in the mean: prefill by 3.4%, decode by 1.2%, all steps by 20.0%"
    fitted = replace(bare, fit_error=fits | {"decode_mean": 0.005, "decode_max": 0.9})
    assert fitted.cost_source(Parallelism()) == f"TP1: {note}"
    assert fitted.cost_source(Parallelism(1, 2)) == f"TP1PP2: divided by stages from TP1 ({note})"
    assert "off" not in replace(fitted, costs={}).cost_source(Parallelism()), "nothing of it was fitted"


def test_files_of_before_are_read(tmp_path: Path) -> None:
    """They say in which pieces KV moves, which nobody asks for."""
    profile = built_in_profile("OPT-13B", "A100-80G")
    save_profile(profile, tmp_path / "p.json")
    raw = json.loads((tmp_path / "p.json").read_text())
    assert "chunk_bytes" not in raw["overheads"]
    raw["overheads"]["chunk_bytes"] = 98304
    (tmp_path / "p.json").write_text(json.dumps(raw))
    assert load_profile(tmp_path / "p.json") == profile


def test_a_profile_is_of_the_model_that_it_is_taken_for(tmp_path: Path) -> None:
    served = replace(dims_on_cpu(find_model("embedded")), max_len=512)
    save_profile(analytic_profile(served, "cpu"), tmp_path / "p.json")
    assert load_profile_of(tmp_path / "p.json", "tiny").model == served, (
        "widths and context are as it was measured"
    )
    for other in "OPT-13B", "Llama-3.2-1B":
        with pytest.raises(ConfigError, match="is of diptych-tiny") as caught:
            load_profile_of(tmp_path / "p.json", other)
        assert len(caught.value.lines()) <= 6
    save_profile(analytic_profile("Llama-3.1-8B", "H100"), tmp_path / "p.json")
    with pytest.raises(ConfigError, match="Llama-3.1-8B-FP8"):
        load_profile_of(tmp_path / "p.json", "Llama-3.1-8B-FP8")


def test_on_the_cpu_matrices_keep_16_bits_and_kv_has_32() -> None:
    shape = find_model("embedded")
    here, there = built_in_profile(shape, "cpu"), built_in_profile(shape, "H100")
    assert (here.model.weight_bytes, here.model.kv_bytes) == (2.0, 4.0)
    assert dims_on_cpu(replace(shape, weight_bytes=4.0)).weight_bytes == 4.0
    assert there.model == shape and shape.kv_bytes == 2.0
    assert here.kv_tokens(Parallelism()) < analytic_profile(shape, "cpu").kv_tokens(Parallelism()) / 1.9


def test_the_file_in_the_documents_is_a_profile(tmp_path: Path) -> None:
    page = Path(__file__).parents[4] / "docs" / "planning.md"
    (example,) = re.findall(
        r"^```json\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "p.json").write_text(example)
    profile = load_profile_of(tmp_path / "p.json", "Llama-3.1-8B")
    assert profile.device.name == "X9" and profile.device.node.devices_per_node == 4
    assert isinstance(profile.cost(Parallelism(2)), StepCost) and profile.kv_tokens(Parallelism()) == 250_000
    bare = json.loads(example) | {"splits": []}
    (tmp_path / "p.json").write_text(json.dumps(bare))
    assert isinstance(load_profile(tmp_path / "p.json").cost(Parallelism()), RooflineCost)
