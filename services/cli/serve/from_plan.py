"""`diptych serve --plan FILE`: from what the planner answered to settings, and to what must be placed together.

A plan is deployed on this machine as it is, or refused: for another model, for other devices or more of them than there
are, beside settings that say otherwise: about its pools at all, or a step size, a KV codec or prefilling workers other
than it verified. What is started of a placement is in `planner.placement.candidates.deployed_placement`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError
from diptych.slo import strictest_slo
from planner.costs.kv.classes import same_classes
from planner.costs.model import EMBEDDED_NAMES as PLANNED_EMBEDDED
from planner.costs.model import find_model
from planner.hardware import list_gpus, normalize_name
from planner.placement.candidates import deployed_placement, local_prefill_mode
from planner.placement.packing import device_groups
from planner.placement.plan_file import PlanFile, load_plan
from planner.types import BOTH, DECODE, PREFILL, Placement
from services.cluster.spec import Bundle
from services.host.gpus import find_gpus
from services.host.model_probe import EMBEDDED_MODEL, ProbedModel

POOL_SETTINGS = ("prefill", "decode", "colocated", "prefill_tp", "prefill_pp", "decode_tp", "decode_pp")


def apply_plan(loaded: LoadedConfig) -> tuple[LoadedConfig, PlanFile | None]:
    """The settings with those of their plan, if one is named, and that plan.

    Raises:
        ConfigError: the plan cannot be read, contradicts other settings, or is for another model or other hardware.
    """
    path = loaded.config.plan
    if path is None:
        return loaded, None
    plan = load_plan(path)
    twice = [name for name in POOL_SETTINGS if name in loaded.origins]
    if twice:
        raise ConfigError(
            "the pools are given twice",
            f"by the plan {path} and by {loaded.origins[twice[0]]}",
            "leave out one of them",
        )
    _check_device_kind(plan, loaded.config)
    if loaded.config.ray_address is None and loaded.config.device != "cuda":
        _check_cores(plan)
    given = _pool_settings(plan) | {"model": _planned_model(loaded, plan)} | _slo_settings(loaded, plan)
    given |= _verified_settings(loaded, plan)
    assert given.keys() <= Config.model_fields.keys()  # `model_copy` does not check
    return LoadedConfig(
        loaded.config.model_copy(update=given), loaded.origins | dict.fromkeys(given, f"the plan {path}")
    ), plan


def apply_plan_slos(loaded: LoadedConfig) -> LoadedConfig:
    """The settings with the SLOs and the target of their plan, if one is named; its pools do not matter.

    Raises:
        ConfigError: the plan cannot be read.
    """
    path = loaded.config.plan
    given = {} if path is None else _slo_settings(loaded, load_plan(path))
    origins = loaded.origins | dict.fromkeys(given, f"the plan {path}")
    return LoadedConfig(loaded.config.model_copy(update=given), origins)


def check_planned_model(plan: PlanFile | None, model: ProbedModel) -> None:
    """Raises ConfigError if the model that was found is not the model of the plan."""
    if plan is not None and model.num_layers != plan.layers:
        raise ConfigError(
            "the plan is for another model",
            f"it counts on {plan.layers} layers ({plan.model}), and {model.path} has {model.num_layers}",
            "plan for this one: diptych plan --model FOLDER --out plan.json",
        )


def one_group_per_worker(sizes: Mapping[str, int]) -> tuple[tuple[Bundle, ...], ...]:
    """Each worker by itself, anywhere; `sizes` are devices by worker."""
    return tuple((Bundle(name, devices),) for name, devices in sizes.items())


def node_groups(plan: PlanFile) -> tuple[tuple[Bundle, ...], ...]:
    """What must be on one node, by the plan's affinity: workers, each with its devices.

    A worker's ranks are children of one process. So groups of the lcm rule (`planner.placement.packing`) that
    hold stages of the same worker are on one node together.

    Raises:
        ConfigError: a group does not fit a node of the plan.
    """
    names = _worker_names(plan)
    joined: list[dict[str, int]] = []
    for group in device_groups(plan.placement, plan.layers, plan.devices_per_node):
        one: dict[str, int] = defaultdict(int)
        for seat in group.seats:
            one[names[seat.pool, seat.instance]] += 1
        for other in [other for other in joined if other.keys() & one.keys()]:
            joined.remove(other)
            for name, devices in other.items():
                one[name] += devices
        joined.append(one)
    return tuple(tuple(Bundle(name, devices) for name, devices in sorted(one.items())) for one in joined)


def _worker_names(plan: PlanFile) -> dict[tuple[int, int], str]:
    """Workers by pool and instance: "prefill-0", numbered over all pools of a role."""
    found: dict[tuple[int, int], str] = {}
    count = {PREFILL: 0, DECODE: 0}
    for index, pool in enumerate(plan.pools):
        role = PREFILL if pool.role == PREFILL else DECODE
        for instance in range(pool.count):
            found[index, instance] = f"{role}-{count[role]}"
            count[role] += 1
    return found


def _pool_settings(plan: PlanFile) -> dict[str, Any]:
    """Numbers and splits of the pools that are started, as settings."""
    started = deployed_placement(plan.placement)
    counts = {role: sum(pool.count for pool in started.role(role)) for role in (PREFILL, DECODE, BOTH)}
    if counts[PREFILL]:
        given: dict[str, Any] = {"prefill": counts[PREFILL], "decode": counts[DECODE]}
        given |= _split_settings("prefill", started, PREFILL)
    else:
        given = {"colocated": counts[BOTH]}
    return given | _split_settings("decode", started, DECODE, BOTH)


def _split_settings(name: str, placement: Placement, *roles: str) -> dict[str, int]:
    splits = sorted({pool.parallelism for pool in placement.role(*roles)})
    if len(splits) != 1:
        raise ConfigError(
            f"the plan has {name} workers of different sizes",
            f"{' and '.join(map(str, splits))}: all workers of a pool are alike here",
            "plan anew, or take the pools by hand: --prefill, --decode, --decode-tp, ...",
        )
    return {f"{name}_tp": splits[0].tp, f"{name}_pp": splits[0].pp}


def _check_device_kind(plan: PlanFile, config: Config) -> None:
    """Raises ConfigError if the plan is for other devices than workers compute on: CPU cores, unless it is said."""
    if config.device == "cuda":
        return _check_gpus(plan, config)
    other = list_gpus(pool.device for pool in plan.pools if pool.device)
    if not other:
        return
    cores = len(os.sched_getaffinity(0))
    here = f"workers compute on the cores of this machine, which are {cores}"
    size = f"--nodes 1 --gpus-per-node {cores}"
    if config.ray_address is not None:
        here = "workers compute on the cores of the Ray cluster's nodes"
        size = "--nodes N --gpus-per-node CORES"
    raise ConfigError(
        f"the plan is for {plan.placement.devices} devices of the kind {', '.join(other)}",
        here,
        f"add --device cuda, or plan for what is here: diptych plan --device cpu {size}",
    )


def _check_gpus(plan: PlanFile, config: Config) -> None:
    """Raises ConfigError if the plan is for CPU cores, or for other GPUs than this machine's or more of them.

    What the nodes of a Ray cluster have is seen when workers are placed there.
    """
    planned = sorted({pool.device for pool in plan.pools if pool.device})
    if cores := set(planned) - set(list_gpus(planned)):
        raise ConfigError(
            f"the plan is for devices of the kind {', '.join(sorted(cores))}",
            "with --device cuda workers compute on GPUs",
            "leave out --device cuda, or plan for the GPU: diptych plan --device NAME",
        )
    if config.ray_address is not None:
        return
    gpus = find_gpus()
    names = sorted({gpu.name for gpu in gpus})
    kinds = {normalize_name(name) for name in names}
    if other := [name for name in planned if normalize_name(name) not in kinds]:
        raise ConfigError(
            f"the plan is for {plan.placement.devices} devices of the kind {', '.join(other)}",
            f"this machine has {len(gpus)} of the kind {', '.join(names)}",
            f"plan for what is here: diptych plan --device {normalize_name(names[0])} --nodes 1"
            f" --gpus-per-node {len(gpus)}",
        )
    if plan.placement.devices > len(gpus):
        raise ConfigError(
            f"the plan is for {plan.placement.devices} GPUs",
            f"this machine has {len(gpus)}",
            f"plan with --nodes 1 --gpus-per-node {len(gpus)}; or share them, without a prediction:"
            f" {_pool_flags(plan)}",
        )


def _check_cores(plan: PlanFile) -> None:
    """Raises ConfigError if this machine lacks the plan's devices; workers compute on its CPU cores."""
    cores, wanted = len(os.sched_getaffinity(0)), plan.placement.devices
    if wanted > cores:
        raise ConfigError(
            f"the plan is for {wanted} cores",
            f"workers compute on the cores of this machine, which are {cores}",
            f"plan with --nodes 1 --gpus-per-node {cores}; or share cores, without a prediction: {_pool_flags(plan)}",
        )


