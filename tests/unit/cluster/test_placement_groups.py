"""Placement groups and replicas, with a Ray that is made up: who sits where, what is given back, and the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import StartError
from diptych.specs import GatewaySpec, WorkerSpec
from services.cluster import ray_cluster as under_test
from services.cluster.deployment import LocalDeployment
from services.cluster.ray_cluster import PlacementGroups, RayCluster
from services.cluster.spec import Bundle, DeploymentSpec
from services.host.supervisor import ChildStatus


class Ray:
    """Groups that were asked for, and those given back."""

    def __init__(self) -> None:
        self.made: list[tuple[list[dict[str, int]], str]] = []
        self.removed: list[int] = []

    def make(self, bundles: list[dict[str, int]], strategy: str, name: str) -> Any:
        self.made.append((bundles, strategy))
        return SimpleNamespace(id=len(self.made))

    def remove(self, group: Any) -> None:
        self.removed.append(group.id)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    fake = Ray()
    monkeypatch.setattr(under_test, "placement_group", fake.make)
    monkeypatch.setattr(under_test, "remove_placement_group", fake.remove)
    yield fake


def test_a_pair_shares_a_group_on_one_node(ray: Ray) -> None:
    places = PlacementGroups()
    places.reserve_group((Bundle("prefill-0", 2), Bundle("decode-0", 1)))
    assert ray.made == [([{"CPU": 2}, {"CPU": 1}], "STRICT_PACK")]
    assert places.bundle_of("prefill-0")[1:] == (0, 2) and places.bundle_of("decode-0")[1:] == (1, 1)


def test_a_place_in_a_pair_is_taken_by_the_next_worker_of_its_size(ray: Ray) -> None:
    places = PlacementGroups()
    places.reserve_group((Bundle("prefill-0", 2), Bundle("decode-0", 1)))
    places.release_bundle("decode-0")
    assert ray.removed == []
    places.reserve_group((Bundle("prefill-1", 2),))
    assert len(ray.made) == 2, "the free one is too small"
    places.reserve_group((Bundle("decode-1", 1),))
    assert len(ray.made) == 2 and places.bundle_of("decode-1")[1:] == (1, 1)
    places.release_bundle("decode-1")
    places.release_bundle("prefill-0")
    places.release_bundle("prefill-0")
    assert ray.removed == [1]
    places.reserve_group((Bundle("decode-2", 1),))
    assert len(ray.made) == 3, "nothing of a group that is gone is given out"


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

    def launch_worker(self, spec: WorkerSpec, log: Path, module: str) -> Worker:
        self.groups.bundle_of(spec.worker)
        self.launched.append(spec)
        return Worker(spec.worker)


def spec(role: str, core: int | None) -> WorkerSpec:
    return WorkerSpec(worker=f"{role}-0", role=role, gateway="tcp://a:1", keys_dir="/k", model="m", core=core)


def test_replicas_are_started_like_the_first_within_the_budget_and_given_back(
    ray: Ray, tmp_path: Path
) -> None:
    gateway = GatewaySpec(
        host="", port=1, channel="", keys_dir="", model="m", served_names=("m",), num_prefill=1, num_decode=1
    )
    workers = spec("prefill", 0), spec("decode", None)
    groups = ((Bundle("prefill-0"),), (Bundle("decode-0"),))
    machine = Machine()
    deployment = LocalDeployment(
        DeploymentSpec(workers, gateway, tmp_path, groups, device_budget=3), lambda status: None
    )
    deployment._head = cast(RayCluster, machine)

    async def story() -> None:
        for group in groups:
            machine.groups.reserve_group(group)
        for one in workers:
            deployment._launch_worker(one)
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
        for task in deployment._worker_watchers.values():
            task.cancel()
        await asyncio.gather(*deployment._worker_watchers.values(), return_exceptions=True)

    asyncio.run(story())
