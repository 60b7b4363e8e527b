"""Where a model lies on disk and what it needs: its folder, config, weight index, memory arithmetic and fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from diptych.errors import ConfigError, ModelError
from diptych.hashing import Field, digest, fingerprint
from engine.model.linear import NARROW
from engine.model.memory import Memory, available_memory, plan_memory
from engine.model.shape import Shape, check_config, read_shape
from engine.model.weights import READABLE, dtype_of
from kvcache.layout import CHUNK_TOKENS, KVLayout, Shard, shards

WIRE_VERSION = 1  # of the KV bytes as they travel; grows when their meaning changes

FETCHED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
MATRIX = "model.layers.0.mlp.down_proj.weight"  # one for all: checkpoints have one dtype
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

RANKS_PER_CORE = 4  # beyond this a worker's ranks would mostly wait for each other's turn

HASH_WHOLE_BYTES = 256 << 20  # up to here every byte of the weights is hashed, beyond it samples are
SAMPLES, SAMPLE_BYTES = 64, 64 << 10


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder in Hugging Face layout that was found complete and supported. No tensor has been read yet."""

    name: str  # as asked for: a folder or a hub id
    path: Path
    shape: Shape
    weights: dict[str, Path]  # tensor name -> safetensors file

    @classmethod
    def resolve(cls, name: str, revision: str | None = None) -> ModelFiles:
        """Find `name`, a local folder or a hub id (downloaded if it is not cached), and read all but the tensors.

        Raises:
            ModelError: not found, incomplete (config, tokenizer, weights), or not supported. Remote code never runs.
        """
        path = _locate(name, revision)
        raw = _read_json(path / "config.json", name)
        architecture = check_config(name, raw)
        try:
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ModelError(f"the config.json of {name} is not valid", _brief(error)) from error
        if not any((path / tokenizer).is_file() for tokenizer in TOKENIZERS):
            raise ModelError(
                f"the folder of {name} has no tokenizer",
                f"none of {', '.join(TOKENIZERS)} is in {path}",
                "copy the tokenizer files of the model next to its weights",
            )
        return cls(name, path, read_shape(name, architecture, config), _index(name, path))

    def layout(self, dtype: str = "float32") -> KVLayout:
        """How this model's KV lies in memory."""
        return KVLayout(self.shape.layers, self.shape.kv_heads, self.shape.head_dim, dtype)

    def split(self, tp: int, pp: int) -> tuple[Shard, ...]:
        """What each of `tp * pp` ranks holds.

        Raises:
            ConfigError: that is more ranks than this machine's cores can carry.
            ModelError: the heads do not divide among `tp` ranks, or there are fewer layers than `pp` stages.
        """
        shape, layout, cores = self.shape, self.layout(), len(os.sched_getaffinity(0))
        if tp * pp > RANKS_PER_CORE * cores:
            why = f"each computes in a process of its own, and there are {cores} cores for them"
            raise ConfigError(
                f"{tp * pp} ranks are too many for one worker here", why, "use a smaller tp or pp"
            )
        heads = [n for n in range(1, shape.kv_heads + 1) if shape.kv_heads % n == 0]
        try:
            return shards(layout, tp, pp)
        except ValueError as error:
            raise ModelError(
                f"{self.name} cannot be split into {pp} stages of {tp} ranks",
                f"it has {shape.layers} layers of {shape.heads} heads over {shape.kv_heads} KV heads: {error}",
                f"use a tp of {', '.join(map(str, heads))}, and a pp of at most {shape.layers}",
            ) from None

    def memory(
        self,
        *,
        max_model_len: int | None,
        kv_bytes: int | None,
        available_bytes: int | None = None,
        tp: int = 1,
        step_tokens: int = 512,
        step_rows: int = 64,
    ) -> Memory:
        """Decide context and pool size, and check that they fit in `available_bytes` (default: what the system has).

        `max_model_len` None is the model's own; `kv_bytes` None is room for several full requests, as far as fits. The
        rest is as in `plan_memory`.

        Raises:
            ModelError: longer than the model's context, or it does not fit; `why` has the arithmetic.
        """
        available = available_memory() if available_bytes is None else available_bytes
        return plan_memory(
            self.name,
            self.shape,
            self.layout(),
            max_model_len=max_model_len,
            kv_bytes=kv_bytes,
            available=available,
            tp=tp,
            matrix_bytes=self._matrix_bytes(),
            step_tokens=step_tokens,
            step_rows=step_rows,
        )

    def _matrix_bytes(self) -> int:
        """Bytes per number of the matrices in memory: two if stored so, and products can read it."""
        path = self.weights.get(MATRIX)
        stored = READABLE.get(dtype_of(path, MATRIX) or "") if path is not None else None
        return 2 if stored in NARROW.values() else 4

    def fingerprint(self, dtype: str = "float32") -> tuple[str, dict[str, str]]:
        """(hex digest, readable fields) of everything two workers must share to exchange KV.

        The name is shown but not hashed: the same content in another folder is the same model. Weights up to 256 MiB
        are hashed whole; larger ones by file sizes, safetensors headers and 64 samples of 64 KiB per file, which tells
        apart any two trained checkpoints but would miss a few flipped bytes.
        """
        layout = self.layout(dtype)
        hashed: dict[str, Field] = {
            "weights": _hash_files(sorted(set(self.weights.values()))),
            "config": _hash_files([self.path / "config.json"]),
            "tokenizer": _hash_files(
                [self.path / name for name in TOKENIZERS if (self.path / name).is_file()]
            ),
            "dtype": dtype,
            "kv_layout": "x".join(map(str, layout.chunk_shape)),
            "chunk_tokens": CHUNK_TOKENS,
            "wire_version": WIRE_VERSION,
        }
        shown = {
            name: str(value)[:16]
            for name, value in hashed.items()
            if name in ("weights", "config", "tokenizer")
        }
        shown |= {name: str(value) for name, value in hashed.items() if name not in shown}
        return fingerprint(hashed), {"model": self.name} | shown