def _pool_flags(plan: PlanFile) -> str:
    given = {name: value for name, value in _pool_settings(plan).items() if value != 1}
    return (
        " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items()) or "leave out --plan"
    )


def _planned_model(loaded: LoadedConfig, plan: PlanFile) -> str:
    named = loaded.config.model if "model" in loaded.origins else None
    if named is not None and _plain_model_name(named) != _plain_model_name(plan.model):
        raise ConfigError(
            "the plan is for another model",
            f"it was made for {plan.model}, and {named} is to be served ({loaded.origins['model']})",
            f"leave out {loaded.origins['model']}, or plan anew: diptych plan --model {named}",
        )
    return named or (EMBEDDED_MODEL if plan.model in PLANNED_EMBEDDED else plan.model)


def _plain_model_name(model: str) -> str:
    """A model's name without owner and variants."""
    try:
        plain = find_model(model).name.lower()
    except ConfigError:
        plain = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return EMBEDDED_MODEL if plain in PLANNED_EMBEDDED else plain


def _verified_settings(loaded: LoadedConfig, plan: PlanFile) -> dict[str, Any]:
    """The step size, the codec of KV, eviction and the workers that prefill, as the plan verified them.

    "never" and "fallback" are one to a plan: they differ only where no prefill worker is left.

    Raises:
        ConfigError: a setting says something else.
    """
    kept = {"kv_cache_codec": plan.kv_cache_codec, "kv_keep": plan.kv_keep}
    config, found = loaded.config, _step_settings(plan) | kept
    if "auto" in (plan.local_prefill, local_prefill_mode(plan.placement)):
        found["local_prefill"] = "auto"
    elif config.local_prefill == "auto":
        found["local_prefill"] = plan.local_prefill
    if "kv_cache_codec" in loaded.origins and _is_planned_codec(config.kv_cache_codec, plan):
        # It may name more than the plan does, for example a calibration, or leave a share open.
        found["kv_cache_codec"] = config.kv_cache_codec
    for name, value in found.items():
        said = getattr(config, name)
        if name in loaded.origins and said != value:
            raise ConfigError(
                f"{name} is {_shown_value(said)}, and the plan was made with {_shown_value(value)}",
                f"from {loaded.origins[name]}: the prediction of the plan {config.plan} would not hold",
                f"leave out {loaded.origins[name]}, or plan anew",
            )
    return found


