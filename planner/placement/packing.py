"""Assigns a placement's instances to groups of devices that must share a node, and the groups to nodes.

DistServe aligns the stages of a prefill and a decode instance so that KV moves only within a node (section 4.2; the
group size follows its artefact). With lp layers per prefill stage and ld per decode stage, a group holds lcm(lp, ld)
layers of both: lcm/lp prefill stages and lcm/ld decode stages. This module is pure; Ray creates a STRICT_PACK placement
group for each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diptych.errors import ConfigError
from planner.types import BOTH, DECODE, PREFILL, InstancePool, Placement


@dataclass(frozen=True, slots=True)
class RankSlot:
    """One device of a group: tensor-parallel rank `rank` of stage `stage` of an instance of `pools[pool]`."""

    pool: int
    role: str
    instance: int
    stage: int
    rank: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that must be on one node.

    The reason is that KV of the layers [first_layer, last_layer) moves between them, or that they are the ranks of one
    stage.
    """

    seats: tuple[RankSlot, ...]
    first_layer: int
    last_layer: int

    @property
    def devices(self) -> int:
        """Number of devices in the group."""
        return len(self.seats)

    @property
    def device(self) -> str:
        """The name of the device type that the group needs; empty if the placement names none."""
        return self.seats[0].device


def group_layers(layers: int, prefill_pp: int, decode_pp: int) -> int:
    """Number of layers in one group of a pair: the lcm of the layers per stage of both instances.

    Raises ValueError if the stages do not divide the layers.
    """
    for stages in (prefill_pp, decode_pp):
        if stages < 1 or layers % stages:
            raise ValueError(f"{stages} stages do not divide {layers} layers")
    return math.lcm(layers // prefill_pp, layers // decode_pp)


def device_groups(placement: Placement, layers: int, devices_per_node: int) -> list[DeviceGroup]:
    """The device groups of a placement for a model with `layers` layers, in the order of its pools.

    With low affinity, n prefill and m decode instances form gcd(n, m) units; within a unit, the segments with the same
    layers share a group. Otherwise only the ranks of one stage must share a node; an instance that fits on one node is
    kept whole. Raises ConfigError if a group is larger than a node, or if low affinity has not one pool of each role.
    """
    if placement.affinity == "low" and not placement.colocated:
        made = [
            *_pair_groups(placement, layers),
            *_single_groups(placement, layers, devices_per_node, (BOTH,)),
        ]
    else:
        made = [*_single_groups(placement, layers, devices_per_node, (PREFILL, DECODE, BOTH))]
    for group in made:
        if group.devices > devices_per_node:
            raise ConfigError(
                f"{group.devices} devices must share a node, and a node has {devices_per_node}",
                f"{placement} keeps the layers {group.first_layer} to {group.last_layer - 1} of its instances together",
                "take smaller instances or more stages, or a link between nodes that allows high affinity",
            )
    return made


def assign_nodes(wanted: Sequence[DeviceGroup], nodes: Mapping[str, int]) -> list[str]:
    """Chooses a node for each group; `nodes` maps node names to their free devices.

    The largest group is placed first, on the node with the fewest free devices that suffice. Raises ConfigError if the
    groups do not fit.
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
                "add nodes, or plan with the --nodes and --gpus-per-node that exist",
            )
        place = min(fitting, key=lambda name: (free[name], name))
        free[place] -= need
        places[index] = place
    return [places[index] for index in range(len(wanted))]


def _pair_groups(placement: Placement, layers: int) -> Iterator[DeviceGroup]:
    """The groups of prefill and decode instances that exchange KV within a node."""
    numbered = list(enumerate(placement.pools))
    givers = [(index, pool) for index, pool in numbered if pool.role == PREFILL]
    takers = [(index, pool) for index, pool in numbered if pool.role == DECODE]
    if len(givers) != 1 or len(takers) != 1:
        raise ConfigError(
            "KV that stays within nodes needs one prefill and one decode pool",
            f"the placement is {placement}",
            "use affinity high or none",
        )
    (p_index, p_pool), (d_index, d_pool) = givers[0], takers[0]
    span = _layer_span(layers, p_pool, d_pool)
    units = math.gcd(p_pool.count, d_pool.count)
    for unit in range(units):
        for first in range(0, layers, span):
            seats = [
                *_rank_slots(p_index, p_pool, unit, units, layers, first, span),
                *_rank_slots(d_index, d_pool, unit, units, layers, first, span),
            ]
            yield DeviceGroup(tuple(seats), first, first + span)


def _layer_span(layers: int, giver: InstancePool, taker: InstancePool) -> int:
    try:
        return group_layers(layers, giver.parallelism.pp, taker.parallelism.pp)
    except ValueError as error:
        raise ConfigError(
            "a placement does not fit the model's layers", str(error), "choose stages that divide the layers"
        ) from error


def _rank_slots(
    index: int, pool: InstancePool, unit: int, units: int, layers: int, first: int, span: int
) -> Iterator[RankSlot]:
    """The devices of one pool that belong to unit `unit` (of `units`) and to the layers from `first` on."""
    share, per_stage = pool.count // units, layers // pool.parallelism.pp
    for instance in range(unit * share, (unit + 1) * share):
        for stage in range(first // per_stage, (first + span) // per_stage):
            for rank in range(pool.parallelism.tp):
                yield RankSlot(index, pool.role, instance, stage, rank, pool.device)


def _single_groups(
    placement: Placement, layers: int, devices_per_node: int, roles: tuple[str, ...]
) -> Iterator[DeviceGroup]:
    """The groups of instances that exchange no KV within a node: whole instances, or single stages if too large."""
    for index, pool in enumerate(placement.pools):
        if pool.role not in roles:
            continue
        span = layers if pool.parallelism.devices <= devices_per_node else _layer_span(layers, pool, pool)
        for instance in range(pool.count):
            for first in range(0, layers, span):
                seats = _rank_slots(index, pool, instance, pool.count, layers, first, span)
                yield DeviceGroup(tuple(seats), first, first + span)
