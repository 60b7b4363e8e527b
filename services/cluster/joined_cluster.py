"""The driver's view of a Ray cluster that others started: its nodes, and the detached actors of one deployment.

Each deployment has a namespace of its own, so that several share a cluster. Actors and placement groups are detached:
they outlive the driver. Ray's key-value store says which driver a namespace has, and the next one adopts its actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import ray
from ray import cloudpickle
from ray._private.state import state as cluster_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from diptych.errors import StartError
from services.cluster import node_probe
from services.cluster.actors import ActorStatuses, actor_options
from services.cluster.capacity import NodeCapacity, has_room
from services.cluster.daemon_calls import call_in_time, start_daemon
from services.cluster.detached_groups import DetachedGroups, ray_errors, remove_leftover
from services.cluster.join import LEAVES, NamespaceClaim, check_head, find_head, join_cluster
from services.cluster.node_probe import NodeReport
from services.cluster.node_worker import ActorReport, NodeOrder, NodeWorker
from services.cluster.sealed_keys import seal_keys
from services.cluster.spec import Bundle
from services.host.supervision.supervisor import ChildStatus

ACTOR_TIMEOUT_S, KILL_TIMEOUT_S = 15.0, 5.0
# Seconds after which nodes that are still waited for are named, and those that Ray needs to deliver an answer.
LONG_PROBE_S, ANSWER_TIMEOUT_S = 5.0, 30.0
# Longest time in seconds for nodes to tell Ray what has become free, and between two looks.
FREE_TIMEOUT_S, FREE_POLL_S = 5.0, 0.1

# The names that workers' actors have.
WORKER_NAME = re.compile(r"(prefill|decode)-[0-9]+")

# Ray warns of detached actors in placement groups, which end with their group. Here they are meant to.
logging.getLogger("ray.actor").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """The actor of a worker that an earlier driver has left, on the node at `address`. An `ended` worker stays so."""

    actor: Any
    order: NodeOrder
    address: str
    ended: bool


class NodeWorkerHandle:
    """The handle of one worker in the driver: awaitable status and stop. Sends the keys to its actor."""

    def __init__(self, name: str, actor: Any, keys: Mapping[str, bytes], context: str) -> None:
        self.name, self.address, self.log_file = name, "", ""
        self._actor, self._keys, self._context = actor, keys, context
        self._statuses = ActorStatuses(name)
        # The public key for which keys were sealed that the actor could not open.
        self._refused_key = b""

    async def next_status(self, timeout_s: float = 20.0) -> ChildStatus | None:
        """The next new status; None if there is none in time. If the actor died, a status "waiting" (for Ray)."""
        try:
            report = await cast(
                Awaitable[ActorReport],
                self._actor.wait_status.remote(self._statuses.seen_version, timeout_s),
            )
            if report.wanted_key and self._keys and not await self._deliver_keys(report.wanted_key):
                return self._statuses.on_lost()
        except ray.exceptions.RayActorError as error:
            return self._statuses.on_failed(error) if error.actor_init_failed else self._statuses.on_lost()
        except ray.exceptions.RayError as error:
            return self._statuses.on_failed(error)
        self.address, self.log_file = report.address, report.log_file
        return self._statuses.on_status((report.address, report.pid), report.status)

    async def _deliver_keys(self, wanted_key: bytes) -> bool:
        """Send the keys, sealed for the actor that wants them. False if that one has died meanwhile: the actor that Ray
        has started in its place cannot open them, and says later what it wants.

        Raises:
            RayError: the actor cannot be asked, or cannot open what was sealed for itself.
        """
        try:
            await self._actor.deliver_keys.remote(seal_keys(self._keys, wanted_key, self._context))
        except ray.exceptions.RayTaskError:
            if wanted_key == self._refused_key:
                raise
            self._refused_key = wanted_key
            return False
        return True

    def kill(self) -> None:
        """End the worker without grace, and its actor. Without Ray's head the actor stays, and this may wait for it."""
        # The actor itself is asked too: that does not go through Ray's head.
        self._actor.stop.remote(0.0)
        ray.kill(self._actor)

    async def stop(self, grace_s: float) -> None:
        """Stop the worker and its actor; the worker is killed after `grace_s` seconds."""
        # The first error means that the actor has died, and its worker with it.
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            stopping = cast(Awaitable[None], self._actor.stop.remote(grace_s))
            await asyncio.wait_for(stopping, grace_s + ACTOR_TIMEOUT_S)
        await call_in_time(self.kill, KILL_TIMEOUT_S)


