"""All parts of one deployment on this machine: the gateway's process, the Ray head, and the workers' actors.

The gateway is a child of `diptych serve` itself, not an actor: requests do not depend on Ray in any way.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import msgspec

from diptych.keys import make_keys
from services.cluster.environment import child_environ
from services.cluster.head import GONE, Head, Worker
from services.cluster.parts import Plan
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
        self.workers: list[Worker] = []
        self._gateway = Supervisor(
            "gateway",
            [sys.executable, "-m", plan.gateway_module],
            msgspec.json.encode(plan.gateway),
            plan.log("gateway"),
            child_environ(1, os.environ),
        )
        self._watching: list[asyncio.Task[None]] = []
        self._blind = False

    def start(self) -> None:
        """Make this deployment's keys, start the gateway's process and the workers' actors."""
        make_keys(self._plan.gateway.keys_dir)
        self._gateway.start()
        self._watching.append(asyncio.create_task(self._watch_gateway()))
        for index, spec in enumerate(self._plan.workers):
            worker = self._head.launch(index, spec, self._plan.log(spec.worker), self._plan.worker_module)
            self.workers.append(worker)
            self._watching.append(asyncio.create_task(self._watch_worker(worker)))
        for part, pid in self._head.parts().items():
            self._watching.append(asyncio.create_task(self._watch_ray(part, pid)))

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
            self._hear(status)
            if status.state in ("stopped", "retired"):
                return

    async def stop(self, drain_s: float) -> None:
        """Gateway first, which lets open requests finish for `drain_s`; then the workers. Idempotent."""
        await asyncio.to_thread(self._gateway.stop, drain_s + GATEWAY_GRACE_S)
        for task in self._watching:  # what the workers say from here on is no news
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching.clear()
        await asyncio.gather(*(worker.stop(WORKER_GRACE_S) for worker in self.workers))
        self.workers.clear()
