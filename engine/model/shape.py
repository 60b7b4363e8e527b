"""A model's architecture as numbers, read from its Hugging Face config; what we cannot run is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diptych.errors import ModelError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` is "default", "linear" (uses `factor`) or "llama3" (uses all)."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-family decoder: RMSNorm, rotary grouped-query attention, gated SiLU."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context: int  # longest sequence the model was made for, in tokens
    eps: float
    tied: bool  # the output matrix is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # by layer: how many tokens back attention reaches, itself included; 0 is all
    rope: Rope

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Numbers in the matrices as they are held in memory: a tied output matrix is held a second time, packed."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + 2 * self.vocab * self.hidden


@dataclass(frozen=True, slots=True)
class Traits:
    """Where an architecture departs from Llama. None means: as the config's `attention_bias` says."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False


SUPPORTED = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": Traits(qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Traits(qk_norm=True),
}


def refuse(name: str, why: str) -> ModelError:
    """The error for a model we do not run."""
    return ModelError(
        f"the model {name} is not supported", why, f"use one of {', '.join(SUPPORTED)}, not quantised"
    )


def check_config(name: str, raw: dict[str, Any]) -> str:
    """The architecture named by `config.json`.

    Raises:
        ModelError: it is not one of `SUPPORTED`, or the checkpoint is quantised.
    """
    architecture = (raw.get("architectures") or ["(none named)"])[0]
    if architecture not in SUPPORTED:
        raise refuse(name, f"its config.json names the architecture {architecture}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise refuse(name, f"its weights are quantised (method {method})")
    return str(architecture)


def read_shape(name: str, architecture: str, config: Any) -> Shape:
    """`config` (a transformers config of a supported architecture) as a `Shape`.

    Raises:
        ModelError: an activation, a rope scaling or a head count that we do not implement.
    """
    traits = SUPPORTED[architecture]
    bias = bool(getattr(config, "attention_bias", False))
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if config.hidden_act != "silu":
        raise refuse(name, f"its activation is {config.hidden_act}, and only silu is implemented")
    if heads % kv_heads or head_dim % 2:
        raise refuse(name, f"{heads} query heads over {kv_heads} KV heads of width {head_dim} do not divide")
    return Shape(
        architecture=architecture,
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=int(config.intermediate_size),
        vocab=int(config.vocab_size),
        context=int(config.max_position_embeddings),
        eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
        o_bias=bias if traits.o_bias is None else traits.o_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=traits.qk_norm,
        windows=_windows(config),
        rope=_rope(name, config.rope_parameters),
    )


def _windows(config: Any) -> tuple[int, ...]:
    """Attention span of each layer. Configs without layer types (Mistral) use the window in all layers."""
    layers, window = int(config.num_hidden_layers), int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(name: str, parameters: dict[str, Any]) -> Rope:
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise refuse(name, f"its rope scaling is {kind}; implemented are default, linear and llama3")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse(name, "it rotates only a part of each head")
    theta, factor = float(parameters["rope_theta"]), float(parameters.get("factor", 1.0))
    if kind != "llama3":
        return Rope(kind, theta, factor)
    return Rope(
        kind,
        theta,
        factor,
        float(parameters["low_freq_factor"]),
        float(parameters["high_freq_factor"]),
        int(parameters["original_max_position_embeddings"]),
    )
