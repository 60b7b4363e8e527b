"""Works out what several classes of KV mean for a model and its profile: room, bytes and step times of each.

    --kv-cache-codec raw:0.25,nuq4-1%      a quarter of the bytes for KV is for raw, the rest for nuq4-1%

Sizes follow from `kvcache.codecs.storage`, as workers store and move KV. What a step costs on KV of a class is measured
by `diptych profile` with the same list, as ratios to the profile's own codec (`planner.types.KvClassWork`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, isclose

from diptych.chunks import CHUNK_TOKENS, RAW_CLASS
from diptych.errors import ConfigError
from kvcache.class_shares import ClassShare, parse_class_shares
from planner.costs.kv.codec import find_codec, is_same_codec, with_kv_codec
from planner.costs.model import ModelDims
from planner.costs.profile import CostProfile
from planner.types import KvClass, KvClassWork

# Shares in a plan's file are multiples of this. Shares that differ by less than `SHARE_ROUNDING` are the same.
SHARE_STEP, SHARE_ROUNDING = 1e-6, 1e-5
# Advice names shares in steps of one in so many.
SHARE_ADVICE = 100


def base_codec(text: str) -> str:
    """The codec that a profile is for, where workers have those of a list: `raw` if it is named, else the first.

    Raises:
        ConfigError: as `kvcache.class_shares.parse_class_shares`.
    """
    names = [str(one.codec_id) for one in parse_class_shares(text)]
    return RAW_CLASS if RAW_CLASS in names else names[0]


def read_classes(text: str) -> tuple[ClassShare, ...]:
    """The classes that `--kv-cache-codec` names, if there are several; none if it names a single codec.

    Raises:
        ConfigError: as `kvcache.class_shares.parse_class_shares`.
    """
    classes = parse_class_shares(text)
    return classes if len(classes) > 1 else ()


def check_codecs(text: str) -> str:
    """The value of `--kv-cache-codec`, as it is. Raises ValueError: it is neither a codec nor a list of them."""
    try:
        parse_class_shares(text)
    except ConfigError as error:
        raise ValueError("; ".join(error.lines())) from None
    return text


def format_classes(classes: Sequence[KvClass]) -> str:
    """The classes and their shares, as `--kv-cache-codec` takes them; rounded down, so that they are at most 1."""
    return ",".join(f"{one.name}:{floor(one.share / SHARE_STEP + 0.01) * SHARE_STEP:.6g}" for one in classes)


def same_classes(dims: ModelDims, first: str, second: str) -> bool:
    """Whether two values of `--kv-cache-codec` mean the same: the codecs in their order, and their shares.

    Raises:
        ConfigError: as `kvcache.class_shares.parse_class_shares`, or a codec does not fit the model's heads.
    """
    ones, others = parse_class_shares(first), parse_class_shares(second)
    return len(ones) == len(others) and all(
        isclose(one.share, other.share, abs_tol=SHARE_ROUNDING)
        and is_same_codec(dims, str(one.codec_id), str(other.codec_id))
        for one, other in zip(ones, others, strict=True)
    )


def plan_kv_classes(profile: CostProfile, text: str) -> tuple[KvClass, ...]:
    """The classes of a worker with that profile, the default one first; none if `text` names a single codec.

    Raises:
        ConfigError: a codec is unknown, named twice or does not fit the model; or the profile was measured with KV of
            another codec and not with this one.
    """
    shares = read_classes(text)
    model, made = profile.model, list[KvClass]()
    for one in shares:
        name = str(one.codec_id)
        if any(is_same_codec(model, name, other.name) for other in made):
            raise ConfigError(
                f"the KV codec {name} is named twice", f"--kv-cache-codec {text}", "name it once"
            )
        token_bytes = _class_dims(profile, name, text).kv_token_bytes
        ratio = token_bytes / model.kv_token_bytes
        made.append(
            KvClass(name, one.share, token_bytes, one.share / ratio, _class_work(profile, name, ratio))
        )
    return tuple(made)


def shared_kv_classes(profiles: Iterable[CostProfile], text: str) -> tuple[KvClass, ...]:
    """The classes of workers that exchange KV, of which each has one of `profiles`; work costs as by the first.

    Raises:
        ConfigError: as `plan_kv_classes`, or KV of a class takes other bytes on one device than on another.
    """
    by_device = {profile.device.name: plan_kv_classes(profile, text) for profile in profiles}
    found = list(by_device.values())
    sizes = {tuple((one.token_bytes, one.room) for one in classes) for classes in found}
    if len(sizes) > 1:
        raise ConfigError(
            "several KV classes need the same size of KV on all devices",
            f"--kv-cache-codec {text}, and KV of {' and '.join(by_device)} differs in size",
            "use one kind of device, or a single codec",
        )
    return found[0]


def whole_request(kv_tokens: float, max_len: int) -> int:
    """Tokens that every class of an instance must have room for, as `diptych serve` demands: a request of full length.

    0 where even the whole instance, of `kv_tokens` tokens, has no room for one: it then serves shorter requests only.
    """
    return max_len if kv_tokens >= max_len else 0


def check_class_rooms(classes: Sequence[KvClass], kv_tokens: float, max_len: int) -> None:
    """Raises ConfigError: a class has too small a share of an instance's `kv_tokens` for one request of full length."""
    need = -(-whole_request(kv_tokens, max_len) // CHUNK_TOKENS) * CHUNK_TOKENS
    small = next((one for one in classes if int(kv_tokens * one.room) < need), None)
    if small is None:
        return
    first = advise_shares(classes, kv_tokens, [need] * len(classes))
    raise ConfigError(
        f"the share of the KV class {small.name} is too small for one request",
        f"{small.share:.3g} of an instance holds {int(kv_tokens * small.room):,} tokens, and a request may have"
        f" {max_len:,}",
        f"{first}, or take instances with more memory.\nWithout a plan, `diptych serve` accepts smaller shares with a"
        " smaller --max-model-len",
    )


def advise_shares(classes: Sequence[KvClass], kv_tokens: float, needs: Sequence[float]) -> str:
    """What to do so that each class has room for its tokens of `needs` on an instance of `kv_tokens`: other shares, as
    `--kv-cache-codec` takes them, or fewer classes if no shares suffice.
    """
    least = [
        ceil(need / kv_tokens * one.share / one.room * SHARE_ADVICE)
        for one, need in zip(classes, needs, strict=True)
    ]
    spare = SHARE_ADVICE - sum(least)
    if spare < 0:
        return "take fewer classes"
    shares = [low + floor(spare * one.share) for low, one in zip(least, classes, strict=True)]
    listed = (f"{one.name}:{share / SHARE_ADVICE:.2f}" for one, share in zip(classes, shares, strict=True))
    return f"use --kv-cache-codec {','.join(listed)}"


def _class_dims(profile: CostProfile, codec: str, text: str) -> ModelDims:
    """The model's dimensions with KV of one class. Raises ConfigError: nothing is known of the class."""
    model, measured = profile.model, profile.model.kv_codec or RAW_CLASS
    if is_same_codec(model, measured, codec):
        return model
    if measured != RAW_CLASS and find_codec(model, profile.kv_classes, codec) is None:
        known = " and ".join((measured, *profile.kv_classes))
        raise ConfigError(
            f"the profile was measured with KV of {known}, and not of {codec}",
            f"--kv-cache-codec {text}",
            f"measure all of them: diptych profile --kv-cache-codec {text}",
        )
    return with_kv_codec(model, codec)


def _class_work(profile: CostProfile, codec: str, ratio: float) -> KvClassWork:
    """What work on KV of a class costs: as measured; else by its bytes, where costs are analytic; else as of `raw`."""
    if is_same_codec(profile.model, profile.model.kv_codec, codec):
        return KvClassWork()
    known = find_codec(profile.model, profile.kv_classes, codec)
    if known is not None:
        return profile.kv_classes[known]
    return KvClassWork() if profile.costs else KvClassWork(context=ratio)


def find_class(profile: CostProfile, classes: Sequence[KvClass], name: str) -> str | None:
    """Which of the classes a name of a codec means, as `nuq4-1%.g128@0123456789abcdef` does `nuq4-1%`; None: none.

    Raises:
        ConfigError: there is no such codec, or it does not fit the model.
    """
    return find_codec(profile.model, [one.name for one in classes], name)


def kv_class_notes(
    classes: Sequence[KvClass], mix: Mapping[str, float], *profiles: CostProfile
) -> tuple[str, ...]:
    """What a reader has to know about several classes of KV: their shares of bytes and of requests, and their sizes.

    `profiles` are those that step costs come from, as they were measured.
    """
    if not classes:
        return ()
    lines = [
        f"KV class {one.name}: {one.share:.0%} of the bytes for KV, {one.token_bytes:,.0f} bytes per token,"
        f" {mix.get(one.name, 0.0):.0%} of the requests"
        for one in classes
    ]
    guessed = {
        one.name
        for profile in profiles
        for one in classes
        if profile.costs
        and not is_same_codec(profile.model, profile.model.kv_codec, one.name)
        and find_codec(profile.model, profile.kv_classes, one.name) is None
    }
    if guessed:
        names = " and ".join(one.name for one in classes if one.name in guessed)
        lines.append(
            f"step times were not measured with KV of {names}; they are those of KV of the class raw"
        )
    return tuple(lines)
