"""What the driver asks of a Ray cluster, and what becomes of Ray's errors. Ray is made up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray

from diptych.errors import StartError
from diptych.specs import WorkerSpec
from services.cluster import actors, detached_groups
from services.cluster import joined_cluster as under_test
from services.cluster.capacity import NodeCapacity
from services.cluster.detached_groups import DetachedGroups, GroupPlace
from services.cluster.joined_cluster import FoundWorker, JoinedCluster
from services.cluster.node_worker import NodeOrder
from services.cluster.spec import Bundle

NODE = NodeCapacity("n1", "10.0.0.1", {"CPU": 4.0}, {"CPU": 4.0})


class ActorMaker:
    """Ray's `remote`: records the options of actors, and refuses to make them if it has an `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, dict[str, Any]()

    def __call__(self, made: type) -> Any:
        return SimpleNamespace(options=self.options)

    def options(self, **asked: Any) -> Any:
        self.asked = asked
        return SimpleNamespace(remote=self.make)

    def make(self, order: bytes) -> object:
        if self.error is not None:
            raise self.error
        return object()


def order(**demand: float) -> NodeOrder:
    worker = WorkerSpec(worker="decode-0", role="decode", gateway="tcp://a:1", keys_dir="", model="m")
    return NodeOrder(
        spec=worker, module="m", namespace="n", question="{}", max_workers=1, cpus=1.0, keys_dir="",
        gateway_key="", pin_cores=True, group="decode-0", index=0, demand=demand,
    )  # fmt: skip


def joined(demand: dict[str, float], monkeypatch: pytest.MonkeyPatch, maker: ActorMaker) -> JoinedCluster:
    """A cluster in which decode-0 has its bundle."""
    monkeypatch.setattr(ray, "remote", maker)
    monkeypatch.setattr(actors, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    cluster = JoinedCluster("10.0.0.1:6379", "n")
    place = GroupPlace("decode-0", 0, tuple(demand.items()))
    monkeypatch.setattr(cluster.groups, "find_place", lambda worker: (place, object()))
    return cluster


def test_memory_is_asked_of_ray_by_its_own_option(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = ActorMaker()
    asked = order(CPU=1.0, memory=8e9, fast=1.0)
    joined(asked.demand, monkeypatch, maker).launch_worker(asked, {})
    assert maker.asked["memory"] == 8e9 and maker.asked["resources"] == {"fast": 1.0}


@pytest.mark.parametrize("error", [ValueError("the name is taken"), ray.exceptions.RayError("no head")])
def test_an_actor_that_ray_refuses_is_an_error_in_few_lines(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = order(CPU=1.0)
    with pytest.raises(StartError, match="Ray makes no actor for decode-0") as caught:
        joined(asked.demand, monkeypatch, ActorMaker(error)).launch_worker(asked, {})
    assert str(error) in caught.value.why and len(caught.value.lines()) <= 6


def test_a_group_that_ray_refuses_is_an_error_in_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = list[str]()

    def refuse_the_second(bundles: Any, *, name: str, **_: Any) -> Any:
        if name == "diptych: decode-0":
            raise ValueError("Invalid bundle")
        return name

    monkeypatch.setattr(detached_groups, "placement_group", refuse_the_second)
    monkeypatch.setattr(detached_groups, "remove_placement_group", removed.append)
    monkeypatch.setattr(detached_groups, "remove_leftover", lambda name: None)
    with pytest.raises(StartError, match="Ray reserves nothing for decode-0") as caught:
        DetachedGroups().reserve_groups([(Bundle("prefill-0"),), (Bundle("decode-0"),)], [NODE])
    assert "Invalid bundle" in caught.value.why
    assert removed == ["diptych: prefill-0"], "nothing stays reserved"


class NamedActors:
    """Ray's named actors: `made_of` has module and class of each, by name. None: it has just ended."""

    def __init__(self, made_of: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.made_of, self.killed = made_of, list[str]()
        monkeypatch.setattr(ray.util, "list_named_actors", lambda: list(self.made_of))
        monkeypatch.setattr(ray, "get_actor", self.find)
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "get", self.get)

    def find(self, name: str) -> Any:
        made_of = self.made_of[name]
        if made_of is None:
            raise ValueError("there is no such actor")
        module, _, kind = made_of.rpartition(".")
        return SimpleNamespace(
            name=name,
            _ray_actor_creation_function_descriptor=SimpleNamespace(module_name=module, class_name=kind),
            describe_order=SimpleNamespace(remote=lambda: name),
        )

    def get(self, asked: str, timeout: float) -> Any:
        raise ray.exceptions.RayActorError(error_msg=f"{asked} is gone")

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)
        del self.made_of[actor.name]


OWN = "services.cluster.node_worker.NodeWorker"


def test_actors_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"cache": "shop.Cache", "decode": "shop.Decoder", "gone-1": None, "decode-9": None}
    actors = NamedActors(dict(others), monkeypatch)
    cluster = JoinedCluster("10.0.0.1:6379", "n")
    assert not cluster.has_workers() and cluster.list_workers() == {}
    actors.made_of["decode-0"] = OWN
    assert cluster.has_workers() and cluster.list_workers() == {}
    assert actors.killed == ["decode-0"], "a worker that does not answer is removed"
    assert actors.made_of == others


def test_actors_that_do_not_answer_have_one_deadline_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = NamedActors({f"decode-{number}": OWN for number in range(4)}, monkeypatch)
    now_s, waited = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])

    def wait_in_vain(asked: str, timeout: float) -> Any:
        waited.append(timeout)
        now_s[0] += timeout
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", wait_in_vain)
    assert JoinedCluster("10.0.0.1:6379", "n").list_workers() == {}
    assert len(waited) == 4 and sum(waited) <= under_test.ACTOR_TIMEOUT_S + 1.0
    assert actors.made_of == {}


