"""Calibration files: `kvquant.safetensors` holds what `nuq*` codecs need to know of a model.

For each codec name N in the file, with L layers, C key channels and codes of b bits:

    N.key_scales, N.key_zeros           [L, C] float16
    N.key_centroids, N.key_levels       [L, 2^b] float32
    N.value_centroids, N.value_levels   [L, 2^b] float32

and as metadata `format`, `model` (the hash of the weights), `layers`, `kv_heads`, `head_dim`, `group`, `digest`, and
outside the digest `tokens` and `quality`. The digest is part of a codec's id, so pages of two calibrations are never
taken for each other. A file is read whole, up to a limit, before anything in it is believed; if its digest is not that
of its content, it is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
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
from kvcache.codecs.codec_id import CALIBRATED, CODE_BITS, HASH_CHARS, CodecId
from kvcache.codecs.datatype import MIN_SCALE, Datatype, LayerConstants

FILE_NAME = "kvquant.safetensors"
FORMAT = "diptych kvquant 1"
MAX_FILE_BYTES = 64 << 20
# Largest absolute value of a level. Q-Norm stretches the range -1 to 1 by far less.
MAX_LEVEL = 4.0
# Most characters of a file's text that an error shows.
MAX_SHOWN_CHARS = 64
METADATA_KEY = "__metadata__"
ADVICE = "calibrate this model again, or use a codec that needs no calibration, for example tq4"
CALIBRATED_NAMES = tuple(name for name in CODE_BITS if CodecId(name).family == CALIBRATED)
TENSOR_PATTERN = re.compile(r"(?P<codec>nuq[234](-1%)?)\.(?P<part>[a-z_]+)")
CHANNEL_PARTS = ("key_scales", "key_zeros")
TABLE_PARTS = ("key_centroids", "key_levels", "value_centroids", "value_levels")


# Names of dtypes in safetensors' notation.
DTYPE_NAMES = {"float16": "F16", "float32": "F32"}


class CalibratedModel(msgspec.Struct, frozen=True):
    """The model that a calibration belongs to: the hash of its weights, and the shape of its KV."""

    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int


class CodecQuality(msgspec.Struct, frozen=True):
    """What one codec costs: mean bits of a stored number, growth of perplexity in percent and its 95 % interval."""

    bits: float
    ppl_delta_pct: float
    interval: tuple[float, float]


class MeasuredQuality(msgspec.Struct, frozen=True):
    """What was measured with a calibration, on text that it had not seen.

    `perplexity` is the model's own, over `windows` windows of `tokens` tokens. `codecs` has the codecs by name, those
    that need no calibration included.
    """

    windows: int
    tokens: int
    perplexity: float
    codecs: dict[str, CodecQuality]


@dataclass(frozen=True)
class Calibration:
    """Constants of one model: per codec name, one `LayerConstants` per layer.

    `group` is the number of values that share a scale per token; datatypes were fitted for it. `tokens` tells on how
    many tokens they were fitted, `quality` what they cost; both are outside the digest.
    """

    model: CalibratedModel
    group: int
    tokens: int
    constants: dict[str, tuple[LayerConstants, ...]]
    quality: MeasuredQuality | None = None

    @cached_property
    def digest(self) -> str:
        """The hash that names this calibration in a codec's id; 16 hex characters."""
        fields: list[HashField] = [FORMAT, *msgspec.structs.astuple(self.model), self.group]
        for name, array in sorted(_to_tensors(self).items()):
            fields += [name, str(array.dtype), "x".join(map(str, array.shape)), array.tobytes()]
        return hash_fields(fields).hex()[:HASH_CHARS]

    def group_constants(self, name: str, layer: int, first_channel: int) -> LayerConstants:
        """What one page needs: the constants of a layer, key channels cut to the group that begins at `first_channel`.

        Raises:
            ModelError: the file has no such codec.
        """
        if name not in self.constants:
            raise ModelError(
                f"the calibration has no constants for {name}", f"it has {', '.join(self.constants)}", ADVICE
            )
        whole, channels = self.constants[name][layer], slice(first_channel, first_channel + self.group)
        return LayerConstants(whole.key_scales[channels], whole.key_zeros[channels], whole.keys, whole.values)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the file whole or not at all. Equal calibrations give equal bytes.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(serialise_calibration(calibration))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def serialise_calibration(calibration: Calibration) -> bytes:
    """The content of a calibration file.

    The header is written here, since the safetensors library writes metadata in an order that changes from run to run.
    """
    model = calibration.model
    metadata = {
        "format": FORMAT,
        "model": model.fingerprint,
        "layers": str(model.layers),
        "kv_heads": str(model.kv_heads),
        "head_dim": str(model.head_dim),
        "group": str(calibration.group),
        "digest": calibration.digest,
        "tokens": str(calibration.tokens),
    }
    if calibration.quality is not None:
        metadata["quality"] = msgspec.json.encode(calibration.quality).decode()
    header: dict[str, Any] = {METADATA_KEY: metadata}
    parts, place = list[bytes](), 0
    # Wide numbers come first, so that all are aligned.
    for name, array in sorted(
        _to_tensors(calibration).items(), key=lambda item: (-item[1].itemsize, item[0])
    ):
        offsets = [place, place + array.nbytes]
        header[name] = {
            "dtype": DTYPE_NAMES[str(array.dtype)],
            "shape": array.shape,
            "data_offsets": offsets,
        }
        parts.append(array.tobytes())
        place = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _to_tensors(calibration: Calibration) -> dict[str, NDArray[Any]]:
    return {
        f"{name}.{part}": np.ascontiguousarray(np.stack([_part_of(layer, part) for layer in layers]))
        for name, layers in calibration.constants.items()
        for part in (*CHANNEL_PARTS, *TABLE_PARTS)
    }


