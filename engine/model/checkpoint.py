"""A model on disk: finds its folder, config, weights and tokenizer, and computes its memory needs and fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from diptych.chunks import CHUNK_TOKENS, HINT_VERSION, KV_VERSION, TICKET_VERSION
from diptych.errors import ConfigError, ModelError
from diptych.hashing import HashField, fingerprint_fields, hash_fields
from diptych.model_config import CONFIG_FILE, load_model_config
from engine.model.architecture import ModelConfig, check_architecture, read_config
from engine.model.memory_plan import MemoryPlan, available_memory, plan_memory
from engine.model.safetensors_header import full_tensor_name, read_safetensors_header
from engine.model.weight_dtype import matrix_bytes
from kvcache.layout import KvLayout, Shard, split_layout

# All files of a model except its weights.
DESCRIPTION_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
CHECKPOINT_FILES = (*DESCRIPTION_FILES, "*.safetensors")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
# The dtype of this matrix stands for all weights, since checkpoints have a single dtype.
SAMPLE_MATRIX = "model.layers.0.mlp.down_proj.weight"
# Number of characters of a digest that are shown.
SHOWN_CHARS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# Most ranks per core. With more, the ranks of a worker would mostly wait for a core.
MAX_RANKS_PER_CORE = 4

# Weights of up to HASH_WHOLE_BYTES are hashed completely. Of larger ones, NUM_SAMPLES samples of SAMPLE_BYTES are
# hashed.
HASH_WHOLE_BYTES = 256 << 20
NUM_SAMPLES, SAMPLE_BYTES = 64, 64 << 10


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder in Hugging Face layout that is complete and supported. No tensor has been read yet."""

    # The model as the user named it: a folder or a hub id.
    name: str
    path: Path
    config: ModelConfig
    # The safetensors file of each tensor, by tensor name.
    weights: dict[str, Path]

    @classmethod
    def resolve(cls, name: str, revision: str | None = None) -> Checkpoint:
        """Find `name`, a local folder or a hub id (downloaded if it is not cached), and read everything but the
        tensors.

        Raises:
            ModelError: not found, incomplete (config, tokenizer, weights), or not supported. Remote code never runs.
        """
        path, config = find_model(name, revision, CHECKPOINT_FILES)
        return cls(name, path, config, _tensor_files(name, path))

    def layout(self, dtype: str = "float32", codec: str = "") -> KvLayout:
        """The layout of this model's KV in memory; `codec` is a canonical id, or empty."""
        return KvLayout(self.config.layers, self.config.kv_heads, self.config.head_dim, dtype, codec)

    def split(self, tp: int, pp: int, codec: str = "") -> tuple[Shard, ...]:
        """The shard (layers and KV heads) of each of `tp * pp` ranks.

        Raises:
            ConfigError: there are too many ranks for this machine's cores.
            ModelError: `tp` does not divide the heads or cuts a group of heads that `codec` codes together, or there
                are fewer layers than `pp` stages.
        """
        config, layout, cores = self.config, self.layout(codec=codec), len(os.sched_getaffinity(0))
        if tp * pp > MAX_RANKS_PER_CORE * cores:
            why = f"each computes in a process of its own, and there are {cores} cores for them"
            raise ConfigError(
                f"{tp * pp} ranks are too many for one worker here", why, "use a smaller tp or pp"
            )
        heads = [n for n in range(1, config.kv_heads + 1) if config.kv_heads % n == 0]
        if layout.pages_per_layer % tp and tp in heads:
            raise self._cuts_group(tp, layout)
        try:
            return split_layout(layout, tp, pp)
        except ValueError as error:
            raise ModelError(
                f"{self.name} cannot be split into {pp} stages of {tp} ranks",
                f"it has {config.layers} layers of {config.heads} heads over {config.kv_heads} KV heads: {error}",
                f"use a tp of {', '.join(map(str, heads))}, and a pp of at most {config.layers}",
            ) from None

    def _cuts_group(self, tp: int, layout: KvLayout) -> ModelError:
        """The error of a split that would cut heads which are coded together."""
        name, width = layout.codec.partition(".")[0], self.config.kv_heads // tp * self.config.head_dim
        return ModelError(
            f"{tp} ranks cannot share KV that is coded as {layout.codec}",
            f"it codes {layout.page_heads} KV heads together, and each rank has {self.config.kv_heads // tp}",
            f"use {name}.g{width}:  diptych calibrate {self.name} --group {width} --out FILE,"
            " then --kv-cache-calibration FILE\n"
            f"or tq4, which codes each head alone, or a tp of at most {layout.pages_per_layer}",
        )

    def memory(
        self,
        *,
        max_model_len: int | None,
        kv_bytes: int | None,
        codec: str = "",
        available_bytes: int | None = None,
        tp: int = 1,
        ranks: int | None = None,
        step_tokens: int = 512,
        step_rows: int = 64,
        coded: bool | None = None,
        evicting_seqs: int = 0,
    ) -> MemoryPlan:
        """Decide the context length and the pool size, and check that they fit in `available_bytes` (default: the
        system's).

        `max_model_len` None: the model's own context. `kv_bytes` None: room for several full requests, as far as it
        fits. `codec` is that of the pool, a canonical id or empty. The other arguments are those of `plan_memory`.

        Raises:
            ModelError: `max_model_len` exceeds the model's context, or memory is too small; `why` has the calculation.
        """
        available = available_memory() if available_bytes is None else available_bytes
        return plan_memory(
            self.name,
            self.config,
            self.layout(codec=codec),
            max_model_len=max_model_len,
            kv_bytes=kv_bytes,
            available=available,
            tp=tp,
            ranks=ranks,
            matrix_bytes=self._matrix_bytes(),
            step_tokens=step_tokens,
            step_rows=step_rows,
            coded=coded,
            evicting_seqs=evicting_seqs,
        )

    def _matrix_bytes(self) -> int:
        """Bytes per number of the matrices in memory: two if they are stored in 16 bits and the kernels support it."""
        path = self.weights.get(SAMPLE_MATRIX)
        return matrix_bytes(tensor_dtype(path, SAMPLE_MATRIX) if path is not None else None)

    def hash_weights(self) -> str:
        """Hex digest of the weights alone: the same in every folder, whatever lies beside them.

        Weights up to 256 MiB are hashed completely; larger ones by file sizes, safetensors headers and 64 samples of
        64 KiB per file, which distinguishes any two trained checkpoints but could miss a few flipped bytes.
        """
        return _hash_files(sorted(set(self.weights.values())))

    def packing_identity(self) -> str:
        """Hex digest of the weights for files made from them: also another if any of the weight files was written.

        So weights of which only samples are hashed, and a few bytes were changed in place, are not mistaken.
        """
        stats = [path.stat() for path in sorted(set(self.weights.values()))]
        times = [field for at in stats for field in (at.st_size, at.st_mtime_ns)]
        return hash_fields([self.hash_weights(), *times]).hex()

    def fingerprint(
        self, dtype: str = "float32", weight_kind: str = "exact", device_type: str = "cpu"
    ) -> tuple[str, dict[str, str]]:
        """(hex digest, readable fields) of everything that two workers must have in common to exchange KV.

        The name is among the fields but not hashed: the same content in another folder is the same model. Weights count
        as `hash_weights` says. A `weight_kind` other than "exact" is a field too, since it changes the answers; and so
        is a `device_type` other than "cpu", which rounds otherwise.
        """
        layout = self.layout(dtype)
        hashed: dict[str, HashField] = {
            "weights": self.hash_weights(),
            "config": _hash_files([self.path / CONFIG_FILE]),
            "tokenizer": _hash_tokenizer(self.path),
            "dtype": dtype,
            "kv_layout": "x".join(map(str, layout.chunk_shape)),
            "chunk_tokens": CHUNK_TOKENS,
            "wire_version": f"{KV_VERSION}.{TICKET_VERSION}.{HINT_VERSION}",
        }
        if weight_kind != "exact":
            hashed["weight_kind"] = weight_kind
        if device_type != "cpu":
            hashed["device_type"] = device_type
        shown = {
            name: str(value)[:SHOWN_CHARS]
            for name, value in hashed.items()
            if name in ("weights", "config", "tokenizer")
        }
        shown |= {name: str(value) for name, value in hashed.items() if name not in shown}
        return fingerprint_fields(hashed), {"model": self.name} | shown


