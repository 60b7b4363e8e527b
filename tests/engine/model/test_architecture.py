"""Config files, read by our own code and by transformers: the same shape, or both refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding  # type: ignore[import-untyped]

from diptych.errors import ModelError
from engine.cpu.matmul import HALVES
from engine.model import weight_dtype
from engine.model.architecture import SUPPORTED, ModelConfig, RopeConfig, read_config
from tests.support.factories import FAMILIES, SMALL

ARCHITECTURES = {traits.model_type: name for name, traits in SUPPORTED.items()}


def expected(model_type: str, raw: dict[str, Any]) -> ModelConfig:
    """The shape as transformers' own configuration class says it."""
    fields = {name: value for name, value in copy.deepcopy(raw).items() if name != "model_type"}
    config = FAMILIES[model_type][0](**fields)
    traits = SUPPORTED[ARCHITECTURES[model_type]]
    bias, heads = bool(getattr(config, "attention_bias", False)), config.num_attention_heads
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    rope = config.rope_parameters
    scaled = rope["rope_type"] != "default"
    bounds = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return ModelConfig(
        architecture=ARCHITECTURES[model_type],
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
        o_bias=bias if traits.o_bias is None else traits.o_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=traits.qk_norm,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        rope=RopeConfig(
            rope["rope_type"],
            rope["rope_theta"],
            rope["factor"] if scaled else 1.0,
            *((rope[name] for name in bounds) if rope["rope_type"] == "llama3" else ()),
        ),
    )


def optional(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


theta = st.sampled_from([1e4, 5e5, 1e6])
factors = st.floats(1.0, 16.0, allow_nan=False)
ropes = st.one_of(
    st.none(),
    optional(rope_theta=theta),
    st.fixed_dictionaries({"rope_type": st.just("default")}, optional={"rope_theta": theta}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries({"type": st.just("linear"), "factor": factors}, optional={"rope_theta": theta}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.just(1.0),
            "high_freq_factor": st.just(4.0),
        },
        optional={"original_max_position_embeddings": st.integers(128, 8192), "rope_theta": theta},
    ),
)
layers = 3
configs = optional(
    vocab_size=st.integers(1, 200_000),
    hidden_size=st.sampled_from([128, 256, 4096]),
    intermediate_size=st.integers(1, 30_000),
    num_attention_heads=st.sampled_from([32, 64]),
    num_key_value_heads=st.sampled_from([1, 2, 4, 8]),
    max_position_embeddings=st.integers(1, 200_000),
    rms_norm_eps=st.sampled_from([1e-5, 1e-6]),
    tie_word_embeddings=st.booleans(),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    head_dim=st.sampled_from([32, 64, 128]),
    hidden_act=st.just("silu"),
    rope_parameters=ropes,
    rope_scaling=ropes,
    rope_theta=theta,
    sliding_window=st.sampled_from([None, 16, 4096]),
    use_sliding_window=st.booleans(),
    max_window_layers=st.integers(0, 5),
    layer_types=st.lists(
        st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers
    ),
    torch_dtype=st.just("float16"),
    transformers_version=st.just("4.40.0"),
).map(lambda found: found | {"num_hidden_layers": layers})


@given(model_type=st.sampled_from(sorted(FAMILIES)), raw=configs)
def test_the_shape_is_what_transformers_says(model_type: str, raw: dict[str, Any]) -> None:
    wanted = expected(model_type, raw)
    for stated in (raw, raw | {"model_type": model_type}):
        assert read_config("m", ARCHITECTURES[model_type], stated) == wanted


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_defaults_are_those_of_transformers(model_type: str) -> None:
    assert read_config("m", ARCHITECTURES[model_type], {}) == expected(model_type, {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 50}, "multiple"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"] * 5}, "5 entries for 2 layers"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs 'low_freq_factor'"),
    ],
)
def test_what_transformers_calls_invalid_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception):  # noqa: B017  transformers has an exception of its own for each
        expected("llama", SMALL | fields)
    with pytest.raises(ModelError) as caught:
        read_config("m", "LlamaForCausalLM", SMALL | fields)
    assert caught.value.what == "the config.json of m is not valid" and message in caught.value.why


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling is yarn"),
        ({"partial_rotary_factor": 0.5}, "rotates only a part"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            {
                "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
                "layer_types": ["full_attention"] * 2,
            },
            "differ by layer",
        ),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 7}, "do not divide"),
    ],
)
def test_what_is_not_implemented_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_config("m", "LlamaForCausalLM", SMALL | fields)
    assert caught.value.what == "the model m is not supported" and message in caught.value.why


@pytest.mark.parametrize("model_type", ["gpt2", None, 3, []])
def test_a_model_type_of_another_family_is_refused(model_type: Any) -> None:
    with pytest.raises(ModelError, match="not valid"):
        read_config("m", "LlamaForCausalLM", SMALL | {"model_type": model_type})


def test_memory_is_planned_for_the_matrices_that_the_kernels_hold() -> None:
    assert weight_dtype.has_float16_conversion() == HALVES
    assert bool(binding.get_host_cpu_features().get("f16c")) <= HALVES
    wide = 2 if HALVES else 4
    assert [weight_dtype.matrix_bytes(kind) for kind in ("F32", "BF16", "F16", None)] == [4, 2, wide, 4]
