"""Defines model dimensions, from which step times and the memory of weights and KV are computed.

Only dense decoders are covered. Everything is computed from config.json; no weights are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from diptych.model_config import CONFIG_FILE, load_model_config
from planner.types import Count, CountOrZero, Parallelism, Positive, PositiveOrZero

DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}
REPO_ROOT = Path(__file__).resolve().parents[2]
EMBEDDED_NAMES = ("embedded", "tiny", "diptych-tiny")


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The dimensions of a dense decoder, and the memory that follows from them.

    `ffn_matrices` is 3 for a gated feed-forward block, 2 for a plain one. `vectors` counts the numbers per layer that
    every tensor-parallel rank holds whole (biases, norms). `positions` is the number of learned position embeddings.
    `table_split` is true if ranks split the vocabulary; DistServe's OPT holds it whole on each device. `weight_bytes`
    is the size of one number in a layer's matrices (embeddings keep at least 2 bytes), `kv_bytes` of one number in the
    KV cache. `lookup_bytes` is 0 unless each rank holds a whole embedding beside a separate output matrix, as CPU
    workers do: then it is the size of one number in that embedding, in hidden states and in vectors, and the output
    matrix has `weight_bytes`. `kv_codec` names the codec of the KV cache as `--kv-cache-codec` does; "": none.
    """

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count
    ffn_matrices: Count
    vocab: Count
    max_len: Count
    positions: CountOrZero = 0
    vectors: CountOrZero = 0
    tied: bool = False
    table_split: bool = True
    weight_bytes: Positive = 2.0
    kv_bytes: Positive = 2.0
    lookup_bytes: PositiveOrZero = 0.0
    kv_codec: str = ""

    @property
    def layer_matrix(self) -> int:
        """Number of weights in the matrices of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + self.ffn_matrices * self.hidden * self.ffn

    @property
    def table(self) -> int:
        """Number of weights in one vocabulary matrix (embedding or output)."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Total number of weights; tied input and output embeddings count once."""
        tables = self.table * (1 if self.tied else 2) + self.positions * self.hidden
        return tables + self.layers * (self.layer_matrix + self.vectors)

    @property
    def kv_token_bytes(self) -> float:
        """KV of one token over all layers and heads, in bytes."""
        return 2 * self.kv_bytes * self.layers * self.kv_heads * self.head_dim

    @property
    def table_bytes(self) -> float:
        """Bytes of one number in an embedding: at least 2, also if layers are quantised to 8 bits."""
        return max(self.weight_bytes, 2.0)

    @property
    def state_bytes(self) -> float:
        """Bytes of one number in a hidden state, a norm or a bias."""
        return self.lookup_bytes or self.table_bytes

    def device_layers(self, parallelism: Parallelism) -> int:
        """Layers of the largest pipeline stage."""
        return -(-self.layers // parallelism.pp)

    def device_kv_heads(self, parallelism: Parallelism) -> int:
        """KV heads on one device; tp above the number of KV heads copies a head to several devices."""
        return -(-self.kv_heads // parallelism.tp)

    def layer_weights(self, parallelism: Parallelism) -> float:
        """Weights in one layer's matrices on one device; KV projections are copied where tp exceeds the KV heads."""
        query = 2 * self.hidden * self.head_dim * self.heads / parallelism.tp
        keys = 2 * self.hidden * self.head_dim * self.device_kv_heads(parallelism)
        return query + keys + self.ffn_matrices * self.hidden * self.ffn / parallelism.tp

    def weights_bytes(self, parallelism: Parallelism) -> float:
        """Bytes of weights on the fullest device of an instance.

        The first stage holds the embedding, the last stage the output matrix. With one stage, tied matrices count once.
        """
        layers = self.device_layers(parallelism)
        vectors = self.state_bytes * layers * self.vectors
        return (
            self._tables_bytes(parallelism)
            + self.weight_bytes * layers * self.layer_weights(parallelism)
            + vectors
        )

    def _tables_bytes(self, parallelism: Parallelism) -> float:
        """Bytes of embedding and output matrix on the device that holds most of them."""
        share = parallelism.tp if self.table_split else 1
        positions = self.state_bytes * self.positions * self.hidden
        if self.lookup_bytes:
            lookup, output = self.lookup_bytes * self.table, self.weight_bytes * self.table / share
            return (lookup + output if parallelism.pp == 1 else max(lookup, output)) + positions
        tables = self.table * (2 if parallelism.pp == 1 and not self.tied else 1) / share
        return self.table_bytes * tables + positions

    def kv_device_token_bytes(self, parallelism: Parallelism) -> float:
        """KV of one token on one device, in bytes."""
        return (
            2
            * self.kv_bytes
            * self.device_layers(parallelism)
            * self.device_kv_heads(parallelism)
            * self.head_dim
        )

    def valid(self, parallelism: Parallelism) -> bool:
        """Whether `parallelism` divides the model evenly: query heads and KV heads by tp, layers by pp.

        tp may also be a multiple of the number of KV heads, which are then copied.
        """
        if self.heads % parallelism.tp or self.layers % parallelism.pp:
            return False
        return self.kv_heads % parallelism.tp == 0 or parallelism.tp % self.kv_heads == 0

    def splits(self, devices: int, exactly: bool = False) -> Iterator[Parallelism]:
        """Valid splits over at most `devices` devices (or `exactly` that many), ordered by tp, then pp."""
        for tp in range(1, devices + 1):
            for pp in range(1, devices // tp + 1):
                parallelism = Parallelism(tp, pp)
                if self.valid(parallelism) and (not exactly or parallelism.devices == devices):
                    yield parallelism


def dims_from_config(config: Mapping[str, Any], name: str = "") -> ModelDims:
    """The dimensions of a model, from its Hugging Face `config.json`.

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
        dims = _read_config(config, name)
    except KeyError as missing:
        raise ConfigError(
            f"{name} cannot be planned for", f"its config has no {missing.args[0]}", fix
        ) from None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError) as error:
        raise ConfigError(
            f"{name} cannot be planned for", f"its config has a dimension that is none: {error}", fix
        ) from None
    counts = (dims.layers, dims.hidden, dims.heads, dims.kv_heads, dims.head_dim, dims.ffn, dims.vocab)
    if min(*counts, dims.max_len) < 1:
        raise ConfigError(f"{name} cannot be planned for", "its config has a dimension below 1", fix)
    return dims


def _read_config(config: Mapping[str, Any], name: str) -> ModelDims:
    """Reads the dimensions without checking them; a missing key raises KeyError."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    # Only OPT's config has this key. OPT has two matrices in its MLP, learned positions and biases.
    plain = "ffn_dim" in config
    kind = str(config.get("model_type", ""))
    vectors = 2 * hidden
    if kind == "qwen2":
        vectors += (heads + 2 * kv_heads) * head_dim
    if kind == "qwen3":
        vectors += 2 * head_dim
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    stored = DTYPE_BYTES.get(dtype, 2.0)
    quantised = config.get("quantization_config") or {}
    return ModelDims(
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


def dims_on_cpu(dims: ModelDims) -> ModelDims:
    """The dimensions as CPU workers hold the model in memory (`engine.model.memory_plan.plan_memory`).

    Matrices keep the 16 bits of their checkpoint; KV (unless it is coded), hidden states and the embedding are float32.
    """
    wide = DTYPE_BYTES["float32"]
    matrices = DTYPE_BYTES["bfloat16"] if dims.weight_bytes <= DTYPE_BYTES["bfloat16"] else wide
    kv_bytes = dims.kv_bytes if dims.kv_codec else wide
    return replace(dims, weight_bytes=matrices, kv_bytes=kv_bytes, lookup_bytes=wide)


def _opt_dims(name: str, layers: int, hidden: int, heads: int) -> ModelDims:
    """OPT as DistServe's artefact counts it: 12 h² + 5 h weights per layer, embeddings whole on each device."""
    return ModelDims(
        name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, 2, 50272, 2048,
        positions=2048, vectors=5 * hidden, tied=True, table_split=False,
    )  # fmt: skip


def _llama_dims(
    name: str, *dims: int, tied: bool = False, biased: bool = False, normed: bool = False
) -> ModelDims:
    """A Llama-like model. `dims`: layers, hidden, heads, KV heads, head width, FFN width, vocabulary, longest context.

    `biased` models have biases in the QKV projections (Qwen2); `normed` ones have norms of queries and keys (Qwen3).
    """
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab, max_len = dims
    vectors = 2 * hidden + biased * (heads + 2 * kv_heads) * head_dim + normed * 2 * head_dim
    return ModelDims(
        name, layers, hidden, heads, kv_heads, head_dim, ffn, 3, vocab, max_len, vectors=vectors, tied=tied
    )


# Dimensions from each model's published config.json.
BUILT_IN_MODELS = {
    dims.name.lower(): dims
    for dims in (
        _opt_dims("OPT-6.7B", 32, 4096, 32),
        _opt_dims("OPT-13B", 40, 5120, 40),
        _opt_dims("OPT-30B", 48, 7168, 56),
        _opt_dims("OPT-66B", 64, 9216, 72),
        _opt_dims("OPT-175B", 96, 12288, 96),
        _llama_dims("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
        _llama_dims("Llama-2-13B", 40, 5120, 40, 40, 128, 13824, 32000, 4096),
        _llama_dims("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000, 4096),
        _llama_dims("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
        _llama_dims("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        _llama_dims("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, 131072),
        _llama_dims("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
        _llama_dims("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, 131072, tied=True),
        _llama_dims("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        _llama_dims("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000, 32768),
        _llama_dims("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, 32768, tied=True, biased=True),
        _llama_dims("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, 32768, tied=True, biased=True),
        _llama_dims("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, 32768, tied=True, biased=True),
        _llama_dims("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 32768, biased=True),
        _llama_dims("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, 32768, biased=True),
        _llama_dims("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, 32768, biased=True),
        _llama_dims("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, 32768, biased=True),
        _llama_dims("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied=True, normed=True),
        _llama_dims("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, 40960, tied=True, normed=True),
        _llama_dims("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 40960, normed=True),
        _llama_dims("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 40960, normed=True),
        _llama_dims("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960, normed=True),
    )
}


def find_model(name: str | Path) -> ModelDims:
    """The dimensions of a built-in model, of the embedded model ("embedded"), or of a folder with a `config.json`.

    An owner ("meta-llama/") and suffixes such as -Instruct or -hf are ignored; the suffix -FP8 gives 8-bit weights.

    Raises:
        ConfigError: the model is not known. The error lists the built-in models.
    """
    text = str(name)
    if text in EMBEDDED_NAMES:
        folder = REPO_ROOT / "models" / "tiny"
        return dims_from_config(load_model_config(folder), "diptych-tiny")
    plain = text.rsplit("/", 1)[-1].lower()
    eight = plain.endswith("-fp8")
    plain = re.sub(
        r"(-fp8|-instruct|-chat|-base|-hf|-it|-v0\.\d)+$", "", plain.replace("meta-llama", "llama")
    )
    if plain in BUILT_IN_MODELS:
        return (
            replace(BUILT_IN_MODELS[plain], name=BUILT_IN_MODELS[plain].name + "-FP8", weight_bytes=1.0)
            if eight
            else BUILT_IN_MODELS[plain]
        )
    folder = Path(text)
    file = folder / CONFIG_FILE if folder.is_dir() else folder
    if file.name == CONFIG_FILE and file.is_file():
        return dims_from_config(
            _load_config(file), folder.resolve().name if folder.is_dir() else file.parent.resolve().name
        )
    raise ConfigError(
        f"the model {text!r} is not known",
        "built in: " + ", ".join(sorted(dims.name for dims in BUILT_IN_MODELS.values())),
        "name one of these, or give the folder of a model (its config.json holds its dimensions)",
    )


def _load_config(file: Path) -> Mapping[str, Any]:
    """Reads a `config.json`; raises ConfigError if it is unreadable or holds no JSON object."""
    try:
        return load_model_config(file.parent)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read", str(error), "give a folder with a valid config.json"
        ) from None
    except TypeError:
        raise ConfigError(
            f"{file} is not a model's config", "it holds no JSON object", "give a config.json"
        ) from None