def _is_planned_codec(codecs: str, plan: PlanFile) -> bool:
    """Whether codecs and their shares mean what the plan was made with; as text if nothing is known of the model."""
    try:
        return same_classes(find_model(plan.model), codecs, plan.kv_cache_codec)
    except ConfigError:
        return codecs == plan.kv_cache_codec


def _step_settings(plan: PlanFile) -> dict[str, Any]:
    if plan.steps is None:
        return {}
    return {
        "max_num_seqs": plan.steps.max_num_seqs,
        "max_num_batched_tokens": plan.steps.max_num_batched_tokens,
        "enable_chunked_prefill": plan.steps.chunked_prefill,
    }


def _shown_value(value: object) -> str:
    return str(value).lower()


def _slo_settings(loaded: LoadedConfig, plan: PlanFile) -> dict[str, float]:
    """The plan's SLO in milliseconds, and its target; of several kinds of request the strictest: there is only one."""
    if not plan.slos:
        return {}
    strictest = strictest_slo(plan.slos_by_kind.values())
    given: dict[str, float] = {
        f"slo_{name}_ms": limit_s * 1e3
        for name, limit_s in strictest.limits_s().items()
        if limit_s is not None and f"slo_{name}_ms" not in loaded.origins
    }
    # A plan may ask for all requests; a target leaves some for the error budget.
    if given and "slo_target" not in loaded.origins and 0 < strictest.attainment < 1:
        given["slo_target"] = strictest.attainment
    return given
