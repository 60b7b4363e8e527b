"""A local Ray head, and one actor per worker that supervises the worker's process.

Ray is the control plane only: it places, starts, watches and stops. No request, token or KV byte travels through it.
Workers are children of their actors, not actors, so that none of Ray's threads runs where tokens are computed.

When the head (`gcs_server`) dies, actors and the workers under them go on, and are watched as before; only an actor
that dies itself does not come back. When the `raylet` dies they go on as well, but Ray calls the actors dead, so that
nothing more is heard of their workers. `diptych serve` says either, and still ends them all when it stops.

The head listens on the loopback interface alone and asks every caller for a token drawn at start. Its processes ask the
kernel to die with the thread that started them; what they leave behind is ended by `services.cli.guard`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diptych.config import WorkerSpec
from diptych.errors import StartError
from services.cluster.environment import child_environ, loopback_only
from services.cluster.parts import Bundle
from services.cluster.supervisor import Status, Supervisor

OBJECT_STORE_BYTES = 80 << 20  # nothing of ours is stored there; Ray asks for 75 MiB at least
PARTS = ("gcs_server", "raylet")
LOST = -2  # a version that no status has
GONE = "its supervisor died"


class WorkerActor:
    """What Ray places: keeps one worker process alive. Ray starts it anew when it dies, and the worker with it."""

    def __init__(self, spec: bytes, module: str, log: str) -> None:
        worker = msgspec.json.decode(spec, type=WorkerSpec)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # The one before was killed, by whatever ended its supervisor; the kernel saw to that.
            spec = msgspec.json.encode(msgspec.structs.replace(worker, ended="killed"))
        self._supervisor = Supervisor(
            worker.worker,
            [sys.executable, "-m", module],
            spec,
            Path(log),
            loopback_only(child_environ(worker.threads, os.environ)),
        )
        self._supervisor.start()

    def wait(self, seen: int, timeout_s: float) -> tuple[int, Status]:
        """This actor's process id, and the status once it is newer than `seen`."""
        return os.getpid(), self._supervisor.wait(seen, timeout_s)

    def stop(self, grace_s: float) -> None:
        self._supervisor.stop(grace_s)


class Worker:
    """The driver's hold on one worker: awaitable status and stop."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor
        self._seen, self._life, self._lives = -1, 0, 0

    async def next(self, timeout_s: float = 20.0) -> Status | None:
        """The next status, or None when there is none in time. A worker whose actor died is "waiting" for Ray."""
        try:
            life, status = await cast(
                Awaitable[tuple[int, Status]], self._actor.wait.remote(self._seen, timeout_s)
            )
        except ray.exceptions.RayActorError:
            fresh, self._seen = self._seen != LOST, LOST
            self._lives += fresh
            return Status(self.name, "waiting", restarts=self._lives, ended=GONE) if fresh else None
        fresh = (life, status.version) != (self._life, self._seen)
        self._life, self._seen = life, status.version
        return replace(status, restarts=status.restarts + self._lives) if fresh else None

    async def stop(self, grace_s: float) -> None:
        with contextlib.suppress(ray.exceptions.RayActorError):  # it is gone already, and its child with it
            await cast(Awaitable[None], self._actor.stop.remote(grace_s))
        ray.kill(self._actor)


@dataclass(frozen=True, slots=True)
class _Place:
    """A bundle of a placement group."""

    group: PlacementGroup
    index: int
    devices: int


class Places:
    """Placement groups: who sits where. Each group is STRICT_PACK, so that all of it is on one node."""

    def __init__(self) -> None:
        self._taken: dict[str, _Place] = {}
        self._free: list[_Place] = []  # left by workers that ended, in groups where others still are

    def reserve(self, group: Sequence[Bundle]) -> None:
        """Ask Ray for a group of bundles; does not wait for it. One bundle takes a free one of its size, if any is."""
        if len(group) == 1 and (place := self._vacant(group[0].devices)) is not None:
            self._taken[group[0].worker] = place
            return
        made = placement_group(
            [{"CPU": bundle.devices} for bundle in group],
            strategy="STRICT_PACK",
            name=" ".join(bundle.worker for bundle in group),
        )
        for index, bundle in enumerate(group):
            self._taken[bundle.worker] = _Place(made, index, bundle.devices)

    def of(self, worker: str) -> tuple[PlacementGroup, int, int]:
        """Its group, its bundle in it, and the devices of that."""
        place = self._taken[worker]
        return place.group, place.index, place.devices

    def release(self, worker: str) -> None:
        """The worker is gone; its group goes back to Ray once nobody is in it."""
        place = self._taken.pop(worker, None)
        if place is None:
            return
        self._free.append(place)
        if not any(other.group.id == place.group.id for other in self._taken.values()):
            self._free = [other for other in self._free if other.group.id != place.group.id]
            remove_placement_group(place.group)

    def _vacant(self, devices: int) -> _Place | None:
        found = next((place for place in self._free if place.devices == devices), None)
        if found is not None:
            self._free.remove(found)
        return found


class Head:
    """A Ray head for one deployment on this machine."""

    def __init__(self, folder: Path, devices: int) -> None:
        """`folder`: for Ray's sockets and logs; keep it short, a socket's path has 107 characters at most. `devices`
        are the most that workers may ever hold: Ray itself places no more.
        """
        self._folder, self._devices = folder, devices
        self.places = Places()
        self.address = ""

    def start(self) -> None:
        """Start Ray; blocks for some seconds. Call it from a thread that lives as long as the deployment.

        The environment was prepared by `services.cluster.environment.prepare_ray` before this module was imported.

        Raises:
            StartError: Ray did not come up.
        """
        try:
            context = ray.init(
                address="local",
                num_cpus=self._devices,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                namespace="diptych",
                _temp_dir=str(self._folder),
            )
        except Exception as error:  # Ray raises whatever its parts raised
            raise StartError(
                "Ray did not start", " ".join(str(error).split())[:300], f"see {self._folder}"
            ) from None
        self.address = cast(Any, context).address_info["gcs_address"]

    def launch(self, spec: WorkerSpec, log: Path, module: str) -> Worker:
        """Place the actor of a worker, for which there is a place, and let it start the worker's process."""
        group, index, devices = self.places.of(spec.worker)
        actor = ray.remote(WorkerActor).options(
            name=spec.worker,
            num_cpus=devices,
            max_restarts=-1,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        return Worker(spec.worker, actor.remote(msgspec.json.encode(spec), module, str(log)))

    def parts(self) -> dict[str, int]:
        """Process ids of the two parts of Ray that everything else hangs on, by name."""
        found: dict[str, int] = {}
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                found[one.name()] = one.pid
        return {name: found[name] for name in PARTS if name in found}

    def hush(self) -> None:
        """End Ray's thread that listens for errors: once the head's store is gone it would ask again without a pause,
        and take a core for it.
        """
        ray._private.worker.global_worker.threads_stopped.set()

    def stop(self) -> None:
        """Stop Ray and everything it started. Idempotent."""
        ray.shutdown()
