"""A model as the planner sees it: the numbers that decide how long a step takes and how much memory it needs.

Dense decoders only. Bytes and counts; nothing here is read from weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from planner.terms import Split

DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}
ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ("embedded", "tiny", "diptych-tiny")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's dimensions.

    `ffn_matrices` is 3 for a gated feed-forward block, 2 for a plain one. `vectors` are numbers per layer that every
    tensor-parallel rank holds whole (biases, norms). `positions` are learned position embeddings. `table_split` says
    that ranks share the vocabulary; DistServe's OPT holds it whole on each device. `weight_bytes` is of one number in
    a layer's matrices, `kv_bytes` of one in the cache; embeddings keep at least 16 bits.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    ffn_matrices: int
    vocab: int
    max_len: int
    positions: int = 0
    vectors: int = 0
    tied: bool = False
    table_split: bool = True
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def layer_matrix(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + self.ffn_matrices * self.hidden * self.ffn

    @property
    def table(self) -> int:
        """Numbers in one vocabulary matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.table * (1 if self.tied else 2) + self.positions * self.hidden
        return tables + self.layers * (self.layer_matrix + self.vectors)

    @property
    def kv_token_bytes(self) -> float:
        """KV of one token over all layers and heads, in bytes."""
        return 2 * self.kv_bytes * self.layers * self.kv_heads * self.head_dim

    @property
    def table_bytes(self) -> float:
        """Bytes of one number in an embedding."""
        return max(self.weight_bytes, 2.0)

    def device_layers(self, split: Split) -> int:
        """Layers of the largest stage."""
        return -(-self.layers // split.pp)

    def device_kv_heads(self, split: Split) -> int:
        """KV heads on one device: a share, or one copy each where there are more devices than heads."""
        return -(-self.kv_heads // split.tp)

    def layer_weights(self, split: Split) -> float:
        """Numbers in one layer's matrices on one device; KV projections are copied where tp exceeds the KV heads."""
        query = 2 * self.hidden * self.head_dim * self.heads / split.tp
        keys = 2 * self.hidden * self.head_dim * self.device_kv_heads(split)
        return query + keys + self.ffn_matrices * self.hidden * self.ffn / split.tp

    def weights_bytes(self, split: Split) -> float:
        """Bytes of weights on the fullest device of an instance.

        Embedding and output matrix lie on the first and the last stage; with one stage a tied one is held once.
        """
        share = split.tp if self.table_split else 1
        tables = (
            self.table * (2 if split.pp == 1 and not self.tied else 1) / share + self.positions * self.hidden
        )
        layers = self.device_layers(split)
        vectors = self.table_bytes * layers * self.vectors
        return self.table_bytes * tables + self.weight_bytes * layers * self.layer_weights(split) + vectors

    def kv_device_token_bytes(self, split: Split) -> float:
        """KV of one token on one device, in bytes."""
        return 2 * self.kv_bytes * self.device_layers(split) * self.device_kv_heads(split) * self.head_dim

    def valid(self, split: Split) -> bool:
        """Whether heads and layers divide: tp divides the query heads, and the KV heads or they it; pp the layers."""
        if self.heads % split.tp or self.layers % split.pp:
            return False
        return self.kv_heads % split.tp == 0 or split.tp % self.kv_heads == 0

    def splits(self, devices: int, exactly: bool = False) -> Iterator[Split]:
        """Valid splits over at most `devices` devices, or over just as many; by tp, then pp."""
        for tp in range(1, devices + 1):
            for pp in range(1, devices // tp + 1):
                split = Split(tp, pp)
                if self.valid(split) and (not exactly or split.devices == devices):
                    yield split


def shape_of(config: Mapping[str, Any], name: str = "") -> Shape:
    """The shape told by a Hugging Face `config.json`.

    Raises:
        ConfigError: a dimension is missing, or the model is not a dense decoder.
    """
    name = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            raise ConfigError(
                f"{name} cannot be planned for",
                f"its config names {config[key]} experts ({key}); cost models are of dense decoders",
                "plan for a dense model",
            )
    fix = "give the folder or config.json of a decoder from Hugging Face"
    try:
        shape = _read(config, name)
    except KeyError as missing:
        raise ConfigError(
            f"{name} cannot be planned for", f"its config has no {missing.args[0]}", fix
        ) from None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError) as error:
        raise ConfigError(
            f"{name} cannot be planned for", f"its config has a dimension that is none: {error}", fix
        ) from None
    counts = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab)
    if min(*counts, shape.max_len) < 1:
        raise ConfigError(f"{name} cannot be planned for", "its config has a dimension below 1", fix)
    return shape


def _read(config: Mapping[str, Any], name: str) -> Shape:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    plain = "ffn_dim" in config  # OPT: two matrices, learned positions, biases
    kind = str(config.get("model_type", ""))
    vectors = 2 * hidden
    if kind == "qwen2":
        vectors += (heads + 2 * kv_heads) * head_dim
    if kind == "qwen3":
        vectors += 2 * head_dim
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    stored = DTYPE_BYTES.get(dtype, 2.0)
    quantised = config.get("quantization_config") or {}
    return Shape(
        name=name,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=int(config["ffn_dim"] if plain else config["intermediate_size"]),
        ffn_matrices=2 if plain else 3,
        vocab=int(config["vocab_size"]),
        max_len=int(config["max_position_embeddings"]),
        positions=int(config["max_position_embeddings"]) if plain else 0,
        vectors=5 * hidden if plain else vectors,
        tied=bool(config.get("tie_word_embeddings", plain)),
        table_split=not plain,
        weight_bytes=1.0 if quantised.get("quant_method") in ("fp8", "modelopt") else stored,
        kv_bytes=stored,
    )


def on_cpu(shape: Shape) -> Shape:
    """As workers hold it that compute on the CPU: weights and KV are float32 there, whatever the checkpoint has."""
    return replace(shape, weight_bytes=DTYPE_BYTES["float32"], kv_bytes=DTYPE_BYTES["float32"])


def _opt(name: str, layers: int, hidden: int, heads: int) -> Shape:
    """OPT as DistServe's artefact counts it: 12 h² + 5 h a layer, the embeddings whole on each device."""
    return Shape(
        name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, 2, 50272, 2048,
        positions=2048, vectors=5 * hidden, tied=True, table_split=False,
    )  # fmt: skip


def _llama(name: str, *dims: int, tied: bool = False, biased: bool = False, normed: bool = False) -> Shape:
    """`dims`: layers, hidden, heads, KV heads, head width, feed-forward width, vocabulary, longest context."""
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab, max_len = dims
    vectors = 2 * hidden + biased * (heads + 2 * kv_heads) * head_dim + normed * 2 * head_dim
    return Shape(
        name, layers, hidden, heads, kv_heads, head_dim, ffn, 3, vocab, max_len, vectors=vectors, tied=tied
    )


# Dimensions from each model's published config.json.
KNOWN = {
    shape.name.lower(): shape
    for shape in (
        _opt("OPT-6.7B", 32, 4096, 32),
        _opt("OPT-13B", 40, 5120, 40),
        _opt("OPT-30B", 48, 7168, 56),
        _opt("OPT-66B", 64, 9216, 72),
        _opt("OPT-175B", 96, 12288, 96),
        _llama("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
        _llama("Llama-2-13B", 40, 5120, 40, 40, 128, 13824, 32000, 4096),
        _llama("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000, 4096),
        _llama("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
        _llama("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        _llama("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, 131072),
        _llama("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
        _llama("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, 131072, tied=True),
        _llama("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        _llama("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000, 32768),
        _llama("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, 32768, tied=True, biased=True),
        _llama("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, 32768, tied=True, biased=True),
        _llama("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, 32768, tied=True, biased=True),
        _llama("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 32768, biased=True),
        _llama("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, 32768, biased=True),
        _llama("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, 32768, biased=True),
        _llama("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, 32768, biased=True),
        _llama("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied=True, normed=True),
        _llama("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, 40960, tied=True, normed=True),
        _llama("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 40960, normed=True),
        _llama("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 40960, normed=True),
        _llama("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960, normed=True),
    )
}


def known(name: str | Path) -> Shape:
    """The shape of a built-in model, of the embedded one ("embedded"), or of a folder with a `config.json`.

    Owners, and endings such as -Instruct or -hf, do not matter; -FP8 makes weights of 8 bits.

    Raises:
        ConfigError: the name is none of these; it lists those built in.
    """
    text = str(name)
    if text in EMBEDDED:
        folder = ROOT / "models" / "tiny"
        return shape_of(json.loads((folder / "config.json").read_text()), "diptych-tiny")
    plain = text.rsplit("/", 1)[-1].lower()
    eight = plain.endswith("-fp8")
    plain = re.sub(
        r"(-fp8|-instruct|-chat|-base|-hf|-it|-v0\.\d)+$", "", plain.replace("meta-llama", "llama")
    )
    if plain in KNOWN:
        return (
            replace(KNOWN[plain], name=KNOWN[plain].name + "-FP8", weight_bytes=1.0)
            if eight
            else KNOWN[plain]
        )
    folder = Path(text)
    file = folder / "config.json" if folder.is_dir() else folder
    if file.name == "config.json" and file.is_file():
        return shape_of(_json(file), folder.resolve().name if folder.is_dir() else file.parent.resolve().name)
    raise ConfigError(
        f"the model {text!r} is not known",
        "built in: " + ", ".join(sorted(shape.name for shape in KNOWN.values())),
        "name one of these, or give the folder of a model (its config.json tells its shape)",
    )


def _json(file: Path) -> Mapping[str, Any]:
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read", str(error), "give a folder with a valid config.json"
        ) from None
    if not isinstance(read, dict):
        raise ConfigError(f"{file} is not a model's config", "it holds no JSON object", "give a config.json")
    return read
