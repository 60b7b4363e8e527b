"""Several classes of KV for a model and its profile: bytes and room by the storage formula, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.errors import ConfigError, ModelError
from engine.model.memory_plan import MemoryPlan
from engine.model.pool_split import split_pool
from kvcache.layout import KvLayout
from planner.costs.kv.classes import (
    base_codec,
    check_class_rooms,
    kv_class_notes,
    plan_kv_classes,
    shared_kv_classes,
)
from planner.costs.kv.codec import code_profile, codec_note
from planner.costs.model import find_model
from planner.costs.profile_file import built_in_profile, load_profile, save_profile
from planner.costs.step import StepCost
from planner.sim.exact.deployment import InstanceSpec
from planner.sim.exact.simulate import class_slabs
from planner.types import KvClassWork, Parallelism, StepBatch

SPLIT = Parallelism()
STEP = StepCost((1e-3, 1e-5, 2e-9), ((1e-3, 1e-8, 1e-4), (2e-3, 5e-9, 1e-4)))
MEASURED = replace(built_in_profile("embedded", "cpu"), rooms={SPLIT: 64 * 900}, costs={SPLIT: STEP})
WORK = KvClassWork(token=1.2, square=0.9, context=0.75)
CODECS = {"raw": "", "tq4": "tq4.s0", "int8": "int8.g32", "nuq4-1%": "nuq4-1%.g128@0123456789abcdef"}


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("raw:0.25,nuq4-1%", {"raw": 0.25, "nuq4-1%": 0.75}),
        ("nuq4-1%:0.5,raw", {"nuq4-1%": 0.5, "raw": 0.5}),
        ("raw:0.2,int8:0.3,tq4", {"raw": 0.2, "int8": 0.3, "tq4": 0.5}),
    ],
)
def test_slabs_are_those_that_a_worker_takes(text: str, shares: dict[str, float]) -> None:
    """By `engine.model.memory_plan.split_pool`, over the layouts of the pools, for the same bytes."""
    classes = plan_kv_classes(MEASURED, text)
    assert {one.name: pytest.approx(one.share) for one in classes} == shares
    layouts = [KvLayout(6, 4, 32, "float32", CODECS[name]) for name in shares]
    pool_bytes = round(64 * 900 * MEASURED.model.kv_token_bytes)
    plan = MemoryPlan(1024, 900, pool_bytes, 0, 0, 0, 0)
    counts = split_pool("tiny", plan, layouts, list(shares.values()))
    predicted = class_slabs(InstanceSpec(STEP, MEASURED.kv_tokens(SPLIT)), classes)
    for slabs, layout, one in zip(counts, layouts, classes, strict=True):
        assert 64 * one.token_bytes == layout.chunk_bytes
        assert abs(predicted[one.name] - slabs) <= 1


def test_a_share_that_a_worker_refuses_is_refused() -> None:
    """By `split_pool` for the same bytes, and the advice is a share with which a worker starts."""
    kv_tokens = MEASURED.kv_tokens(SPLIT)
    pool_bytes = round(kv_tokens * MEASURED.model.kv_token_bytes)

    def split(text: str, max_model_len: int = 1024) -> tuple[int, ...]:
        plan = MemoryPlan(max_model_len, 900, pool_bytes, 0, 0, 0, 0)
        layouts = [KvLayout(6, 4, 32, "float32", CODECS[name]) for name in ("raw", "tq4")]
        return split_pool("tiny", plan, layouts, [one.share for one in plan_kv_classes(MEASURED, text)])

    check_class_rooms(plan_kv_classes(MEASURED, "raw:0.02,tq4"), kv_tokens, 1024)
    assert split("raw:0.02,tq4")[0] >= 16
    with pytest.raises(ModelError):
        split("raw:0.01,tq4")
    with pytest.raises(ConfigError, match="raw is too small for one request") as refused:
        check_class_rooms(plan_kv_classes(MEASURED, "raw:0.01,tq4"), kv_tokens, 1024)
    assert len(refused.value.lines()) <= 6
    assert "use --kv-cache-codec raw:0.02,tq4:0.97, or" in refused.value.fix
    assert "serve` accepts smaller shares with a smaller --max-model-len" in refused.value.fix
    check_class_rooms(plan_kv_classes(MEASURED, "raw:0.02,tq4:0.97"), kv_tokens, 1024)
    assert split("raw:0.02,tq4:0.97")[0] >= 16
    assert split("raw:0.01,tq4", 512)[0] >= 8
    # An instance without room for a request of full length serves shorter ones.
    check_class_rooms(plan_kv_classes(MEASURED, "raw:0.01,tq4"), kv_tokens, kv_tokens + 1)


def test_advised_shares_work_together() -> None:
    """Of a little more than one request: all that raw leaves is too little; of less, nothing has room for both."""
    classes = plan_kv_classes(MEASURED, "raw:0.9,tq4")
    with pytest.raises(ConfigError, match=r"tq4 is too small") as refused:
        check_class_rooms(classes, 1280.0, 1024)
    shares = re.search(r"use --kv-cache-codec (\S+), or", refused.value.fix)
    assert shares is not None
    check_class_rooms(plan_kv_classes(MEASURED, shares[1]), 1280.0, 1024)
    with pytest.raises(ConfigError, match=r"is too small") as refused:
        check_class_rooms(plan_kv_classes(MEASURED, "raw:0.9,tq4"), 1100.0, 1024)
    assert refused.value.fix.startswith("take fewer classes, or take instances with more memory")
    assert len(refused.value.lines()) <= 6


def test_a_single_codec_is_no_class() -> None:
    assert plan_kv_classes(MEASURED, "tq4") == plan_kv_classes(MEASURED, "raw:1") == ()
    assert [base_codec(text) for text in ("tq4", "tq4:0.5,raw", "tq4:0.5,int8")] == ["tq4", "raw", "tq4"]


def test_the_work_of_a_class_is_as_measured_else_that_of_raw() -> None:
    profile = replace(MEASURED, kv_classes={"tq4": WORK})
    raw, tq4, int8 = plan_kv_classes(profile, "raw:0.3,tq4.s0:0.3,int8")
    assert (raw.work, tq4.work, int8.work) == (KvClassWork(), WORK, KvClassWork())
    lines = kv_class_notes((raw, tq4, int8), {"raw": 0.5, "tq4.s0": 0.5}, profile)
    assert "tq4.s0: 30%" in lines[1] and "864 bytes per token, 50% of the requests" in lines[1]
    assert "not measured with KV of int8;" in lines[-1]
    assert len(kv_class_notes((raw, tq4), {}, profile)) == 2


def test_analytic_attention_reads_the_bytes_of_the_class() -> None:
    profile = built_in_profile("Llama-3.1-8B", "H100")
    raw, tq4 = plan_kv_classes(profile, "raw:0.5,tq4")
    assert raw.work == KvClassWork() and tq4.work == KvClassWork(context=33_792 / 131_072)
    assert raw.room == 0.5 and tq4.room == pytest.approx(0.5 * 131_072 / 33_792)


def test_a_profile_of_several_classes_serves_each_of_them(tmp_path: Path) -> None:
    profile = replace(MEASURED, kv_classes={"nuq4-1%": WORK})
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    coded = code_profile(profile, "nuq4-1%.g128")
    assert coded.kv_tokens(SPLIT) == int(64 * 900 * 6144 / 864)
    assert len(codec_note(coded.model, profile)) == 1, "its steps were measured"
    plain, cost = STEP, coded.cost(SPLIT)
    decode, prefill = StepBatch(0, 0.0, 4, 40_000), StepBatch(100, 1e4)
    assert cost.step_s(decode) == pytest.approx(plain.step_s(StepBatch(0, 0.0, 4, 30_000)))
    assert cost.step_s(prefill) == pytest.approx(plain.step_s(StepBatch(120, 0.9e4)))
    assert len(codec_note(code_profile(profile, "tq4").model, profile)) == 2


def test_a_profile_without_classes_is_still_read(tmp_path: Path) -> None:
    save_profile(MEASURED, tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    assert '"kv_classes": {}' in text
    (tmp_path / "p.json").write_text(text.replace(',\n "kv_classes": {}', ""), encoding="utf-8")
    assert load_profile(tmp_path / "p.json") == MEASURED


@pytest.mark.parametrize(
    ("entry", "message"),
    [('{"int5": {}}', "int5"), ('{"raw": {}}', "raw should be"), ('{"tq4": {"token": 0}}', "token")],
)
def test_classes_of_a_file_that_cannot_be_are_refused(tmp_path: Path, entry: str, message: str) -> None:
    save_profile(MEASURED, tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    (tmp_path / "p.json").write_text(
        text.replace('"kv_classes": {}', f'"kv_classes": {entry}'), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="not valid") as caught:
        load_profile(tmp_path / "p.json")
    assert message in " ".join(caught.value.lines()) and len(caught.value.lines()) <= 6


def test_a_profile_of_a_codec_is_refused_for_classes_that_it_does_not_know() -> None:
    coded = code_profile(MEASURED, "tq4")
    for text in ("raw:0.5,tq4", "tq4:0.5,int8"):
        with pytest.raises(ConfigError, match="measured with KV of tq4") as caught:
            plan_kv_classes(coded, text)
        assert len(caught.value.lines()) <= 6
    both = replace(coded, kv_classes={"int8": WORK})
    assert [one.work for one in plan_kv_classes(both, "int8:0.5,tq4")] == [WORK, KvClassWork()]


def test_one_class_twice_and_devices_with_other_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        plan_kv_classes(MEASURED, "tq4:0.5,tq4.s0")
    there = built_in_profile(find_model("embedded"), "H100")
    with pytest.raises(ConfigError, match="same size of KV") as caught:
        shared_kv_classes([MEASURED, there], "raw:0.5,tq4")
    assert len(caught.value.lines()) <= 6
    assert shared_kv_classes([MEASURED, there], "tq4") == ()
