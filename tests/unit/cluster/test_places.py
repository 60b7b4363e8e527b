"""Placement groups and replicas, with a Ray that is made up: who sits where, what is given back, and the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.config import GatewaySpec, WorkerSpec
from diptych.errors import StartError
from services.cluster import head as under_test
from services.cluster.deployment import Deployment
from services.cluster.head import Head, Places
from services.cluster.parts import Bundle, Plan
from services.cluster.supervisor import Status


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
    places = Places()
    places.reserve((Bundle("prefill-0", 2), Bundle("decode-0", 1)))
    assert ray.made == [([{"CPU": 2}, {"CPU": 1}], "STRICT_PACK")]
    assert places.of("prefill-0")[1:] == (0, 2) and places.of("decode-0")[1:] == (1, 1)


def test_a_place_in_a_pair_is_taken_by_the_next_worker_of_its_size(ray: Ray) -> None:
    places = Places()
    places.reserve((Bundle("prefill-0", 2), Bundle("decode-0", 1)))
    places.release("decode-0")
    assert ray.removed == []
    places.reserve((Bundle("prefill-1", 2),))
    assert len(ray.made) == 2, "the free one is too small"
    places.reserve((Bundle("decode-1", 1),))
    assert len(ray.made) == 2 and places.of("decode-1")[1:] == (1, 1)
    places.release("decode-1")
    places.release("prefill-0")
    places.release("prefill-0")
    assert ray.removed == [1]
    places.reserve((Bundle("decode-2", 1),))
    assert len(ray.made) == 3, "nothing of a group that is gone is given out"


class Worker:
    """A worker whose supervisor says nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.stopped = name, False

    async def next(self, timeout_s: float) -> Status | None:
        return await asyncio.sleep(3600, None)

    async def stop(self, grace_s: float) -> None:
        self.stopped = True


class Machine:
    """A head that launches such workers."""

    def __init__(self) -> None:
        self.places = Places()
        self.launched: list[WorkerSpec] = []

    def launch(self, spec: WorkerSpec, log: Path, module: str) -> Worker:
        self.places.of(spec.worker)
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
    deployment = Deployment(
        Plan(workers, gateway, tmp_path, groups, budget=3), cast(Head, machine), lambda status: None
    )

    async def story() -> None:
        for group in groups:
            machine.places.reserve(group)
        for one in workers:
            deployment._launch(one)
        assert deployment.held == 2 and deployment.pools == (1, 1)
        assert deployment.grow("prefill") == "prefill-1"
        assert [(one.role, one.core is None) for one in machine.launched[2:]] == [("prefill", False)]
        assert deployment.pools == (2, 1) and deployment.states["prefill-1"] == "starting"
        with pytest.raises(StartError, match="no room"):
            deployment.grow("decode")
        await deployment.retire("prefill-1")
        await deployment.retire("prefill-1")
        assert deployment.held == 2 and ray.removed == [3]
        assert deployment.grow("decode") == "decode-1"
        assert [(one.role, one.core) for one in machine.launched[3:]] == [("decode", None)]
        deployment._blind = True
        await deployment.retire("decode-1")
        with pytest.raises(StartError, match="no decode worker"):
            deployment.grow("decode")
        for task in deployment._watched.values():
            task.cancel()
        await asyncio.gather(*deployment._watched.values(), return_exceptions=True)

    asyncio.run(story())
