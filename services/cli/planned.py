"""`diptych serve --plan FILE`: from what the planner answered to settings, and to what must be placed together.

A plan is deployed on this machine as it is, or refused: for another model, for other devices or more of them than
there are, beside settings that say otherwise: of its pools at all, of a step and of who reads prompts anything else
than was verified. What is started of a placement is in `planner.candidates.deployed`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.errors import ConfigError
from diptych.load import Loaded
from planner import plan_file
from planner.candidates import deployed, local_prefill
from planner.groups import groups
from planner.plan_file import PlanFile
from planner.shape import EMBEDDED as PLANNED_EMBEDDED
from planner.shape import known
from planner.terms import BOTH, DECODE, PREFILL, Placement
from services.cli.model import EMBEDDED, Model
from services.cluster.parts import Bundle

POOLS = ("prefill", "decode", "colocated", "prefill_tp", "prefill_pp", "decode_tp", "decode_pp")


def planned(loaded: Loaded) -> tuple[Loaded, PlanFile | None]:
    """The settings with those of their plan, if one is named, and that plan.

    Raises:
        ConfigError: the plan cannot be read, contradicts other settings, or is for another model or other hardware.
    """
    path = loaded.config.plan
    if path is None:
        return loaded, None
    plan = plan_file.load(path)
    twice = [name for name in POOLS if name in loaded.origins]
    if twice:
        raise ConfigError(
            "the pools are given twice",
            f"by the plan {path} and by {loaded.origins[twice[0]]}",
            "leave out one of them",
        )
    _check_devices(plan)
    given = _pools(plan) | {"model": _model(loaded, plan)} | _objectives(loaded, plan)
    given |= _verified(loaded, plan)
    return Loaded(
        replace(loaded.config, **given), loaded.origins | dict.fromkeys(given, f"the plan {path}")
    ), plan


def check_model(plan: PlanFile | None, model: Model) -> None:
    """Raises ConfigError where the model that was found is not the one that was planned for."""
    if plan is not None and model.layers != plan.layers:
        raise ConfigError(
            "the plan is for another model",
            f"it counts on {plan.layers} layers ({plan.model}), and {model.path} has {model.layers}",
            "plan for this one: diptych plan --model FOLDER --out plan.json",
        )


def alone(sizes: Mapping[str, int]) -> tuple[tuple[Bundle, ...], ...]:
    """Each worker by itself, anywhere; `sizes` are devices by worker."""
    return tuple((Bundle(name, devices),) for name, devices in sizes.items())


def together(plan: PlanFile) -> tuple[tuple[Bundle, ...], ...]:
    """What must be on one node, by the plan's affinity: workers, each with its devices.

    A worker's ranks are children of one process. So groups of the lcm rule (`planner.groups`) that hold stages of the
    same worker are on one node together.

    Raises:
        ConfigError: a group does not fit a node of the plan.
    """
    names = _names(plan)
    joined: list[dict[str, int]] = []
    for group in groups(plan.placement, plan.layers, plan.devices_per_node):
        one: dict[str, int] = defaultdict(int)
        for seat in group.seats:
            one[names[seat.pool, seat.instance]] += 1
        for other in [other for other in joined if other.keys() & one.keys()]:
            joined.remove(other)
            for name, devices in other.items():
                one[name] += devices
        joined.append(one)
    return tuple(tuple(Bundle(name, devices) for name, devices in sorted(one.items())) for one in joined)


def _names(plan: PlanFile) -> dict[tuple[int, int], str]:
    """Workers by pool and instance: "prefill-0", numbered over all pools of a role."""
    found: dict[tuple[int, int], str] = {}
    count = {PREFILL: 0, DECODE: 0}
    for index, pool in enumerate(plan.pools):
        role = PREFILL if pool.role == PREFILL else DECODE
        for instance in range(pool.count):
            found[index, instance] = f"{role}-{count[role]}"
            count[role] += 1
    return found


def _pools(plan: PlanFile) -> dict[str, Any]:
    """Numbers and splits of the pools that are started, as settings."""
    started = deployed(plan.placement)
    counts = {role: sum(pool.count for pool in started.role(role)) for role in (PREFILL, DECODE, BOTH)}
    if counts[PREFILL]:
        given: dict[str, Any] = {"prefill": counts[PREFILL], "decode": counts[DECODE]}
        given |= _split("prefill", started, PREFILL)
    else:
        given = {"colocated": counts[BOTH]}
    return given | _split("decode", started, DECODE, BOTH)


def _split(name: str, started: Placement, *roles: str) -> dict[str, int]:
    splits = sorted({pool.split for pool in started.role(*roles)})
    if len(splits) != 1:
        raise ConfigError(
            f"the plan has {name} workers of different sizes",
            f"{' and '.join(map(str, splits))}: all workers of a pool are alike here",
            "plan anew, or take the pools by hand: --prefill, --decode, --decode-tp, ...",
        )
    return {f"{name}_tp": splits[0].tp, f"{name}_pp": splits[0].pp}


def _check_devices(plan: PlanFile) -> None:
    """Workers compute on the cores of this machine."""
    cores, wanted = len(os.sched_getaffinity(0)), plan.placement.devices
    other = sorted(
        {pool.device for pool in plan.pools if pool.device and not pool.device.lower().startswith("cpu")}
    )
    here = f"workers compute on the cores of this machine, which are {cores}"
    if other:
        raise ConfigError(
            f"the plan is for {wanted} devices of the kind {', '.join(other)}",
            here,
            f"plan for what is here: diptych plan --device cpu --nodes 1 --gpus-per-node {cores}",
        )
    if wanted > cores:
        raise ConfigError(
            f"the plan is for {wanted} cores",
            here,
            f"plan with --nodes 1 --gpus-per-node {cores}; or share cores, without a promise: {_flags(plan)}",
        )


def _flags(plan: PlanFile) -> str:
    given = {name: value for name, value in _pools(plan).items() if value != 1}
    return (
        " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items()) or "leave out --plan"
    )


def _model(loaded: Loaded, plan: PlanFile) -> str:
    named = loaded.config.model if "model" in loaded.origins else None
    if named is not None and _plain(named) != _plain(plan.model):
        raise ConfigError(
            "the plan is for another model",
            f"it was made for {plan.model}, and {named} is to be served ({loaded.origins['model']})",
            f"leave out {loaded.origins['model']}, or plan anew: diptych plan --model {named}",
        )
    return named or (EMBEDDED if plan.model in PLANNED_EMBEDDED else plan.model)


def _plain(model: str) -> str:
    """A model's name without owner and variants."""
    try:
        plain = known(model).name.lower()
    except ConfigError:
        plain = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return EMBEDDED if plain in PLANNED_EMBEDDED else plain


