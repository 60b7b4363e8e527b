"""Chooses a node of a Ray cluster for each group of workers, or says what was asked and what each node has (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from diptych.errors import StartError
from services.cluster.spec import Bundle

# Most lines of an error that are about nodes, and most nodes that are named.
NODE_LINES, MAX_SHOWN_NODES = 3, 9
DEVICES = ("CPU", "GPU")


@dataclass(slots=True)
class NodeCapacity:
    """A living node: its address, and all of its Ray resources and those that are free, by name."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: dict[str, float]
    # The workers that are placed here, as (role, worker).
    placed: list[str] = field(default_factory=list)

    def has_room(self, demand: Mapping[str, float]) -> bool:
        """Whether all of `demand` is free here."""
        return all(self.free.get(name, 0.0) >= amount for name, amount in demand.items())

    def could_hold(self, demand: Mapping[str, float]) -> bool:
        """Whether the node has all of `demand`, free or not."""
        return all(self.total.get(name, 0.0) >= amount for name, amount in demand.items())


def group_demand(bundles: Sequence[Bundle]) -> dict[str, float]:
    """The resources of all bundles of a group together."""
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.demand.items():
            total[name] = _exact(total.get(name, 0.0) + amount)
    return total


def place_groups(bundle_groups: Sequence[Sequence[Bundle]], nodes: Sequence[NodeCapacity]) -> list[str]:
    """The node (its id) of each group; the nodes' `free` and `placed` are updated.

    Larger groups come first. Each goes to the node with the fewest workers of its roles, then with the fewest workers:
    so the workers of a pool are spread over the nodes, and one lost node takes as few of them as possible.

    Raises:
        StartError: a group does not fit on any node; the error says what was asked, and what each node has.
    """
    chosen: dict[int, str] = {}
    order = sorted(
        range(len(bundle_groups)),
        key=lambda index: (-sum(group_demand(bundle_groups[index]).values()), index),
    )
    for index in order:
        demand = group_demand(bundle_groups[index])
        fitting = [node for node in nodes if node.has_room(demand)]
        if not fitting:
            raise capacity_error(bundle_groups[index], bundle_groups, nodes)
        roles = {_role_of(bundle.worker) for bundle in bundle_groups[index]}
        node = min(
            fitting,
            key=lambda node: (
                sum(_role_of(worker) in roles for worker in node.placed),
                len(node.placed),
                -node.free.get("CPU", 0.0),
                node.address,
            ),
        )
        for name, amount in demand.items():
            node.free[name] = _exact(node.free[name] - amount)
        node.placed += [bundle.worker for bundle in bundle_groups[index]]
        chosen[index] = node.node_id
    return [chosen[index] for index in range(len(bundle_groups))]


def min_cpus(bundle_groups: Sequence[Sequence[Bundle]]) -> float:
    """The CPUs that the smallest worker takes of its node."""
    return min(bundle.demand["CPU"] for bundles in bundle_groups for bundle in bundles)


def max_sharing(bundle_groups: Sequence[Sequence[Bundle]]) -> int:
    """The most workers that Ray may place on one GPU; 1 where each has GPUs of its own, or none."""
    amounts = [bundle.demand.get("GPU", 1.0) for bundles in bundle_groups for bundle in bundles]
    return max(1, _ray_steps(1.0) // max(1, _ray_steps(min(amounts))))


def has_room(bundle_groups: Sequence[Sequence[Bundle]], nodes: Sequence[NodeCapacity]) -> bool:
    """Whether `place_groups` finds a node for each group now; the nodes are left as they are."""
    try:
        place_groups(bundle_groups, copy_nodes(nodes))
    except StartError:
        return False
    return True


def copy_nodes(nodes: Sequence[NodeCapacity]) -> list[NodeCapacity]:
    """Copies of the nodes on which groups may be placed on trial."""
    return [replace(node, free=dict(node.free), placed=list(node.placed)) for node in nodes]


def count_devices(nodes: Sequence[NodeCapacity], demand: Mapping[str, float], devices: int) -> int:
    """How many devices workers may hold in the cluster, if each worker takes `demand` and has so many `devices`."""
    fits = [
        min(
            _ray_steps(node.total.get(name, 0.0)) // _ray_steps(amount)
            for name, amount in demand.items()
            if amount > 0
        )
        for node in nodes
    ]
    return sum(fits) * devices


def capacity_error(
    bundles: Sequence[Bundle], bundle_groups: Sequence[Sequence[Bundle]], nodes: Sequence[NodeCapacity]
) -> StartError:
    """The error for a group that fits on no node, in at most six lines."""
    demand = group_demand(bundles)
    workers = " and ".join(bundle.worker for bundle in bundles)
    together = " on one node" if len(bundles) > 1 else ""
    asked = f"asked: {format_resources(demand)} for {workers}{together}"
    if len(bundle_groups) > 1:
        every = group_demand([bundle for one in bundle_groups for bundle in one])
        asked += f"; {format_resources(every)} in all"
    fix = "ask for less, add nodes, or free some: `ray status` shows who holds them"
    if not any(node.could_hold(demand) for node in nodes):
        fix = "no node has that much even when it is idle: use smaller workers, or add a node that has it"
    return StartError(
        f"the Ray cluster has no room for {workers}", "\n".join([asked, *_node_lines(nodes, demand)]), fix
    )


def format_resources(amounts: Mapping[str, float]) -> str:
    """Resources in words: "CPU 2, GPU 1"."""
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())


def _node_lines(nodes: Sequence[NodeCapacity], demand: Mapping[str, float]) -> list[str]:
    """At most `NODE_LINES` lines with what each node has of the resources in `demand`."""
    if not nodes:
        return ["the cluster has no living node"]
    shown = [
        f"{node.address}: "
        + ", ".join(
            f"{name} {node.free.get(name, 0):g} of {node.total.get(name, 0):g} free" for name in demand
        )
        for node in sorted(nodes, key=lambda node: node.address)
    ]
    if len(shown) > MAX_SHOWN_NODES:
        shown = [*shown[:MAX_SHOWN_NODES], f"and {len(shown) - MAX_SHOWN_NODES} more nodes"]
    per_line = -(-len(shown) // NODE_LINES)
    return ["; ".join(shown[first : first + per_line]) for first in range(0, len(shown), per_line)]


def _ray_steps(amount: float) -> int:
    """An amount in the steps of 0.0001 in which Ray counts."""
    return round(amount * 1e4)


def _exact(amount: float) -> float:
    """The amount that Ray counts for a sum or difference of amounts, which as floats need not be exact."""
    return round(amount, 4)


def _role_of(worker: str) -> str:
    return worker.rsplit("-", 1)[0]
