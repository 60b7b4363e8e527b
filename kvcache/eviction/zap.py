"""The rule `zap`: a linear function of a head's own key and value says what to keep.

KVzip (Kim et al. 2025, arXiv 2505.23416) lets a model repeat its context and keeps the rows that this looks at; KVzap
(Jegou and Jeblick 2026, arXiv 2601.07891) predicts such scores instead of computing them. Here the prediction is linear
in a row's key before rotation, its value, and the logarithms of their norms, with weights for each head
(`engine.calibration.keep_fit`). So scores follow from KV as it is stored: every worker that has a row judges it alike.

Rows that score below a threshold go once they are older than 64 tokens. The threshold of a share T is the one with
which the calibration's text keeps T of the attention of its repetition.

The file `kvquant.zap` lies beside the calibration of codecs (`surrogate_path`). With L layers, H KV heads
and heads of D numbers it has

    weights      [L, H, 2 D + 3] float32: of key, value, log of the key's norm, of the value's norm, and a constant
    thresholds   [99] float32: for T = 0.01 to 0.99, descending, since a larger share keeps more

and as metadata `format`, `model`, `layers`, `kv_heads`, `head_dim`, `tokens`, `r2` and `digest`.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from diptych.errors import ModelError
from diptych.hashing import HashField, hash_fields
from kvcache.codecs.calibration import METADATA_KEY, CalibratedModel, read_metadata
from kvcache.layout import Shard

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]

FILE_SUFFIX = ".zap"
FORMAT = "diptych kvzap 1"
ADVICE = "calibrate this model again, or remove the file: requests are then evicted by the rule ada"
MAX_FILE_BYTES = 64 << 20
NUM_THRESHOLDS = 99
# Norms are at least this large before their logarithm is taken.
MIN_NORM = 1e-6
HASH_CHARS = 16


def row_features(keys: Doubles, values: NDArray[Any]) -> Doubles:
    """What a score is linear in, [n, 2 D + 3], from unrotated keys and values, [n, D] each."""
    wide = np.asarray(values, np.float64)
    norms = [np.log(np.maximum(np.sqrt((x * x).sum(axis=1)), MIN_NORM)) for x in (keys, wide)]
    return np.concatenate([keys, wide, norms[0][:, None], norms[1][:, None], np.ones((len(keys), 1))], axis=1)


class Angles:
    """The rotations of rows at some positions, which all heads share."""

    def __init__(self, positions: NDArray[Any], frequencies: Doubles) -> None:
        angles = np.asarray(positions, np.float64)[:, None] * frequencies
        self._cos, self._sin = np.cos(angles), np.sin(angles)

    def take_last(self, count: int) -> tuple[Doubles, Doubles]:
        """Cosines and sines of the last `count` positions, [count, D / 2] each."""
        first = len(self._cos) - count
        return self._cos[first:], self._sin[first:]

    def unrotate(self, keys: NDArray[Any]) -> Doubles:
        """Keys [n, D] of the last n of the positions as they were before they were rotated."""
        low, high = np.split(np.asarray(keys, np.float64), 2, axis=1)
        cos, sin = self.take_last(len(keys))
        return np.concatenate([low * cos + high * sin, high * cos - low * sin], axis=1)


@dataclass(frozen=True)
class KeepSurrogate:
    """The weights of all layers and KV heads of a model, or of a rank's.

    `tokens` tells on how many tokens they were fitted, and `r2` how much of the variance of scores they explain; both
    are outside the digest.
    """

    model: CalibratedModel
    weights: Floats
    thresholds: Floats
    tokens: int = 0
    r2: float = 0.0

    @cached_property
    def digest(self) -> str:
        """The hash that names these weights; 16 hex characters."""
        fields: list[HashField] = [FORMAT, *msgspec.structs.astuple(self.model)]
        for array in (self.weights, self.thresholds):
            fields += ["x".join(map(str, array.shape)), np.ascontiguousarray(array).tobytes()]
        return hash_fields(fields).hex()[:HASH_CHARS]

    @property
    def rule(self) -> str:
        """The rule as `diptych.eviction_spec.KeepSpec` names it."""
        return f"zap@{self.digest}"

    def take_shard(self, shard: Shard) -> KeepSurrogate:
        """The weights of a rank's layers and heads."""
        return replace(self, weights=self.weights[slice(*shard.layers), slice(*shard.heads)])

    def score_rows(
        self, layer: int, head: int, keys: NDArray[Any], values: NDArray[Any], angles: Angles
    ) -> Doubles:
        """The scores of rows of a head, [n]: logarithms of attention. Arguments are those of `row_features`, but keys
        are rotated.

        Each row's sum has one order, whatever rows are beside it.
        """
        features = row_features(angles.unrotate(keys), values)
        scores: Doubles = (features * self.weights[layer, head].astype(np.float64)).sum(axis=1)
        return scores

    def find_threshold(self, share: float) -> float:
        """The score below which rows go if `share` of the attention is to stay; between two shares, a line.

        Beyond the last share, the threshold falls as the attention that may go: scores are logarithms of attention.
        """
        grid = np.arange(1, NUM_THRESHOLDS + 1) / (NUM_THRESHOLDS + 1)
        found = float(np.interp(share, grid, self.thresholds.astype(np.float64)))
        if share >= 1:
            return -math.inf
        return found + math.log((1 - share) / (1 - grid[-1])) if share > grid[-1] else found


