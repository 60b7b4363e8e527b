"""Placement groups and replicas, with a Ray that is made up: who sits where, what is given back, and the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from diptych.errors import StartError
from diptych.specs import GatewaySpec, WorkerSpec
from services.cluster.local_deployment import LocalDeployment
from services.cluster.local_ray import ray_head as under_test
from services.cluster.local_ray.ray_head import LocalRay, PlacementGroups
from services.cluster.spec import Bundle, DeploymentSpec
from services.host.supervision.supervisor import ChildStatus


class Ray:
    """Groups that were asked for, and those given back."""

    def __init__(self) -> None:
        self.made: list[list[dict[str, float]]] = []
        self.removed: list[int] = []

    @property
    def reserved(self) -> float:
        """The CPUs of all groups that there are."""
        living = [group for number, group in enumerate(self.made, 1) if number not in self.removed]
        return sum(bundle["CPU"] for group in living for bundle in group)

    def make(self, bundles: list[dict[str, float]], strategy: str, name: str) -> Any:
        self.made.append(bundles)
        return SimpleNamespace(id=len(self.made))

    def remove(self, group: Any) -> None:
        self.removed.append(group.id)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    fake = Ray()
    monkeypatch.setattr(under_test, "placement_group", fake.make)
    monkeypatch.setattr(under_test, "remove_placement_group", fake.remove)
    yield fake


class Worker:
    """A worker whose supervisor says nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.stopped = name, False

    async def next_status(self, timeout_s: float) -> ChildStatus | None:
        return await asyncio.sleep(3600, None)

    async def stop(self, grace_s: float) -> None:
        self.stopped = True


class Machine:
    """A head that launches such workers."""

    def __init__(self) -> None:
        self.groups = PlacementGroups()
        self.launched: list[WorkerSpec] = []

    def process_ids(self) -> dict[str, int]:
        return {}

    def launch_worker(self, spec: WorkerSpec, log: Path, module: str) -> Worker:
        self.groups.find_place(spec.worker)
        self.launched.append(spec)
        return Worker(spec.worker)


def spec(role: str, core: int | None) -> WorkerSpec:
    return WorkerSpec(worker=f"{role}-0", role=role, gateway="tcp://a:1", keys_dir="/k", model="m", core=core)


def made_deployment(folder: Path, *groups: tuple[Bundle, ...], budget: int) -> LocalDeployment:
    """A deployment of one prefill and one decode worker, whose ranks are the devices of its bundle."""
    gateway = GatewaySpec(
        host="", port=1, channel="", keys_dir="", model="m", served_names=("m",), num_prefill=1, num_decode=1
    )
    ranks = {bundle.worker: bundle.devices for group in groups for bundle in group}
    workers = (
        msgspec.structs.replace(spec("prefill", 0), tp=ranks["prefill-0"]),
        msgspec.structs.replace(spec("decode", None), tp=ranks["decode-0"]),
    )
    what = DeploymentSpec(workers, gateway, folder, groups, device_budget=budget)
    return LocalDeployment(what, lambda status: None)


async def end_watchers(deployment: LocalDeployment) -> None:
    for task in deployment._worker_watchers.values():
        task.cancel()
    await asyncio.gather(*deployment._worker_watchers.values(), return_exceptions=True)


def test_a_worker_of_a_pair_gives_its_devices_back(ray: Ray, tmp_path: Path) -> None:
    """A worker that needs more than it had takes its room; Ray would never place one beyond the budget."""
    deployment = made_deployment(tmp_path, (Bundle("decode-0", 1), Bundle("prefill-0", 2)), budget=4)

    async def story() -> None:
        await deployment.start_workers(cast(LocalRay, Machine()))
        assert ray.reserved == deployment.held_devices == 3
        await deployment.remove_worker("decode-0")
        assert await deployment.start_worker("prefill") == "prefill-1"
        assert ray.reserved == deployment.held_devices == 4
        await end_watchers(deployment)

    asyncio.run(story())


def test_replicas_are_started_like_the_first_within_the_budget_and_given_back(
    ray: Ray, tmp_path: Path
) -> None:
    machine = Machine()
    deployment = made_deployment(tmp_path, (Bundle("prefill-0"),), (Bundle("decode-0"),), budget=3)

    async def story() -> None:
        await deployment.start_workers(cast(LocalRay, machine))
        assert deployment.held_devices == 2 and deployment.pools == (1, 1)
        assert await deployment.start_worker("prefill") == "prefill-1"
        assert [(one.role, one.core is None) for one in machine.launched[2:]] == [("prefill", False)]
        assert deployment.pools == (2, 1) and deployment.states["prefill-1"] == "starting"
        with pytest.raises(StartError, match="no room"):
            await deployment.start_worker("decode")
        await deployment.remove_worker("prefill-1")
        await deployment.remove_worker("prefill-1")
        assert deployment.held_devices == 2 and ray.removed == [3]
        assert await deployment.start_worker("decode") == "decode-1"
        assert [(one.role, one.core) for one in machine.launched[3:]] == [("decode", None)]
        deployment._ray_lost = True
        await deployment.remove_worker("decode-1")
        with pytest.raises(StartError, match="no decode worker"):
            await deployment.start_worker("decode")
        await end_watchers(deployment)

    asyncio.run(story())


def test_a_replica_takes_as_much_of_a_gpu_as_the_first_one(ray: Ray, tmp_path: Path) -> None:
    half = (("CPU", 1.0), ("GPU", 0.5))
    groups = [(Bundle(name, resources=half),) for name in ("prefill-0", "decode-0")]
    deployment = made_deployment(tmp_path, *groups, budget=4)

    async def story() -> None:
        await deployment.start_workers(cast(LocalRay, Machine()))
        await deployment.start_worker("decode")
        assert ray.made == [[{"CPU": 1.0, "GPU": 0.5}]] * 3
        await end_watchers(deployment)

    asyncio.run(story())
