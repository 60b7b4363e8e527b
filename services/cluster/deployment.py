"""All parts of one deployment on this machine: the gateway's process, the Ray head, and the workers' actors.

The gateway is a child of `diptych serve` itself, not an actor: requests do not depend on Ray in any way.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable

import msgspec

from diptych.config import WorkerSpec
from diptych.errors import StartError
from diptych.keys import make_keys
from services.cluster.environment import child_environ
from services.cluster.head import GONE, Head, Worker
from services.cluster.parts import Bundle, Plan
from services.cluster.supervisor import Status, Supervisor

Hear = Callable[[Status], None]
GATEWAY_GRACE_S = 2.0
WORKER_GRACE_S = 2.0  # after the gateway has drained nothing is left to wait for
WAIT_S, PAUSE_S = 20.0, 0.2
RAY = "ray"  # whose status is told when a part of it ends: "failed", with the part as its phase


class Deployment:
    """Gateway and workers, under a Ray head that runs already. `hear` is told every change."""

    def __init__(self, plan: Plan, head: Head, hear: Hear) -> None:
        self._plan, self._head, self._hear = plan, head, hear
        self.workers: dict[str, Worker] = {}
        self.specs: dict[str, WorkerSpec] = {}  # what those workers were told when they were started
        self.statuses: dict[str, Status] = {}  # the latest of each of them
        self._gateway = Supervisor(
            "gateway",
            [sys.executable, "-m", plan.gateway_module],
            msgspec.json.encode(plan.gateway),
            plan.log("gateway"),
            child_environ(1, os.environ),
        )
        self._watching: list[asyncio.Task[None]] = []
        self._watched: dict[str, asyncio.Task[None]] = {}  # of these, by worker
        self._number = Counter(spec.worker.rsplit("-", 1)[0] for spec in plan.workers)  # of a role, ever
        self._blind = False

    def start(self) -> None:
        """Make this deployment's keys, start the gateway's process and the workers' actors."""
        make_keys(self._plan.gateway.keys_dir)
        self._gateway.start()
        self._watching.append(asyncio.create_task(self._watch_gateway()))
        for group in self._plan.groups:
            self._head.places.reserve(group)
        for spec in self._plan.workers:
            self._launch(spec)
        for part, pid in self._head.parts().items():
            self._watching.append(asyncio.create_task(self._watch_ray(part, pid)))

    def _launch(self, spec: WorkerSpec) -> None:
        worker = self._head.launch(spec, self._plan.log(spec.worker), self._plan.worker_module)
        self.workers[spec.worker], self.specs[spec.worker] = worker, spec
        self.statuses[spec.worker] = Status(spec.worker)
        self._watched[spec.worker] = asyncio.create_task(self._watch_worker(worker))

    # --- replicas ---

    @property
    def states(self) -> dict[str, str]:
        """Of the supervisors, by worker."""
        return {name: status.state for name, status in self.statuses.items()}

    @property
    def pools(self) -> tuple[int, int]:
        """How many of the workers there are were started as prefill and as decode workers."""
        roles = [spec.role for name, spec in self.specs.items() if self.states[name] != "retired"]
        return roles.count("prefill"), roles.count("decode")

    @property
    def held(self) -> int:
        """Devices of all workers that there are, those included that start or end."""
        return sum(spec.tp * spec.pp for spec in self.specs.values())

    def grow(self, role: str) -> str:
        """Start one worker more, like the first of its role; returns its name. It is ready when its status says so.

        Raises StartError: the budget is spent, or Ray is not there any more.
        """
        like = next(spec for spec in self._plan.workers if spec.role == role)
        devices = like.tp * like.pp
        if self.held + devices > self._plan.budget:
            why = f"{self.held} of {self._plan.budget} devices are held, and it needs {devices}"
            raise StartError(f"no room for another {role} worker", why)
        if self._blind:
            raise StartError(f"no {role} worker can be started", "the control plane is lost")
        name = f"{role}-{self._number[role]}"
        self._number[role] += 1
        self._head.places.reserve((Bundle(name, devices),))
        self._launch(msgspec.structs.replace(like, worker=name, core=self._core(like)))
        return name

    async def retire(self, name: str) -> None:
        """End what is left of a worker, at once, and give its place back. Idempotent."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        watching = self._watched.pop(name)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await worker.stop(WORKER_GRACE_S)
        self._head.places.release(name)
        del self.specs[name], self.statuses[name]

    def _core(self, like: WorkerSpec) -> int | None:
        """The core that the fewest workers are pinned to; none where they are not."""
        if like.core is None:
            return None
        taken = Counter(spec.core for spec in self.specs.values())
        return min(sorted(os.sched_getaffinity(0)), key=lambda core: taken[core])

    async def _watch_ray(self, part: str, pid: int) -> None:
        """Say once that a part of Ray has ended. Requests do not go through it, and need not notice."""
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        descriptor = os.pidfd_open(pid)
        loop.add_reader(descriptor, over.set)
        try:
            await over.wait()
            self._blind = True  # actors live on beside their workers, but Ray may call them dead from now on
            self._head.hush()
            self._hear(Status(RAY, "failed", phase=part))
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def _watch_gateway(self) -> None:
        seen = -1
        while True:
            status = await asyncio.to_thread(self._gateway.wait, seen, WAIT_S)
            if status.version != seen:
                seen = status.version
                self._hear(status)
            if status.state == "stopped":
                return

    async def _watch_worker(self, worker: Worker) -> None:
        while True:
            status = await worker.next(WAIT_S)
            if status is None or (self._blind and status.ended == GONE):
                await asyncio.sleep(PAUSE_S)  # Ray answers at once, again and again, while an actor is away
                continue
            self.statuses[status.name] = status
            self._hear(status)
            if status.state in ("stopped", "retired"):
                return

    async def stop(self, drain_s: float) -> None:
        """Gateway first, which lets open requests finish for `drain_s`; then the workers. Idempotent."""
        await asyncio.to_thread(self._gateway.stop, drain_s + GATEWAY_GRACE_S)
        watching = [*self._watching, *self._watched.values()]
        for task in watching:  # what the workers say from here on is no news
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        self._watching.clear()
        self._watched.clear()
        await asyncio.gather(*(worker.stop(WORKER_GRACE_S) for worker in self.workers.values()))
        self.workers.clear()