def surrogate_path(calibration: Path) -> Path:
    """The file that belongs to a file of codecs' calibration, beside it: `x.zap` to `x.safetensors`."""
    return calibration.with_name(calibration.stem + FILE_SUFFIX)


def serialise_surrogate(surrogate: KeepSurrogate) -> bytes:
    """The content of a file. Equal surrogates give equal bytes."""
    model, arrays = surrogate.model, {"weights": surrogate.weights, "thresholds": surrogate.thresholds}
    header: dict[str, Any] = {
        METADATA_KEY: {
            "format": FORMAT,
            "model": model.fingerprint,
            "layers": str(model.layers),
            "kv_heads": str(model.kv_heads),
            "head_dim": str(model.head_dim),
            "tokens": str(surrogate.tokens),
            "r2": f"{surrogate.r2:.4f}",
            "digest": surrogate.digest,
        }
    }
    place = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32", "shape": array.shape, "data_offsets": [place, place + array.nbytes],
        }  # fmt: skip
        place += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return len(text).to_bytes(8, "little") + text + data


def pack_surrogate(surrogate: KeepSurrogate | None) -> tuple[bytes, CalibratedModel] | None:
    """What `parse_surrogate` takes in another process; None of None."""
    return None if surrogate is None else (serialise_surrogate(surrogate), surrogate.model)


def write_surrogate(surrogate: KeepSurrogate, path: Path) -> None:
    """Write the file whole or not at all. Raises OSError if it cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(serialise_surrogate(surrogate))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_surrogate(path: Path, model: CalibratedModel) -> KeepSurrogate:
    """Read and check the file of `model`.

    Raises:
        ModelError: it cannot be read, or as `parse_surrogate`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ModelError(f"the file {path} cannot be read", error.strerror or str(error), ADVICE) from error
    return parse_surrogate(content, model, str(path))


def parse_surrogate(content: bytes, model: CalibratedModel, name: str = FILE_SUFFIX) -> KeepSurrogate:
    """Check the content of a file of `model`, whose name is for errors.

    Raises:
        ModelError: it is too large, damaged, of another format or model, or has impossible numbers.
    """
    try:
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        metadata, tensors = read_metadata(content, (FORMAT,)), load(content)
        _check_model(name, metadata, model)
        return _check_content(metadata, tensors, model)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, msgspec.DecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the file {name} is no calibration of evictions", reason, ADVICE) from error


def _check_model(name: str, metadata: dict[str, str], model: CalibratedModel) -> None:
    """Raises ModelError if the file belongs to another model."""
    wanted = {
        "model": model.fingerprint,
        "layers": str(model.layers),
        "kv_heads": str(model.kv_heads),
        "head_dim": str(model.head_dim),
    }
    for field, value in wanted.items():
        found = metadata.get(field, "not given")
        if found != value:
            raise ModelError(
                f"the file {name} belongs to another model",
                f"{field} is {found[:64]} in the file and {value} here",
                ADVICE,
            )


def _check_content(
    metadata: dict[str, str], tensors: dict[str, NDArray[Any]], model: CalibratedModel
) -> KeepSurrogate:
    """The surrogate of a file. Raises ValueError if its numbers cannot be right."""
    shapes = {
        "weights": (model.layers, model.kv_heads, 2 * model.head_dim + 3),
        "thresholds": (NUM_THRESHOLDS,),
    }
    if tensors.keys() != shapes.keys():
        raise ValueError(f"it has the tensors {', '.join(sorted(tensors))[:100]}")
    for name, shape in shapes.items():
        array = tensors[name]
        if array.dtype != np.float32 or array.shape != shape:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds numbers that are not finite")
    if (np.diff(tensors["thresholds"]) > 0).any():
        raise ValueError("thresholds ascend, so a larger share would keep less")
    tokens, r2 = metadata.get("tokens", ""), metadata.get("r2", "")
    if not re.fullmatch(r"[0-9]{1,12}", tokens, re.ASCII) or not math.isfinite(float(r2)):
        raise ValueError(f"tokens and r2 are {tokens[:40]!r} and {r2[:40]!r}")
    found = KeepSurrogate(model, tensors["weights"], tensors["thresholds"], int(tokens), float(r2))
    if metadata.get("digest") != found.digest:
        raise ValueError(f"its digest is {metadata.get('digest', 'not given')[:64]}, not {found.digest}")
    return found
