"""What a driver does with the workers of an earlier one, and where Ray's head is silent.

Ray is made up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from diptych.channel.keys import make_keys
from diptych.errors import ConfigError, StartError
from diptych.specs import GatewaySpec, WorkerSpec
from services.cluster import join, joined_deployment
from services.cluster.daemon_calls import await_daemon, call_in_time
from services.cluster.join import find_head
from services.cluster.joined_cluster import FoundWorker, JoinedCluster
from services.cluster.joined_deployment import ClusterDeployment
from services.cluster.spec import Bundle, ClusterSpec, DeploymentSpec
from services.host.supervision.supervisor import ChildStatus

PAIR = (Bundle("prefill-0"), Bundle("decode-0"))


class Worker:
    """A worker whose supervisor says nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.killed = name, threading.Event()

    async def next_status(self, timeout_s: float) -> ChildStatus | None:
        return await asyncio.sleep(3600, None)

    async def stop(self, grace_s: float) -> None:
        pass

    def kill(self) -> None:
        self.killed.set()


class Joined:
    """A cluster in which an earlier driver has left the workers `found`."""

    def __init__(self, found: Mapping[str, FoundWorker]) -> None:
        self.found, self.address = dict(found), "10.0.0.1:6379"
        self.removed: dict[str, str] = {}
        self.groups = SimpleNamespace(release_all=self.release_all, remove_leftovers=lambda: False)
        self.released = threading.Event()
        self.silent = threading.Event()

    def list_workers(self) -> dict[str, FoundWorker]:
        return self.found

    def adopt_worker(self, found: FoundWorker, keys: Mapping[str, bytes]) -> Worker:
        assert "server.secret" not in keys and len(keys) == 4
        return Worker(found.order.spec.worker)

    def remove_actor(self, name: str, actor: Any, group: str) -> None:
        self.removed[name] = group

    def release_all(self) -> None:
        self.released.set()

    def list_nodes(self) -> list[Any]:
        self.silent.wait()
        return []


def spec(worker: str) -> WorkerSpec:
    return WorkerSpec(
        worker=worker, role=worker.rpartition("-")[0], gateway="tcp://a:1", keys_dir="", model="m"
    )


def deployment(tmp_path: Path, *groups: tuple[Bundle, ...], replan: bool = False) -> ClusterDeployment:
    """A deployment with the workers of these groups, in a cluster without any."""
    gateway = GatewaySpec(
        host="", port=1, channel="", keys_dir=str(tmp_path), model="m", served_names=("m",), num_prefill=1,
        num_decode=1, replan=replan,
    )  # fmt: skip
    workers = tuple(spec(bundle.worker) for group in groups for bundle in group)
    plan = DeploymentSpec(workers, gateway, tmp_path, groups, device_budget=9)
    cluster = ClusterSpec(namespace="n", question="{}", max_workers=2)
    if not (tmp_path / "server.secret").exists():
        make_keys(tmp_path)
    joined = cast(JoinedCluster, Joined({}))
    return ClusterDeployment(plan, cluster, joined, lambda status: None, lambda line: None)


def left_by(
    earlier: ClusterDeployment, group: str, *workers: str, ended: bool = False
) -> dict[str, FoundWorker]:
    """What a cluster finds of workers that `earlier` has placed in one placement group."""
    return {
        name: FoundWorker(None, earlier._make_order(spec(name), group, index), "10.0.0.2", ended)
        for index, name in enumerate(workers)
    }


def adopt(
    deployment: ClusterDeployment, found: Mapping[str, FoundWorker]
) -> tuple[list[str], dict[str, str]]:
    """The workers that it adopts, and those that it ends, with the groups that are removed with them."""
    joined = Joined(found)
    deployment._joined = cast(JoinedCluster, joined)
    adopted, freed = deployment._adopt_workers()
    assert freed is bool(joined.removed) and deployment.has_taken_over
    assert sorted(deployment._placed) == sorted(adopted)
    deployment._placed.clear()
    return sorted(adopted), joined.removed


