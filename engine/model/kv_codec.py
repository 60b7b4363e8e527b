"""Chooses the codec of a worker's KV: from the name that the user gave to the canonical id for a model.

NumPy is loaded only if KV is coded, so that looking at a model stays quick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diptych.chunks import RAW_CLASS
from diptych.errors import ConfigError
from kvcache.class_shares import parse_class_shares
from kvcache.codecs.codec_id import CALIBRATED, CodecId, complete_codec_id, parse_codec_id

# Imported for types only: both modules import NumPy.
if TYPE_CHECKING:
    from engine.model.checkpoint import Checkpoint
    from kvcache.codecs.calibration import Calibration
    from kvcache.layout import Shard


@dataclass(frozen=True, slots=True)
class KvClassChoice:
    """A KV class of a worker: the codec's canonical id (empty: none), its calibration, and its share of the pool."""

    codec: str
    calibration: Calibration | None
    share: float


def resolve_kv_classes(
    checkpoint: Checkpoint, asked: str, calibration_file: str = ""
) -> tuple[KvClassChoice, ...]:
    """The KV classes that `--kv-cache-codec` names for a model, the default one first.

    The arguments are those of `resolve_kv_codec`.

    Raises:
        ConfigError: as `kvcache.class_shares.parse_class_shares` or `resolve_kv_codec`, or two of them are the same.
        ModelError: as `resolve_kv_codec`.
    """
    shares = parse_class_shares(asked)
    calibrated = any(one.codec_id.family == CALIBRATED for one in shares)
    choices = []
    for one in shares:
        file = calibration_file if one.codec_id.family == CALIBRATED or not calibrated else ""
        codec, calibration = resolve_kv_codec(checkpoint, str(one.codec_id), file)
        choices.append(KvClassChoice(codec, calibration, one.share))
    codecs = [one.codec for one in choices]
    twice = next((codec for codec in codecs if codecs.count(codec) > 1), None)
    if twice is not None:
        raise ConfigError(f"the KV codec {twice} is named twice", f"--kv-cache-codec {asked}", "name it once")
    return tuple(choices)


def largest_codec(checkpoint: Checkpoint, classes: tuple[KvClassChoice, ...]) -> str:
    """The codec of the class whose chunks take the most bytes: the pool is sized so that it holds a request of it."""
    return max((one.codec for one in classes), key=lambda codec: checkpoint.layout(codec=codec).chunk_bytes)


def split_ranks(
    checkpoint: Checkpoint, classes: tuple[KvClassChoice, ...], tp: int, pp: int
) -> tuple[Shard, ...]:
    """The shard of each of `tp * pp` ranks; every KV class of a worker is split alike.

    Raises:
        ConfigError: there are too many ranks for this machine's cores.
        ModelError: the model cannot be split this way, or the codec of a class codes heads together that it would cut.
    """
    return [checkpoint.split(tp, pp, one.codec) for one in classes][0]


def format_kv_classes(classes: tuple[KvClassChoice, ...]) -> str:
    """The classes as `--kv-cache-codec` takes them, with canonical ids; empty for `raw` alone."""
    if len(classes) == 1:
        return classes[0].codec
    return ",".join(f"{one.codec or RAW_CLASS}:{one.share!r}" for one in classes)


def resolve_kv_codec(
    checkpoint: Checkpoint, asked: str, calibration_file: str = ""
) -> tuple[str, Calibration | None]:
    """The canonical id of a codec for a model (`kvcache.layout.KvLayout.codec`), and its calibration if it has one.

    Args:
        checkpoint: of the model.
        asked: the codec as the user named it; `raw`: none.
        calibration_file: for codecs with calibration; empty: `kvquant.safetensors` in the model's folder.

    Raises:
        ConfigError: `asked` is not a codec, or needs something that the model or its calibration does not have.
        ModelError: the calibration file is not there, damaged, or of another model.
    """
    codec_id = parse_codec_id(asked)
    if calibration_file and codec_id.family != CALIBRATED:
        raise ConfigError(
            f"the KV codec {codec_id} takes no calibration",
            f"--kv-cache-calibration names {calibration_file}",
            "leave it out, or use a codec with one, for example --kv-cache-codec nuq4-1%",
        )
    if codec_id.name == RAW_CLASS:
        return "", None
    calibration = None
    if codec_id.family == CALIBRATED:
        calibration = _find_calibration(checkpoint, codec_id, calibration_file)
        codec_id = replace(codec_id, group=codec_id.group or calibration.group)
    shape = checkpoint.shape
    digest = None if calibration is None else calibration.digest
    codec_id = complete_codec_id(codec_id, shape.kv_heads, shape.head_dim, digest)
    if calibration is not None and calibration.group != codec_id.group:
        raise ConfigError(
            f"the KV codec {codec_id} does not fit the calibration",
            f"that was made for groups of {calibration.group} values",
            f"use {codec_id.name}.g{calibration.group}, or calibrate for these groups:"
            f" diptych calibrate {checkpoint.name} --group {codec_id.group} --out FILE,"
            " then --kv-cache-calibration FILE",
        )
    from kvcache.codecs.registry import build_codec  # imports NumPy

    # Building the codec of one layer finds whatever else does not fit.
    build_codec(codec_id, shape.head_dim, calibration)
    return str(codec_id), calibration


def _find_calibration(checkpoint: Checkpoint, codec_id: CodecId, file: str) -> Calibration:
    """The calibration that a codec needs. Raises ConfigError or ModelError."""
    from engine.model.calibration_file import load_calibration  # imports NumPy

    calibration = load_calibration(checkpoint, file)
    if calibration is None:
        raise ConfigError(
            f"the KV codec {codec_id} needs a calibration of this model, and there is none",
            f"there is no kvquant.safetensors in {checkpoint.path}, and --kv-cache-calibration names no file",
            f"make one:  diptych calibrate {checkpoint.name}\nor use a codec that needs none, for example tq4",
        )
    return calibration