def folder_fingerprint(name: str, folder: Path, fields: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """As `Checkpoint.fingerprint`, of a model of any architecture that another engine serves, and that engine's fields.

    Raises:
        OSError: a file of the folder cannot be read.
    """
    hashed: dict[str, HashField] = {
        "weights": _hash_files(sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)),
        "config": _hash_files([folder / CONFIG_FILE]),
        "tokenizer": _hash_tokenizer(folder),
    }
    shown = {field: str(value)[:SHOWN_CHARS] for field, value in hashed.items()}
    wire = f"{KV_VERSION}.{TICKET_VERSION}.{HINT_VERSION}"
    more = {**fields, "chunk_tokens": str(CHUNK_TOKENS), "wire_version": wire}
    return fingerprint_fields({**hashed, **more}), {"model": name} | shown | more


def tokenizer_identity(name: str, revision: str | None = None) -> str:
    """The tokenizer field of a worker's identity, computed for the model `name` on this machine.

    Raises:
        ModelError: the model was not found.
    """
    return _hash_tokenizer(locate_folder(name, revision, DESCRIPTION_FILES))[:SHOWN_CHARS]


def _hash_tokenizer(path: Path) -> str:
    return _hash_files([path / name for name in TOKENIZER_FILES if (path / name).is_file()])


