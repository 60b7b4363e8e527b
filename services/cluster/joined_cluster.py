"""The driver's view of a Ray cluster that others started: its nodes, and the detached actors of one deployment.

Each deployment has a namespace of its own, so that several share a cluster. Actors and placement groups are detached:
they outlive the driver. Ray's key-value store says which driver a namespace has, and the next one adopts its actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import ray
from ray import cloudpickle
from ray._private.state import state as cluster_state
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from diptych.errors import StartError
from services.cluster import node_probe
from services.cluster.capacity import NodeCapacity, place_groups
from services.cluster.join import join_cluster
from services.cluster.node_probe import NodeReport
from services.cluster.node_worker import ActorReport, NodeOrder, NodeWorker
from services.cluster.sealed_keys import seal_keys
from services.cluster.spec import SUPERVISOR_DIED, Bundle
from services.host.supervisor import ChildStatus, ErrorReport

# Seconds in which placement groups must come about; that there is room for them was seen before.
PLACE_TIMEOUT_S = 12.0
PROBE_TIMEOUT_S, ACTOR_TIMEOUT_S, KILL_TIMEOUT_S = 120.0, 15.0, 5.0
# Seconds for Ray to notice the end of an earlier driver.
DRIVER_END_S = 5.0
# Versions of statuses that do not come from an actor: it has died, or it has failed.
LOST_VERSION, FAILED_VERSION = -2, -3

# Ray warns of detached actors in placement groups, which end with their group. Here they are meant to.
logging.getLogger("ray.actor").setLevel(logging.ERROR)


def start_daemon(call: Callable[[], object]) -> threading.Thread:
    """Run `call` in a thread that keeps no process alive; its errors are ignored."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def call_in_time(call: Callable[[], object], timeout_s: float) -> None:
    """Run `call` in a thread, for at most `timeout_s` seconds: without its head Ray may wait for ever."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            call()
        # The error means that the loop has ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    start_daemon(run)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), timeout_s)


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """The actor of a worker that an earlier driver has left, on the node at `address`. A stopped worker stays so."""

    actor: Any
    order: NodeOrder
    address: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The bundle `index` of the placement group with this `name`, which a worker occupies."""

    name: str
    index: int
    demand: tuple[tuple[str, float], ...]


class NodeWorkerHandle:
    """The handle of one worker in the driver: awaitable status and stop. Sends the keys to its actor."""

    def __init__(self, name: str, actor: Any, keys: Mapping[str, bytes], context: str) -> None:
        self.name, self.address, self.log_file = name, "", ""
        self._actor, self._keys, self._context = actor, keys, context
        self._seen_version, self._actor_deaths = -1, 0
        # Address and process of the actor that has reported last.
        self._life: tuple[str, int] | None = None

    async def next_status(self, timeout_s: float = 20.0) -> ChildStatus | None:
        """The next new status; None if there is none in time. If the actor died, a status "waiting" (for Ray)."""
        try:
            report = await cast(
                Awaitable[ActorReport], self._actor.wait_status.remote(self._seen_version, timeout_s)
            )
            if report.wanted_key and self._keys:
                await self._actor.deliver_keys.remote(seal_keys(self._keys, report.wanted_key, self._context))
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:
                return self._failed_status(error)
            fresh, self._seen_version = self._seen_version != LOST_VERSION, LOST_VERSION
            self._actor_deaths += fresh
            if not fresh:
                return None
            return ChildStatus(self.name, "waiting", restarts=self._actor_deaths, ended=SUPERVISOR_DIED)
        except ray.exceptions.RayError as error:
            return self._failed_status(error)
        self.address, self.log_file = report.address, report.log_file
        life = (report.address, report.pid)
        fresh = (life, report.status.version) != (self._life, self._seen_version)
        self._life, self._seen_version = life, report.status.version
        if not fresh:
            return None
        return replace(report.status, restarts=report.status.restarts + self._actor_deaths)

    def _failed_status(self, error: Exception) -> ChildStatus | None:
        """The status of a worker whose actor cannot do what it has to; None if that was said before."""
        fresh, self._seen_version = self._seen_version != FAILED_VERSION, FAILED_VERSION
        if not fresh:
            return None
        last = str(error).strip().splitlines()[-1:]
        report = ErrorReport(f"the actor of {self.name} has failed", " ".join(last)[:300])
        return ChildStatus(self.name, "failed", error=report)

    def kill(self) -> None:
        """End the actor, and its worker with it. Without Ray's head this may wait for it."""
        ray.kill(self._actor)

    async def stop(self, grace_s: float) -> None:
        """Stop the worker and its actor; the worker is killed after `grace_s` seconds."""
        # The first error means that the actor has died, and its worker with it.
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            stopping = cast(Awaitable[None], self._actor.stop.remote(grace_s))
            await asyncio.wait_for(stopping, grace_s + ACTOR_TIMEOUT_S)
        await call_in_time(self.kill, KILL_TIMEOUT_S)


