"""Runs all parts of one deployment on this machine: the gateway's process, the Ray head, and the workers' actors.

The gateway is a child of `diptych serve` itself, not an actor, so that requests do not depend on Ray in any way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import msgspec

from diptych.channel.keys import KeyBackup, make_keys
from diptych.errors import DiptychError, StartError
from diptych.specs import WorkerSpec
from services.cluster.head_watch import await_process_end
from services.cluster.spec import SUPERVISOR_DIED, Bundle, DeploymentSpec
from services.host.child_environment import child_environment
from services.host.supervision.supervisor import ChildStatus, Supervisor

# Imported for types only. Ray itself is imported later: that takes about a second, in which the gateway starts
# already.
if TYPE_CHECKING:
    from services.cluster.local_ray.ray_head import LocalRay

log = logging.getLogger(__name__)

OnStatus = Callable[[ChildStatus], None]
GATEWAY_GRACE_S = 2.0
# Seconds that workers get to stop. They are few, because workers have no requests left once the gateway has drained.
WORKER_GRACE_S = 2.0
STATUS_WAIT_S, LOST_ACTOR_PAUSE_S = 20.0, 0.2
# The gateway's name in statuses and logs.
GATEWAY = "gateway"
# The name under which the end of one of Ray's processes is reported, with state "failed" and the process's name as
# phase.
RAY = "ray"


class WorkerHandle(Protocol):
    """A worker that Ray has placed, as its deployment knows it."""

    name: str

    async def next_status(self, timeout_s: float) -> ChildStatus | None:
        """The next new status; None if there is none in time."""

    async def stop(self, grace_s: float) -> None:
        """Stop the worker; kill it after `grace_s` seconds."""


class LocalDeployment:
    """A gateway, and workers under a Ray head. `on_status` is called with every change of a status."""

    def __init__(self, spec: DeploymentSpec, on_status: OnStatus) -> None:
        self._spec, self._on_status = spec, on_status
        # `start_workers` sets this attribute.
        self._local_ray: LocalRay
        self.workers: dict[str, WorkerHandle] = {}
        # The specification that each worker was started with.
        self.specs: dict[str, WorkerSpec] = {}
        self.statuses: dict[str, ChildStatus] = {}  # the latest status of each worker
        self._keys = KeyBackup(spec.gateway.keys_dir)
        self._gateway = Supervisor(
            GATEWAY,
            [sys.executable, "-m", spec.gateway_module],
            msgspec.json.encode(spec.gateway),
            spec.log_path(GATEWAY),
            child_environment(1, os.environ),
            prepare=self._keys.restore_keys,
        )
        self._watchers: list[asyncio.Task[None]] = []
        self._worker_watchers: dict[str, asyncio.Task[None]] = {}  # by worker
        # Number of workers of each role that were ever started. It gives the next worker its number.
        self._started_count = Counter(worker.worker.rsplit("-", 1)[0] for worker in spec.workers)
        self._ray_lost = False

    def start_gateway(self) -> None:
        """Make this deployment's keys and start the gateway's process. The Ray head may start later."""
        make_keys(self._spec.gateway.keys_dir)
        self._start_gateway_process()

    def _start_gateway_process(self) -> None:
        """Start the gateway's process, whose keys are there, and watch it."""
        self._gateway.start()
        self._watchers.append(asyncio.create_task(self._watch_gateway()))

    async def start_workers(self, local_ray: LocalRay) -> None:
        """Start the workers' actors under a running Ray head, and watch them and Ray's processes."""
        self._local_ray = local_ray
        for bundle in chain.from_iterable(self._spec.node_groups):
            self._local_ray.groups.reserve_bundle(bundle)
        for spec in self._spec.workers:
            self._launch_worker(spec)
        for part, pid in self._local_ray.process_ids().items():
            self._watchers.append(asyncio.create_task(self._watch_ray(part, pid)))

    def _launch_worker(self, spec: WorkerSpec) -> None:
        """Start the actor of a worker and a task that watches it."""
        log_path = self._spec.log_path(spec.worker)
        self._record_worker(self._local_ray.launch_worker(spec, log_path, self._spec.worker_module), spec)

    def _record_worker(self, worker: WorkerHandle, spec: WorkerSpec) -> None:
        """Record a worker that was started with this specification, and watch it."""
        self.workers[spec.worker], self.specs[spec.worker] = worker, spec
        self.statuses[spec.worker] = ChildStatus(spec.worker)
        self._worker_watchers[spec.worker] = asyncio.create_task(self._watch_worker(worker))

    # --- replicas ---

    @property
    def states(self) -> dict[str, str]:
        """The state of each worker's supervisor, by worker."""
        return {name: status.state for name, status in self.statuses.items()}

    @property
    def started_roles(self) -> dict[str, str]:
        """The role with which each worker was started, by worker."""
        return {name: spec.role for name, spec in self.specs.items()}

    @property
    def pools(self) -> tuple[int, int]:
        """Number of workers that were started for the (prefill, decode) pool and have not retired."""
        roles = [spec.role for name, spec in self.specs.items() if self.states[name] != "retired"]
        return roles.count("prefill"), roles.count("decode")

    @property
    def held_devices(self) -> int:
        """Devices held by all workers, including those that start or end."""
        return sum(spec.tp * spec.pp for spec in self.specs.values())

    async def start_worker(self, role: str) -> str:
        """Start one more worker with the settings of the first one of its role; return its name.

        The worker is usable once its status is "ready". Raises StartError if the device budget is used up or Ray is
        lost.
        """
        like = next(spec for spec in self._spec.workers if spec.role == role)
        devices = like.tp * like.pp
        self._check_budget(role, devices)
        name = f"{role}-{self._started_count[role]}"
        self._started_count[role] += 1
        self._local_ray.groups.reserve_bundle(replace(self._bundle_of(like.worker), worker=name))
        self._launch_worker(msgspec.structs.replace(like, worker=name, core=self._pick_core(like)))
        return name

    def _bundle_of(self, worker: str) -> Bundle:
        """What a worker that was there from the start takes."""
        return next(
            bundle for bundle in chain.from_iterable(self._spec.node_groups) if bundle.worker == worker
        )

    def _check_budget(self, role: str, devices: int) -> None:
        """Raises StartError if so many more devices may not be held, or Ray is lost."""
        if self.held_devices + devices > self._spec.device_budget:
            why = (
                f"{self.held_devices} of {self._spec.device_budget} devices are held, and it needs {devices}"
            )
            raise StartError(f"no room for another {role} worker", why)
        if self._ray_lost:
            raise StartError(f"no {role} worker can be started", "the control plane is lost")

    async def remove_worker(self, name: str) -> None:
        """Kill what is left of a worker and release its devices. Idempotent."""
        worker = self.workers.get(name)
        if worker is None:
            return
        if watching := self._worker_watchers.pop(name, None):
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await worker.stop(WORKER_GRACE_S)
        # Until here `stop` ends it too: this may be cancelled.
        self.workers.pop(name, None)
        await self._release_bundle(name)
        self.specs.pop(name, None)
        self.statuses.pop(name, None)

    async def _release_bundle(self, name: str) -> None:
        """Give the place of a worker that is gone back to Ray."""
        self._local_ray.groups.release_bundle(name)

    def _pick_core(self, spec: WorkerSpec) -> int | None:
        """The CPU core with the fewest workers pinned to it; None if workers are not pinned."""
        if spec.core is None:
            return None
        taken = Counter(other.core for other in self.specs.values())
        return min(sorted(os.sched_getaffinity(0)), key=lambda core: taken[core])

    async def _watch_ray(self, part: str, pid: int) -> None:
        """Report once that one of Ray's processes has ended."""
        await await_process_end(pid)
        self._local_ray.stop_error_listener()
        self._on_ray_lost(part)

    def _on_ray_lost(self, part: str) -> None:
        """Report that a part of Ray is lost. Requests do not go through Ray and are not affected."""
        # The actors and their workers continue, but from now on Ray may report the actors as dead.
        self._ray_lost = True
        self._on_status(ChildStatus(RAY, "failed", phase=part))

    async def _watch_gateway(self) -> None:
        """Report each new status of the gateway until it has stopped."""
        version = -1
        while True:
            status = await asyncio.to_thread(self._gateway.wait_status, version, STATUS_WAIT_S)
            if status.version != version:
                version = status.version
                self._on_status(status)
            if status.state == "stopped":
                return

    async def _watch_worker(self, worker: WorkerHandle) -> None:
        """Report each new status of a worker until it has stopped or retired."""
        while True:
            status = await worker.next_status(STATUS_WAIT_S)
            if status is None or (self._ray_lost and status.ended == SUPERVISOR_DIED):
                # Ray answers at once while an actor is away, so without a pause this would be a busy loop.
                await asyncio.sleep(LOST_ACTOR_PAUSE_S)
                continue
            if status.ended == SUPERVISOR_DIED:
                self._restore_keys()
            self.statuses[status.name] = status
            self._on_status(status)
            if status.state in ("stopped", "retired"):
                return

    def _restore_keys(self) -> None:
        """Write the key files again if they are gone, since an actor that Ray restarts reads them."""
        try:
            self._keys.restore_keys()
        except (OSError, DiptychError) as error:
            log.warning("the keys of this deployment cannot be written again: %s", error)

    async def stop(self, drain_s: float) -> None:
        """Stop the gateway, which lets open requests finish for up to `drain_s`, then the workers. Idempotent."""
        await asyncio.to_thread(self._gateway.stop, drain_s + GATEWAY_GRACE_S)
        watching = [*self._watchers, *self._worker_watchers.values()]
        # Status changes are expected from here on, and are not reported.
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        self._watchers.clear()
        self._worker_watchers.clear()
        await asyncio.gather(*(worker.stop(WORKER_GRACE_S) for worker in self.workers.values()))
        self.workers.clear()

    def end_at_once(self) -> None:
        """End the gateway if `stop` has not, without grace. The workers end with Ray."""
        self._gateway.stop(0.0)
