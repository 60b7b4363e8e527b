"""Calibration files: `kvquant.safetensors` holds what `nuq*` codecs need to know of a model, and factors of others.

For each codec name N in the file, with L layers, C key channels and codes of b bits:

    N.key_scales, N.key_zeros           [L, C] float16
    N.key_centroids, N.key_levels       [L, 2^b] float32
    N.value_centroids, N.value_levels   [L, 2^b] float32

    N.key_factors, N.value_factors      [L, C] float32: of `int*` and `tq*`, where factors lower the error

and as metadata `format`, `model` (the hash of the weights), `layers`, `kv_heads`, `head_dim`, `group`, `digest`,
`factors_digest`, and outside the digests `tokens` and `quality`. A digest is part of a codec's id, so pages of two
calibrations are never taken for each other. Without factors the format is 1, as it was before there were any; with
factors it is 2. A file is read whole, up to a limit, before anything in it is believed; if its digests are not those
of its content, it is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from kvcache.codecs.basis import Basis
from kvcache.codecs.calibration_tensors import (
    CHANNEL_PARTS,
    FACTOR_PARTS,
    TABLE_PARTS,
    check_tensors,
    read_constants,
    read_factors,
)
from kvcache.codecs.codec_id import CALIBRATED, CODE_BITS, HASH_CHARS, CodecId
from kvcache.codecs.datatype import LayerConstants, LayerFactors

FILE_NAME = "kvquant.safetensors"
# Without factors, and with them.
FORMATS = ("diptych kvquant 1", "diptych kvquant 2")
MAX_FILE_BYTES = 64 << 20
# Most characters of a file's text that an error shows.
MAX_SHOWN_CHARS = 64
METADATA_KEY = "__metadata__"
ADVICE = "calibrate this model again, or use a codec that takes no calibration, for example fp8"
CALIBRATED_NAMES = tuple(name for name in CODE_BITS if CodecId(name).family == CALIBRATED)
FACTORED_NAMES = tuple(name for name in CODE_BITS if CodecId(name).takes_factors)


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
    factors: dict[str, tuple[LayerFactors, ...]] = field(default_factory=dict)
    quality: MeasuredQuality | None = None

    @cached_property
    def digest(self) -> str:
        """The hash that names the constants in the ids of `nuq*`; 16 hex characters."""
        fields: list[HashField] = [FORMATS[0], *msgspec.structs.astuple(self.model), self.group]
        return _hash_tensors(fields, _constant_tensors(self))

    @cached_property
    def factors_digest(self) -> str:
        """The hash that names the factors in the ids of other codecs; 16 hex characters."""
        fields: list[HashField] = [FORMATS[1], *msgspec.structs.astuple(self.model)]
        return _hash_tensors(fields, _factor_tensors(self))

    def digest_for(self, name: str) -> str | None:
        """What stands for this calibration in the id of the codec with a name; None: it takes nothing from here."""
        if name in self.factors:
            return self.factors_digest
        return self.digest if name in CALIBRATED_NAMES else None

    def head_basis(self, name: str, layer: int, head: int, seed: int | None) -> Basis:
        """The basis of a layer and KV head for a codec with factors; `seed` is that of its random rotation."""
        whole, dim = self.factors[name][layer], self.model.head_dim
        channels = slice(head * dim, (head + 1) * dim)
        return Basis(whole.keys[channels], whole.values[channels], seed)

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
        "format": FORMATS[bool(calibration.factors)],
        "model": model.fingerprint,
        "layers": str(model.layers),
        "kv_heads": str(model.kv_heads),
        "head_dim": str(model.head_dim),
        "group": str(calibration.group),
        "digest": calibration.digest,
        "tokens": str(calibration.tokens),
    }
    if calibration.factors:
        metadata["factors_digest"] = calibration.factors_digest
    if calibration.quality is not None:
        metadata["quality"] = msgspec.json.encode(calibration.quality).decode()
    header: dict[str, Any] = {METADATA_KEY: metadata}
    parts, place = list[bytes](), 0
    # Wide numbers come first, so that all are aligned.
    tensors = _constant_tensors(calibration) | _factor_tensors(calibration)
    for name, array in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
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


def _hash_tensors(fields: list[HashField], tensors: dict[str, NDArray[Any]]) -> str:
    for name, array in sorted(tensors.items()):
        fields += [name, str(array.dtype), "x".join(map(str, array.shape)), array.tobytes()]
    return hash_fields(fields).hex()[:HASH_CHARS]


def _factor_tensors(calibration: Calibration) -> dict[str, NDArray[Any]]:
    return {
        f"{name}.{part}": np.ascontiguousarray(
            np.stack([layer.keys if part == FACTOR_PARTS[0] else layer.values for layer in layers])
        )
        for name, layers in calibration.factors.items()
        for part in FACTOR_PARTS
    }


def _constant_tensors(calibration: Calibration) -> dict[str, NDArray[Any]]:
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
        metadata = read_metadata(content, FORMATS)
        tensors = load(content)
    except OSError as error:
        raise ModelError(
            f"the calibration file {path} cannot be read", error.strerror or str(error), ADVICE
        ) from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, msgspec.DecodeError) as error:
        raise ModelError(
            f"the file {path} is not a calibration of KV codecs", _shorten(str(error)), ADVICE
        ) from error
    _check_model(path, metadata, model)
    try:
        group = _read_group(metadata, model)
        check_tensors(tensors, model.layers, model.kv_heads, model.head_dim)
        tokens, quality = _read_count(metadata, "tokens"), _read_quality(metadata)
        constants, factors = read_constants(tensors, model.layers), read_factors(tensors, model.layers)
        found = Calibration(model, group, tokens, constants, factors, quality)
        _check_digests(metadata, found)
    except (ValueError, msgspec.DecodeError) as error:
        raise ModelError(f"the calibration file {path} is damaged", _shorten(str(error)), ADVICE) from error
    return found


def _check_digests(metadata: dict[str, str], calibration: Calibration) -> None:
    digests = {"digest": calibration.digest}
    if calibration.factors or "factors_digest" in metadata:
        digests["factors_digest"] = calibration.factors_digest
    for name, digest in digests.items():
        if metadata.get(name) != digest:
            stated = _shorten(metadata.get(name, "not given"), MAX_SHOWN_CHARS)
            raise ValueError(f"its {name} is {stated}, and that of its content {digest}")
    if metadata["format"] != FORMATS[bool(calibration.factors)]:
        raise ValueError(f"its format is {metadata['format']}, which does not fit its tensors")


def _shorten(text: str, limit: int = 200) -> str:
    return " ".join(text.split())[:limit]


def read_metadata(content: bytes, wanted: Sequence[str]) -> dict[str, str]:
    """The metadata of a file of safetensors, of one of the formats wanted. Raises ValueError if it is of another."""
    length = int.from_bytes(content[:8], "little")
    if not 2 <= length <= len(content) - 8:
        raise ValueError(f"a header of {length} bytes in a file of {len(content)}")
    header = msgspec.json.decode(content[8 : 8 + length], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(header.get(METADATA_KEY, msgspec.Raw(b"{}")), type=dict[str, str])
    if metadata.get("format") not in wanted:
        found = _shorten(metadata.get("format", "not given"))
        raise ValueError(f"its format is {found}, not {' or '.join(wanted)}")
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
