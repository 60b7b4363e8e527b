"""Placement groups that outlive the driver: reserves the places of a deployment's workers, and gives them back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from diptych.errors import StartError
from services.cluster.capacity import NodeCapacity, place_groups
from services.cluster.node_worker import NodeOrder
from services.cluster.spec import Bundle

# Seconds in which placement groups must come about; that there is room for them was seen before.
PLACE_TIMEOUT_S = 12.0
# Placement groups with such names are Diptych's; others of the namespace are left alone.
GROUP_PREFIX = "diptych: "


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The bundle `index` of the placement group with this `name`, which a worker occupies."""

    name: str
    index: int
    demand: tuple[tuple[str, float], ...]


class DetachedGroups:
    """Detached placement groups of one namespace, and which worker has which bundle. All of a group is on one node."""

    def __init__(self) -> None:
        self._taken: dict[str, GroupPlace] = {}
        self._groups: dict[str, PlacementGroup] = {}
        # Bundles of ended workers, in groups that other workers still have.
        self._free_places: list[GroupPlace] = []

    def reserve_groups(
        self, bundle_groups: Sequence[Sequence[Bundle]], nodes: Sequence[NodeCapacity]
    ) -> None:
        """Reserve the groups, each on the node that `services.cluster.capacity.place_groups` chooses.

        A single bundle takes a free one of its size, if there is one: Ray counts that as taken.

        Raises:
            StartError: there is no room for one, or Ray refuses it; nothing is reserved then.
        """
        bundle_groups = [
            bundles for bundles in bundle_groups if len(bundles) > 1 or not self._take_free_bundle(bundles[0])
        ]
        targets = place_groups(bundle_groups, nodes)
        try:
            made = [
                self._make_group(group, node_id)
                for group, node_id in zip(bundle_groups, targets, strict=True)
            ]
            deadline_s = time.monotonic() + PLACE_TIMEOUT_S
            for group, one in zip(bundle_groups, made, strict=True):
                _await_group(group, one, deadline_s)
        except StartError:
            for group in bundle_groups:
                for bundle in group:
                    self.release_bundle(bundle.worker)
            raise

    def _take_free_bundle(self, bundle: Bundle) -> bool:
        """Whether a free bundle of this size was there; it is the worker's now."""
        demand = tuple(bundle.demand.items())
        found = next((place for place in self._free_places if place.demand == demand), None)
        if found is None:
            return False
        self._free_places.remove(found)
        self._taken[bundle.worker] = found
        return True

    def _make_group(self, bundles: Sequence[Bundle], node_id: str) -> PlacementGroup:
        """Ask Ray for a placement group on a node. Raises StartError if Ray refuses it."""
        name = name_group(bundles)
        with ray_errors(f"Ray reserves nothing for {_workers_of(bundles)}"):
            remove_leftover(name)
            made: PlacementGroup = placement_group(
                [bundle.demand for bundle in bundles],
                strategy="STRICT_PACK",
                name=name,
                lifetime="detached",
                _soft_target_node_id=node_id,
            )
        self._groups[name] = made
        for index, bundle in enumerate(bundles):
            self._taken[bundle.worker] = GroupPlace(name, index, tuple(bundle.demand.items()))
        return made

    def adopt_bundle(self, worker: str, order: NodeOrder) -> None:
        """Note the bundle of a worker that an earlier driver has placed."""
        self._taken[worker] = GroupPlace(order.group, order.index, tuple(order.demand.items()))
        # The error means that the group is gone: there is nothing to release.
        with contextlib.suppress(ValueError):
            self._groups.setdefault(order.group, get_placement_group(order.group))

    def remove_leftovers(self) -> bool:
        """Remove the groups that an earlier driver has left, and no worker here has; whether there were any.

        Raises:
            StartError: Ray cannot be asked.
        """
        with ray_errors("places of an earlier start cannot be given back"):
            names = {one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"}
            left = sorted(name for name in names - self._groups.keys() if name.startswith(GROUP_PREFIX))
            # Other namespaces may have groups of the same names. Those are not found.
            return True in [remove_leftover(name) for name in left]

    def find_place(self, worker: str) -> tuple[GroupPlace, PlacementGroup]:
        """The worker's bundle, and its group."""
        place = self._taken[worker]
        return place, self._groups[place.name]

    def release_bundle(self, worker: str) -> None:
        """Free the bundle of a worker that is gone; a group without workers is returned to Ray."""
        place = self._taken.pop(worker, None)
        if place is None:
            return
        self._free_places.append(place)
        if any(other.name == place.name for other in self._taken.values()):
            return
        self._free_places = [other for other in self._free_places if other.name != place.name]
        group = self._groups.pop(place.name, None)
        if group is not None:
            remove_placement_group(group)

    def release_all(self) -> None:
        """Free all bundles."""
        for worker in list(self._taken):
            self.release_bundle(worker)


def name_group(bundles: Sequence[Bundle]) -> str:
    """The name of the placement group that is made for these bundles."""
    return GROUP_PREFIX + " ".join(bundle.worker for bundle in bundles)


def count_bundles(name: str) -> int:
    """How many bundles the placement group of this name has."""
    return len(name.removeprefix(GROUP_PREFIX).split())


def _workers_of(bundles: Sequence[Bundle]) -> str:
    return " and ".join(bundle.worker for bundle in bundles)


def _await_group(bundles: Sequence[Bundle], made: PlacementGroup, deadline_s: float) -> None:
    """Wait until a group is reserved. Raises StartError if it is not by `deadline_s` (monotonic)."""
    with ray_errors(f"Ray has not placed {_workers_of(bundles)}"):
        placed = made.wait(max(0.1, deadline_s - time.monotonic()))
    if not placed:
        raise StartError(
            f"Ray has not placed {_workers_of(bundles)}",
            f"its resources were free, and after {PLACE_TIMEOUT_S:g} s they are not reserved",
            "see who has taken them: ray status",
        )


@contextlib.contextmanager
def ray_errors(what: str) -> Iterator[None]:
    """Turn what Ray raises within the block for a call that it refuses into an error that says `what`.

    Raises:
        StartError: Ray has refused a call.
    """
    try:
        yield
    except (ValueError, TypeError, ray.exceptions.RayError) as error:
        raise StartError(
            what, " ".join(str(error).split())[:300], "see Ray's logs, and `ray status`"
        ) from None


def remove_leftover(name: str) -> bool:
    """Remove the placement group of this name that an earlier driver has left; whether there was one."""
    try:
        remove_placement_group(get_placement_group(name))
    except ValueError:
        return False
    return True
