"""What an actor takes of Ray's resources, on this machine as in a cluster; and what is reported of one that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from diptych.specs import WorkerSpec
from services.cluster import actors
from services.cluster.local_ray import ray_head
from services.cluster.local_ray.ray_head import LocalRay, RayWorker
from services.cluster.spec import SUPERVISOR_DIED, Bundle
from services.host.supervision.supervisor import ChildStatus


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of all actors that are made; a place is the group and the index of the bundle."""
    asked: list[dict[str, Any]] = []

    def options(**some: Any) -> Any:
        asked.append(some)
        return SimpleNamespace(remote=lambda *order: object())

    monkeypatch.setattr(ray, "remote", lambda made: SimpleNamespace(options=options))
    monkeypatch.setattr(ray_head, "placement_group", lambda bundles, **_: bundles)
    monkeypatch.setattr(
        actors,
        "PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: (group, placement_group_bundle_index),
    )
    return asked


@pytest.mark.parametrize(
    ("resources", "taken"),
    [
        ((), {"num_cpus": 3.0, "num_gpus": 0.0, "memory": None, "resources": {}}),
        (
            (("CPU", 2.0), ("GPU", 3.0), ("memory", 5e9), ("fast_link", 1.0)),
            {"num_cpus": 2.0, "num_gpus": 3.0, "memory": 5e9, "resources": {"fast_link": 1.0}},
        ),
    ],
)
def test_an_actor_on_this_machine_takes_what_its_bundle_demands(
    resources: tuple[tuple[str, float], ...],
    taken: dict[str, Any],
    asked: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    local_ray, bundle = LocalRay(tmp_path, 8), Bundle("decode-0", 3, resources)
    local_ray.groups.reserve_bundle(bundle)
    spec = WorkerSpec(worker="decode-0", role="decode", gateway="tcp://a:1", keys_dir="", model="m")
    local_ray.launch_worker(spec, tmp_path / "log", "module")
    (options,) = asked
    assert {name: options[name] for name in taken} == taken
    assert (options["name"], options["max_restarts"]) == ("decode-0", -1)
    assert options["scheduling_strategy"] == ([bundle.demand], 0), "the group has room for just that"


def test_a_dead_actor_is_reported_once_and_counts_as_a_restart() -> None:
    gone = ray.exceptions.RayActorError(error_msg="it is gone")
    ready = ChildStatus("decode-0", "ready", version=1, restarts=2)
    results: Iterator[Any] = iter([(7, ready), (7, ready), gone, gone, (8, ready)])

    async def answer(version: int, timeout_s: float) -> Any:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    worker = RayWorker("decode-0", SimpleNamespace(wait_status=SimpleNamespace(remote=answer)))

    async def story() -> list[ChildStatus | None]:
        return [await worker.next_status() for _ in range(5)]

    first, again, lost, still, back = asyncio.run(story())
    assert first == ready and again is None and still is None
    assert lost is not None and (lost.state, lost.ended, lost.restarts) == ("waiting", SUPERVISOR_DIED, 1)
    assert back is not None and (back.state, back.restarts) == ("ready", 3), (
        "the same version, of another actor"
    )
