"""What local and joined Ray have in common: how a worker's actor is placed, and which statuses it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.cluster.spec import SUPERVISOR_DIED
from services.host.supervision.supervisor import ChildStatus, ErrorReport

# Versions of statuses that do not come from an actor: it has died, or it has failed. Real versions are never negative.
LOST_VERSION, FAILED_VERSION = -2, -3


def actor_options(
    worker: str, demand: Mapping[str, float], group: PlacementGroup, index: int, *, max_concurrency: int
) -> dict[str, Any]:
    """Ray's options for the actor of a worker on the bundle `index` of a placement group. Ray restarts it if it dies.

    `demand` is what the worker takes (`services.cluster.spec.Bundle.demand`), `max_concurrency` how many calls the
    actor answers at a time.
    """
    resources = dict(demand)
    return {
        "name": worker,
        "num_cpus": resources.pop("CPU", 0.0),
        "num_gpus": resources.pop("GPU", 0.0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "max_restarts": -1,
        "max_concurrency": max_concurrency,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


class ActorStatuses:
    """The statuses of a worker, whose actor may die and be restarted by Ray. Each one is reported once."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        # Version of the latest status, and the actor that has reported it.
        self.seen_version = -1
        self._life: object = None
        self._deaths = 0

    def on_status(self, life: object, status: ChildStatus) -> ChildStatus | None:
        """A status has come from an actor, of which `life` is another one for each restart; None if it is not new.

        The deaths of actors count as restarts of the worker.
        """
        fresh = (life, status.version) != (self._life, self.seen_version)
        self._life, self.seen_version = life, status.version
        return replace(status, restarts=status.restarts + self._deaths) if fresh else None

    def on_lost(self) -> ChildStatus | None:
        """The actor has died, and Ray restarts it: "waiting". None if that was reported before."""
        fresh, self.seen_version = self.seen_version != LOST_VERSION, LOST_VERSION
        self._deaths += fresh
        if not fresh:
            return None
        return ChildStatus(self._worker, "waiting", restarts=self._deaths, ended=SUPERVISOR_DIED)

    def on_failed(self, error: Exception) -> ChildStatus | None:
        """The actor cannot do what it has to: "failed". None if that was reported before."""
        fresh, self.seen_version = self.seen_version != FAILED_VERSION, FAILED_VERSION
        if not fresh:
            return None
        last = str(error).strip().splitlines()[-1:]
        report = ErrorReport(f"the actor of {self._worker} has failed", " ".join(last)[:300])
        return ChildStatus(self._worker, "failed", error=report)
