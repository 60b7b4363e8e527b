"""Runs a local Ray head, and one actor per worker that supervises the worker's process.

Ray is the control plane only: it places, starts, watches and stops workers. No request, token or KV byte goes through
Ray. Workers are child processes of their actors, so that none of Ray's threads runs where tokens are computed.
If the head process (`gcs_server`) dies, actors and workers go on and are still watched, but an actor that dies later is
not restarted. If the `raylet` dies, actors and workers go on too, but Ray reports the actors as dead, so that no more
statuses arrive. `diptych serve` reports either, and still ends all processes when it stops.

The head listens on the loopback interface only and requires a token drawn at start. Its processes ask the kernel to end
them with the thread that started them; `services.host.supervision.process_guard` ends whatever they leave behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import ray
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from diptych.channel.keys import KeyBackup
from diptych.errors import StartError
from diptych.specs import WorkerSpec
from services.cluster.actors import ActorStatuses, actor_options
from services.cluster.local_ray.lean_head import lean_head
from services.cluster.spec import Bundle
from services.host.child_environment import ucx_on_loopback
from services.host.supervision.supervisor import ChildStatus, Supervisor
from services.host.vllm.interpreter import worker_command, worker_environment

# Diptych stores nothing in Ray's object store, but Ray requires at least 75 MiB.
OBJECT_STORE_BYTES = 80 << 20
RAY_PROCESSES = ("gcs_server", "raylet")


class WorkerActor:
    """The actor that Ray places for a worker: it keeps one worker process alive.

    Ray restarts the actor if it dies, and the new actor starts the worker again.
    """

    def __init__(self, spec: bytes, module: str, log: str) -> None:
        worker = msgspec.json.decode(spec, type=WorkerSpec)
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        if restarted:
            # The previous worker was killed by the kernel together with its supervisor.
            spec = msgspec.json.encode(msgspec.structs.replace(worker, ended="killed"))
        self._supervisor = Supervisor(
            worker.worker,
            worker_command(worker, module),
            spec,
            Path(log),
            ucx_on_loopback(worker_environment(worker, os.environ)),
            prepare=KeyBackup(worker.keys_dir).restore_keys,
            restarted=restarted,
        )
        self._supervisor.start()

    def wait_status(self, version: int, timeout_s: float) -> tuple[int, ChildStatus]:
        """This process id, and the status once its version is not `version`, or after `timeout_s`."""
        return os.getpid(), self._supervisor.wait_status(version, timeout_s)

    def stop(self, grace_s: float) -> None:
        """Stop the worker and wait for its end; kill it after `grace_s` seconds."""
        self._supervisor.stop(grace_s)


class RayWorker:
    """The handle of one worker in `diptych serve`: awaitable status and stop."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor
        self._statuses = ActorStatuses(name)

    async def next_status(self, timeout_s: float = 20.0) -> ChildStatus | None:
        """The next new status; None if there is none in time. If the actor died, a status "waiting" (for Ray)."""
        try:
            pid, status = await cast(
                Awaitable[tuple[int, ChildStatus]],
                self._actor.wait_status.remote(self._statuses.seen_version, timeout_s),
            )
        except ray.exceptions.RayActorError:
            return self._statuses.on_lost()
        return self._statuses.on_status(pid, status)

    async def stop(self, grace_s: float) -> None:
        """Stop the worker and its actor; the worker is killed after `grace_s` seconds."""
        # The error means that the actor has died, and its worker with it.
        with contextlib.suppress(ray.exceptions.RayActorError):
            await cast(Awaitable[None], self._actor.stop.remote(grace_s))
        ray.kill(self._actor)


class PlacementGroups:
    """Ray placement groups, one for each worker: all of this machine is one node, so that no two must be together.

    Ray takes no part of a group back. With the workers of a plan's pair in one group, the devices of one that has ended
    would stay reserved for as long as the other one runs, though the budget counts them as free.
    """

    def __init__(self) -> None:
        self._taken: dict[str, tuple[PlacementGroup, dict[str, float]]] = {}

    def reserve_bundle(self, bundle: Bundle) -> None:
        """Ask Ray for what a worker takes, without waiting."""
        made = placement_group([bundle.demand], strategy="STRICT_PACK", name=bundle.worker)
        self._taken[bundle.worker] = made, bundle.demand

    def find_place(self, worker: str) -> tuple[PlacementGroup, dict[str, float]]:
        """The worker's placement group, and what it takes of Ray's resources."""
        return self._taken[worker]

    def release_bundle(self, worker: str) -> None:
        """Return the devices of a worker that is gone to Ray. Idempotent."""
        place = self._taken.pop(worker, None)
        if place is not None:
            remove_placement_group(place[0])


class LocalRay:
    """The Ray head of one deployment on this machine."""

    def __init__(self, folder: Path, devices: int, gpus: int = 0) -> None:
        """`folder` is for Ray's sockets and logs; its path must be short, since a socket's path has at most 107
        characters. `devices` is the most that workers may ever hold, `gpus` the GPUs among which Ray divides them; Ray
        places no more.
        """
        self._folder, self._devices, self._gpus = folder, devices, gpus
        self.groups = PlacementGroups()
        self.address = ""

    def start(self) -> None:
        """Start Ray, which blocks for some seconds. The calling thread must live as long as the deployment.

        `services.host.child_environment.prepare_ray_environment` must have prepared the environment before this
        module was imported.

        Raises:
            StartError: Ray did not start.
        """
        try:
            with lean_head():
                context = ray.init(
                    address="local",
                    num_cpus=self._devices,
                    num_gpus=self._gpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                    namespace="diptych",
                    # Marks the job as a remote client's: otherwise actors import from the working directory first.
                    job_config=JobConfig(_client_job=True),
                    _temp_dir=str(self._folder),
                )
        except Exception as error:
            # Ray has no common base class for the errors of its parts.
            raise StartError(
                "Ray did not start", " ".join(str(error).split())[:300], f"see {self._folder}"
            ) from None
        self.address = cast(Any, context).address_info["gcs_address"]

    def launch_worker(self, spec: WorkerSpec, log: Path, module: str) -> RayWorker:
        """Start the actor of a worker on its reserved bundle; the actor starts the worker's process."""
        group, demand = self.groups.find_place(spec.worker)
        options = actor_options(spec.worker, demand, group, 0, max_concurrency=4)
        actor = ray.remote(WorkerActor).options(**options)
        return RayWorker(spec.worker, actor.remote(msgspec.json.encode(spec), module, str(log)))

    def process_ids(self) -> dict[str, int]:
        """Process ids of Ray's two essential processes, by name."""
        found: dict[str, int] = {}
        for one in psutil.Process().children(recursive=True):
            # The error means that the process has ended meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                found[one.name()] = one.pid
        return {name: found[name] for name in RAY_PROCESSES if name in found}

    def stop_error_listener(self) -> None:
        """End Ray's error listener thread, which polls without a pause and uses up a core once gcs_server is gone."""
        ray._private.worker.global_worker.threads_stopped.set()

    def stop(self) -> None:
        """Stop Ray and all processes that it started. Idempotent."""
        ray.shutdown()