class DetachedGroups:
    """Detached placement groups of one namespace, and which worker has which bundle. All of a group is on one node."""

    def __init__(self) -> None:
        self._taken: dict[str, GroupPlace] = {}
        self._groups: dict[str, PlacementGroup] = {}

    def reserve_groups(self, groups: Sequence[Sequence[Bundle]], nodes: Sequence[NodeCapacity]) -> None:
        """Reserve the groups, each on the node that `services.cluster.capacity.place_groups` chooses.

        Raises:
            StartError: there is no room for one, or Ray refuses it; nothing is reserved then.
        """
        targets = place_groups(groups, nodes)
        try:
            made = [self._make_group(group, node_id) for group, node_id in zip(groups, targets, strict=True)]
            deadline_s = time.monotonic() + PLACE_TIMEOUT_S
            for group, one in zip(groups, made, strict=True):
                _await_group(group, one, deadline_s)
        except StartError:
            for group in groups:
                for bundle in group:
                    self.release_bundle(bundle.worker)
            raise

    def _make_group(self, group: Sequence[Bundle], node_id: str) -> PlacementGroup:
        """Ask Ray for a placement group on a node. Raises StartError if Ray refuses it."""
        name = " ".join(bundle.worker for bundle in group)
        with _ray_errors(f"Ray reserves nothing for {_workers_of(group)}"):
            _remove_leftover(name)
            made: PlacementGroup = placement_group(
                [bundle.demand for bundle in group],
                strategy="STRICT_PACK",
                name=name,
                lifetime="detached",
                _soft_target_node_id=node_id,
            )
        self._groups[name] = made
        for index, bundle in enumerate(group):
            self._taken[bundle.worker] = GroupPlace(name, index, tuple(bundle.demand.items()))
        return made

    def adopt_bundle(self, worker: str, order: NodeOrder) -> None:
        """Note the bundle of a worker that an earlier driver has placed."""
        self._taken[worker] = GroupPlace(order.group, order.index, tuple(order.demand.items()))
        # The error means that the group is gone: there is nothing to release.
        with contextlib.suppress(ValueError):
            self._groups.setdefault(order.group, get_placement_group(order.group))

    def find_place(self, worker: str) -> tuple[GroupPlace, PlacementGroup]:
        """The worker's bundle, and its group."""
        place = self._taken[worker]
        return place, self._groups[place.name]

    def release_bundle(self, worker: str) -> None:
        """Free the bundle of a worker that is gone; a group without workers is returned to Ray."""
        place = self._taken.pop(worker, None)
        if place is None or any(other.name == place.name for other in self._taken.values()):
            return
        group = self._groups.pop(place.name, None)
        if group is not None:
            remove_placement_group(group)

    def release_all(self) -> None:
        """Free all bundles."""
        for worker in list(self._taken):
            self.release_bundle(worker)


def _workers_of(group: Sequence[Bundle]) -> str:
    return " and ".join(bundle.worker for bundle in group)


