"""How the classes of KV fared in `diptych simulate`: room, requests, moved bytes and preemptions of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from diptych.chunks import CHUNK_TOKENS
from planner.sim.exact.deployment import SimDeployment
from planner.sim.exact.simulate import ExactSimulation, class_slabs
from planner.types import JobResult


class KvClassUse:
    """Adds up the runs of one deployment. Without several classes there is nothing to tell."""

    def __init__(self, deployment: SimDeployment) -> None:
        self._deployment = deployment
        self._requests: Counter[str] = Counter()
        self._preempted: Counter[str] = Counter()
        self._moved: dict[str, float] = {one.name: 0.0 for one in deployment.kv_classes}
        self._used: dict[str, int] = {}

    def add(self, simulation: ExactSimulation, results: Sequence[JobResult]) -> None:
        """Counts a run that has ended."""
        if not self._deployment.kv_classes:
            return
        self._preempted.update(simulation.preempted)
        for name, count in simulation.most_used.items():
            self._used[name] = max(count, self._used.get(name, 0))
        for one in results:
            name = one.job.kv_class
            self._requests[name] += 1
            self._moved[name] += one.moved_bytes

    def figures(self) -> dict[str, dict[str, Any]]:
        """The figures by class. `slabs` are those of one instance by pool; `most_slabs` were held at one time."""
        deployment, rooms = self._deployment, list[tuple[str, dict[str, int]]]()
        for pool, machine in zip(deployment.placement.pools, deployment.instances, strict=True):
            rooms.append((f"{pool.role} {pool.parallelism}", class_slabs(machine, deployment.kv_classes)))
        return {
            one.name: {
                "share": one.share,
                "chunk_bytes": round(one.token_bytes * CHUNK_TOKENS),
                "slabs": {pool: slabs[one.name] for pool, slabs in rooms},
                "most_slabs": self._used.get(one.name, 0),
                "requests": self._requests[one.name],
                "moved_bytes": round(self._moved[one.name]),
                "preemptions": self._preempted[one.name],
            }
            for one in deployment.kv_classes
        }