def _verified(loaded: Loaded, plan: PlanFile) -> dict[str, Any]:
    """What workers take on in a step and who reads prompts, as it was verified.

    "never" and "fallback" are one to a plan: they differ only where no prefill worker is left.

    Raises:
        ConfigError: a setting says something else.
    """
    config, found = loaded.config, _steps(plan)
    if "auto" in (plan.local_prefill, local_prefill(plan.placement)):
        found["local_prefill"] = "auto"
    elif config.local_prefill == "auto":
        found["local_prefill"] = plan.local_prefill
    for name, value in found.items():
        said = getattr(config, name)
        if name in loaded.origins and said != value:
            raise ConfigError(
                f"{name} is {_shown(said)}, and the plan was made with {_shown(value)}",
                f"from {loaded.origins[name]}: what the plan {config.plan} promises would not hold",
                f"leave out {loaded.origins[name]}, or plan anew",
            )
    return found


def _steps(plan: PlanFile) -> dict[str, Any]:
    if plan.steps is None:
        return {}
    return {
        "max_num_seqs": plan.steps.max_num_seqs,
        "max_num_batched_tokens": plan.steps.max_num_batched_tokens,
        "enable_chunked_prefill": plan.steps.chunked_prefill,
    }


def _shown(value: object) -> str:
    return str(value).lower()


def _objectives(loaded: Loaded, plan: PlanFile) -> dict[str, float]:
    """The plan's objectives in milliseconds; of several kinds of request the strictest, as the gateway has but one."""
    found = {}
    for name in ("ttft", "tpot"):
        limits = [limit for slo in plan.slos.values() if (limit := getattr(slo, f"{name}_s")) is not None]
        if limits and f"slo_{name}_ms" not in loaded.origins:
            found[f"slo_{name}_ms"] = min(limits) * 1e3
    return found
