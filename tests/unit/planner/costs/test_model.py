"""Shapes: published parameter counts, KV sizes, splits, and configs that cannot be planned for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from planner.costs.model import BUILT_IN_MODELS, ModelDims, dims_from_config, find_model
from planner.types import Parallelism


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("facebook/opt-13b", 12.85),
        ("facebook/opt-66b", 65.7),
        ("OPT-175B", 174.6),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("meta-llama/Llama-3.1-70B", 70.55),
        ("meta-llama/Llama-2-70b-hf", 68.98),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen2.5-32B", 32.76),
        ("Qwen/Qwen2.5-72B", 72.7),
        ("Qwen/Qwen3-32B", 32.76),
        ("mistralai/Mistral-7B-v0.1", 7.24),
        ("Qwen/Qwen2.5-0.5B", 0.494),
    ],
)
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert find_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_kv_of_a_token() -> None:
    assert (
        find_model("OPT-66B").kv_token_bytes == 2 * 2 * 9216 * 64
    )  # 1.125 GiB for 512 tokens, as the paper says
    assert find_model("Llama-3.1-70B").kv_token_bytes == 2 * 2 * 80 * 8 * 128


@pytest.mark.parametrize("shape", BUILT_IN_MODELS.values(), ids=lambda one: one.name)
def test_devices_hold_less_the_more_there_are(shape: ModelDims) -> None:
    one = find_model(shape.name)
    splits = sorted(one.splits(16), key=lambda split: split.devices)
    assert Parallelism() in splits
    for split in splits:
        for wider in (Parallelism(split.tp * 2, split.pp), Parallelism(split.tp, split.pp * 2)):
            if one.valid(wider):
                assert one.weights_bytes(wider) < one.weights_bytes(split)
                assert one.kv_device_token_bytes(wider) <= one.kv_device_token_bytes(split)


def test_splits_divide_heads_and_layers_or_copy_kv_heads() -> None:
    shape = find_model("Llama-3.1-70B")  # 64 heads, 8 of KV, 80 layers
    assert set(shape.splits(4)) == {
        Parallelism(1),
        Parallelism(2),
        Parallelism(4),
        Parallelism(1, 2),
        Parallelism(2, 2),
        Parallelism(1, 4),
    }
    assert shape.valid(Parallelism(16)) and shape.device_kv_heads(Parallelism(16)) == 1
    assert not shape.valid(Parallelism(3)) and not shape.valid(Parallelism(1, 3))
    assert all(split.devices == 8 for split in shape.splits(8, exactly=True))
    copied = shape.layer_weights(Parallelism(16)) * 16 - shape.layer_weights(Parallelism(8)) * 8
    assert copied == 2 * 8192 * 128 * 8  # eight more copies of one K and one V head


def test_the_stage_with_a_vocabulary_matrix_is_the_fullest() -> None:
    shape = find_model("Llama-3.1-8B")
    halves = shape.weights_bytes(Parallelism(1, 2))
    assert halves - shape.weights_bytes(Parallelism()) / 2 == pytest.approx(0, abs=1)


def test_eight_bit_weights_keep_their_embeddings() -> None:
    wide, narrow = find_model("Llama-3.1-70B"), find_model("nvidia/Llama-3.1-70B-Instruct-FP8")
    tables = 2 * wide.table * 2
    assert narrow.weights_bytes(Parallelism()) - tables == pytest.approx(
        (wide.weights_bytes(Parallelism()) - tables) / 2, rel=1e-3
    )


def test_a_folder_and_the_embedded_model(tmp_path: Path) -> None:
    shape = find_model("embedded")
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.tied) == (6, 256, 4, True)
    config = {
        "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, built = find_model(tmp_path), find_model("Qwen2.5-0.5B")
    assert read.parameters == built.parameters and read.kv_token_bytes == built.kv_token_bytes


def test_an_opt_config_counts_as_the_artefact_does() -> None:
    config = {
        "model_type": "opt", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40,
        "ffn_dim": 20480, "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16",
    }  # fmt: skip
    assert dims_from_config(config).parameters == find_model("OPT-13B").parameters


def test_unknown_models_experts_and_broken_configs_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as unknown:
        find_model("gpt-7")
    assert "Llama-3.1-8B" in unknown.value.why and len(unknown.value.lines()) <= 6
    with pytest.raises(ConfigError) as experts:
        dims_from_config({"num_local_experts": 8}, "Mixtral")
    assert "dense" in experts.value.why
    with pytest.raises(ConfigError) as missing:
        dims_from_config({"hidden_size": 8, "num_attention_heads": 2}, "half")
    assert "num_hidden_layers" in missing.value.why
    whole = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 100, "max_position_embeddings": 128,
    }  # fmt: skip
    assert dims_from_config(whole).layers == 2
    for wrong in (
        {"hidden_size": "wide"},
        {"vocab_size": None},
        {"num_attention_heads": 0},
        {"head_dim": -1},
    ):
        with pytest.raises(ConfigError, match="cannot be planned for"):
            dims_from_config(whole | wrong)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError):
        find_model(tmp_path)