def test_workers_as_they_are_wanted_are_adopted_and_others_end(tmp_path: Path) -> None:
    one = deployment(tmp_path, *[(bundle,) for bundle in PAIR])
    found = left_by(one, "g", "prefill-0") | left_by(one, "h", "decode-0", "decode-7")
    assert adopt(one, found) == (["decode-0", "prefill-0"], {"decode-7": ""})
    ended = left_by(one, "g", "prefill-0", ended=True)
    assert adopt(one, ended) == ([], {"prefill-0": "g"})
    other = msgspec.structs.replace(found["decode-0"].order, demand={"CPU": 2.0})
    assert adopt(one, {"decode-0": FoundWorker(None, other, "", False)}) == ([], {"decode-0": "h"})
    pinned = msgspec.structs.replace(found["decode-0"].order, pin_cores=False)
    assert adopt(one, {"decode-0": FoundWorker(None, pinned, "", False)}) == ([], {"decode-0": "h"})


def test_keys_of_the_user_are_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterDeployment, "_start_gateway_process", lambda self: None)
    one = deployment(tmp_path, PAIR)
    (tmp_path / "server.secret").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    one._cluster = replace(one._cluster, node_keys_dir=str(tmp_path))
    one.start_gateway()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    one._cluster = replace(one._cluster, node_keys_dir="")
    one.start_gateway()
    assert (tmp_path / "server.secret").exists()


def test_workers_with_keys_of_another_start_are_not_adopted(tmp_path: Path) -> None:
    one = deployment(tmp_path, PAIR)
    found = left_by(one, "g", "prefill-0", "decode-0")
    make_keys(tmp_path)
    assert adopt(one, found) == ([], {"prefill-0": "g", "decode-0": "g"})


def test_a_pair_of_which_one_is_gone_is_placed_anew_together(tmp_path: Path) -> None:
    one = deployment(tmp_path, PAIR)
    assert adopt(one, left_by(one, "g", "prefill-0")) == ([], {"prefill-0": "g"})
    whole = left_by(one, "g", "prefill-0", "decode-0")
    assert adopt(one, whole) == (["decode-0", "prefill-0"], {})


def test_a_pair_that_is_apart_is_placed_anew_together(tmp_path: Path) -> None:
    """An earlier start without a plan had spread them."""
    one = deployment(tmp_path, PAIR)
    apart = left_by(one, "diptych: prefill-0", "prefill-0") | left_by(one, "diptych: decode-0", "decode-0")
    assert adopt(one, apart) == ([], {"prefill-0": "diptych: prefill-0", "decode-0": "diptych: decode-0"})
    # The other way round nothing is amiss.
    two = deployment(tmp_path, *[(bundle,) for bundle in PAIR])
    assert adopt(two, left_by(two, "g", "prefill-0", "decode-0")) == (["decode-0", "prefill-0"], {})


def test_no_worker_is_adopted_in_a_group_with_a_place_that_is_not_taken(tmp_path: Path) -> None:
    """Ray takes no part of a group back: the place would stay reserved for as long as the other worker runs."""
    one = deployment(tmp_path, *[(bundle,) for bundle in PAIR], (Bundle("decode-1"),), replan=True)
    name = "diptych: prefill-0 decode-0"
    pair = left_by(one, name, "prefill-0", "decode-0")
    wider = msgspec.structs.replace(pair["decode-0"].order, demand={"CPU": 2.0})
    other = left_by(one, "diptych: decode-1", "decode-1")
    changed = pair | other | {"decode-0": FoundWorker(None, wider, "10.0.0.2", False)}
    assert adopt(one, changed) == (["decode-1"], {"prefill-0": name, "decode-0": name})
    assert adopt(one, left_by(one, name, "prefill-0") | other) == (["decode-1"], {"prefill-0": name})
    assert adopt(one, pair | other) == (["decode-0", "decode-1", "prefill-0"], {})
    # A replanner had put decode-3 into the place that decode-0 had left.
    assert adopt(one, left_by(one, name, "prefill-0", "decode-3")) == (["decode-3", "prefill-0"], {})


