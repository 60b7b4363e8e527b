"""Computes what a KV codec changes in a model's dimensions and in a cost profile: the bytes of KV, and so the room.

Sizes follow from `kvcache.codecs.storage`, to the byte as workers store and move KV. They do not depend on the
calibration, so a codec with one can be planned for before the model is calibrated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.errors import ConfigError
from kvcache.codecs.codec_id import CALIBRATED, HASH_CHARS, CodecId, complete_codec_id, parse_codec_id
from kvcache.codecs.storage import coded_page_bytes, heads_per_page
from planner.costs.model import ModelDims
from planner.costs.profile import CostProfile
from planner.costs.step import StepCost
from planner.types import KvClassWork

# Stands for the hash of a calibration that need not exist yet.
ANY_CALIBRATION = "0" * HASH_CHARS


def with_kv_codec(dims: ModelDims, codec: str) -> ModelDims:
    """The dimensions of a model whose KV is kept and moved in `codec`, named as for `--kv-cache-codec`.

    Raises:
        ConfigError: there is no such codec, or it does not fit the model's heads.
    """
    codec_id = parse_codec_id(codec)
    if codec_id.name == RAW_CLASS:
        return dims
    return replace(dims, kv_codec=codec, kv_bytes=_bytes_per_value(codec_id, dims))


def check_codec_name(codec: str) -> str:
    """The name of a codec, as it is. Raises ValueError: there is no such codec."""
    try:
        parse_codec_id(codec)
    except ConfigError as error:
        raise ValueError("; ".join(error.lines())) from None
    return codec


def is_same_codec(dims: ModelDims, first: str, second: str) -> bool:
    """Whether two names of codecs mean the same for a model, as `tq4` and `tq4.s0` do; "" is `raw`.

    Which calibration an id names does not count: it changes neither the bytes of KV nor the time of a step.

    Raises:
        ConfigError: there is no such codec, or it does not fit the model's heads.
    """
    ids = (_canonical_id(parse_codec_id(name or RAW_CLASS), dims) for name in (first, second))
    one, other = (replace(codec_id, calibration=None) for codec_id in ids)
    return one == other


def find_codec(dims: ModelDims, names: Iterable[str], codec: str) -> str | None:
    """The first of `names` that means the same as `codec` for a model, or `codec` itself if it is among them; None if
    there is none.

    Raises:
        ConfigError: there is no such codec, or it does not fit the model's heads.
    """
    same = [name for name in names if is_same_codec(dims, name, codec)]
    return codec if codec in same else next(iter(same), None)


def _canonical_id(codec_id: CodecId, dims: ModelDims) -> CodecId:
    """The canonical id of a codec for a model, with any calibration where the id names none."""
    calibration = codec_id.calibration or (ANY_CALIBRATION if codec_id.family == CALIBRATED else None)
    return complete_codec_id(codec_id, dims.kv_heads, dims.head_dim, calibration)


def _bytes_per_value(codec_id: CodecId, dims: ModelDims) -> float:
    """Bytes of one number of KV, with its share of scales and outliers; mean of keys and values."""
    whole = _canonical_id(codec_id, dims)
    values = 2 * CHUNK_TOKENS * heads_per_page(whole, dims.head_dim) * dims.head_dim
    return coded_page_bytes(whole, dims.head_dim) / values


def code_profile(profile: CostProfile, codec: str) -> CostProfile:
    """The profile for KV in `codec`: measured room is scaled by the bytes of KV.

    Step costs are those of the codec if the profile was measured with it too; if not, they stay.

    Raises:
        ConfigError: the profile was measured with KV of another codec, or the codec does not fit the model.
    """
    measured = profile.model.kv_codec or RAW_CLASS
    if is_same_codec(profile.model, measured, codec):
        return profile
    known = find_codec(profile.model, profile.kv_classes, codec)
    if measured != RAW_CLASS and known is None:
        raise ConfigError(
            f"the profile was measured with KV of the codec {measured}, and --kv-cache-codec is {codec}",
            "the time of a step and the room for KV are those of its codec",
            f"use --kv-cache-codec {measured}, or measure anew with {codec}",
        )
    model = with_kv_codec(profile.model, codec)
    more = profile.model.kv_token_bytes / model.kv_token_bytes
    rooms = {parallelism: int(tokens * more) for parallelism, tokens in profile.rooms.items()}
    coded = replace(profile, model=model, rooms=rooms, kv_classes={})
    if known is None:
        return coded
    work = profile.kv_classes[known]
    costs = {
        split: scale_work(cost, work) if isinstance(cost, StepCost) else cost
        for split, cost in profile.costs.items()
    }
    return replace(coded, costs=costs)


def scale_work(cost: StepCost, work: KvClassWork) -> StepCost:
    """The cost of steps whose KV is all of a class, from the cost on KV of the profile's own codec."""
    first, token, square = cost.prefill
    decode = tuple((constant, context * work.context, row) for constant, context, row in cost.decode)
    return replace(cost, prefill=(first, token * work.token, square * work.square), decode=decode)


def codec_note(model: ModelDims, *profiles: CostProfile) -> tuple[str, ...]:
    """What a reader has to know about KV that is coded; nothing where it is not.

    `profiles` are those that step costs come from, as they were measured.
    """
    if not model.kv_codec:
        return ()
    size = f"KV is stored and moved in {model.kv_codec}: {model.kv_token_bytes:,.0f} bytes per token"
    others = [
        one
        for one in profiles
        if one.costs and find_codec(model, (one.model.kv_codec, *one.kv_classes), model.kv_codec) is None
    ]
    if not others:
        return (size,)
    return (size, "step times were measured with KV of the class raw; those with coded KV may differ")