def _part_of(layer: LayerConstants, part: str) -> NDArray[Any]:
    if part in CHANNEL_PARTS:
        return layer.key_scales if part == "key_scales" else layer.key_zeros
    side, _, table = part.partition("_")
    datatype = layer.keys if side == "key" else layer.values
    return datatype.centroids if table == "centroids" else datatype.levels


def read_calibration(path: Path, model: CalibratedModel) -> Calibration:
    """Reads and checks a calibration file of `model`.

    Raises:
        ModelError: the file is not there, too large, damaged, of another model, or holds numbers that cannot be right.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        metadata = read_metadata(content, FORMAT)
        tensors = load(content)
    except OSError as error:
        raise ModelError(
            f"the calibration file {path} cannot be read", error.strerror or str(error), ADVICE
        ) from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, msgspec.DecodeError) as error:
        raise ModelError(
            f"the file {path} is not a KVQuant calibration", _shorten(str(error)), ADVICE
        ) from error
    _check_model(path, metadata, model)
    try:
        group = _read_group(metadata, model)
        _check_tensors(tensors, model)
        tokens, quality = _read_count(metadata, "tokens"), _read_quality(metadata)
        found = Calibration(model, group, tokens, _to_constants(tensors, model.layers), quality)
        if metadata.get("digest") != found.digest:
            stated = _shorten(metadata.get("digest", "not given"), MAX_SHOWN_CHARS)
            raise ValueError(f"its digest is {stated}, and that of its content {found.digest}")
    except (ValueError, msgspec.DecodeError) as error:
        raise ModelError(f"the calibration file {path} is damaged", _shorten(str(error)), ADVICE) from error
    return found


def _shorten(text: str, limit: int = 200) -> str:
    return " ".join(text.split())[:limit]


def read_metadata(content: bytes, wanted: str) -> dict[str, str]:
    """The metadata of a file of safetensors, whose format must be `wanted`. Raises ValueError if it is not."""
    length = int.from_bytes(content[:8], "little")
    if not 2 <= length <= len(content) - 8:
        raise ValueError(f"a header of {length} bytes in a file of {len(content)}")
    header = msgspec.json.decode(content[8 : 8 + length], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(header.get(METADATA_KEY, msgspec.Raw(b"{}")), type=dict[str, str])
    if metadata.get("format") != wanted:
        raise ValueError(f"its format is {_shorten(metadata.get('format', 'not given'))}, not {wanted}")
    return metadata


def _read_count(metadata: dict[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text, re.ASCII):
        raise ValueError(f"{name} is {_shorten(text, MAX_SHOWN_CHARS) or 'not given'}, not a positive number")
    return int(text)


def _check_model(path: Path, metadata: dict[str, str], model: CalibratedModel) -> None:
    shape = {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    wanted = {"model": model.fingerprint} | {name: str(count) for name, count in shape.items()}
    for name, value in wanted.items():
        found = metadata.get(name, "not given")
        if found != value:
            raise ModelError(
                f"the calibration file {path} belongs to another model",
                f"{name} is {_shorten(found, MAX_SHOWN_CHARS)} in the file and {value} here",
                ADVICE,
            )


def _read_group(metadata: dict[str, str], model: CalibratedModel) -> int:
    group, channels = _read_count(metadata, "group"), model.kv_heads * model.head_dim
    if channels % group or group % model.head_dim:
        raise ValueError(f"groups of {group} do not divide {model.kv_heads} heads of {model.head_dim}")
    return group


def _read_quality(metadata: dict[str, str]) -> MeasuredQuality | None:
    if "quality" not in metadata:
        return None
    quality = msgspec.json.decode(metadata["quality"], type=MeasuredQuality)
    rows = quality.codecs.values()
    numbers = [quality.perplexity, *(x for row in rows for x in (row.bits, row.ppl_delta_pct, *row.interval))]
    if not all(map(math.isfinite, numbers)) or not quality.codecs.keys() <= CODE_BITS.keys():
        raise ValueError("its quality has numbers that are not finite, or unknown codecs")
    return quality


def _check_tensors(tensors: dict[str, NDArray[Any]], model: CalibratedModel) -> None:
    """Refuses tensors that are unknown, missing, of another type or shape, or hold impossible numbers."""
    matches = {name: TENSOR_PATTERN.fullmatch(name) for name in tensors}
    unknown = [name for name, match in matches.items() if match is None]
    codecs = {match["codec"] for match in matches.values() if match is not None}
    expected: dict[str, tuple[type[np.generic], int]] = {
        f"{codec}.{part}": (np.float16, model.kv_heads * model.head_dim)
        for codec in codecs
        for part in CHANNEL_PARTS
    } | {
        f"{codec}.{part}": (np.float32, 1 << CODE_BITS[codec][0]) for codec in codecs for part in TABLE_PARTS
    }
    if unknown or not codecs or tensors.keys() != expected.keys():
        wrong = sorted(unknown or tensors.keys() ^ expected.keys())
        raise ValueError(f"tensors that are unknown or missing: {', '.join(wrong)[:100] or 'all'}")
    for name, (kind, count) in expected.items():
        array = tensors[name]
        if array.dtype != kind or array.shape != (model.layers, count):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds numbers that are not finite")
        if name.endswith("key_scales") and (array < MIN_SCALE).any():
            raise ValueError(f"{name} holds scales below {MIN_SCALE}")
        if kind is np.float32:
            limit = 1.0 if name.endswith("centroids") else MAX_LEVEL
            if (np.diff(array) < 0).any() or (np.abs(array) > limit).any():
                raise ValueError(f"{name} is not ascending within {-limit} to {limit}")


def _to_constants(tensors: dict[str, NDArray[Any]], layers: int) -> dict[str, tuple[LayerConstants, ...]]:
    present = [name for name in CALIBRATED_NAMES if f"{name}.{CHANNEL_PARTS[0]}" in tensors]
    return {
        name: tuple(
            LayerConstants(
                tensors[f"{name}.key_scales"][layer],
                tensors[f"{name}.key_zeros"][layer],
                Datatype(tensors[f"{name}.key_centroids"][layer], tensors[f"{name}.key_levels"][layer]),
                Datatype(tensors[f"{name}.value_centroids"][layer], tensors[f"{name}.value_levels"][layer]),
            )
            for layer in range(layers)
        )
        for name in present
    }