def test_no_worker_is_adopted_in_a_group_that_is_made_anew(tmp_path: Path) -> None:
    """A replanner had put decode-3 into the place that decode-0 had left."""
    one = deployment(tmp_path, PAIR, (Bundle("decode-1"),), replan=True)
    name = "diptych: prefill-0 decode-0"
    found = left_by(one, name, "prefill-0", "decode-3") | left_by(one, "diptych: decode-1", "decode-1")
    assert adopt(one, found) == (["decode-1"], {"prefill-0": name, "decode-3": name})


def test_a_start_waits_until_what_it_has_freed_is_free(tmp_path: Path) -> None:
    one = deployment(tmp_path, (Bundle("decode-0"),))
    stale = msgspec.structs.replace(left_by(one, "g", "decode-0")["decode-0"].order, demand={"CPU": 2.0})
    joined, reserved = SlowJoined({"decode-0": FoundWorker(None, stale, "", False)}), list[Any]()
    joined.answering.set()
    joined.list_nodes = lambda: pytest.fail("they are listed too early")  # type: ignore[method-assign]
    joined.groups.reserve_groups = lambda groups, nodes: reserved.extend(nodes)
    one._joined = cast(JoinedCluster, joined)
    joined.await_room = lambda groups: [SimpleNamespace(address="10.0.0.2", placed=[])]  # type: ignore[attr-defined]
    one._place_workers()
    assert [node.address for node in reserved] == ["10.0.0.2"] and list(joined.launched) == ["decode-0"]


def test_what_a_replanner_had_started_is_kept_where_there_is_one(tmp_path: Path) -> None:
    one = deployment(tmp_path, PAIR, replan=True)
    found = left_by(one, "g", "prefill-0", "decode-0") | left_by(one, "h", "decode-3")
    assert adopt(one, found) == (["decode-0", "decode-3", "prefill-0"], {})
    assert one._started_count["decode"] == 4


def test_workers_are_ended_at_once_though_ray_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_deployment, "RELEASE_TIMEOUT_S", 0.2)
    one, workers = deployment(tmp_path, PAIR), [Worker("prefill-0"), Worker("decode-0")]
    one.workers = {worker.name: worker for worker in workers}
    joined = cast(Joined, one._joined)
    joined.groups.release_all = joined.silent.wait
    graces = list[float]()
    monkeypatch.setattr(one._gateway, "stop", graces.append)
    try:
        one.end_at_once()
        assert graces == [0.0]
        assert all(worker.killed.wait(10.0) for worker in workers)
    finally:
        joined.silent.set()


def test_no_worker_is_started_while_ray_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "head_answers", lambda address, timeout_s: False)
    with pytest.raises(StartError, match="no decode worker can be started"):
        asyncio.run(deployment(tmp_path, PAIR).start_worker("decode"))


class SlowJoined(Joined):
    """A cluster that says what it has, and takes workers, only once it is `answering`."""

    def __init__(self, found: Mapping[str, FoundWorker]) -> None:
        super().__init__(found)
        self.asked, self.answering = threading.Event(), threading.Event()
        self.groups.reserve_groups = lambda groups, nodes: None
        self.groups.find_place = lambda worker: (SimpleNamespace(name="g", index=0), None)
        self.launched = dict[str, Worker]()

    def list_workers(self) -> dict[str, FoundWorker]:
        self.asked.set()
        self.answering.wait()
        return self.found

    def list_nodes(self) -> list[Any]:
        return []

    def launch_worker(self, order: Any, keys: Mapping[str, bytes]) -> Worker:
        worker = self.launched[order.spec.worker] = Worker(order.spec.worker)
        return worker


def test_a_start_goes_on_and_can_be_stopped_while_ray_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_deployment, "RELEASE_TIMEOUT_S", 0.1)
    one = deployment(tmp_path, PAIR)
    monkeypatch.setattr(one._gateway, "stop", lambda grace_s: None)
    joined = SlowJoined({})
    one._joined = cast(JoinedCluster, joined)

    async def story() -> None:
        starting = asyncio.create_task(one.start_workers(joined))
        while not joined.asked.is_set():
            await asyncio.sleep(0.001)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await one.stop(0.0)
        joined.answering.set()
        assert await asyncio.to_thread(one._idle.wait, 10.0)

    asyncio.run(story())
    assert joined.launched == {} and joined.released.is_set() and one.has_taken_over


