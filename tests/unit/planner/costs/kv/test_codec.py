"""Bytes of coded KV, counted by hand, and what follows from them: room, moved bytes, profiles and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from kvcache.codecs.codec_id import complete_codec_id, parse_codec_id
from kvcache.layout import KvLayout
from planner.costs.capacity import kv_capacity_tokens
from planner.costs.kv.codec import code_profile, codec_note, find_codec, is_same_codec, with_kv_codec
from planner.costs.model import dims_on_cpu, find_model
from planner.costs.profile_file import built_in_profile, load_profile, save_profile
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.types import Parallelism

# 4 KV heads of 32 values.
EMBEDDED = dims_on_cpu(find_model("embedded"))
SPLIT = Parallelism()
STEP = StepCost((1e-3, 1e-5, 0.0), ((1e-3, 1e-8, 1e-4),))


def numbers(layers: int, kv_heads: int, head_dim: int) -> int:
    """Numbers of KV of one token: keys and values."""
    return 2 * layers * kv_heads * head_dim


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        ("raw", 32),
        ("fp16", 16),
        ("fp8", 8),
        # Factors of a calibration take no room in a page.
        (f"int4.g32@{'a' * 16}", 4 + 1),
        (f"tq3@{'a' * 16}", 3 + 0.5),
        # A group is the head of 32 values: scale and minimum are 32 bits for 32 values.
        ("int8", 8 + 1),
        ("int4", 4 + 1),
        # One scale of 16 bits for 32 values.
        ("tq4", 4 + 0.5),
        ("tq-k8v4", (8 + 4) / 2 + 0.5),
        # A group is 128 values: 2 outliers of 16 + 8 bits; values have a scale and a zero point of 16 bits besides.
        ("nuq4-1%", 4 + 2 * 24 / 128 + 32 / 128 / 2),
    ],
)
def test_bytes_per_token_of_the_embedded_model(codec: str, bits: float) -> None:
    shape = with_kv_codec(EMBEDDED, codec)
    assert (EMBEDDED.kv_heads, EMBEDDED.head_dim) == (4, 32)
    assert shape.kv_token_bytes == numbers(EMBEDDED.layers, 4, 32) * bits / 8
    assert shape.kv_codec == ("" if codec == "raw" else codec)


@pytest.mark.parametrize("codec", ["int8", "tq4", "nuq4-1%", "nuq3-1%"])
def test_it_is_what_workers_store_and_move(codec: str) -> None:
    whole = complete_codec_id(parse_codec_id(codec), 4, 32, "0" * 16 if codec.startswith("nuq") else None)
    layout = KvLayout(EMBEDDED.layers, 4, 32, "float32", str(whole))
    assert 64 * with_kv_codec(EMBEDDED, codec).kv_token_bytes == layout.chunk_bytes


def test_llama_at_tq4() -> None:
    """8 KV heads of 128 values in 32 layers: 4 bits and 16 bits per head, 4.125 bits in all."""
    shape = find_model("Llama-3.1-8B")
    assert shape.kv_token_bytes == 131_072
    assert with_kv_codec(shape, "tq4").kv_token_bytes == 2 * 32 * 8 * (128 * 4 + 16) / 8 == 33_792


def test_room_grows_as_bytes_shrink() -> None:
    memory = find_device("cpu").memory_bytes
    raw, coded = (
        kv_capacity_tokens(with_kv_codec(EMBEDDED, codec), SPLIT, memory) for codec in ("raw", "tq4")
    )
    assert coded / raw == pytest.approx(32 / 4.5, rel=1e-4)


def test_a_measured_room_is_scaled_and_steps_stay() -> None:
    profile = replace(built_in_profile("embedded", "cpu"), rooms={SPLIT: 9_000}, costs={SPLIT: STEP})
    coded = code_profile(profile, "tq4")
    assert coded.kv_tokens(SPLIT) == 9_000 * 64 // 9
    assert coded.cost(SPLIT) == STEP and coded.model.kv_codec == "tq4"
    assert code_profile(profile, "raw") is profile and code_profile(coded, "tq4") is coded
    size, steps = codec_note(coded.model, profile)
    assert "tq4" in size and f"{coded.model.kv_token_bytes:,.0f} bytes" in size
    assert "measured with KV of the class raw" in steps
    assert codec_note(coded.model, coded) == (size,), "it was measured with the codec itself"
    assert codec_note(profile.model, profile) == ()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("tq4", "tq4.s0", True),
        ("tq4", "tq4.s1", False),
        ("int8", "int8.g32", True),
        ("int8", "int8.g16", False),
        ("nuq4-1%", "nuq4-1%.g128@0123456789abcdef", True),
        ("nuq4-1%@0123456789abcdef", "nuq4-1%@fedcba9876543210", True),
        ("nuq4-1%", "nuq4-1%.g64", False),
        ("nuq4-1%", "nuq4", False),
        ("", "raw", True),
        ("raw", "fp16", False),
    ],
)
def test_names_are_compared_by_what_they_mean(first: str, second: str, same: bool) -> None:
    assert is_same_codec(EMBEDDED, first, second) is is_same_codec(EMBEDDED, second, first) is same


def test_a_class_with_factors_costs_what_was_measured_for_it() -> None:
    """The same codec with and without factors means the same to a plan; the one that is named goes first."""
    factored = f"int4.g32@{'a' * 16}"
    assert find_codec(EMBEDDED, ["int4.g32", factored], factored) == factored
    assert find_codec(EMBEDDED, [factored, "int4.g32"], "int4.g32") == "int4.g32"
    assert find_codec(EMBEDDED, ["raw", factored], "int4") == factored
    assert find_codec(EMBEDDED, ["raw", "fp16"], "fp8") is None


def test_a_profile_suits_every_name_of_its_codec() -> None:
    profile = replace(built_in_profile("embedded", "cpu"), rooms={SPLIT: 9_000}, costs={SPLIT: STEP})
    coded = code_profile(profile, "tq4")
    assert code_profile(coded, "tq4.s0") is coded
    assert len(codec_note(with_kv_codec(EMBEDDED, "tq4.s0"), coded)) == 1
    with pytest.raises(ConfigError, match="measured with KV of the codec tq4"):
        code_profile(coded, "tq4.s1")


def test_a_profile_of_another_codec_is_refused() -> None:
    coded = code_profile(built_in_profile("embedded", "cpu"), "tq4")
    for other in ("raw", "int8"):
        with pytest.raises(ConfigError, match="tq4") as caught:
            code_profile(coded, other)
        assert len(caught.value.lines()) <= 6 and other in str(caught.value)


def test_a_profile_keeps_its_codec(tmp_path: Path) -> None:
    coded = code_profile(replace(built_in_profile("embedded", "cpu"), costs={SPLIT: STEP}), "int8")
    save_profile(coded, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == coded


@pytest.mark.parametrize("codec", ["int5", "tq4.g9", ""])
def test_what_is_no_codec_is_refused(codec: str) -> None:
    with pytest.raises(ConfigError):
        with_kv_codec(EMBEDDED, codec)


@pytest.mark.parametrize(
    ("model", "device"), [("embedded", "cpu"), ("OPT-13B", "A100-80G"), ("OPT-30B", "A100-80G")]
)
def test_profiles_that_come_with_us_can_be_coded(model: str, device: str) -> None:
    shape = find_model(model)
    raw, coded = built_in_profile(shape, device), built_in_profile(with_kv_codec(shape, "tq4"), device)
    assert coded.model.kv_token_bytes < raw.model.kv_token_bytes / 3
    assert coded.kv_tokens(Parallelism(2)) > 3 * raw.kv_tokens(Parallelism(2))