def test_an_actor_of_another_version_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = NamedActors({"decode-0": OWN}, monkeypatch)
    find = actors.find

    def find_older(name: str) -> Any:
        older = find(name)
        del older.describe_order
        return older

    def get(asked: Any, timeout: float) -> Any:
        raise ValueError("Invalid type of object refs")

    monkeypatch.setattr(ray, "get_actor", find_older)
    monkeypatch.setattr(ray, "get", get)
    assert JoinedCluster("10.0.0.1:6379", "n").list_workers() == {}
    assert actors.killed == ["decode-0"]


def test_an_actor_of_another_program_with_a_workers_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = NamedActors({"decode-0": "shop.Decoder"}, monkeypatch)
    cluster = JoinedCluster("10.0.0.1:6379", "n")
    for ask in (cluster.has_workers, cluster.list_workers):
        with pytest.raises(StartError, match="decode-0 is in the namespace n") as caught:
            ask()
        assert "shop.Decoder" in caught.value.why and "--ray-namespace" in caught.value.fix
    assert actors.killed == []


def test_a_head_that_is_lost_meanwhile_is_an_error_in_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.RayError("the head is gone")

    cluster = JoinedCluster("10.0.0.1:6379", "n")
    monkeypatch.setattr(ray, "nodes", fail)
    monkeypatch.setattr(under_test, "cluster_state", SimpleNamespace(available_resources_per_node=dict))
    monkeypatch.setattr(ray, "kill", fail)
    monkeypatch.setattr(ray.util, "list_named_actors", fail)
    monkeypatch.setattr(
        detached_groups, "placement_group", lambda *_, **__: SimpleNamespace(name="g", wait=fail)
    )
    monkeypatch.setattr(detached_groups, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(detached_groups, "remove_leftover", lambda name: None)
    monkeypatch.setattr(detached_groups, "get_placement_group", fail)
    monkeypatch.setattr(detached_groups, "placement_group_table", fail)
    left = FoundWorker(object(), order(CPU=1.0), "10.0.0.1", False)
    for ask in (
        lambda: cluster.adopt_worker(left, {}),
        cluster.groups.remove_leftovers,
        cluster.list_nodes,
        cluster.has_workers,
        cluster.list_workers,
        lambda: cluster.remove_actor("decode-0", object(), ""),
        lambda: cluster.groups.reserve_groups([(Bundle("decode-0"),)], [NODES[0]]),
    ):
        NODES[0].free["CPU"] = 4.0
        with pytest.raises(StartError) as caught:
            ask()
        assert "the head is gone" in caught.value.why and len(caught.value.lines()) <= 6


class Probes:
    """Nodes that answer, with the versions `VERSIONS`; those in `silent` do not."""

    def __init__(self, silent: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.silent, self.asked, self.waited = silent, list[str](), list[float]()
        monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=self.options))
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", lambda _, timeout: ANSWER)

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=self.ask)

    def ask(
        self, question: str, workers: int, cpus: float, node_cpus: float, deployment: str, limit: float
    ) -> str:
        self.asked.append(deployment)
        return deployment

    def wait(self, asked: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        self.waited.append(timeout)
        assert num_returns == len(asked)
        late = [one for one in asked if one.partition("@")[2] in self.silent]
        return [one for one in asked if one not in late], late


ANSWER = {"versions": {"ray": "2"}, "niceness": 0, "reconnect_s": "", "reply": {}}
NODES = [NodeCapacity(f"{number:056x}", f"10.0.0.{number}", {"CPU": 4.0}, {}) for number in range(1, 7)]


def test_all_nodes_have_the_same_time_to_find_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    probes = Probes(set(), monkeypatch)
    cluster = JoinedCluster("10.0.0.1:6379", "n")
    found = cluster.probe_nodes(NODES, "{}", 2, 1, 600.0, said.append)
    assert [report.address for report in found] == [node.address for node in NODES]
    assert said == [] and cluster.probe_nodes([], "{}", 2, 1, 600.0, said.append) == []
    probes.silent, probes.waited = {node.address for node in NODES[1:]}, []
    with pytest.raises(
        StartError, match="nodes 10.0.0.2, 10.0.0.3, 10.0.0.4 and 2 more do not answer"
    ) as caught:
        cluster.probe_nodes(NODES, "{}", 2, 1, 600.0, said.append)
    assert 600.0 <= sum(probes.waited) <= 700.0 and len(caught.value.lines()) <= 6
    assert said == ["waiting for the nodes 10.0.0.2, 10.0.0.3, 10.0.0.4 and 2 more"]


class GroupMaker:
    """Ray's placement groups: on which nodes they were asked for, by name, and which were removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.removed = dict[str, str](), list[str]()
        monkeypatch.setattr(detached_groups, "placement_group", self.make)
        monkeypatch.setattr(
            detached_groups, "remove_placement_group", lambda group: self.removed.append(group.name)
        )
        monkeypatch.setattr(detached_groups, "remove_leftover", lambda name: None)

    def make(self, bundles: Any, *, name: str, _soft_target_node_id: str, **_: Any) -> Any:
        self.made[name] = _soft_target_node_id
        return SimpleNamespace(name=name, wait=lambda timeout_s: True)


def test_a_worker_that_leaves_a_pair_leaves_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, groups = GroupMaker(monkeypatch), DetachedGroups()
    full = NodeCapacity("n1", "10.0.0.1", {"CPU": 2.0}, {"CPU": 2.0})
    groups.reserve_groups([(Bundle("prefill-0"), Bundle("decode-0"))], [full])
    groups.release_bundle("decode-0")
    with pytest.raises(StartError, match="no room for decode-1"):
        groups.reserve_groups([(Bundle("decode-1", 2),)], [full])
    # Ray counts the bundle as taken, so there is no other room.
    groups.reserve_groups([(Bundle("decode-1"),)], [full])
    assert groups.find_place("decode-1")[0].index == 1
    assert list(maker.made) == ["diptych: prefill-0 decode-0"] and maker.removed == []
    groups.release_bundle("prefill-0")
    groups.release_bundle("decode-1")
    assert maker.removed == ["diptych: prefill-0 decode-0"]
    with pytest.raises(StartError, match="no room for decode-2"):
        groups.reserve_groups([(Bundle("decode-2"),)], [full])


def test_a_fleet_grows_on_another_node_and_shrinks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, groups = GroupMaker(monkeypatch), DetachedGroups()
    first, second = (NodeCapacity(f"n{one}", f"10.0.0.{one}", {"CPU": 2.0}, {"CPU": 2.0}) for one in (1, 2))
    groups.reserve_groups([(Bundle("prefill-0"), Bundle("decode-0"))], [first, second])
    groups.reserve_groups([(Bundle("decode-1"),)], [first, second])
    assert maker.made == {"diptych: prefill-0 decode-0": "n1", "diptych: decode-1": "n2"}
    groups.release_bundle("decode-1")
    assert maker.removed == ["diptych: decode-1"]


def test_places_that_a_killed_driver_has_left_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of workers that this start does not have; those of others, and of other programs, stay."""
    groups, removed = DetachedGroups(), list[str]()
    own = {"diptych: decode-0", "diptych: decode-7", "diptych: prefill-0 decode-0"}
    table = [*own, "diptych: elsewhere-0", "shop"]

    def find(name: str) -> Any:
        if name not in own:
            raise ValueError("there is none in this namespace")
        return SimpleNamespace(name=name)

    monkeypatch.setattr(detached_groups, "get_placement_group", find)
    monkeypatch.setattr(detached_groups, "remove_placement_group", lambda group: removed.append(group.name))
    rows = {str(number): {"name": name, "state": "CREATED"} for number, name in enumerate(table)}
    rows["gone"] = {"name": "diptych: decode-9", "state": "REMOVED"}
    monkeypatch.setattr(detached_groups, "placement_group_table", lambda: rows)
    groups.adopt_bundle("decode-0", msgspec.structs.replace(order(CPU=1.0), group="diptych: decode-0"))
    assert groups.remove_leftovers()
    assert removed == ["diptych: decode-7", "diptych: prefill-0 decode-0"]
    own.intersection_update({"diptych: decode-0"})
    assert not groups.remove_leftovers()


def test_room_that_was_freed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, free = JoinedCluster("10.0.0.1:6379", "n"), iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(
        cluster, "list_nodes", lambda: [NodeCapacity("n1", "a", {"CPU": 2.0}, {"CPU": next(free)})]
    )
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (node,) = cluster.await_room([(Bundle("prefill-0"),), (Bundle("decode-0"),)])
    assert node.free == {"CPU": 2.0} and node.placed == []
    monkeypatch.setattr(under_test, "FREE_TIMEOUT_S", 0.0)
    free = iter([0.0])
    assert cluster.await_room([(Bundle("decode-0"),)])[0].free == {"CPU": 0.0}


def test_a_cluster_is_left_while_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either it is not joined any more, or it is left afterwards."""
    cluster, looking, done = JoinedCluster("10.0.0.1:6379", "n"), threading.Event(), list[str]()

    def look(address: str) -> None:
        looking.set()
        assert cluster._leaves.wait(60.0)

    monkeypatch.setattr(under_test, "check_head", look)
    monkeypatch.setattr(under_test, "join_cluster", lambda *_: done.append("joined"))
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("left"))
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(cluster.start)
        assert looking.wait(60.0)
        cluster.stop()
        with pytest.raises(StartError, match="the deployment stops"):
            joining.result(60.0)
    assert done == ["left"]
    monkeypatch.setattr(under_test, "KILL_TIMEOUT_S", 0.01)
    with cluster._joining:
        cluster.stop()
    assert done == ["left"], "not while Ray is being joined"
    cluster.stop()
    assert done == ["left", "left"]