def find_model(
    name: str, revision: str | None = None, patterns: Sequence[str] = DESCRIPTION_FILES
) -> tuple[Path, ModelConfig]:
    """The folder of a model, and its architecture according to its config. Weights need not be there.

    Files of a hub model are downloaded if they match `patterns`.

    Raises:
        ModelError: not found, without a config or a tokenizer, or not supported. Remote code never runs.
    """
    path = locate_folder(name, revision, patterns)
    raw = _read_json_object(path / CONFIG_FILE, name)
    config = read_config(name, check_architecture(name, raw), raw)
    _check_tokenizer(name, path)
    return path, config


def find_tokenized(name: str, revision: str | None, weights: bool) -> Path:
    """The folder of a model of any architecture, which another engine serves; it has a tokenizer that can be read.

    Files of a hub model are downloaded, with `weights` those of its weights too.

    Raises:
        ModelError: not found, or without a config or a tokenizer.
    """
    path = locate_folder(name, revision, CHECKPOINT_FILES if weights else DESCRIPTION_FILES)
    _read_json_object(path / CONFIG_FILE, name)
    _check_tokenizer(name, path)
    return path


def _check_tokenizer(name: str, path: Path) -> None:
    """Raises ModelError if the folder of a model has no tokenizer that can be read."""
    if not (path / TOKENIZER_FILES[0]).is_file():
        slow = [tokenizer for tokenizer in TOKENIZER_FILES[1:] if (path / tokenizer).is_file()]
        raise ModelError(
            f"the folder of {name} has no tokenizer.json",
            f"{slow[0]} alone is not read" if slow else f"looked in {path}",
            "convert it: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            if slow
            else "copy the tokenizer files of the model next to its config",
        )


def is_folder_name(name: str) -> bool:
    """Whether a model's name means a folder, which need not exist, rather than a hub id."""
    folder = Path(name).expanduser()
    return folder.is_dir() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1


