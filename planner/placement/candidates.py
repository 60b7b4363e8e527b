"""Enumerates the deployments that can be tried: every way to split a model over the devices of a cluster.

A unit is the smallest deployment that serves requests: one colocated instance, or one prefill and one decode instance.
A plan consists of whole units (DistServe's Algorithm 2), or of pools that are sized independently (its Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.types import BOTH, DECODE, PREFILL, InstancePool, Parallelism, Placement


@dataclass(frozen=True, slots=True)
class ClusterGrid:
    """The limits of a split: attention `heads` (a multiple of tp), `layers` (a multiple of pp), and equal nodes."""

    layers: int
    heads: int
    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        """Number of devices in the cluster."""
        return self.nodes * self.devices_per_node


def enumerate_splits(
    grid: ClusterGrid, most: int | None = None, within_node: bool = True
) -> list[Parallelism]:
    """Every split that divides heads and layers, over at most `most` devices (default: the cluster's).

    `within_node` keeps each stage on one node.
    """
    most = grid.devices if most is None else min(most, grid.devices)
    widest = min(most, grid.devices_per_node) if within_node else most
    return [
        Parallelism(tp, pp)
        for tp in range(1, widest + 1)
        if grid.heads % tp == 0
        for pp in range(1, most // tp + 1)
        if grid.layers % pp == 0
    ]


def pairs_within_nodes(grid: ClusterGrid, prefill: str = "", decode: str = "") -> Iterator[Placement]:
    """Pairs whose KV stays within nodes, as DistServe's algorithm 2 (v3) enumerates them.

    Each instance is cut into `cross` segments, one per node, of tp × pp devices each. A node holds the same segment of
    the prefill and of the decode instance, so both segments together must fit its devices. The result has the same
    pairs, in number and shape, as the enumerator of DistServe's artefact.
    """
    per_node = grid.devices_per_node
    for cross in range(1, grid.nodes + 1):
        inner = [one for one in enumerate_splits(grid, per_node) if grid.layers % (cross * one.pp) == 0]
        for prefill_split in inner:
            for decode_split in inner:
                if prefill_split.devices + decode_split.devices <= per_node:
                    yield make_pair(
                        _whole_split(prefill_split, cross),
                        _whole_split(decode_split, cross),
                        "low",
                        cross,
                        prefill,
                        decode,
                    )


def pairs_across_nodes(
    grid: ClusterGrid, prefill: str = "", decode: str = "", within_node: bool = True
) -> Iterator[Placement]:
    """Every pair of instances that fits the cluster, wherever its instances lie: KV may move between any two nodes.

    With `within_node` false the result is the full product of the artefact, whose stages may be wider than a node.
    """
    every = enumerate_splits(grid, within_node=within_node)
    for prefill_split in every:
        for decode_split in every:
            if prefill_split.devices + decode_split.devices <= grid.devices:
                yield make_pair(prefill_split, decode_split, "high", 1, prefill, decode)


def colocated_units(grid: ClusterGrid, device: str = "") -> Iterator[Placement]:
    """Every single colocated instance (one that both prefills and decodes)."""
    for parallelism in enumerate_splits(grid):
        yield make_colocated(parallelism, device)


def make_pair(
    prefill_split: Parallelism,
    decode_split: Parallelism,
    affinity: str = "high",
    cross: int = 1,
    prefill: str = "",
    decode: str = "",
) -> Placement:
    """A placement of one prefill and one decode instance; `prefill` and `decode` name their devices."""
    pools = (InstancePool(PREFILL, prefill_split, 1, prefill), InstancePool(DECODE, decode_split, 1, decode))
    return Placement(pools, affinity, cross)


def make_colocated(parallelism: Parallelism, device: str = "") -> Placement:
    """A placement of one colocated instance (one that both prefills and decodes)."""
    return Placement((InstancePool(BOTH, parallelism, 1, device),), "none")


def replicate_unit(placement: Placement, count: int) -> Placement:
    """A placement of `count` copies of a unit."""
    pools = (
        InstancePool(pool.role, pool.parallelism, pool.count * count, pool.device) for pool in placement.pools
    )
    return Placement(tuple(pools), placement.affinity, placement.cross)


def with_counts(placement: Placement, counts: tuple[int, ...]) -> Placement:
    """The unit with `counts[i]` instances in its i-th pool."""
    pools = (
        InstancePool(pool.role, pool.parallelism, count, pool.device)
        for pool, count in zip(placement.pools, counts, strict=True)
    )
    return Placement(tuple(pools), placement.affinity, placement.cross)


def combine_placements(parts: tuple[Placement, ...]) -> Placement:
    """Joins placements to one; equal pools are merged. The affinity is that of the first part with KV transfer."""
    counts: dict[tuple[str, Parallelism, str], int] = {}
    for pool in (pool for part in parts for pool in part.pools):
        key = (pool.role, pool.parallelism, pool.device)
        counts[key] = counts.get(key, 0) + pool.count
    moving = next((part for part in parts if not part.colocated), parts[0])
    pools = (
        InstancePool(role, parallelism, count, device)
        for (role, parallelism, device), count in counts.items()
    )
    return Placement(tuple(pools), moving.affinity, moving.cross)


def family_of(placement: Placement) -> str:
    """The family of a placement: "colocated", "disaggregated" or "hybrid"."""
    roles = {pool.role for pool in placement.pools}
    if roles == {BOTH}:
        return "colocated"
    return "hybrid" if BOTH in roles else "disaggregated"


def deployed_placement(placement: Placement) -> Placement:
    """The placement that `diptych serve` starts for a plan.

    `diptych serve` has no colocated instances beside prefill and decode instances. A hybrid's colocated instances are
    started as decode instances, which also prefill prompts where that is faster (`local_prefill_mode`).
    """
    if family_of(placement) != "hybrid":
        return placement
    pools = (replace(pool, role=DECODE) if pool.role == BOTH else pool for pool in placement.pools)
    return Placement(tuple(pools), placement.affinity, placement.cross)


def local_prefill_mode(placement: Placement) -> str:
    """The setting `local_prefill` for a placement: "auto" lets decode instances prefill too, "never" forbids it."""
    return "auto" if family_of(placement) == "hybrid" else "never"


def colocated_companion(pair: Placement) -> InstancePool:
    """The colocated instance that a hybrid adds to a pair.

    It equals the pair's decode instance, since `diptych serve` starts all decode instances with one split and device.
    """
    return replace(pair.pools[-1], role=BOTH, count=1)


def with_local_prefill(placement: Placement) -> Placement:
    """The placement with decode instances turned into colocated ones: an upper limit of what local prefill allows."""
    pools = (replace(pool, role=BOTH) if pool.role == DECODE else pool for pool in placement.pools)
    return Placement(tuple(pools), placement.affinity, placement.cross)


def _whole_split(segment: Parallelism, cross: int) -> Parallelism:
    """The split of an instance that consists of `cross` such segments, one pipeline stage group after the other."""
    return Parallelism(segment.tp, segment.pp * cross)
