"""What `diptych simulate` deploys: pools from words, hardware and a profile, and the settings of `diptych serve`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from diptych.chunks import RAW_CLASS
from diptych.config.fields import SettingSpec
from diptych.errors import ConfigError
from diptych.slo import Slo, read_limit_s
from planner import hardware
from planner.costs.kv.classes import check_class_rooms, kv_class_notes, read_classes, shared_kv_classes
from planner.costs.kv.codec import code_profile, codec_note, with_kv_codec
from planner.costs.kv.eviction import find_keep, keep_notes
from planner.costs.model import ModelDims, find_model
from planner.costs.profile import CostProfile
from planner.costs.profile_file import built_in_profile, load_profile_of
from planner.kv_links import choose_kv_link, parse_link_flag
from planner.sim.exact.deployment import SimDeployment, build_deployment
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    InstancePool,
    LinkSpec,
    Parallelism,
    Placement,
    keeps_steps_within_tpot,
)
from services.cli.simulate.bulk_use import bulk_beside
from services.cli.simulate.kv_tiers import check_tier_room, read_tiers
from services.cli.simulate.options import DECODE_OVERDRAFT, LOCAL_PREFILL, SimulateOptions

ROLES = {"P": PREFILL, "D": DECODE, "C": BOTH}
POOL_PATTERN = re.compile(r"(\d+)\s*([PDC])((?:\s*(?:TP|PP)\d+)*)\s*(?:@\s*(\S+))?", re.IGNORECASE)
# Most devices of a placement.
MAX_DEVICES = 100_000


def simulated_deployment(options: SimulateOptions, slo: Slo) -> SimDeployment:
    """The deployment that `options` describe; `slo` is the strictest SLO of all kinds.

    Raises:
        ConfigError: a flag cannot be used, the model does not fit, a class of KV has too small a share, or there is
            no such device.
    """
    profile, several = _measured_profile(options), read_classes(options.kv_cache_codec)
    codec = RAW_CLASS if several else options.kv_cache_codec
    dims = with_kv_codec(find_model(options.model), codec) if profile is None else profile.model
    if options.placement is None:
        raise ConfigError("--placement is missing", "it says what is simulated", '--placement "1P + 1D"')
    device = options.device if profile is None or "device" in options.given else profile.device.name
    placement, profiles = _resolve_devices(parse_placement(options.placement, device), dims, profile)
    for pool in placement.pools:
        if not dims.valid(pool.parallelism):
            why = f"{dims.heads} heads are shared by TP devices, {dims.layers} layers by PP stages, evenly"
            raise ConfigError(f"{dims.name} cannot be spread as {pool.parallelism}", why, "take others")
    made = build_deployment(
        placement,
        profiles,
        link=_kv_link(options.link, placement, profiles),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_step_tokens(options),
        chunked_prefill=options.enable_chunked_prefill,
        prefix_caching=options.enable_prefix_caching,
        local_prefill=_local_prefill(options, placement),
        overdraft=_decode_overdraft(options, placement),
        kv_classes=shared_kv_classes(profiles.values(), options.kv_cache_codec),
        keep=find_keep(profile, options.kv_keep, options.kv_cache_codec),
        bulk=bulk_beside(options, slo),
        tiers=read_tiers(options),
    )
    check_tier_room(made)
    for machine in made.instances:
        check_class_rooms(made.kv_classes, machine.kv_tokens, made.max_model_len)
    bound = _tpot_bound_pools(options, placement)
    budget_s = _step_budget_s(options.tpot_budget_ms, slo.tpot_s, placement, bool(bound))
    machines = tuple(
        replace(machine, tpot_s=budget_s if pool in bound else None)
        for pool, machine in zip(placement.pools, made.instances, strict=True)
    )
    return replace(made, instances=machines)


def _measured_profile(options: SimulateOptions) -> CostProfile | None:
    """The profile that was named, for KV in the codec that was named."""
    if options.profile is None:
        return None
    profile = load_profile_of(options.profile, options.model)
    return profile if read_classes(options.kv_cache_codec) else code_profile(profile, options.kv_cache_codec)


def class_profile(options: SimulateOptions) -> CostProfile:
    """A profile that says what names of codecs mean for the model."""
    if options.profile is not None:
        return load_profile_of(options.profile, options.model)
    return CostProfile(find_model(options.model), hardware.find_device(options.device))


def codec_notes(
    options: SimulateOptions, deployment: SimDeployment, mix: Mapping[str, float]
) -> tuple[str, ...]:
    """What the report says about KV that is coded or evicted; `mix` are the shares of the requests by class."""
    profile = None if options.profile is None else load_profile_of(options.profile, options.model)
    known = [] if profile is None else [profile]
    if deployment.kv_classes:
        return kv_class_notes(deployment.kv_classes, mix, *known)
    dims = find_model(options.model) if profile is None else profile.model
    coded = dims if dims.kv_codec else with_kv_codec(dims, options.kv_cache_codec)
    return (*codec_note(coded, *known), *keep_notes(deployment.keep))


def parse_placement(text: str, device: str) -> Placement:
    """A placement from words such as "2P TP2 + 1D TP1" or "4C TP2PP2 @H100"; `device` is that of pools without one.

    Raises:
        ConfigError: a part is not of that form.
    """
    pools = []
    for part in text.split("+"):
        found = POOL_PATTERN.fullmatch(part.strip())
        count = int(found[1]) if found else 0
        if found is None or not count:
            raise ConfigError(
                f"the placement's part {part.strip()!r} is not understood",
                "a part is a count, P (prefill), D (decode) or C (both), TPn and PPn, then @DEVICE; or nB alone (bulk)",
                'such as --placement "2P TP2 + 1D TP1"',
            )
        sizes = {
            name.upper(): int(size) for name, size in re.findall(r"(TP|PP)(\d+)", found[3], re.IGNORECASE)
        }
        if not all(sizes.values()):
            raise ConfigError(f"{part.strip()!r} has a size of 0", "TP and PP are at least 1", "leave it out")
        if len(re.findall("TP|PP", found[3], re.IGNORECASE)) > len(sizes):
            raise ConfigError(
                f"{part.strip()!r} has a size twice", "TP and PP are said once", "leave one out"
            )
        split = Parallelism(sizes.get("TP", 1), sizes.get("PP", 1))
        pools.append(InstancePool(ROLES[found[2].upper()], split, count, found[4] or device))
    placement = Placement(tuple(pools))
    if placement.devices > MAX_DEVICES:
        why = f"the placement has {placement.devices:,}"
        raise ConfigError(f"at most {MAX_DEVICES:,} devices are simulated", why, "take fewer")
    return placement


def _resolve_devices(
    placement: Placement, dims: ModelDims, profile: CostProfile | None
) -> tuple[Placement, dict[str, CostProfile]]:
    """The placement with its devices' own names, and the profiles of these: `profile`'s device may be its own."""
    own = () if profile is None else (profile.device,)
    devices = {pool.device: hardware.find_device(pool.device, *own) for pool in placement.pools}
    pools = tuple(replace(pool, device=devices[pool.device].name) for pool in placement.pools)
    profiles = {one.name: built_in_profile(dims, one) for one in devices.values()}
    if profile is not None:
        name = profile.device.name
        if name not in profiles:
            why = f"it is of {name}, and the placement has {', '.join(sorted(profiles))}"
            raise ConfigError("--profile has no effect here", why, "leave it out, or leave out --device")
        profiles[name] = profile
    return replace(placement, pools=pools), profiles


def _kv_link(text: str | None, placement: Placement, profiles: Mapping[str, CostProfile]) -> LinkSpec:
    """The link that carries KV from prefill to decode instances: that of `--link`, or `choose_kv_link`'s choice.

    Pools of the same device type that fit on one node together are assumed to share a node.
    """
    pools = [pool for pool in placement.pools if pool.role != BOTH]
    moving = [(pool, profiles[pool.device].device.node) for pool in pools]
    if not moving:
        if text is not None:
            raise ConfigError(
                "--link has no effect here", "instances that do both move no KV", "leave it out"
            )
        return LinkSpec()
    first = profiles[pools[0].device]
    asked = parse_link_flag(text, first.device.node.inter.latency_s)
    alike = len({pool.device for pool in pools}) == 1
    within = alike and sum(pool.devices for pool in pools) <= first.device.slots
    return choose_kv_link(moving, first.overheads.link, within and asked is None, asked)


def _step_tokens(options: SimulateOptions) -> int:
    seats, tokens = options.max_num_seqs, options.max_num_batched_tokens
    if seats > tokens:
        raise ConfigError(
            f"a step of {tokens} tokens is too small for {seats} requests",
            "every running request may decode one token in it",
            f"use --max-num-batched-tokens {seats} or more, or a smaller --max-num-seqs",
        )
    return tokens


def _local_prefill(options: SimulateOptions, placement: Placement) -> str:
    return _split_setting(LOCAL_PREFILL, options.local_prefill, options, placement, "every instance prefills")


def _decode_overdraft(options: SimulateOptions, placement: Placement) -> bool:
    why = "every instance has the room of a prompt before it computes it"
    return _split_setting(DECODE_OVERDRAFT, options.decode_overdraft, options, placement, why) == "auto"


def _split_setting(
    setting: SettingSpec, value: str, options: SimulateOptions, placement: Placement, why: str
) -> str:
    """A setting of deployments with two pools; `why` it has no effect on others."""
    flag = f"--{setting.name.replace('_', '-')}"
    try:
        setting.kind.parse(value)
    except ValueError as error:
        fix = f"one of {setting.kind.metavar.replace('|', ', ')}"
        raise ConfigError(f"{flag} {value} cannot be used", f"it {error}", fix) from None
    if placement.colocated and setting.name in options.given:
        raise ConfigError(f"{flag} has no effect here", why, "leave it out")
    return value


def _tpot_bound_pools(options: SimulateOptions, placement: Placement) -> list[InstancePool]:
    """Pools whose steps are kept within a time, as in `diptych serve`."""
    chunked, local = options.enable_chunked_prefill, options.local_prefill
    return [pool for pool in placement.pools if keeps_steps_within_tpot(pool.role, chunked, local)]


def _step_budget_s(budget_ms: float | None, tpot_s: float, placement: Placement, bound: bool) -> float | None:
    """How long a step may take that is kept within a time, as some are if `bound`; None: as long as it takes.

    An infinite budget takes the bound away that the SLO `tpot_s` sets.
    """
    finite_ms = None if budget_ms == math.inf else budget_ms
    budget_s = tpot_s if budget_ms is None else read_limit_s("--tpot-budget-ms", finite_ms)
    if budget_ms is not None and not bound:
        why = (
            "whole prompts take their time"
            if any(placement.role(BOTH))
            else "no instance prefills while it decodes"
        )
        raise ConfigError("--tpot-budget-ms has no effect here", why, "leave it out")
    return budget_s if math.isfinite(budget_s) else None
