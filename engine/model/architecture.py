"""Reads a model's architecture from its Hugging Face config, and refuses unsupported features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diptych.errors import ModelError
from diptych.model_config import (
    ATTENTION_KINDS,
    ConfigFields,
    invalid_config,
    read_config_fields,
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of rotary positions. `kind` is "default", "linear" (uses `factor`) or "llama3" (uses all)."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a Llama-family decoder: RMSNorm, rotary grouped-query attention, gated SiLU."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    # Length of the longest supported sequence, in tokens.
    context: int
    eps: float
    # Whether the output matrix is the embedding table.
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    # How many tokens back the attention of each layer reaches, the token itself included; 0 means all.
    windows: tuple[int, ...]
    rope: RopeConfig

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Numbers in the matrices as held in memory: a tied output matrix counts twice, since a packed copy is kept."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + 2 * self.vocab * self.hidden


@dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """How an architecture differs from Llama. None: as `attention_bias` in the config says."""

    model_type: str = "llama"
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False


SUPPORTED = {
    "LlamaForCausalLM": ArchitectureTraits(),
    "MistralForCausalLM": ArchitectureTraits("mistral", qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": ArchitectureTraits("qwen2", qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": ArchitectureTraits("qwen3", qk_norm=True),
}


def unsupported_model(name: str, why: str) -> ModelError:
    """The error for a model that is not supported."""
    return ModelError(
        f"the model {name} is not supported", why, f"use one of {', '.join(SUPPORTED)}, not quantised"
    )


def check_architecture(name: str, raw: dict[str, Any]) -> str:
    """The architecture that `config.json` names.

    Raises:
        ModelError: it is not one of `SUPPORTED`, or the checkpoint is quantised.
    """
    architecture = (raw.get("architectures") or ["(none named)"])[0]
    if architecture not in SUPPORTED:
        raise unsupported_model(name, f"its config.json names the architecture {architecture}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise unsupported_model(name, f"its weights are quantised (method {method})")
    return str(architecture)


def read_config(name: str, architecture: str, raw: dict[str, Any]) -> ModelConfig:
    """Convert `config.json` of a supported architecture to a `ModelConfig`.

    Raises:
        ModelError: a field is not valid, or asks for an activation, a rope scaling, a kind of attention or a head
            count that is not implemented.
    """
    traits = SUPPORTED[architecture]
    config = read_config_fields(name, traits.model_type, raw)
    bias, heads = bool(config.attention_bias), config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or config.hidden_size // heads
    if config.hidden_act != "silu":
        raise unsupported_model(name, f"its activation is {config.hidden_act}, and only silu is implemented")
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise unsupported_model(
            name, f"{heads} query heads over {kv_heads} KV heads of width {head_dim} do not divide"
        )
    return ModelConfig(
        architecture=architecture,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
        o_bias=bias if traits.o_bias is None else traits.o_bias,
        mlp_bias=bool(config.mlp_bias),
        qk_norm=traits.qk_norm,
        windows=_attention_windows(name, config),
        rope=_rope_config(name, config.rope()),
    )


def _attention_windows(name: str, config: ConfigFields) -> tuple[int, ...]:
    """The attention window of each layer, in tokens; 0 means all."""
    kinds = config.layer_kinds()
    unknown = sorted(set(kinds) - set(ATTENTION_KINDS))
    if unknown:
        raise unsupported_model(
            name, f"its layers use {unknown[0]}; implemented are {' and '.join(ATTENTION_KINDS)}"
        )
    return tuple(config.window() if kind == "sliding_attention" else 0 for kind in kinds)


def _rope_config(name: str, parameters: dict[str, Any]) -> RopeConfig:
    """Check and convert the rotary parameters. Raises ModelError for a scaling that is not implemented."""
    kind = parameters["rope_type"]
    if any(layer in parameters for layer in ATTENTION_KINDS):
        raise unsupported_model(name, "its rotary parameters differ by layer")
    if kind not in ("default", "linear", "llama3"):
        raise unsupported_model(
            name, f"its rope scaling is {kind}; implemented are default, linear and llama3"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported_model(name, "it rotates only a part of each head")
    try:
        theta = float(parameters["rope_theta"])
        if kind == "default":
            return RopeConfig(kind, theta)
        factor = float(parameters["factor"])
        if kind == "linear":
            return RopeConfig(kind, theta, factor)
        return RopeConfig(
            kind,
            theta,
            factor,
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise invalid_config(name, f"its rope scaling is {kind}, which needs {error}") from None
    except (TypeError, ValueError) as error:
        raise invalid_config(name, f"its rope parameters are not numbers: {error}") from None
