"""Chooses the codec of a worker's KV: from the name that the user gave to the canonical id for a model.

NumPy is loaded only if KV is coded, so that looking at a model stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diptych.chunks import AUTO_CLASS, DEFAULT_KV_BUDGET_PCT, RAW_CLASS
from diptych.errors import ConfigError, ModelError
from kvcache.class_shares import parse_class_shares, split_auto
from kvcache.codecs.codec_id import CALIBRATED, CodecId, complete_codec_id, parse_codec_id

# Imported for types only: both modules import NumPy.
if TYPE_CHECKING:
    from engine.model.checkpoint import Checkpoint
    from kvcache.codecs.calibration import Calibration
    from kvcache.layout import Shard


INT_AND_TQ = "int* or tq* without a group and seed"
# The share of the pool that `raw` gets of a plain `auto`.
AUTO_RAW_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class KvClassChoice:
    """A KV class of a worker: the codec's canonical id (empty: none), its calibration, and its share of the pool.

    `loss_pct` is by how many percent perplexity grows with it, as the model's calibration recorded; None: not recorded.
    """

    codec: str
    calibration: Calibration | None
    share: float
    loss_pct: float | None = None


def resolve_kv_classes(
    checkpoint: Checkpoint, asked: str, calibration_file: str = ""
) -> tuple[KvClassChoice, ...]:
    """The KV classes that `--kv-cache-codec` names for a model, the default one first.

    The arguments are those of `resolve_kv_codec`.

    Raises:
        ConfigError: as `kvcache.class_shares.parse_class_shares` or `resolve_kv_codec`, or two of them are the same.
        ModelError: as `resolve_kv_codec`.
    """
    auto, named = split_auto(asked)
    shares = parse_class_shares(named)
    # `auto` reads the losses of classes without a calibration from the file, too.
    users = [one for one in shares if one.codec_id.family == CALIBRATED or one.codec_id.takes_factors]
    choices = []
    for one in shares:
        file = calibration_file if one in users or not (auto or users) else ""
        # Where several classes may use the file, it need not have something for each.
        must_use = not auto and len(shares) == 1
        codec, calibration = resolve_kv_codec(checkpoint, str(one.codec_id), file, must_use=must_use)
        choices.append(KvClassChoice(codec, calibration, one.share))
    found = next((one.calibration for one in choices if one.calibration is not None), None)
    if calibration_file and found is None and not auto:
        raise ConfigError(
            "none of the KV codecs takes anything from the calibration",
            f"--kv-cache-codec {asked}, --kv-cache-calibration {calibration_file}",
            f"leave it out; or take factors: name {INT_AND_TQ}, with a calibration that has some for it",
        )
    if any(one.codec for one in choices):
        measured = _find_measured(checkpoint, found, calibration_file if auto else "")
        choices = [replace(one, loss_pct=_recorded_loss(checkpoint, one.codec, measured)) for one in choices]
    codecs = [one.codec for one in choices]
    twice = next((codec for codec in codecs if codecs.count(codec) > 1), None)
    if twice is not None:
        raise ConfigError(f"the KV codec {twice} is named twice", f"--kv-cache-codec {asked}", "name it once")
    return tuple(choices)


def expand_auto(
    checkpoint: Checkpoint, asked: str, calibration_file: str = "", budget_pct: float | None = None
) -> str:
    """The classes that a plain `auto` stands for: `raw`, and the lightest class within the budget. Anything else stays
    as it is. The arguments are those of `resolve_kv_classes` and `check_auto`.

    Raises:
        ConfigError: the calibration has no class within the budget, or there is no calibration with measured losses.
        ModelError: the calibration file is damaged, or of another model.
    """
    if split_auto(asked) != (True, ""):
        return asked
    measured = _find_measured(checkpoint, None, calibration_file)
    if measured is None or (quality := measured.quality) is None:
        raise ConfigError(
            "--kv-cache-codec auto needs to know what codecs cost, and nothing says it",
            f"there is no calibration of {checkpoint.name} with measured losses",
            f"make one:  diptych calibrate {checkpoint.name}\nor name codecs, for example --kv-cache-codec tq4",
        )
    budget = DEFAULT_KV_BUDGET_PCT if budget_pct is None else budget_pct
    within = [name for name, one in quality.codecs.items() if one.ppl_delta_pct <= budget]
    if not within:
        raise _no_choice_error(
            asked, budget, {name: one.ppl_delta_pct for name, one in quality.codecs.items()}
        )
    codecs = {name: _resolved(checkpoint, name, calibration_file) for name in within}
    lightest = min(
        within,
        key=lambda name: (
            checkpoint.layout(codec=codecs[name]).chunk_bytes,
            quality.codecs[name].ppl_delta_pct,
        ),
    )
    return f"{AUTO_CLASS},{RAW_CLASS}:{AUTO_RAW_SHARE},{lightest}"


def _resolved(checkpoint: Checkpoint, name: str, calibration_file: str) -> str:
    codec_id = parse_codec_id(name)
    file = calibration_file if codec_id.family == CALIBRATED or codec_id.takes_factors else ""
    return resolve_kv_codec(checkpoint, name, file, must_use=False)[0]


def check_auto(classes: tuple[KvClassChoice, ...], asked: str, budget_pct: float | None) -> None:
    """Check that the router has a choice where it is to choose.

    Args:
        classes: of the worker.
        asked: `--kv-cache-codec`.
        budget_pct: `--kv-quality-budget`; None: not set.

    Raises:
        ConfigError: `asked` says `auto` and fewer than two classes are within the budget, or there is a budget and only
            one class.
    """
    if not split_auto(asked)[0]:
        if budget_pct is not None and len(classes) == 1:
            raise ConfigError(
                "--kv-quality-budget is for a choice between KV codecs, and there is one codec",
                f"--kv-cache-codec {asked}",
                "leave out the budget, or use --kv-cache-codec auto",
            )
        return
    budget = DEFAULT_KV_BUDGET_PCT if budget_pct is None else budget_pct
    losses = {one.codec or RAW_CLASS: one.loss_pct if one.codec else 0.0 for one in classes}
    if sum(loss is not None and loss <= budget for loss in losses.values()) < 2:
        raise _no_choice_error(asked, budget, losses)


def _no_choice_error(asked: str, budget_pct: float, losses: Mapping[str, float | None]) -> ConfigError:
    shown = ", ".join(
        f"{name.partition('@')[0]} {'not recorded' if loss is None else f'{loss:.2g}%'}"
        for name, loss in losses.items()
    )
    return ConfigError(
        f"--kv-cache-codec {asked} leaves no choice within --kv-quality-budget {budget_pct:g}%",
        f"growth of perplexity: {shown}",
        "raise the budget, or name two codecs or more that lose less",
    )


def _find_measured(
    checkpoint: Checkpoint, calibration: Calibration | None, calibration_file: str
) -> Calibration | None:
    """The calibration that says what codecs cost: `calibration`, or else the file; None if nothing says it.

    A file that was not asked for counts only if it can be read.
    """
    from engine.model.calibration_file import load_calibration  # imports NumPy

    if calibration is None:
        try:
            calibration = load_calibration(checkpoint, calibration_file)
        except ModelError:
            if calibration_file:
                raise
    return None if calibration is None or calibration.quality is None else calibration


def _recorded_loss(checkpoint: Checkpoint, codec: str, measured: Calibration | None) -> float | None:
    """The loss of a codec, if the calibration has it for these parameters: with the factors that the calibration has
    for the codec, and with none if it has none.
    """
    if not codec:
        return 0.0
    codec_id, config = parse_codec_id(codec), checkpoint.config
    if measured is None or measured.quality is None or codec_id.name not in measured.quality.codecs:
        return None
    if codec_id.family != CALIBRATED:
        digest = measured.digest_for(codec_id.name)
        if codec_id != complete_codec_id(CodecId(codec_id.name), config.kv_heads, config.head_dim, digest):
            return None
    return measured.quality.codecs[codec_id.name].ppl_delta_pct


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


def format_kv_classes(classes: tuple[KvClassChoice, ...], asked: str = "") -> str:
    """The classes as `--kv-cache-codec` takes them, with canonical ids; empty for `raw` alone.

    `asked` is how the user named them: it says whether the router chooses among them.
    """
    if len(classes) == 1:
        return classes[0].codec
    named = [f"{one.codec or RAW_CLASS}:{one.share!r}" for one in classes]
    return ",".join([AUTO_CLASS, *named] if split_auto(asked)[0] else named)


def resolve_kv_codec(
    checkpoint: Checkpoint, asked: str, calibration_file: str = "", *, must_use: bool = True
) -> tuple[str, Calibration | None]:
    """The canonical id of a codec for a model (`kvcache.layout.KvLayout.codec`), and its calibration if it has one.

    Args:
        checkpoint: of the model.
        asked: the codec as the user named it; `raw`: none.
        calibration_file: for codecs with calibration; empty: `kvquant.safetensors` in the model's folder.
        must_use: whether a file that is named must have something for this codec.

    Raises:
        ConfigError: `asked` is not a codec, or needs something that the model or its calibration does not have.
        ModelError: the calibration file is not there, damaged, or of another model.
    """
    codec_id, config = parse_codec_id(asked), checkpoint.config
    if codec_id.name == RAW_CLASS and not calibration_file:
        return "", None
    if codec_id.family == CALIBRATED:
        calibration: Calibration | None = _find_calibration(checkpoint, codec_id, calibration_file)
        assert calibration is not None
        codec_id = replace(codec_id, group=codec_id.group or calibration.group)
    else:
        calibration = _find_factors(checkpoint, codec_id, calibration_file, must_use)
    if codec_id.name == RAW_CLASS:
        return "", None
    digest = None if calibration is None else calibration.digest_for(codec_id.name)
    codec_id = complete_codec_id(codec_id, config.kv_heads, config.head_dim, digest)
    if calibration is not None and codec_id.family == CALIBRATED and calibration.group != codec_id.group:
        raise ConfigError(
            f"the KV codec {codec_id} does not fit the calibration",
            f"that was made for groups of {calibration.group} values",
            f"use {codec_id.name}.g{calibration.group}, or calibrate for these groups:"
            f" diptych calibrate {checkpoint.name} --group {codec_id.group} --out FILE,"
            " then --kv-cache-calibration FILE",
        )
    from kvcache.codecs.registry import build_codec  # imports NumPy

    # Building the codec of one layer finds whatever else does not fit.
    build_codec(codec_id, config.head_dim, calibration)
    return str(codec_id), calibration


def _find_factors(checkpoint: Checkpoint, codec_id: CodecId, file: str, must_use: bool) -> Calibration | None:
    """The calibration with factors for a codec that works without; None if there is none. Raises ConfigError or
    ModelError.

    A name alone takes what there is. An id with a group or seed says whether there are factors, so that a worker that
    starts again has the class that it had.
    """
    found, open_id = None, codec_id == CodecId(codec_id.name) or codec_id.calibration is not None
    # Where weights are on other machines, so is what was calibrated for them.
    if codec_id.takes_factors and checkpoint.weights and (open_id or (file and must_use)):
        from engine.model.calibration_file import load_calibration  # imports NumPy

        try:
            found = load_calibration(checkpoint, file)
        except ModelError:
            # A damaged file that was not asked for keeps no codec from being used that works without.
            if file or codec_id.calibration is not None:
                raise
        if open_id and found is not None and found.digest_for(codec_id.name) is not None:
            return found
    if file and must_use:
        raise _unused_file_error(checkpoint, codec_id, file, found)
    return None


def _unused_file_error(
    checkpoint: Checkpoint, codec_id: CodecId, file: str, calibration: Calibration | None
) -> ConfigError:
    """A single codec takes nothing from the file that was named."""
    given = f"--kv-cache-calibration names {file}"
    if not codec_id.takes_factors:
        return ConfigError(
            f"the KV codec {codec_id} takes no calibration",
            given,
            "leave it out, or use a codec with one, for example --kv-cache-codec nuq4-1%",
        )
    if codec_id != CodecId(codec_id.name) and codec_id.calibration is None:
        return ConfigError(
            f"the KV codec {codec_id} takes no calibration: with a group or seed, an id without @ has no factors",
            given,
            f"leave it out, or name {codec_id.name} alone, which takes the factors that the file has for it",
        )
    names = ", ".join(calibration.factors) if calibration is not None else ""
    return ConfigError(
        f"the calibration has no factors for {codec_id.name}, so the KV codec {codec_id} takes nothing from it",
        f"{given}, which has factors for {names or 'no codec'}",
        f"leave it out, or find factors:  diptych calibrate {checkpoint.name} --out FILE",
    )


def check_device_codec(codec: str) -> None:
    """Check that kernels for GPUs have a codec, of a canonical id; empty: none.

    Raises:
        ConfigError: they have not.
    """
    codec_id = parse_codec_id(codec or RAW_CLASS)
    if codec_id.name == "fp8":
        raise ConfigError(
            f"the KV codec {codec_id} is not available on a GPU",
            "kernels there have no numbers of 8 bits (e4m3)",
            "use --kv-cache-codec int8 or fp16, or --device cpu",
        )
    if codec_id.takes_factors and codec_id.calibration is not None:
        raise ConfigError(
            f"the KV codec {codec_id} is not available on a GPU",
            "kernels there have no factors per channel, and the model's calibration has some for this codec",
            f"use --kv-cache-codec {replace(codec_id, calibration=None)}, which has none, or --device cpu",
        )


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