def locate_folder(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder of a model. Files of a hub model that match `patterns` are downloaded if they are not cached.

    Raises:
        ModelError: `name` is neither a folder nor a hub model that can be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if is_folder_name(name):
        raise ModelError(
            f"there is no model at {name}",
            "it is neither a folder nor a hub id of the form owner/name",
            "give a folder with config.json and *.safetensors, or an id such as Qwen/Qwen2.5-0.5B-Instruct",
        )
    # Imported only here, since it loads an HTTP client that folders do not need.
    from engine.model import hub

    try:
        return Path(hub.fetch_snapshot(name, revision, patterns))
    except (*hub.HUB_ERRORS, OSError) as error:
        raise ModelError(
            f"the model {name} is neither a folder here nor could it be fetched",
            _first_line(error),
            "check the name and the network, or give the folder of a downloaded model",
        ) from error


def _tensor_files(name: str, path: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded checkpoint or the header of its single file."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        where = _read_json_object(index, name).get("weight_map", {})
        missing = sorted({file for file in where.values() if not (path / file).is_file()})
        if missing:
            raise ModelError(
                f"the weights of {name} are incomplete", f"missing in {path}: {', '.join(missing[:4])}"
            )
        return {full_tensor_name(tensor): path / file for tensor, file in where.items()}
    if not single.is_file():
        raise ModelError(
            f"the folder of {name} has no weights",
            f"neither model.safetensors nor model.safetensors.index.json is in {path}",
            "only safetensors are read; convert other formats with transformers' save_pretrained",
        )
    try:
        return dict.fromkeys(read_safetensors_header(single), single)
    except (ValueError, OSError) as error:
        raise ModelError(f"the weights file {single} cannot be read", _first_line(error)) from error


def tensor_dtype(path: Path, name: str) -> str | None:
    """The dtype of a tensor in safetensors' notation; None if the file has no such tensor or cannot be read."""
    try:
        return read_safetensors_header(path)[name].dtype
    except (ValueError, KeyError, OSError):
        return None


def _read_json_object(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the model `name`. Raises ModelError if there is none."""
    try:
        if path.name == CONFIG_FILE:
            return load_model_config(path.parent)
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"the folder of {name} has no {path.name}",
            f"looked in {path.parent}",
            "give a Hugging Face model folder",
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"the {path.name} of {name} cannot be read", _first_line(error)) from error
    except TypeError:
        content = None
    if not isinstance(content, dict):
        raise ModelError(f"the {path.name} of {name} is not a JSON object")
    return content


def _first_line(error: Exception) -> str:
    """The first line of an error's text, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _hash_files(paths: list[Path]) -> str:
    """Digest of the contents of files in this order; a file is hashed again only if its size or time has changed."""
    stamps = [(path, path.stat()) for path in paths]
    # Files with fewer bytes than all samples together are hashed completely, too.
    least = NUM_SAMPLES * SAMPLE_BYTES
    small = sum(stat.st_size for _, stat in stamps) <= HASH_WHOLE_BYTES
    parts = [
        _hash_file(path, at.st_size, at.st_mtime_ns, small or at.st_size <= least) for path, at in stamps
    ]
    return hash_fields(parts).hex()


@lru_cache(maxsize=1024)
def _hash_file(path: Path, size: int, mtime_ns: int, whole: bool) -> bytes:
    """Digest of one file: of all its bytes, or of its size, header and samples. The arguments are the cache key."""
    with path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").digest()
        sha = hashlib.sha256(size.to_bytes(8, "big"))
        header_bytes = min(8 + int.from_bytes(file.read(8), "little"), size)
        sha.update(os.pread(file.fileno(), header_bytes, 0))
        for sample in range(NUM_SAMPLES):
            sha.update(
                os.pread(file.fileno(), SAMPLE_BYTES, (size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
            )
        return sha.digest()
