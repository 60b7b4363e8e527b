"""What `diptych simulate` deploys: pools from words, hardware and a profile, and the settings of `diptych serve`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from diptych.errors import ConfigError
from planner import hardware
from planner.links import wanted, way
from planner.profile import Profile, built_in, load_of
from planner.shape import Shape, known
from planner.simulator import Deployment, deployment
from planner.terms import BOTH, DECODE, PREFILL, Link, Placement, Pool, Split, within_tpot
from services.cli.simulate_options import LOCAL

ROLES = {"P": PREFILL, "D": DECODE, "C": BOTH}
POOL = re.compile(r"(\d+)\s*([PDC])((?:\s*(?:TP|PP)\d+)*)\s*(?:@\s*(\S+))?", re.IGNORECASE)
MOST_DEVICES = 100_000  # of a placement


def deployed(options: Mapping[str, Any], given: Collection[str], tpot_s: float) -> Deployment:
    """The deployment that the flags describe, of which `given` were typed, for an objective of TPOT.

    Raises:
        ConfigError: a flag cannot be used, the model does not fit, or there is no such device.
    """
    profile = None if options["profile"] is None else load_of(options["profile"], options["model"])
    shape = known(options["model"]) if profile is None else profile.model
    if options["placement"] is None:
        raise ConfigError("--placement is missing", "it says what is simulated", '--placement "1P + 1D"')
    device = options["device"] if profile is None or "device" in given else profile.device.name
    placement, profiles = _on_devices(parse(options["placement"], device), shape, profile)
    for pool in placement.pools:
        if not shape.valid(pool.split):
            why = f"{shape.heads} heads are shared by TP devices, {shape.layers} layers by PP stages, evenly"
            raise ConfigError(f"{shape.name} cannot be spread as {pool.split}", why, "take others")
    made = deployment(
        placement,
        profiles,
        link=_link(options["link"], placement, profiles),
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=_step_tokens(options),
        chunked_prefill=options["enable_chunked_prefill"],
        prefix_caching=options["enable_prefix_caching"],
        local_prefill=_local(options, given, placement),
    )
    bound = _bound(options, placement)
    budget_s = _budget_s(options["tpot_budget_ms"], tpot_s, placement, bool(bound))
    machines = tuple(
        replace(machine, tpot_s=budget_s if pool in bound else None)
        for pool, machine in zip(placement.pools, made.machines, strict=True)
    )
    return replace(made, machines=machines)


def seconds(milliseconds: float | None) -> float:
    """An objective; endless where there is none. Raises ConfigError: it is no time."""
    if milliseconds is not None and not milliseconds > 0:
        raise ConfigError(
            f"an objective of {milliseconds} ms cannot be kept", "times are positive", "give more"
        )
    return math.inf if milliseconds is None else milliseconds / 1e3


def parse(text: str, device: str) -> Placement:
    """A placement from words such as "2P TP2 + 1D TP1" or "4C TP2PP2 @H100"; `device` is that of pools without one.

    Raises:
        ConfigError: a part is not of that form.
    """
    pools = []
    for part in text.split("+"):
        found = POOL.fullmatch(part.strip())
        count = int(found[1]) if found else 0
        if found is None or not count:
            raise ConfigError(
                f"the placement's part {part.strip()!r} is not understood",
                "a part is a count, P (prefill), D (decode) or C (both), then TPn and PPn, then @DEVICE",
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
        split = Split(sizes.get("TP", 1), sizes.get("PP", 1))
        pools.append(Pool(ROLES[found[2].upper()], split, count, found[4] or device))
    placement = Placement(tuple(pools))
    if placement.devices > MOST_DEVICES:
        why = f"the placement has {placement.devices:,}"
        raise ConfigError(f"at most {MOST_DEVICES:,} devices are simulated", why, "take fewer")
    return placement


def _on_devices(
    placement: Placement, shape: Shape, profile: Profile | None
) -> tuple[Placement, dict[str, Profile]]:
    """The placement with its devices' own names, and the profiles of these: `profile`'s device may be its own."""
    own = () if profile is None else (profile.device,)
    devices = {pool.device: hardware.device(pool.device, *own) for pool in placement.pools}
    pools = tuple(replace(pool, device=devices[pool.device].name) for pool in placement.pools)
    profiles = {one.name: built_in(shape, one) for one in devices.values()}
    if profile is not None:
        name = profile.device.name
        if name not in profiles:
            why = f"it is of {name}, and the placement has {', '.join(sorted(profiles))}"
            raise ConfigError("--profile has no effect here", why, "leave it out, or leave out --device")
        profiles[name] = profile
    return replace(placement, pools=pools), profiles


def _link(text: str | None, placement: Placement, profiles: Mapping[str, Profile]) -> Link:
    """The way of KV: the one that is asked for, or by `planner.links.way`. Pools of one kind of device that fit on one
    of its nodes are taken to be on one.
    """
    pools = [pool for pool in placement.pools if pool.role != BOTH]
    moving = [(pool, profiles[pool.device].device.node) for pool in pools]
    if not moving:
        if text is not None:
            raise ConfigError(
                "--link has no effect here", "instances that do both move no KV", "leave it out"
            )
        return Link()
    first = profiles[pools[0].device]
    asked = wanted(text, first.device.node.inter.latency_s)
    alike = len({pool.device for pool in pools}) == 1
    within = alike and sum(pool.devices for pool in pools) <= first.device.slots
    return way(moving, first.overheads.link, within and asked is None, asked)


def _step_tokens(options: Mapping[str, Any]) -> int:
    seats, tokens = int(options["max_num_seqs"]), int(options["max_num_batched_tokens"])
    if seats > tokens:
        raise ConfigError(
            f"a step of {tokens} tokens is too small for {seats} requests",
            "every running request may decode one token in it",
            f"use --max-num-batched-tokens {seats} or more, or a smaller --max-num-seqs",
        )
    return tokens


def _local(options: Mapping[str, Any], given: Collection[str], placement: Placement) -> str:
    local = str(options["local_prefill"])
    try:
        LOCAL.kind.parse(local)
    except ValueError as error:
        fix = f"one of {LOCAL.kind.metavar.replace('|', ', ')}"
        raise ConfigError(f"--local-prefill {local} cannot be used", f"it {error}", fix) from None
    if placement.colocated and "local_prefill" in given:
        why = "every instance reads prompts"
        raise ConfigError("--local-prefill has no effect here", why, "leave it out")
    return local


def _bound(options: Mapping[str, Any], placement: Placement) -> list[Pool]:
    """Pools whose steps are kept within a time, as in `diptych serve`."""
    chunked, local = options["enable_chunked_prefill"], options["local_prefill"]
    return [pool for pool in placement.pools if within_tpot(pool.role, chunked, local)]


def _budget_s(budget_ms: float | None, tpot_s: float, placement: Placement, bound: bool) -> float | None:
    """How long a step may take that is kept within a time, as some are if `bound`; None: as long as it takes."""
    budget_s = tpot_s if budget_ms is None else seconds(budget_ms)
    if budget_ms is not None and not bound:
        why = (
            "whole prompts take their time"
            if any(placement.role(BOTH))
            else "no instance reads prompts while it writes answers"
        )
        raise ConfigError("--tpot-budget-ms has no effect here", why, "leave it out")
    return budget_s if math.isfinite(budget_s) else None