def test_workers_that_were_placed_when_a_start_is_cancelled_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = deployment(tmp_path, PAIR)
    monkeypatch.setattr(one._gateway, "stop", lambda grace_s: None)
    joined = SlowJoined(left_by(one, "g", "prefill-0", "decode-0"))
    one._joined = cast(JoinedCluster, joined)
    stopped = list[str]()

    async def stop(self: Worker, grace_s: float) -> None:
        stopped.append(self.name)

    monkeypatch.setattr(Worker, "stop", stop)

    async def story() -> None:
        starting = asyncio.create_task(one.start_workers(joined))
        while not joined.asked.is_set():
            await asyncio.sleep(0.001)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        joined.answering.set()
        await one.stop(0.0)

    asyncio.run(story())
    assert sorted(stopped) == ["decode-0", "prefill-0"] and joined.released.is_set()


def test_a_worker_whose_removal_is_cancelled_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replanner is stopped before the workers, at any moment; its last one would live on, detached."""
    one, stopped = deployment(tmp_path, PAIR), list[str]()
    monkeypatch.setattr(one._gateway, "stop", lambda grace_s: None)

    async def stop(self: Worker, grace_s: float) -> None:
        stopped.append(self.name)
        await asyncio.sleep(3600 if len(stopped) == 1 else 0)

    monkeypatch.setattr(Worker, "stop", stop)

    async def story() -> None:
        one._record_worker(Worker("decode-0"), spec("decode-0"))
        removing = asyncio.create_task(one.remove_worker("decode-0"))
        while not stopped:
            await asyncio.sleep(0.001)
        removing.cancel()
        await asyncio.gather(removing, return_exceptions=True)
        await one.stop(0.0)

    asyncio.run(story())
    assert stopped == ["decode-0", "decode-0"] and one.workers == {}


def test_one_more_worker_is_placed_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread = threading.get_ident()

    def answers(address: str, timeout_s: float) -> bool:
        assert threading.get_ident() != loop_thread
        return True

    monkeypatch.setattr(join, "head_answers", answers)
    one, joined = deployment(tmp_path, PAIR), SlowJoined({})
    one._joined = cast(JoinedCluster, joined)

    async def story() -> None:
        assert await one.start_worker("decode") == "decode-1"
        assert list(one.workers) == list(joined.launched) == ["decode-1"]
        for task in one._worker_watchers.values():
            task.cancel()
        await asyncio.gather(*one._worker_watchers.values(), return_exceptions=True)

    asyncio.run(story())


def test_a_worker_that_cannot_be_started_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "head_answers", lambda address, timeout_s: True)
    one, joined, released = deployment(tmp_path, PAIR), SlowJoined({}), list[str]()
    joined.groups.release_bundle = released.append
    one._joined = cast(JoinedCluster, joined)
    (tmp_path / "worker.secret").unlink()
    with pytest.raises(StartError, match=r"worker\.secret"):
        asyncio.run(one.start_worker("decode"))
    assert released == ["decode-1"] and joined.launched == {}


def test_a_call_that_never_returns_is_given_up() -> None:
    asked, silent = threading.Event(), threading.Event()

    def wait_for_head() -> None:
        asked.set()
        silent.wait()

    async def story() -> None:
        await call_in_time(wait_for_head, 0.1)
        # An error is as good as an end.
        await call_in_time(lambda: 1 / 0, 60.0)

    async def hurry() -> None:
        waiting = asyncio.create_task(await_daemon(wait_for_head))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() and await await_daemon(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await await_daemon(lambda: 1 / 0)

    try:
        asyncio.run(story())
        assert asked.is_set()
        asyncio.run(hurry())
    finally:
        silent.set()


@pytest.mark.parametrize("address", ["ray://somewhere:10001", "head", "head:gcs", ":6379"])
def test_what_is_no_address_of_a_head_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of Ray's head") as caught:
        find_head(address)
    assert len(caught.value.lines()) <= 6
