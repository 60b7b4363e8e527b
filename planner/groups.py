"""From a placement to groups of devices that must sit on one node, and from groups to nodes.

DistServe aligns the stages of a prefill and of a decode instance so that KV moves only within a node (section 4.2; the
rule for the size of a group is that of its artefact): with lp and ld layers in a stage of either, a group holds
lcm(lp, ld) layers of both, which is lcm/lp stages of the one and lcm/ld of the other. Pure: Ray makes a STRICT_PACK
placement group of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diptych.errors import ConfigError
from planner.terms import BOTH, DECODE, PREFILL, Placement, Pool


@dataclass(frozen=True, slots=True)
class Seat:
    """One device of a group: rank `rank` of stage `stage` of the `instance`-th instance of `pools[pool]`."""

    pool: int
    role: str
    instance: int
    stage: int
    rank: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that must be on one node, because KV of the layers [first, last) moves between them, or because they
    are the ranks of one stage.
    """

    seats: tuple[Seat, ...]
    first_layer: int
    last_layer: int

    @property
    def devices(self) -> int:
        return len(self.seats)

    @property
    def device(self) -> str:
        """The hardware that all its seats are on; empty where the placement names none."""
        return self.seats[0].device


def group_layers(layers: int, prefill_pp: int, decode_pp: int) -> int:
    """Layers in a group of a pair: lcm of the layers in a stage of either.

    Raises ValueError where stages do not divide the layers.
    """
    for stages in (prefill_pp, decode_pp):
        if stages < 1 or layers % stages:
            raise ValueError(f"{stages} stages do not divide {layers} layers")
    return math.lcm(layers // prefill_pp, layers // decode_pp)


def groups(placement: Placement, layers: int, devices_per_node: int) -> list[Group]:
    """The groups of a placement for a model of `layers` layers, in the order of its pools.

    Low affinity: with n prefill and m decode instances there are gcd(n, m) units, and a unit's segments of the same
    layers share a group. Otherwise nothing but ranks of a stage must be together, and an instance that fits a node is
    kept whole. Raises ConfigError where a group is larger than a node, or low affinity lacks one of the roles.
    """
    if placement.affinity == "low" and not placement.colocated:
        made = [*_paired(placement, layers), *_alone(placement, layers, devices_per_node, (BOTH,))]
    else:
        made = [*_alone(placement, layers, devices_per_node, (PREFILL, DECODE, BOTH))]
    for group in made:
        if group.devices > devices_per_node:
            raise ConfigError(
                f"{group.devices} devices must share a node, and a node has {devices_per_node}",
                f"{placement} keeps the layers {group.first_layer} to {group.last_layer - 1} of its instances together",
                "take smaller instances or more stages, or a link between nodes that allows high affinity",
            )
    return made


def assign(wanted: Sequence[Group], nodes: Mapping[str, int]) -> list[str]:
    """A node for each group, by name: nodes with the number of their free devices.

    Largest group first, into the fullest node that takes it; ties by name. Raises ConfigError where they do not fit.
    """
    free = dict(nodes)
    places: dict[int, str] = {}
    for index in sorted(range(len(wanted)), key=lambda index: (-wanted[index].devices, index)):
        need = wanted[index].devices
        fitting = [name for name in free if free[name] >= need]
        if not fitting:
            left = ", ".join(f"{name}: {count}" for name, count in sorted(free.items())) or "none"
            raise ConfigError(
                f"{sum(group.devices for group in wanted)} devices in {len(wanted)} groups do not fit the nodes",
                f"a group of {need} finds no node; free devices by node: {left[:300]}",
                "add nodes, or plan with --nodes and --gpus-per-node as they are",
            )
        place = min(fitting, key=lambda name: (free[name], name))
        free[place] -= need
        places[index] = place
    return [places[index] for index in range(len(wanted))]


def _paired(placement: Placement, layers: int) -> Iterator[Group]:
    numbered = list(enumerate(placement.pools))
    givers = [(index, pool) for index, pool in numbered if pool.role == PREFILL]
    takers = [(index, pool) for index, pool in numbered if pool.role == DECODE]
    if len(givers) != 1 or len(takers) != 1:
        raise ConfigError(
            "KV is to stay within nodes, and that needs one prefill and one decode pool",
            f"the placement is {placement}",
            "use affinity high or none",
        )
    (p_index, p_pool), (d_index, d_pool) = givers[0], takers[0]
    span = _span(layers, p_pool, d_pool)
    units = math.gcd(p_pool.count, d_pool.count)
    for unit in range(units):
        for first in range(0, layers, span):
            seats = [
                *_seats(p_index, p_pool, unit, units, layers, first, span),
                *_seats(d_index, d_pool, unit, units, layers, first, span),
            ]
            yield Group(tuple(seats), first, first + span)


def _span(layers: int, giver: Pool, taker: Pool) -> int:
    try:
        return group_layers(layers, giver.split.pp, taker.split.pp)
    except ValueError as error:
        raise ConfigError(
            "a placement does not fit the model's layers", str(error), "choose stages that divide the layers"
        ) from error


def _seats(
    index: int, pool: Pool, unit: int, units: int, layers: int, first: int, span: int
) -> Iterator[Seat]:
    share, per_stage = pool.count // units, layers // pool.split.pp
    for instance in range(unit * share, (unit + 1) * share):
        for stage in range(first // per_stage, (first + span) // per_stage):
            for rank in range(pool.split.tp):
                yield Seat(index, pool.role, instance, stage, rank, pool.device)


def _alone(
    placement: Placement, layers: int, devices_per_node: int, roles: tuple[str, ...]
) -> Iterator[Group]:
    for index, pool in enumerate(placement.pools):
        if pool.role not in roles:
            continue
        span = layers if pool.split.devices <= devices_per_node else _span(layers, pool, pool)
        for instance in range(pool.count):
            for first in range(0, layers, span):
                seats = _seats(index, pool, instance, pool.count, layers, first, span)
                yield Group(tuple(seats), first, first + span)
