"""Reads and writes profiles: our own JSON files, DistServe's, and the steps that `benchmarks.gpu_decode` saved.

Our own file is one versioned JSON object; `docs/profile.schema.json` is its JSON Schema. Unknown fields and versions
are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, ValidationError, model_validator

from diptych.chunks import RAW_CLASS
from diptych.errors import ConfigError
from planner.costs.kv.codec import check_codec_name, code_profile
from planner.costs.model import ModelDims, dims_on_cpu, find_model
from planner.costs.profile import CostProfile, Overheads, analytic_profile, scale_cost
from planner.costs.roofline import roofline_cost
from planner.costs.step import StepCost
from planner.hardware import CPU, Device
from planner.hardware import find_device as named_device
from planner.json_file import FileModel, FileVersion, describe_fault
from planner.types import MAX_SECONDS, BulkRates, CostModel, Count, KvClassWork, KvKeep, Parallelism, Seconds

VERSION: Literal[1] = 1
PROFILE_FOLDER = Path(__file__).resolve().parent / "profiles"
ARTEFACT_DEVICE = "A100-80G"
MAX_KV_TOKENS = 10**9

KvCodecName = Annotated[str, AfterValidator(check_codec_name)]
# One line of a `StepCost`: (constant, per token, per square of tokens) of prefill, or (constant, per token of
# context, per row) of decode.
FileCostLine = tuple[Seconds, Seconds, Seconds]


class ProfileSplit(FileModel):
    """The step cost of one split in seconds (`planner.costs.step.StepCost`), and its measured room for KV in tokens."""

    tp: Count
    prefill: FileCostLine
    decode: Annotated[tuple[FileCostLine, ...], Field(min_length=1)]
    pp: Count = 1
    hop_s: Seconds = 0.0
    shared: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    cross: Seconds = 0.0
    kv_tokens: Annotated[int, Field(ge=0, le=MAX_KV_TOKENS)] | None = None


class ProfileFile(FileModel):
    """A whole profile: the model, the device, costs by split, the errors of the fits, and overheads.

    `kv_classes` says, by codec, how steps on such KV compare with steps on KV of the codec of `model`; `kv_keep` what
    eviction does at each threshold that was measured; `bulk` what blocks of bulk work cost.
    A `bytes_per_s` that is left out is infinite. `fit_error` is relative, by name ("prefill_mean", "decode_max", …).
    """

    version: FileVersion
    model: ModelDims
    device: Device
    source: str
    splits: tuple[ProfileSplit, ...]
    fit_error: dict[str, float] = {}
    overheads: Overheads = Overheads()
    kv_classes: dict[KvCodecName, KvClassWork] = {}
    kv_keep: tuple[KvKeep, ...] = ()
    bulk: BulkRates | None = None

    @model_validator(mode="after")
    def _check_classes(self) -> ProfileFile:
        if RAW_CLASS in self.kv_classes:
            raise ValueError("kv_classes: raw should be the codec of model, since it is measured too")
        return self


def built_in_profile(model: ModelDims | str, device: Device | str) -> CostProfile:
    """The profile that comes with us: OPT on A100-80G from the paper's artefact, else analytic.

    OPT models that the artefact lacks are scaled from its OPT-66B (or OPT-13B, whichever is nearer in size). On the CPU
    a model is as workers hold it there.
    """
    bare = analytic_profile(model, device)
    if bare.device.name == CPU:
        return replace(bare, model=dims_on_cpu(bare.model))
    if bare.device.name != ARTEFACT_DEVICE or not bare.model.name.startswith("OPT-"):
        return bare
    have = {
        "OPT-13B": load_profile(PROFILE_FOLDER / "opt-13b.a100-80g.json"),
        "OPT-66B": load_profile(PROFILE_FOLDER / "opt-66b.a100-80g.json"),
    }
    if bare.model.name in have:
        return code_profile(have[bare.model.name], bare.model.kv_codec or RAW_CLASS)
    near = min(have.values(), key=lambda one: abs(math.log(one.model.parameters / bare.model.parameters)))
    costs: dict[Parallelism, CostModel] = {}
    for parallelism, cost in near.costs.items():
        if bare.model.valid(parallelism) and isinstance(cost, StepCost):
            here, there = (roofline_cost(dims, parallelism, bare.device) for dims in (near.model, bare.model))
            costs[parallelism] = scale_cost(cost, here, there)
    return replace(
        bare, costs=costs, source=f"scaled from {near.model.name} by the analytic model ({near.source})"
    )


def save_profile(profile: CostProfile, path: str | Path) -> None:
    """Write `profile` as JSON, schema version 1; times in seconds. Analytic costs are computed anew when it is read."""
    splits = tuple(
        ProfileSplit(
            tp=parallelism.tp,
            prefill=cost.prefill,
            decode=cost.decode,
            pp=parallelism.pp,
            hop_s=cost.hop_s,
            shared=cost.shared,
            cross=cost.cross,
            kv_tokens=profile.rooms.get(parallelism),
        )
        for parallelism, cost in sorted(profile.costs.items())
        if isinstance(cost, StepCost)
    )
    file = ProfileFile(
        version=VERSION,
        model=profile.model,
        device=profile.device,
        source=profile.source,
        splits=splits,
        fit_error=dict(profile.fit_error),
        overheads=profile.overheads,
        kv_classes=dict(profile.kv_classes),
        kv_keep=profile.kv_keep,
        bulk=profile.bulk,
    )
    text = json.dumps(_drop_infinite(file.model_dump(mode="json")), indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_profile(path: str | Path, model: str = "") -> CostProfile:
    """Read a profile of ours, the DistServe artefact's (times in ms), or the steps that `benchmarks.gpu_decode` saved.

    `model` picks one of the artefact's models, and names the one whose steps were measured.

    Raises:
        ConfigError: the file is not there, is none of the three, or has no such model.
    """
    content = _read_content(Path(path))
    raw = _decode_object(content, path)
    if "version" not in raw:
        return _foreign_profile(raw, str(path), model)
    try:
        file = ProfileFile.model_validate_json(_drop_chunk_bytes(raw, content))
    except ValidationError as error:
        raise ConfigError(
            f"the profile {path} is not valid", describe_fault(error), "write it again with `diptych profile`"
        ) from None
    costs: dict[Parallelism, CostModel] = {
        Parallelism(row.tp, row.pp): StepCost(
            row.prefill, row.decode, row.pp, row.hop_s, row.shared, row.cross
        )
        for row in file.splits
    }
    rooms = {Parallelism(row.tp, row.pp): row.kv_tokens for row in file.splits if row.kv_tokens is not None}
    return CostProfile(
        file.model, file.device, costs, rooms, file.source, file.fit_error, file.overheads, file.kv_classes,
        file.kv_keep, file.bulk,
    )  # fmt: skip


def load_profile_of(path: str | Path, model: str, flag: str = "--profile") -> CostProfile:
    """`load_profile`, where the profile must be of that very model; its number widths and context may be others.

    `flag` is what names the profile, for the error.

    Raises:
        ConfigError: also where it is of another model.
    """
    found, wanted = load_profile(path, model), find_model(model)
    if _comparable_dims(found.model) != _comparable_dims(wanted):
        raise ConfigError(
            f"the profile {path} is of {found.model.name}, and --model is {wanted.name}",
            "they are not the same model: layers, widths, vocabulary or the bits of weights differ",
            f"measure that model, or leave out {flag}",
        )
    return found


def _comparable_dims(dims: ModelDims) -> tuple[float, ...]:
    """What two descriptions of one model agree in."""
    eight = dims.weight_bytes <= 1.0
    return (
        dims.layers, dims.hidden, dims.heads, dims.kv_heads, dims.head_dim, dims.ffn, dims.vocab, eight,
    )  # fmt: skip


def _read_content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _decode_object(content: bytes, path: str | Path) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(read, dict):
        raise ConfigError(f"the profile {path} is not valid", "it holds no JSON object", "give a profile")
    return read


def _drop_chunk_bytes(raw: dict[str, Any], content: bytes) -> bytes:
    """`content` without a field of older files: in which pieces KV moves, which nothing needs."""
    overheads = raw.get("overheads")
    if not isinstance(overheads, dict) or "chunk_bytes" not in overheads:
        return content
    kept = {key: one for key, one in overheads.items() if key != "chunk_bytes"}
    return msgspec.json.encode(raw | {"overheads": kept})


def _unreadable(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the profile {path} cannot be read", str(error), "give a JSON file written by `diptych profile`"
    )


def _drop_infinite(value: Any) -> Any:
    """Without infinite numbers, which JSON has not: a link's bandwidth that is left out is infinite when read."""
    if isinstance(value, dict):
        return {key: _drop_infinite(one) for key, one in value.items() if one is not None and one != math.inf}
    return [_drop_infinite(one) for one in value] if isinstance(value, list | tuple) else value


