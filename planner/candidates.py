"""What may be deployed: every way to cut a model over the devices of a cluster.

A unit is the smallest deployment of a kind: one colocated instance, or one prefill and one decode instance. Plans are
made of whole units (DistServe's algorithm 2) or of instances sized apart (its algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.terms import BOTH, DECODE, PREFILL, Placement, Pool, Split


@dataclass(frozen=True, slots=True)
class Grid:
    """What bounds a cut: `heads` of attention that tensor parallelism must divide, `layers` that stages must divide,
    and a cluster of equal nodes.
    """

    layers: int
    heads: int
    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


def splits(grid: Grid, most: int | None = None, within_node: bool = True) -> list[Split]:
    """Every split over at most `most` devices (default: the cluster's). `within_node` keeps a stage on one node."""
    most = grid.devices if most is None else min(most, grid.devices)
    widest = min(most, grid.devices_per_node) if within_node else most
    return [
        Split(tp, pp)
        for tp in range(1, widest + 1)
        if grid.heads % tp == 0
        for pp in range(1, most // tp + 1)
        if grid.layers % pp == 0
    ]


def low(grid: Grid, prefill: str = "", decode: str = "") -> Iterator[Placement]:
    """Pairs whose KV stays within nodes, as DistServe's algorithm 2 (v3) tries them.

    An instance is `cross` segments, one a node; the segment is tp × pp devices, and the same segments of both share a
    node: tp·pp of either add up to at most the devices of a node. The artefact's enumerator, with its counts.
    """
    per_node = grid.devices_per_node
    for cross in range(1, grid.nodes + 1):
        inner = [one for one in splits(grid, per_node) if grid.layers % (cross * one.pp) == 0]
        for reads in inner:
            for writes in inner:
                if reads.devices + writes.devices <= per_node:
                    yield pair(_whole(reads, cross), _whole(writes, cross), "low", cross, prefill, decode)


def high(grid: Grid, prefill: str = "", decode: str = "", within_node: bool = True) -> Iterator[Placement]:
    """Every pair of instances that fits the cluster, wherever they are: KV moves between any two.

    With `within_node` false it is the artefact's product, whose stages may be wider than a node.
    """
    every = splits(grid, within_node=within_node)
    for reads in every:
        for writes in every:
            if reads.devices + writes.devices <= grid.devices:
                yield pair(reads, writes, "high", 1, prefill, decode)


def colocated(grid: Grid, device: str = "") -> Iterator[Placement]:
    """Every single instance that does both."""
    for split in splits(grid):
        yield alone(split, device)


def pair(
    reads: Split, writes: Split, affinity: str = "high", cross: int = 1, prefill: str = "", decode: str = ""
) -> Placement:
    """One prefill and one decode instance; `prefill` and `decode` name their hardware."""
    pools = (Pool(PREFILL, reads, 1, prefill), Pool(DECODE, writes, 1, decode))
    return Placement(pools, affinity, cross)


def alone(split: Split, device: str = "") -> Placement:
    """One instance that does both."""
    return Placement((Pool(BOTH, split, 1, device),), "none")


def times(unit: Placement, count: int) -> Placement:
    """`count` of a unit."""
    pools = (Pool(pool.role, pool.split, pool.count * count, pool.device) for pool in unit.pools)
    return Placement(tuple(pools), unit.affinity, unit.cross)


def counted(unit: Placement, counts: tuple[int, ...]) -> Placement:
    """A unit's pools with `counts` instances each, in their order."""
    pools = (
        Pool(pool.role, pool.split, count, pool.device)
        for pool, count in zip(unit.pools, counts, strict=True)
    )
    return Placement(tuple(pools), unit.affinity, unit.cross)


def both(parts: tuple[Placement, ...]) -> Placement:
    """Placements side by side; equal pools become one. KV stays within nodes if it does in the part that moves any."""
    counts: dict[tuple[str, Split, str], int] = {}
    for pool in (pool for part in parts for pool in part.pools):
        key = (pool.role, pool.split, pool.device)
        counts[key] = counts.get(key, 0) + pool.count
    moving = next((part for part in parts if not part.colocated), parts[0])
    pools = (Pool(role, split, count, device) for (role, split, device), count in counts.items())
    return Placement(tuple(pools), moving.affinity, moving.cross)


def family(placement: Placement) -> str:
    """colocated, disaggregated, or hybrid."""
    roles = {pool.role for pool in placement.pools}
    if roles == {BOTH}:
        return "colocated"
    return "hybrid" if BOTH in roles else "disaggregated"


def deployed(placement: Placement) -> Placement:
    """What `diptych serve` starts: beside pairs there are no colocated instances, but more decode instances, which all
    take KV from prefill instances and read prompts themselves where that is sooner (`local_prefill`).
    """
    if family(placement) != "hybrid":
        return placement
    pools = (replace(pool, role=DECODE) if pool.role == BOTH else pool for pool in placement.pools)
    return Placement(tuple(pools), placement.affinity, placement.cross)


def local_prefill(placement: Placement) -> str:
    """Whether decode instances read prompts where that is sooner ("auto"), or prefill instances only ("never")."""
    return "auto" if family(placement) == "hybrid" else "never"


def companion(pair: Placement) -> Pool:
    """The colocated instance that may be beside a pair: one like those that decode, since what is started of a role is
    of one size and device.
    """
    return replace(pair.pools[-1], role=BOTH, count=1)


def reading(placement: Placement) -> Placement:
    """A placement whose decode instances read prompts as well, for what it can do at most."""
    pools = (replace(pool, role=BOTH) if pool.role == DECODE else pool for pool in placement.pools)
    return Placement(tuple(pools), placement.affinity, placement.cross)


def _whole(segment: Split, cross: int) -> Split:
    return Split(segment.tp, segment.pp * cross)
