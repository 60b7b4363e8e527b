"""The one reader of a model's `config.json`: its content with the defaults of its family, as Hugging Face has them.

Only these fields are read and checked. The defaults are those of transformers' configuration classes, and tests compare
with these. transformers itself is not imported, since that takes seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from diptych.errors import ModelError

CONFIG_FILE = "config.json"

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]

DEFAULT_THETA = 10_000.0
# Names of layer types in older files, and their present names.
LEGACY_KINDS = {"attention": "full_attention"}
ATTENTION_KINDS = ("full_attention", "sliding_attention")


class ConfigFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all families. A field that only some families have is optional here."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    rope_parameters: dict[str, Any] | None = None
    # Older files call `rope_parameters` by this name.
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = DEFAULT_THETA
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def layer_kinds(self) -> list[str]:
        """The kind of attention of each layer: "full_attention" or "sliding_attention".

        Raises:
            ValueError: the number of kinds is not the number of layers.
        """
        if self.layer_types is None:
            return ["sliding_attention"] * self.num_hidden_layers
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        return [LEGACY_KINDS.get(kind, kind) for kind in self.layer_types]

    def window(self) -> int:
        """Number of tokens that a layer with a sliding window attends to; 0 means all."""
        return self.sliding_window or 0

    def rope(self) -> dict[str, Any]:
        """The rotary parameters under their current names: `rope_type`, `rope_theta`, and the parameters of the
        type.
        """
        found = dict(self.rope_scaling or self.rope_parameters or {})
        found.setdefault("rope_theta", self.rope_theta)
        found.setdefault("rope_type", found.get("type", "default"))
        if self.partial_rotary_factor is not None:
            found.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if found["rope_type"] == "llama3":
            found.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        return found


class LlamaFields(ConfigFields, frozen=True, kw_only=True):
    vocab_size: PositiveInt = 32_000
    intermediate_size: PositiveInt = 11_008
    max_position_embeddings: PositiveInt = 2048

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            why = f"{self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            raise ValueError(f"hidden_size {why}")


class MistralFields(ConfigFields, frozen=True, kw_only=True):
    vocab_size: PositiveInt = 32_000
    intermediate_size: PositiveInt = 14_336
    num_key_value_heads: PositiveInt | None = 8
    max_position_embeddings: PositiveInt = 4096 * 32
    sliding_window: int | None = 4096


class Qwen2Fields(ConfigFields, frozen=True, kw_only=True):
    """Layers from `max_window_layers` on have a sliding window, if `use_sliding_window` is set."""

    vocab_size: PositiveInt = 151_936
    intermediate_size: PositiveInt = 22_016
    num_key_value_heads: PositiveInt | None = 32
    max_position_embeddings: PositiveInt = 32_768
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def layer_kinds(self) -> list[str]:
        """The kind of attention of each layer, first to last."""
        if self.layer_types is not None:
            return super().layer_kinds()
        full = min(max(self.max_window_layers, 0), self.num_hidden_layers)
        return ["full_attention"] * full + ["sliding_attention"] * (self.num_hidden_layers - full)

    def window(self) -> int:
        """Tokens in the sliding window; 0 if no layer has one."""
        return super().window() if self.use_sliding_window else 0


class Qwen3Fields(Qwen2Fields, frozen=True, kw_only=True):
    head_dim: PositiveInt | None = 128


FAMILIES: dict[str, type[ConfigFields]] = {
    "llama": LlamaFields,
    "mistral": MistralFields,
    "qwen2": Qwen2Fields,
    "qwen3": Qwen3Fields,
}


def load_model_config(folder: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The content of a model folder's `config.json`, with the family's defaults for the fields that it leaves out.

    Args:
        folder: where the file is.
        missing_ok: whether a folder without the file has an empty content.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON.
        TypeError: it is not a JSON object.
    """
    file = folder / CONFIG_FILE
    if missing_ok and not file.is_file():
        return {}
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise TypeError(f"{CONFIG_FILE} is not a JSON object")
    return _family_defaults(content.get("model_type")) | content


def _family_defaults(model_type: object) -> dict[str, Any]:
    """The values that fields of this family have where a file leaves them out; none for other families."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        return {}
    defaults = {field.name: field.default for field in msgspec.structs.fields(family)}
    return {
        name: value
        for name, value in defaults.items()
        if value is not None and value is not msgspec.NODEFAULT
    }


def read_config_fields(name: str, model_type: str, raw: dict[str, Any]) -> ConfigFields:
    """Check and return the fields of a config. `model_type` is used if the file has none.

    Args:
        name: the model's name, for the error.
        model_type: the default family, a key of `FAMILIES`.
        raw: the content of `config.json`.

    Raises:
        ModelError: a field has an invalid value, or the file's `model_type` is not in `FAMILIES`.
    """
    try:
        family = FAMILIES.get(raw.get("model_type", model_type))
        if family is None:
            raise ValueError(f"model_type is {raw['model_type']!r}, not one of {', '.join(FAMILIES)}")
        found = msgspec.convert(raw, family)
        found.layer_kinds()
        return found
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise invalid_config(name, str(error)) from error


def invalid_config(name: str, why: str) -> ModelError:
    """The error for a `config.json` with an invalid value."""
    return ModelError(f"the config.json of {name} is not valid", why.splitlines()[0][:200] if why else "")