def _check_costs(costs: Mapping[Parallelism, CostModel]) -> None:
    """Raises ValueError for steps without end."""
    for parallelism, cost in costs.items():
        if isinstance(cost, StepCost):
            numbers = (*cost.prefill, *(number for line in cost.decode for number in line))
            if not max(*numbers, cost.hop_s, cost.cross) <= MAX_SECONDS:
                raise ValueError(f"a number of {parallelism} is above {MAX_SECONDS:.0f} s")


def _pick_model(raw: dict[str, Any], path: str, model: str) -> str:
    """The artefact's name of the wanted model."""
    wanted = model.rsplit("/", 1)[-1].lower()
    found = [name for name in raw if not wanted or name.rsplit("/", 1)[-1].lower() == wanted]
    if len(found) != 1:
        raise ConfigError(
            f"the profile {path} has no single answer for the model {model!r}",
            "it holds " + ", ".join(raw),
            "name one of these models",
        )
    return found[0]


def _foreign_profile(raw: dict[str, Any], path: str, model: str) -> CostProfile:
    """A profile from the artefact's coefficients, or from measured steps of one model."""
    # Imported only here, because scipy is needed only to fit these: the simulator loads our own profiles without it.
    from planner.costs import distserve_fits, measured_points

    measured = isinstance(raw.get("decode"), list)
    name = model if measured else _pick_model(raw, path, model)
    dims, on = find_model(name), named_device(str(raw.get("device")) if measured else ARTEFACT_DEVICE)
    try:
        costs, error = (
            measured_points.costs_from_points(raw)
            if measured
            else distserve_fits.costs_from_distserve(raw[name])
        )
        _check_costs(costs)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as wrong:
        raise ConfigError(
            f"the profile {path} is not valid",
            f"{name}: {wrong!r}",
            "give a profile of ours, DistServe's profiler JSON, or what gpu_decode saved",
        ) from None
    source = (
        "measured steps" if measured else "DistServe artefact, Apache-2.0; refitted non-negative and monotone"
    )
    return CostProfile(dims, on, costs, {}, f"{Path(path).name}: {source}", error)
