"""Runs one deployment in a Ray cluster that others started: its gateway here, its workers on the nodes.

The gateway is a child of `diptych serve`, as in a deployment of one machine, and listens for workers at this machine's
address in the cluster. Workers are detached actors: if this process dies, they wait for the gateway of the next one,
which adopts them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from diptych.channel.keys import make_keys, read_worker_keys
from diptych.errors import DiptychError, StartError
from diptych.specs import WorkerSpec
from services.cluster.capacity import NodeCapacity, min_cpus
from services.cluster.daemon_calls import await_daemon, call_in_time, start_daemon
from services.cluster.head_watch import watch_answers
from services.cluster.local_deployment import LocalDeployment, OnStatus, WorkerHandle
from services.cluster.spec import Bundle, ClusterSpec, DeploymentSpec

# Imported for types only, since they import Ray.
if TYPE_CHECKING:
    from services.cluster.joined_cluster import FoundWorker, JoinedCluster
    from services.cluster.node_worker import NodeOrder

# Seconds for Ray to take resources back. Without its head this would wait for it.
RELEASE_TIMEOUT_S = 10.0
# Seconds for an answer of Ray's head while this process does nothing else.
SOON_S = 2.0


class ClusterDeployment(LocalDeployment):
    """A gateway here, and workers on the nodes of a joined cluster."""

    def __init__(
        self,
        spec: DeploymentSpec,
        cluster: ClusterSpec,
        joined: JoinedCluster,
        on_status: OnStatus,
        say: Callable[[str], None],
    ) -> None:
        """`say` prints a line for the user."""
        super().__init__(spec, on_status)
        self._cluster, self._joined, self._say = cluster, joined, say
        self._bundles = {bundle.worker: bundle for bundles in spec.node_groups for bundle in bundles}
        # Workers that were placed and are not recorded yet; set and read while one thread places workers, or none does.
        self._placed: dict[str, tuple[WorkerHandle, WorkerSpec]] = {}
        self._idle, self._stops = threading.Event(), False
        # Whether each worker that an earlier driver has left is adopted or ended.
        self.has_taken_over = False
        self._idle.set()

    def start_gateway(self) -> None:
        """Make this deployment's keys, unless they are there or are the user's, and start the gateway's process."""
        folder = Path(self._spec.gateway.keys_dir)
        if not self._cluster.node_keys_dir and not (folder / "server.secret").exists():
            make_keys(folder)
        self._start_gateway_process()

    async def start_workers(self, local_ray: Any) -> None:
        """Adopt what an earlier driver has left, place and start the other workers, and watch them and Ray's head.

        Raises:
            StartError: there is no room for a worker; the error says what was asked, and what each node has.
        """
        self._local_ray = local_ray
        await self._record_placed(self._place_workers)
        self._watchers.append(asyncio.create_task(self._watch_head()))

    async def _record_placed(self, place: Callable[[], None]) -> None:
        """Run `place`, which blocks while Ray does not answer, in a thread; record what it has put into `_placed`.

        If this is cancelled, `stop` waits for the thread and stops these workers too.
        """
        self._idle.clear()

        def run() -> None:
            try:
                place()
            finally:
                self._idle.set()

        await await_daemon(run)
        for worker, spec in self._placed.values():
            self._record_worker(worker, spec)
        self._placed.clear()

    # --- in the thread of `_record_placed` ---

    def _place_workers(self) -> None:
        adopted, freed = self._adopt_workers()
        missing = [
            bundles
            for one in self._spec.node_groups
            if (bundles := tuple(bundle for bundle in one if bundle.worker not in adopted))
        ]
        if missing:
            nodes = self._joined.await_room(missing) if freed else self._joined.list_nodes()
            for node in nodes:
                node.placed += [name for name, address in adopted.items() if address == node.address]
            self._check_going_on()
            self._joined.groups.reserve_groups(missing, nodes)
        for spec in self._spec.workers:
            if spec.worker not in adopted:
                self._launch_worker(spec)

    def _check_going_on(self) -> None:
        """Raises StartError if the deployment is to be stopped, so that nothing more may be placed."""
        if self._stops:
            raise StartError("the deployment stops")

    def _adopt_workers(self) -> tuple[dict[str, str], bool]:
        """Take over the workers of an earlier driver that are as this one wants them, and end the others.

        Returns the addresses of their nodes, by worker, and whether others were ended. Workers that a replanner had
        added are kept if there is one.
        """
        found = self._joined.list_workers()
        fitting = self._find_fitting(found)
        kept = {found[name].order.group for name in fitting}
        for name in sorted(fitting):
            adopted = self._joined.adopt_worker(found[name], self._worker_keys())
            self._placed[name] = (adopted, found[name].order.spec)
            role, _, number = name.rpartition("-")
            self._started_count[role] = max(self._started_count[role], int(number) + 1)
        for name, worker in found.items():
            if name not in fitting:
                self._check_going_on()
                group_name = worker.order.group
                self._joined.remove_actor(name, worker.actor, group_name if group_name not in kept else "")
        self.has_taken_over = True
        freed = self._joined.groups.remove_leftovers() or fitting != found.keys()
        if fitting:
            self._say(f"adopted {', '.join(sorted(fitting))}, which an earlier start has left running")
        return {name: found[name].address for name in fitting}, freed

    def _find_fitting(self, found: Mapping[str, FoundWorker]) -> set[str]:
        """The workers of an earlier driver that are as this one wants them, and in the right places.

        What must be on one node is in one placement group, or is placed anew together; and that takes the place of an
        earlier placement group of the same name, so that whatever else is in it must end too. All workers of a
        placement group are adopted or none: Ray takes no part of one back, so that the place of a worker that has
        ended would stay reserved for as long as the others run.
        """
        from services.cluster.detached_groups import count_bundles, name_group

        fitting = {name for name, worker in found.items() if self._is_wanted(name, worker)}
        while True:
            misplaced = set[str]()
            for bundles in self._spec.node_groups:
                names = {bundle.worker for bundle in bundles}
                if not names <= fitting or len({found[name].order.group for name in names}) > 1:
                    anew = name_group(bundles)
                    misplaced |= names & fitting
                    misplaced |= {name for name in fitting if found[name].order.group == anew}
            filled = Counter(found[name].order.group for name in fitting)
            partial = {group for group, workers in filled.items() if workers < count_bundles(group)}
            misplaced |= {name for name in fitting if found[name].order.group in partial}
            if not misplaced:
                return fitting
            fitting -= misplaced

    def _is_wanted(self, name: str, found: FoundWorker) -> bool:
        """Whether a worker of an earlier driver is as this one would start it."""
        like = next((spec for spec in self._spec.workers if spec.worker == name), None)
        if like is None and self._spec.gateway.replan:
            like = next((spec for spec in self._spec.workers if spec.role == found.order.spec.role), None)
        if found.ended or like is None:
            return False
        spec = msgspec.structs.replace(like, worker=name)
        return self._make_order(spec, found.order.group, found.order.index).is_like(found.order)

    def _launch_worker(self, spec: WorkerSpec) -> None:
        """Start the actor of a worker on its reserved bundle."""
        self._check_going_on()
        place, _ = self._joined.groups.find_place(spec.worker)
        order = self._make_order(spec, place.name, place.index)
        self._placed[spec.worker] = (self._joined.launch_worker(order, self._worker_keys()), spec)

    def _make_order(self, spec: WorkerSpec, group: str, index: int) -> NodeOrder:
        """The order for a worker's actor on the bundle `index` of a placement group."""
        from services.cluster.node_worker import NodeOrder

        cluster = self._cluster
        return NodeOrder(
            spec=spec,
            module=self._spec.worker_module,
            namespace=cluster.namespace,
            question=cluster.question,
            max_workers=cluster.max_workers,
            cpus=min_cpus(self._spec.node_groups),
            keys_dir=cluster.node_keys_dir,
            gateway_key=read_worker_keys(self._spec.gateway.keys_dir)["server.public"].decode("ascii"),
            pin_cores=cluster.pin_cores,
            group=group,
            index=index,
            demand=self._bundle_like(spec).demand,
        )

    def _worker_keys(self) -> dict[str, bytes]:
        """What workers need of the keys; empty if it lies on the nodes."""
        return {} if self._cluster.node_keys_dir else read_worker_keys(self._spec.gateway.keys_dir)

    def _bundle_like(self, spec: WorkerSpec) -> Bundle:
        """The bundle of a worker: that of the first one of its role, if it is not planned."""
        known = self._bundles.get(spec.worker)
        if known is None:
            like = next(one for one in self._spec.workers if one.role == spec.role)
            known = replace(self._bundles[like.worker], worker=spec.worker)
        return known

    async def start_worker(self, role: str) -> str:
        """Start one more worker, like the first one of its role, where the cluster has room; return its name.

        Raises:
            StartError: the device budget is used up, there is no room, or Ray's head is lost.
        """
        like = next(spec for spec in self._spec.workers if spec.role == role)
        self._check_budget(role, like.tp * like.pp)
        spec = msgspec.structs.replace(like, worker=f"{role}-{self._started_count[role]}")
        await self._record_placed(lambda: self._place_worker(spec))
        self._started_count[role] += 1
        return spec.worker

    def _place_worker(self, spec: WorkerSpec) -> None:
        """Reserve a place for a worker, and start its actor there; blocks."""
        from services.cluster.join import head_answers

        if not head_answers(self._joined.address, SOON_S):
            raise StartError(f"no {spec.role} worker can be started", "Ray's head does not answer")
        nodes = self._joined.list_nodes()
        self._note_placed(nodes)
        self._check_going_on()
        self._joined.groups.reserve_groups([(self._bundle_like(spec),)], nodes)
        try:
            self._launch_worker(spec)
        except DiptychError as error:
            # For example, the keys that it would get are gone.
            self._joined.groups.release_bundle(spec.worker)
            raise StartError(error.what, error.why, error.fix) from None

    async def _release_bundle(self, name: str) -> None:
        """Give the place of a worker that is gone back to Ray, which takes it when its head answers."""
        await call_in_time(lambda: self._joined.groups.release_bundle(name), RELEASE_TIMEOUT_S)

    def _note_placed(self, nodes: list[NodeCapacity]) -> None:
        """Tell each node which workers of this deployment it has, so that the next ones are spread."""
        by_address = {node.address: node for node in nodes}
        for name, handle in self.workers.items():
            address = getattr(handle, "address", "")
            if address in by_address:
                by_address[address].placed.append(name)

    async def _watch_head(self) -> None:
        """Report when Ray's head is lost, and when it is back."""
        from services.cluster.join import head_answers

        await watch_answers(
            lambda: head_answers(self._joined.address),
            lambda: self._on_ray_lost("gcs_server"),
            self._on_head_back,
        )

    def _on_head_back(self) -> None:
        self._ray_lost = False
        self._say("Ray's head is back")

    async def stop(self, drain_s: float) -> None:
        """Stop the gateway, then the workers, and give their places back. Idempotent."""
        self._stops = True
        # What was being placed when the start was cancelled.
        await call_in_time(self._idle.wait, RELEASE_TIMEOUT_S)
        self._take_placed()
        await super().stop(drain_s)
        await call_in_time(self._joined.groups.release_all, RELEASE_TIMEOUT_S)

    def _take_placed(self) -> None:
        """Let workers that were placed, and not recorded, end with the others."""
        self.workers |= {name: worker for name, (worker, _) in self._placed.items()}
        self._placed.clear()

    def end_at_once(self) -> None:
        """End the gateway and all workers that `stop` has not ended, without grace: no guard would end what runs on
        other nodes.
        """
        self._stops = True
        super().end_at_once()
        self._take_placed()
        left = [cast(Any, worker).kill for worker in self.workers.values()]
        threads = [start_daemon(end) for end in (*left, self._joined.groups.release_all)]
        deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def describe_places(self) -> list[str]:
        """A line for each worker: its node, and its log there."""
        return [
            f"{name} on {getattr(handle, 'address', '') or 'no node'}, log {getattr(handle, 'log_file', '')}"
            for name, handle in sorted(self.workers.items())
        ]
