"""From a canonical id to a codec for the pages of one layer."""

from __future__ import annotations

from diptych.errors import ConfigError
from kvcache.codecs.basis import Basis
from kvcache.codecs.calibration import Calibration
from kvcache.codecs.codec_id import CALIBRATED, GROUPED, PLAIN, CodecId
from kvcache.codecs.grouped import GroupedCodec
from kvcache.codecs.hadamard import MIN_BLOCK, block_size
from kvcache.codecs.nuq import NuqCodec
from kvcache.codecs.page import Codec, PageShape
from kvcache.codecs.plain import PlainCodec
from kvcache.codecs.storage import outliers_per_side
from kvcache.codecs.turbo import TurboCodec


def build_codec(
    codec_id: CodecId,
    head_dim: int,
    calibration: Calibration | None = None,
    layer: int = 0,
    first_head: int = 0,
) -> Codec:
    """The codec for one layer, and for one group of heads of it.

    Args:
        codec_id: a canonical id (`kvcache.codecs.codec_id.complete_codec_id`).
        head_dim: values of a head.
        calibration: the one that the id names, if it names one.
        layer: of the model.
        first_head: first KV head of the group within the layer; only `nuq*` codes heads together.

    Raises:
        ConfigError: the id is not canonical, does not fit heads of this size, or names another calibration.
    """
    if codec_id.family == PLAIN:
        return PlainCodec(codec_id, head_dim)
    if codec_id.family == GROUPED:
        if codec_id.group is None or head_dim % codec_id.group:
            raise ConfigError(f"{codec_id} has no group that divides heads of {head_dim} values")
        return GroupedCodec(codec_id, head_dim, _find_basis(codec_id, calibration, layer, first_head))
    if codec_id.family == CALIBRATED:
        return _build_calibrated(codec_id, head_dim, calibration, layer, first_head)
    if codec_id.seed is None or block_size(head_dim) < MIN_BLOCK:
        raise ConfigError(
            f"{codec_id} cannot rotate heads of {head_dim} values",
            f"it needs a seed, and heads that are a multiple of {MIN_BLOCK}",
            f"for example {codec_id.name}.s0, or int4",
        )
    return TurboCodec(codec_id, head_dim, _find_basis(codec_id, calibration, layer, first_head))


def _find_basis(codec_id: CodecId, calibration: Calibration | None, layer: int, head: int) -> Basis:
    if codec_id.calibration is None:
        return Basis(seed=codec_id.seed)
    return _check_calibration(codec_id, calibration).head_basis(codec_id.name, layer, head, codec_id.seed)


def _check_calibration(codec_id: CodecId, calibration: Calibration | None) -> Calibration:
    """The calibration at hand, if it is the one that the id names."""
    at_hand = None if calibration is None else calibration.digest_for(codec_id.name)
    if calibration is None or codec_id.calibration != at_hand:
        raise ConfigError(
            f"the KV codec {codec_id} is of another calibration",
            f"the calibration at hand is {at_hand or 'none'}",
        )
    return calibration


def _build_calibrated(
    codec_id: CodecId, head_dim: int, calibration: Calibration | None, layer: int, first_head: int
) -> Codec:
    calibration = _check_calibration(codec_id, calibration)
    group = calibration.group
    if codec_id.group != group or calibration.model.head_dim != head_dim:
        raise ConfigError(
            f"the KV codec {codec_id} does not fit the calibration",
            f"that is for groups of {group} values and heads of {calibration.model.head_dim}",
            f"use {codec_id.name}.g{group}",
        )
    if 2 * outliers_per_side(codec_id, group) >= group:
        raise ConfigError(f"{codec_id} has more outliers than values")
    constants = calibration.group_constants(codec_id.name, layer, first_head * head_dim)
    return NuqCodec(codec_id, PageShape(group // head_dim, head_dim), constants)
