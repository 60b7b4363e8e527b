"""Which node each group of workers gets, and what is said if there is none."""

from __future__ import annotations

import pytest

from diptych.errors import StartError
from services.cluster.capacity import NodeCapacity, count_devices, max_sharing, min_cpus, place_groups
from services.cluster.spec import Bundle

CPU_1 = (("CPU", 1.0),)


def node(name: str, free: float, total: float | None = None, **more: float) -> NodeCapacity:
    every = {"CPU": free if total is None else total} | more
    return NodeCapacity(name, f"10.0.0.{name}", every, every | {"CPU": free})


def singles(*workers: str) -> list[tuple[Bundle, ...]]:
    return [(Bundle(worker),) for worker in workers]


def test_the_workers_of_a_pool_are_spread() -> None:
    """One lost node takes one worker of each pool, not a whole pool."""
    groups = singles("prefill-0", "prefill-1", "decode-0", "decode-1")
    assert place_groups(groups, [node("1", 4), node("2", 4)]) == ["1", "2", "1", "2"]


def test_workers_that_run_already_count() -> None:
    busy = node("1", 4)
    busy.placed.append("decode-0")
    assert place_groups(singles("decode-1"), [busy, node("2", 2)]) == ["2"]


def test_a_pair_stays_together_and_goes_before_smaller_groups() -> None:
    pair = (Bundle("prefill-0"), Bundle("decode-0"))
    nodes = [node("1", 1), node("2", 2)]
    assert place_groups([*singles("decode-1"), pair], nodes) == ["1", "2"]
    assert [one.free["CPU"] for one in nodes] == [0, 0]


def test_custom_resources_choose_the_node() -> None:
    wanted = [(Bundle("prefill-0", 1, (("CPU", 1.0), ("fast", 1.0))),)]
    assert place_groups(wanted, [node("1", 4), node("2", 1, fast=1)]) == ["2"]


def test_what_fits_nowhere_is_refused_in_six_lines() -> None:
    nodes = [node(str(number), 1, 4) for number in range(30)]
    with pytest.raises(StartError) as caught:
        place_groups([(Bundle("prefill-0", 2), Bundle("decode-0", 1)), *singles("decode-1")], nodes)
    lines = caught.value.lines()
    assert len(lines) == 6
    assert lines[0] == "error: the Ray cluster has no room for prefill-0 and decode-0"
    assert lines[1].endswith("asked: CPU 3 for prefill-0 and decode-0 on one node; CPU 4 in all")
    assert "10.0.0.0: CPU 1 of 4 free" in lines[2] and lines[4].endswith("and 21 more nodes")
    assert "ray status" in lines[5]


def test_what_no_node_could_ever_hold_has_another_fix() -> None:
    with pytest.raises(StartError) as caught:
        place_groups([(Bundle("decode-0", 8),)], [node("1", 1, 4)])
    assert "even when it is idle" in caught.value.fix
    with pytest.raises(StartError, match="no room") as caught:
        place_groups(singles("decode-0"), [])
    assert "no living node" in caught.value.why


def test_the_devices_of_a_cluster_are_whole_workers() -> None:
    nodes = [node("1", 3), node("2", 0, 5), node("3", 0)]
    assert count_devices(nodes, {"CPU": 2.0}, 2) == 2 + 4
    assert count_devices(nodes, dict(CPU_1), 1) == 8


def test_shares_of_a_resource_are_counted_as_ray_does() -> None:
    """Three times 0.1 is 0.3, which as floats it is not."""
    nodes = [node("1", 9, fast=0.3)]
    groups = [(Bundle(f"decode-{number}", resources=(("fast", 0.1),)),) for number in range(3)]
    assert count_devices(nodes, {"fast": 0.1}, 1) == 3
    assert count_devices([node("1", 1, memory=8e9)], {"memory": 8e9 + 1}, 1) == 0
    assert place_groups(groups, nodes) == ["1", "1", "1"] and nodes[0].free["fast"] == 0.0
    pair = [(Bundle("prefill-0", resources=(("fast", 0.1),)), Bundle("decode-0", resources=(("fast", 0.2),)))]
    assert place_groups(pair, [node("1", 9, fast=0.3)]) == ["1"]


def test_the_smallest_worker_decides_how_many_share_a_node() -> None:
    """What it takes by --decode-resources counts, not how many ranks it has."""
    half = Bundle("decode-0", resources=(("CPU", 0.5), ("fast", 1.0)))
    assert min_cpus([(Bundle("prefill-0", 2),), (half,)]) == 0.5
    assert min_cpus(singles("prefill-0", "decode-0")) == 1.0


def test_the_smallest_share_of_a_gpu_decides_how_many_share_one() -> None:
    third = Bundle("decode-0", resources=(("CPU", 1.0), ("GPU", 0.3333)))
    assert max_sharing([(Bundle("prefill-0", resources=(("GPU", 0.5),)),), (third,)]) == 3
    assert max_sharing([(Bundle("prefill-0", resources=(("GPU", 2.0),)),)]) == 1
    assert max_sharing(singles("decode-0")) == 1
