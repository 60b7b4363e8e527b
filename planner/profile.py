"""What is known about a model on a device: costs by split, room for KV, overheads, and where the figures come from.

Measured splits are used as they are; others are scaled from the nearest measured one by the ratio that the analytic
model gives; with none measured the analytic model is all there is. `how` says which of the three it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from diptych.errors import ConfigError
from planner.capacity import kv_tokens
from planner.cost import Line, StepCost
from planner.hardware import CPU, Device
from planner.hardware import device as named_device
from planner.roofline import Roofline, roofline
from planner.shape import Shape, known, on_cpu
from planner.terms import Cost, Link, Split

VERSION = 1
FOLDER = Path(__file__).resolve().parent / "profiles"
ARTEFACT_DEVICE = "A100-80G"
# Of any number in a file, of seconds, of a share of a peak, and of an instance's room.
MOST, MOST_S, MOST_SHARE, MOST_TOKENS = 1e18, 1e3, 10.0, 10**9
# Of steps, as `Profile.fit_error` names them, in words.
KINDS = {"prefill": "reading", "decode": "writing", "mixed": "both at once", "all": "all steps"}


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beyond the model, as measured: per request at the gateway, per message to a worker, per engine step.

    `link` is the way of KV between two workers; an endless one was not measured.
    """

    gateway_s: float = 0.0
    hop_s: float = 0.0
    step_s: float = 0.0
    link: Link = field(default_factory=Link)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of one model on one device. `rooms` are measured KV capacities in tokens; others follow from memory.

    `fit_error` holds relative errors by name ("prefill_mean", "decode_max", …).
    """

    model: Shape
    device: Device
    costs: Mapping[Split, Cost] = field(default_factory=dict)
    rooms: Mapping[Split, int] = field(default_factory=dict)
    source: str = "analytic"
    fit_error: Mapping[str, float] = field(default_factory=dict)
    overheads: Overheads = field(default_factory=Overheads)

    def cost(self, split: Split, cross: int = 1) -> Cost:
        """Seconds of a step with that split: measured, scaled from the nearest measured split, or analytic.

        With `cross` > 1 the stages lie on that many nodes (`Placement.cross`), and `cross - 1` of the ways between them
        are the slow ones between nodes.
        """
        cost = self._within(split)
        if cross == 1 or not isinstance(cost, StepCost | Roofline):
            return cost
        return cost.across(cross - 1, self.device.node.inter, self.model.hidden * self.model.table_bytes)

    def _within(self, split: Split) -> Cost:
        found = self.costs.get(split)
        if found is not None:
            return found
        analytic = roofline(self.model, split, self.device)
        near = self._nearest(split)
        if near is None:
            return analytic
        base = self.costs[near]
        assert isinstance(base, StepCost)  # as `_nearest` looks for
        stages = replace(base, pp=split.pp, hop_s=max(base.hop_s, analytic.hop_s))
        if near.tp == split.tp:
            return stages
        return scaled(stages, roofline(self.model, Split(near.tp), self.device), analytic)

    def kv_tokens(self, split: Split) -> int:
        """Tokens of KV an instance has room for; 0 if its weights do not fit."""
        room = self.rooms.get(split)
        return kv_tokens(self.model, split, self.device.memory_bytes) if room is None else room

    def how(self, split: Split) -> str:
        """Where the cost of that split comes from, in words, and how well it was fitted where that is known."""
        told = f"{self.source}; {self.off}" if self.off else self.source
        if split in self.costs:
            return f"{split}: {told}"
        near = self._nearest(split)
        if near is None:
            return f"{split}: analytic, from the data sheet of {self.device.name}"
        way = "divided by stages" if near.tp == split.tp else "scaled by the analytic model"
        return f"{split}: {way} from {near} ({told})"

    @property
    def off(self) -> str:
        """How far the fitted costs are from what was measured, in words; "" where the profile does not say.

        Of each kind of step the mean error on steps that the fit has not seen, where it was told, else on all.
        """
        found = []
        for kind, doing in KINDS.items():
            names = (f"{kind}_held_out_mean", f"{kind}_held_out", f"{kind}_mean")
            error = next((self.fit_error[name] for name in names if name in self.fit_error), None)
            if error is not None:
                found.append(f"{doing} by {error:.1%}")
        return "off in the mean: " + ", ".join(found) if found else ""

    def _nearest(self, split: Split) -> Split | None:
        """The profiled split with the nearest tp (ratio), then pp."""

        def far(one: Split) -> tuple[float, int, Split]:
            return abs(math.log(one.tp / split.tp)), abs(one.pp - split.pp), one

        return min(
            (one for one, cost in self.costs.items() if isinstance(cost, StepCost)), key=far, default=None
        )


def scaled(cost: StepCost, have: Roofline, want: Roofline) -> StepCost:
    """`cost`, measured where the analytic model says `have`, for where it says `want`: each number by its ratio."""
    fixed = (want.fixed + want.weights) / (have.fixed + have.weights)
    token = (want.product + want.touch) / (have.product + have.touch)
    row = (want.product + want.touch + want.logit) / (have.product + have.touch + have.logit)
    square, context = want.square / have.square, want.context / have.context
    a, b, c = cost.prefill
    return replace(
        cost,
        prefill=(a * fixed, b * token, c * square),
        decode=tuple((d * fixed, e * context, f * row) for d, e, f in cost.decode),
        cross=cost.cross * token,
    )


def analytic(model: Shape | str, device: Device | str) -> Profile:
    """A profile without a single measurement: data sheets and published efficiency."""
    shape = known(model) if isinstance(model, str) else model
    return Profile(shape, named_device(device) if isinstance(device, str) else device)


def built_in(model: Shape | str, device: Device | str) -> Profile:
    """The profile that comes with us: OPT on A100-80G from the paper's artefact, else analytic.

    OPT models that the artefact lacks are scaled from its OPT-66B (or OPT-13B, whichever is nearer in size). On the CPU
    a model is as workers hold it there.
    """
    bare = analytic(model, device)
    if bare.device.name == CPU:
        return replace(bare, model=on_cpu(bare.model))
    if bare.device.name != ARTEFACT_DEVICE or not bare.model.name.startswith("OPT-"):
        return bare
    have = {
        "OPT-13B": load(FOLDER / "opt-13b.a100-80g.json"),
        "OPT-66B": load(FOLDER / "opt-66b.a100-80g.json"),
    }
    if bare.model.name in have:
        return have[bare.model.name]
    near = min(have.values(), key=lambda one: abs(math.log(one.model.parameters / bare.model.parameters)))
    costs: dict[Split, Cost] = {}
    for split, cost in near.costs.items():
        if bare.model.valid(split) and isinstance(cost, StepCost):
            here, there = (roofline(shape, split, bare.device) for shape in (near.model, bare.model))
            costs[split] = scaled(cost, here, there)
    return replace(
        bare, costs=costs, source=f"scaled from {near.model.name} by the analytic model ({near.source})"
    )


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    tp: int
    prefill: Line
    decode: tuple[Line, ...]
    pp: int = 1
    hop_s: float = 0.0
    shared: float = 1.0
    cross: float = 0.0
    kv_tokens: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    model: Shape
    device: Device
    source: str
    splits: list[_Row]
    fit_error: dict[str, float] = {}
    overheads: Overheads = Overheads()


def save(profile: Profile, path: str | Path) -> None:
    """Write `profile` as JSON, schema version 1; times in seconds. Analytic costs are computed anew when it is read."""
    rows = [
        _Row(
            split.tp,
            cost.prefill,
            cost.decode,
            split.pp,
            cost.hop_s,
            cost.shared,
            cost.cross,
            profile.rooms.get(split),
        )
        for split, cost in sorted(profile.costs.items())
        if isinstance(cost, StepCost)
    ]
    file = _File(
        VERSION,
        profile.model,
        profile.device,
        profile.source,
        rows,
        dict(profile.fit_error),
        profile.overheads,
    )
    text = msgspec.json.format(msgspec.json.encode(_finite(msgspec.to_builtins(file))), indent=1)
    Path(path).write_bytes(text + b"\n")


def load(path: str | Path, model: str = "") -> Profile:
    """Read a profile of ours, the DistServe artefact's (times in ms), or the steps that `benchmarks.gpu_decode` saved.

    `model` picks one of the artefact's models, and names the one whose steps were measured.

    Raises:
        ConfigError: the file is not there, is neither of the two, or has no such model.
    """
    raw = _raw(Path(path))
    if "version" not in raw:
        return _foreign(raw, str(path), model)
    try:
        if raw["version"] != VERSION:
            raise msgspec.ValidationError(f"its version is {raw['version']}, and {VERSION} is read")
        file = msgspec.convert(raw, _File)
        _check(file)
        costs = {
            Split(row.tp, row.pp): StepCost(row.prefill, row.decode, row.pp, row.hop_s, row.shared, row.cross)
            for row in file.splits
        }
        _usable(costs)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"the profile {path} is not valid", str(error), "write it again with `diptych profile`"
        ) from None
    rooms = {Split(row.tp, row.pp): row.kv_tokens for row in file.splits if row.kv_tokens is not None}
    return Profile(file.model, file.device, costs, rooms, file.source, file.fit_error, file.overheads)


def load_of(path: str | Path, model: str) -> Profile:
    """`load`, where the profile must be of that very model; its number widths and context may be others.

    Raises:
        ConfigError: also where it is of another model.
    """
    found, wanted = load(path, model), known(model)
    if _dimensions(found.model) != _dimensions(wanted):
        raise ConfigError(
            f"the profile {path} is of {found.model.name}, and --model is {wanted.name}",
            "they are not the same model: layers, widths, vocabulary or the bits of weights differ",
            "measure that model, or leave out --profile",
        )
    return found


def _dimensions(shape: Shape) -> tuple[float, ...]:
    """What two descriptions of one model agree in."""
    eight = shape.weight_bytes <= 1.0
    return (
        shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab, eight,
    )  # fmt: skip


def _check(file: _File) -> None:
    """Raises ValueError for numbers that no machine and no model has."""
    shape, device, beside = file.model, file.device, file.overheads
    links = (beside.link, device.node.intra, device.node.inter)
    above = {
        "device.flops": device.flops,
        "device.bytes_per_s": device.bytes_per_s,
        "device.memory_bytes": device.memory_bytes,
        "device.node.devices_per_node": device.node.devices_per_node,
        "a link's bytes_per_s": min(link.bytes_per_s for link in links),
        "a share in device.gets": min(
            device.gets.flops, device.gets.attention, device.gets.bytes, device.gets.link
        ),
    } | {
        f"model.{name}": getattr(shape, name)
        for name in (
            "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "ffn_matrices", "vocab", "max_len",
            "weight_bytes", "kv_bytes",
        )
    }  # fmt: skip
    for name, number in above.items():
        if not number > 0:
            raise ValueError(f"{name} is {number}, and is above 0")
        if MOST < number < math.inf:
            raise ValueError(f"{name} is {number}")
    if max(device.gets.flops, device.gets.attention, device.gets.bytes, device.gets.link) > MOST_SHARE:
        raise ValueError(f"a share in device.gets is above {MOST_SHARE:.0f}")
    if max((row.kv_tokens or 0 for row in file.splits), default=0) > MOST_TOKENS:
        raise ValueError(f"an instance has room for more than {MOST_TOKENS:,} tokens of KV")
    if min((row.kv_tokens or 0 for row in file.splits), default=0) < 0:
        raise ValueError("an instance has room for less than no KV")
    gets = device.gets
    waits = (
        beside.gateway_s, beside.hop_s, beside.step_s, gets.layer_s, gets.step_s, gets.reduce_s,
        *(link.latency_s for link in links),
    )  # fmt: skip
    if not 0 <= min(waits) <= max(waits) <= MOST_S:
        raise ValueError(f"overheads and latencies are from 0 to {MOST_S:.0f} s")


def _usable(costs: Mapping[Split, Cost]) -> None:
    """Raises ValueError for splits that are none, and for steps without end."""
    for split, cost in costs.items():
        if min(split.tp, split.pp) < 1:
            raise ValueError(f"a split has tp {split.tp}, pp {split.pp}")
        if isinstance(cost, StepCost):
            numbers = (*cost.prefill, *(number for line in cost.decode for number in line))
            if not max(*numbers, cost.hop_s, cost.cross) <= MOST_S:
                raise ValueError(f"a number of {split} is above {MOST_S:.0f} s")


def _raw(path: Path) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"the profile {path} cannot be read", str(error), "give a JSON file written by `diptych profile`"
        ) from None
    if not isinstance(read, dict):
        raise ConfigError(f"the profile {path} is not valid", "it holds no JSON object", "give a profile")
    return read


def _finite(value: Any) -> Any:
    """Without infinite numbers, which JSON has not: a link's bandwidth that is left out is infinite when read."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items() if one is not None and one != math.inf}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _single(raw: dict[str, Any], path: str, model: str) -> str:
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


def _foreign(raw: dict[str, Any], path: str, model: str) -> Profile:
    """A profile from the artefact's coefficients, or from measured steps of one model."""
    # scipy is needed only to fit these: the simulator loads our own profiles without it.
    from planner import artefact, points

    measured = isinstance(raw.get("decode"), list)
    name = model if measured else _single(raw, path, model)
    shape, on = known(name), named_device(str(raw.get("device")) if measured else ARTEFACT_DEVICE)
    try:
        costs, error = points.costs_of(raw) if measured else artefact.costs_of(raw[name])
        _usable(costs)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as wrong:
        raise ConfigError(
            f"the profile {path} is not valid",
            f"{name}: {wrong!r}",
            "give a profile of ours, DistServe's profiler JSON, or what gpu_decode saved",
        ) from None
    told = (
        "measured steps" if measured else "DistServe artefact, Apache-2.0; refitted non-negative and monotone"
    )
    return Profile(shape, on, costs, {}, f"{Path(path).name}: {told}", error)