def _locate(name: str, revision: str | None) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(
            f"there is no model at {name}",
            "it is neither a folder nor a hub id of the form owner/name",
            "give a folder with config.json and *.safetensors, or an id such as Qwen/Qwen2.5-0.5B-Instruct",
        )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FETCHED, etag_timeout=5))
    except (
        HFValidationError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise ModelError(
            f"the model {name} is neither a folder here nor could it be fetched",
            _brief(error),
            "check the name and the network, or give the folder of a downloaded model",
        ) from error


def _index(name: str, path: Path) -> dict[str, Path]:
    """Tensor name -> file, from the sharded index or the single file's header."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        where = _read_json(index, name).get("weight_map", {})
        missing = sorted({file for file in where.values() if not (path / file).is_file()})
        if missing:
            raise ModelError(
                f"the weights of {name} are incomplete", f"missing in {path}: {', '.join(missing[:4])}"
            )
        return {tensor: path / file for tensor, file in where.items()}
    if not single.is_file():
        raise ModelError(
            f"the folder of {name} has no weights",
            f"neither model.safetensors nor model.safetensors.index.json is in {path}",
            "only safetensors are read; convert other formats with transformers' save_pretrained",
        )
    try:
        with safe_open(single, framework="np") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the weights file {single} cannot be read", _brief(error)) from error


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"the folder of {name} has no {path.name}",
            f"looked in {path.parent}",
            "give a Hugging Face model folder",
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"the {path.name} of {name} cannot be read", _brief(error)) from error
    if not isinstance(content, dict):
        raise ModelError(f"the {path.name} of {name} is not a JSON object")
    return content


def _brief(error: Exception) -> str:
    """The first line of an error, short enough to show."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _hash_files(paths: list[Path]) -> str:
    """Digest of the files' content (names do not matter, order does), remembered while size and time stay the same."""
    stamps = [(path, path.stat()) for path in paths]
    least = SAMPLES * SAMPLE_BYTES  # a file smaller than its samples is hashed whole as well
    small = sum(stat.st_size for _, stat in stamps) <= HASH_WHOLE_BYTES
    parts = [
        _hash_file(path, at.st_size, at.st_mtime_ns, small or at.st_size <= least) for path, at in stamps
    ]
    return digest(parts).hex()


@lru_cache(maxsize=1024)
def _hash_file(path: Path, size: int, mtime_ns: int, whole: bool) -> bytes:
    with path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").digest()
        sha = hashlib.sha256(size.to_bytes(8, "big"))
        header_bytes = min(8 + int.from_bytes(file.read(8), "little"), size)
        sha.update(os.pread(file.fileno(), header_bytes, 0))
        for sample in range(SAMPLES):
            sha.update(os.pread(file.fileno(), SAMPLE_BYTES, (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)))
        return sha.digest()