def _await_group(group: Sequence[Bundle], made: PlacementGroup, deadline_s: float) -> None:
    """Wait until a group is reserved. Raises StartError if it is not by `deadline_s` (monotonic)."""
    if not made.wait(max(0.1, deadline_s - time.monotonic())):
        raise StartError(
            f"Ray has not placed {_workers_of(group)}",
            f"its resources were free, and after {PLACE_TIMEOUT_S:g} s they are not reserved",
            "see who has taken them: ray status",
        )


@contextlib.contextmanager
def _ray_errors(what: str) -> Iterator[None]:
    """Turns what Ray raises for a call that it refuses into a StartError."""
    try:
        yield
    except (ValueError, TypeError, ray.exceptions.RayError) as error:
        raise StartError(
            what, " ".join(str(error).split())[:300], "see Ray's logs, and `ray status`"
        ) from None


def _remove_leftover(name: str) -> None:
    """Remove the placement group of this name that an earlier driver has left without workers."""
    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(name))


class JoinedCluster:
    """A Ray cluster that this process has joined as the driver of one deployment."""

    def __init__(self, address: str, namespace: str) -> None:
        self.address, self.namespace = address, namespace
        self.groups = DetachedGroups()
        self._entry = f"diptych:driver:{namespace}"
        self._drives = False

    def start(self) -> None:
        """Join the cluster, and become the namespace's driver; blocks for a second or more.

        Raises:
            ConfigError: the address has not the form HOST:PORT.
            StartError: the cluster cannot be joined, or the namespace has a living driver.
        """
        self.address = join_cluster(self.address, self.namespace)
        self._claim_namespace()

    def _claim_namespace(self) -> None:
        """Raises StartError if another living driver has this namespace."""
        deadline_s = time.monotonic() + DRIVER_END_S
        while (holder := self._living_driver()) and time.monotonic() < deadline_s:
            # An earlier driver may have ended a moment ago.
            time.sleep(0.5)
        if holder:
            raise StartError(
                f"a deployment named {self.namespace} runs in this Ray cluster",
                f"diptych serve, process {holder['pid']} on {holder['host']}, drives it",
                "stop it, or name this one: --ray-namespace NAME",
            )
        job = ray.get_runtime_context().get_job_id()
        entry = {"job": job, "pid": os.getpid(), "host": socket.gethostname()}
        internal_kv._internal_kv_put(self._entry, msgspec.json.encode(entry), overwrite=True)
        self._drives = True

    def _living_driver(self) -> dict[str, Any] | None:
        """The driver that has this namespace, if it is another one and lives."""
        raw: bytes | None = cast(Any, internal_kv)._internal_kv_get(self._entry)
        if raw is None:
            return None
        entry: dict[str, Any] = msgspec.json.decode(raw)
        dead = {job["JobID"]: job["IsDead"] for job in cast(Any, cluster_state).job_table()}
        alive = entry["job"] != ray.get_runtime_context().get_job_id() and not dead.get(entry["job"], True)
        return entry if alive else None

    @property
    def own_address(self) -> str:
        """The address of this machine, as other nodes reach it."""
        return str(cast(Any, ray.util).get_node_ip_address())

    def list_nodes(self) -> list[NodeCapacity]:
        """All living nodes with their resources."""
        free = cast(Any, cluster_state).available_resources_per_node()
        return [
            NodeCapacity(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"],
                dict(free.get(node["NodeID"], {})),
            )
            for node in cast(Any, ray).nodes()
            if node["Alive"]
        ]

    def probe_nodes(
        self, nodes: Sequence[NodeCapacity], question: str, max_workers: int, devices: int
    ) -> list[NodeReport]:
        """Ask each node for its versions and for the model (`services.cluster.node_probe.describe_node`).

        Raises:
            StartError: a node does not answer.
        """
        # Sent by value: it must run where another version of Diptych is installed, or none.
        cast(Any, cloudpickle).register_pickle_by_value(node_probe)
        try:
            probe = ray.remote(node_probe.describe_node)
            asked = {
                node.address: probe.options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
                ).remote(question, max_workers, devices, node.total.get("CPU", 0.0))
                for node in nodes
            }
            return [self._await_report(address, answer) for address, answer in asked.items()]
        finally:
            cast(Any, cloudpickle).unregister_pickle_by_value(node_probe)

    def _await_report(self, address: str, answer: Any) -> NodeReport:
        try:
            return node_probe.parse_report(address, ray.get(answer, timeout=PROBE_TIMEOUT_S))
        except Exception as error:
            # Ray has no common base class for the errors of its parts.
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise StartError(
                f"the node {address} does not answer",
                why,
                "see Ray's logs there, or take it out of the cluster",
            ) from None

    def has_workers(self) -> bool:
        """Whether an earlier driver of this namespace has left workers."""
        return bool(ray.util.list_named_actors())

    def list_workers(self) -> dict[str, FoundWorker]:
        """The actors that an earlier driver of this namespace has left, by worker.

        An actor that does not answer, or is of another version, is removed.
        """
        found: dict[str, FoundWorker] = {}
        for name in ray.util.list_named_actors():
            actor = cast(Any, ray).get_actor(name)
            try:
                raw, address, stopped = cast(Any, ray).get(
                    actor.describe_order.remote(), timeout=ACTOR_TIMEOUT_S
                )
                order = msgspec.json.decode(raw, type=NodeOrder)
                found[name] = FoundWorker(actor, order, address, stopped)
            except (ray.exceptions.RayError, msgspec.MsgspecError, AttributeError, ValueError):
                self.remove_actor(name, actor, "")
        return found

    def adopt_worker(self, found: FoundWorker, keys: Mapping[str, bytes]) -> NodeWorkerHandle:
        """Take over a worker that an earlier driver has started."""
        order = found.order
        self.groups.adopt_bundle(order.spec.worker, order)
        return NodeWorkerHandle(order.spec.worker, found.actor, keys, order.key_context)

    def remove_actor(self, name: str, actor: Any, group: str) -> None:
        """Kill an actor, wait until its name is free, and remove its placement group, if one is named.

        Raises:
            StartError: the name is not free in time.
        """
        ray.kill(actor)
        if group:
            _remove_leftover(group)
        deadline_s = time.monotonic() + ACTOR_TIMEOUT_S
        while name in ray.util.list_named_actors():
            if time.monotonic() > deadline_s:
                raise StartError(f"the worker {name} of an earlier start does not end", "see Ray's logs")
            time.sleep(0.1)

    def launch_worker(self, order: NodeOrder, keys: Mapping[str, bytes]) -> NodeWorkerHandle:
        """Start the actor of a worker on its reserved bundle; `keys` are sent to it, sealed.

        Raises:
            StartError: Ray refuses it.
        """
        name = order.spec.worker
        place, group = self.groups.find_place(name)
        demand = dict(order.demand)
        with _ray_errors(f"Ray makes no actor for {name}"):
            actor = ray.remote(NodeWorker).options(
                name=name,
                lifetime="detached",
                num_cpus=demand.pop("CPU", 0.0),
                num_gpus=demand.pop("GPU", 0.0),
                memory=demand.pop("memory", None),
                resources=demand,
                max_restarts=-1,
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=place.index
                ),
            )
            made = actor.remote(msgspec.json.encode(order))
        return NodeWorkerHandle(name, made, keys, order.key_context)

    def stop(self) -> None:
        """Leave the cluster. Idempotent."""
        if self._drives:
            self._drives = False
            # Without Ray's head this would wait for it. The entry may stay: its driver counts as dead then.
            removing = start_daemon(lambda: cast(Any, internal_kv)._internal_kv_del(self._entry))
            removing.join(KILL_TIMEOUT_S)
        ray.shutdown()
