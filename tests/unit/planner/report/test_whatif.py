"""The same question with one thing changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.hardware import find_device
from planner.kv_links import parse_link
from planner.placement.problem import NodeGroup
from planner.placement.solve import Solution, solve_placement
from planner.report.whatif import (
    WhatIfAnswer,
    apply_change,
    ask_what_if,
    compare_answers,
    spread_over_nodes,
)
from planner.types import LinkSpec
from tests.unit.planner.small_problems import question

BASE = question(nodes=2, rate=5.0)


@pytest.fixture(scope="module")
def base() -> Solution:
    return solve_placement(question())


@pytest.fixture(scope="module")
def looser() -> WhatIfAnswer:
    return ask_what_if(question(), "ttft=x4")


def test_objectives_change_for_every_kind() -> None:
    assert apply_change(BASE, "ttft=0.3").slos == {"": Slo(0.3, 0.03, 0.9)}
    assert apply_change(BASE, "tpot=x2").slos == {"": Slo(0.2, 0.06, 0.9)}
    assert apply_change(BASE, "attainment=0.99").slos == {"": Slo(0.2, 0.03, 0.99)}


def test_devices_change_by_number_or_by_difference() -> None:
    assert apply_change(BASE, "gpus=-2").devices == 6 and apply_change(BASE, "gpus=+8").devices == 16
    assert apply_change(BASE, "gpus=3").devices == 3 and apply_change(BASE, "nodes=4").devices == 16
    assert apply_change(BASE, "gpus=x2").devices == 16
    made = spread_over_nodes(BASE.groups[0], 6)
    assert (made.nodes, made.devices_per_node) == (2, 3)
    assert apply_change(BASE, "device=H100").groups[0].device.name == "H100"


def test_traffic_and_links_change() -> None:
    assert apply_change(BASE, "rate=x3").rate == 15.0 and apply_change(BASE, "cv=2").cv == 2.0
    assert apply_change(BASE, "link=25Gbps").node_link == LinkSpec(3.125e9, 1e-4)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("2 GB/s", 2e9), ("2GBps", 2e9), ("25Gb/s", 3.125e9), ("25Gbps", 3.125e9), ("25gbps", 3.125e9),
     ("8Gbit/s", 1e9), ("1 GByte/s", 1e9), ("1GiB/s", 1 << 30)],
)  # fmt: skip
def test_a_small_b_is_a_bit_and_a_large_one_a_byte(text: str, bytes_per_s: float) -> None:
    assert parse_link(text, 0.0).bytes_per_s == bytes_per_s


def test_nodes_take_as_many_devices_as_before() -> None:
    """Of a stock that half fills a node, twice as many are on that node."""
    half = replace(question(), groups=(spread_over_nodes(question(per_node=8).groups[0], 4),))
    more = apply_change(half, "gpus=+4").groups[0]
    assert (more.nodes, more.devices_per_node) == (1, 8)
    assert apply_change(half, "gpus=+12").groups[0].nodes == 2


def test_another_device_is_another_device() -> None:
    assert apply_change(BASE, "device=H100").profiles["H100"].device.name == "H100"
    both = replace(BASE, groups=(*BASE.groups, *apply_change(BASE, "device=H100").groups))
    with pytest.raises(ConfigError) as caught:
        apply_change(both, "device=h100")
    assert "on offer already" in caught.value.why


def test_a_device_that_is_on_offer_is_found_by_its_name() -> None:
    """`made` is in no table: the request has it."""
    assert apply_change(BASE, "device=made") is BASE
    both = replace(BASE, groups=(*apply_change(BASE, "device=H100").groups, *BASE.groups))
    with pytest.raises(ConfigError) as caught:
        apply_change(both, "device=made")
    assert "on offer already" in caught.value.why


def test_on_the_cpu_a_model_is_as_workers_hold_it_there() -> None:
    other = apply_change(BASE, "device=cpu")
    assert other.site.token_bytes == other.profiles["cpu"].model.kv_token_bytes == 2 * BASE.site.token_bytes


def test_more_cores_are_cores_of_the_same_machine() -> None:
    cpu = find_device("cpu")
    for cores in (3, 4, 7):
        made = spread_over_nodes(NodeGroup(cpu, 1, 2, cpu.slots), cores)
        assert (made.nodes, made.devices_per_node) == (1, cores)
    more = apply_change(replace(BASE, groups=(made,)), "gpus=+2").groups[0]
    assert (more.nodes, more.devices_per_node) == (1, 9)


def test_a_link_between_nodes_that_are_not_there_is_refused(base: Solution, looser: WhatIfAnswer) -> None:
    assert "there is one node" in compare_answers(base, ask_what_if(question(), "link=25Gbps"))[-1]
    assert "one node" not in "".join(compare_answers(base, looser))


@pytest.mark.parametrize(
    "change",
    ["", "ttft", "ttft=", "ttft=fast", "ttft=-1", "ttft=nan", "colour=red", "gpus=-8", "gpus=7.5.1", "link=25",
     "link=0Gbps", "device=abacus", "attainment=2", "gpus=13", "rate=inf"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(change: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_change(BASE, change)
    assert len(caught.value.lines()) <= 6 and caught.value.fix


def test_answers_are_compared(base: Solution, looser: WhatIfAnswer) -> None:
    assert looser.solution is not None
    assert looser.solution.best_candidate.goodput_rps >= base.best_candidate.goodput_rps
    assert "what if ttft=x4" in compare_answers(base, looser)[0] and "goodput" in "".join(
        compare_answers(base, looser)
    )
    never = ask_what_if(question(), "ttft=0.001")
    assert never.solution is None and "forbids" in never.why_not
    assert "nothing is possible" in compare_answers(base, never)[0]