class JoinedCluster:
    """A Ray cluster that this process has joined as the driver of one deployment."""

    def __init__(self, address: str, namespace: str) -> None:
        self.address, self.namespace = address, namespace
        self.groups = DetachedGroups()
        self._claim = NamespaceClaim(namespace)
        # Held while Ray is joined, which must not be left meanwhile.
        self._joining, self._leaves = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Join the cluster, and become the namespace's driver; blocks for a second or more, until `stop` at most.

        Raises:
            ConfigError: the address has not the form HOST:PORT.
            StartError: the cluster cannot be joined, the namespace has a living driver, or `stop` was called.
        """
        self.address = find_head(self.address)
        check_head(self.address)
        with self._joining:
            if self._leaves.is_set():
                raise StartError(LEAVES)
            join_cluster(self.address, self.namespace)
        with ray_errors("the Ray cluster cannot be asked who drives it"):
            self._claim.take_namespace(self._leaves)

    @property
    def own_address(self) -> str:
        """The address of this machine, as other nodes reach it."""
        return str(cast(Any, ray.util).get_node_ip_address())

    def list_nodes(self) -> list[NodeCapacity]:
        """All living nodes with their resources. Raises StartError if Ray cannot be asked."""
        with ray_errors("the Ray cluster cannot be asked for its nodes"):
            free = cast(Any, cluster_state).available_resources_per_node()
            found = cast(Any, ray).nodes()
        return [
            NodeCapacity(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"],
                dict(free.get(node["NodeID"], {})),
            )
            for node in found
            if node["Alive"]
        ]

    def await_room(self, bundle_groups: Sequence[Sequence[Bundle]]) -> list[NodeCapacity]:
        """The nodes as soon as they have room for `bundle_groups`, or else after `FREE_TIMEOUT_S`; blocks.

        What workers had is free a moment after their end, when their nodes have told Ray. Raises StartError if Ray
        cannot be asked.
        """
        deadline_s = time.monotonic() + FREE_TIMEOUT_S
        while not has_room(bundle_groups, nodes := self.list_nodes()) and time.monotonic() < deadline_s:
            time.sleep(FREE_POLL_S)
        return nodes

    def probe_nodes(
        self,
        nodes: Sequence[NodeCapacity],
        question: str,
        max_workers: int,
        cpus: float,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> list[NodeReport]:
        """Ask all nodes at once (`services.cluster.node_probe.describe_node`); each may take `timeout_s` seconds.

        `say` prints a line if they need long. Without a `question` they tell their versions only.

        Raises:
            StartError: a node does not answer.
        """
        if not nodes:
            return []
        # Sent by value: it must run where another version of Diptych is installed, or none.
        cast(Any, cloudpickle).register_pickle_by_value(node_probe)
        try:
            probe = ray.remote(node_probe.describe_node)
            asked = {
                probe.options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
                ).remote(
                    question,
                    max_workers,
                    cpus,
                    node.total.get("CPU", 0.0),
                    node_probe.name_deployment(self.namespace, node.address),
                    timeout_s,
                ): node.address
                for node in nodes
            }
        finally:
            cast(Any, cloudpickle).unregister_pickle_by_value(node_probe)
        for wait_s in (LONG_PROBE_S, timeout_s + ANSWER_TIMEOUT_S - LONG_PROBE_S):
            _, silent = cast(Any, ray).wait(list(asked), num_returns=len(asked), timeout=wait_s)
            if silent and wait_s == LONG_PROBE_S:
                say(f"waiting for {_name_nodes([asked[one] for one in silent])}")
        if silent:
            why = f"waited {timeout_s + ANSWER_TIMEOUT_S:.0f} s"
            raise _silent_nodes([asked[one] for one in silent], why)
        return [_read_report(address, answer) for answer, address in asked.items()]

    def has_workers(self) -> bool:
        """Whether an earlier driver of this namespace has left workers. Raises StartError as `list_workers`."""
        return bool(self._own_actors())

    def _own_actors(self) -> dict[str, Any]:
        """The actors of this namespace that keep Diptych's workers, by worker. All others are left alone.

        Raises:
            StartError: another program's actor has the name of a worker, or Ray cannot be asked.
        """
        found: dict[str, Any] = {}
        with ray_errors("the Ray cluster cannot be asked for its actors"):
            names = [name for name in ray.util.list_named_actors() if WORKER_NAME.fullmatch(name)]
            for name in names:
                # The error means that it has ended meanwhile.
                with contextlib.suppress(ValueError):
                    found[name] = cast(Any, ray).get_actor(name)
        for name, actor in found.items():
            made_of = actor._ray_actor_creation_function_descriptor
            if (made_of.module_name, made_of.class_name) != (NodeWorker.__module__, NodeWorker.__name__):
                raise StartError(
                    f"an actor named {name} is in the namespace {self.namespace}, and is no worker of Diptych",
                    f"it is a {made_of.module_name}.{made_of.class_name} of another program",
                    "give this deployment a namespace of its own: --ray-namespace NAME",
                )
        return found

    def list_workers(self) -> dict[str, FoundWorker]:
        """The actors that an earlier driver of this namespace has left, by worker.

        An actor that does not answer, or is of another version, is removed.

        Raises:
            StartError: another program's actor has the name of a worker, or Ray cannot be asked.
        """
        found: dict[str, FoundWorker] = {}
        actors = self._own_actors()
        asked = {name: _ask_order(actor) for name, actor in actors.items()}
        deadline_s = time.monotonic() + ACTOR_TIMEOUT_S
        for name, actor in actors.items():
            left_s = max(0.1, deadline_s - time.monotonic())
            try:
                raw, address, ended = cast(Any, ray).get(asked[name], timeout=left_s)
                order = msgspec.json.decode(raw, type=NodeOrder)
                found[name] = FoundWorker(actor, order, address, ended)
            except (ray.exceptions.RayError, msgspec.MsgspecError, TypeError, ValueError):
                self.remove_actor(name, actor, "")
        return found

    def adopt_worker(self, found: FoundWorker, keys: Mapping[str, bytes]) -> NodeWorkerHandle:
        """Take over a worker that an earlier driver has started. Raises StartError if Ray cannot be asked."""
        order = found.order
        with ray_errors(f"the worker {order.spec.worker} of an earlier start cannot be taken over"):
            self.groups.adopt_bundle(order.spec.worker, order)
        return NodeWorkerHandle(order.spec.worker, found.actor, keys, order.key_context)

    def remove_actor(self, name: str, actor: Any, group: str) -> None:
        """Kill an actor, wait until its name is free, and remove its placement group, if one is named.

        Raises:
            StartError: the name is not free in time, or Ray cannot be asked.
        """
        deadline_s = time.monotonic() + ACTOR_TIMEOUT_S
        with ray_errors(f"the worker {name} of an earlier start cannot be ended"):
            ray.kill(actor)
            if group:
                remove_leftover(group)
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
        with ray_errors(f"Ray makes no actor for {name}"):
            options = actor_options(name, order.demand, group, place.index, max_concurrency=8)
            actor = ray.remote(NodeWorker).options(lifetime="detached", **options)
            made = actor.remote(msgspec.json.encode(order))
        return NodeWorkerHandle(name, made, keys, order.key_context)

    def stop(self) -> None:
        """Leave the cluster, also if `start` has not ended in another thread. Idempotent."""
        self._leaves.set()
        if not self._joining.acquire(timeout=KILL_TIMEOUT_S):
            # Ray is joined, which it does not end, nor may be left meanwhile. The end of this process does both.
            return
        if self._claim.is_held:
            # Without Ray's head this would wait for it. The entry may stay: its driver counts as dead then.
            start_daemon(self._claim.release).join(KILL_TIMEOUT_S)
        ray.shutdown()
        self._joining.release()


def _ask_order(actor: Any) -> Any:
    """Ray's reference to an actor's answer; None if it is of another version, which cannot be asked."""
    with contextlib.suppress(AttributeError):
        return actor.describe_order.remote()
    return None


def _read_report(address: str, answer: Any) -> NodeReport:
    """The report of a node whose answer has come. Raises StartError if it is an error."""
    try:
        return node_probe.parse_report(address, cast(Any, ray).get(answer, timeout=ANSWER_TIMEOUT_S))
    except Exception as error:
        # Ray has no common base class for the errors of its parts.
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise _silent_nodes([address], why) from None


def _silent_nodes(addresses: Sequence[str], why: str) -> StartError:
    verb = "does" if len(addresses) == 1 else "do"
    return StartError(
        f"{_name_nodes(addresses)} {verb} not answer",
        why,
        "see Ray's logs there, or leave it out of the cluster",
    )


def _name_nodes(addresses: Sequence[str]) -> str:
    """In words, at most three of them: "the nodes 10.0.0.1, 10.0.0.2"."""
    shown = ", ".join(sorted(addresses)[:3])
    more = f" and {len(addresses) - 3} more" if len(addresses) > 3 else ""
    return f"the node{'s' if len(addresses) > 1 else ''} {shown}{more}"
