"""The same question with one thing changed."""

from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from planner.placement import place
from planner.terms import Link, Slo
from planner.whatif import ask, changed, compare, link, spread
from tests.unit.planner.planned import question

BASE = question(nodes=2, rate=5.0)


def test_objectives_change_for_every_kind() -> None:
    assert changed(BASE, "ttft=0.3").slos == {"": Slo(0.3, 0.03, 0.9)}
    assert changed(BASE, "tpot=x2").slos == {"": Slo(0.2, 0.06, 0.9)}
    assert changed(BASE, "attainment=0.99").slos == {"": Slo(0.2, 0.03, 0.99)}


def test_devices_change_by_number_or_by_difference() -> None:
    assert changed(BASE, "gpus=-2").devices == 6 and changed(BASE, "gpus=+8").devices == 16
    assert changed(BASE, "gpus=3").devices == 3 and changed(BASE, "nodes=4").devices == 16
    assert changed(BASE, "gpus=x2").devices == 16
    made = spread(BASE.stocks[0], 6)
    assert (made.nodes, made.devices_per_node) == (2, 3)
    assert changed(BASE, "device=H100").stocks[0].device.name == "H100"


def test_traffic_and_links_change() -> None:
    assert changed(BASE, "rate=x3").rate == 15.0 and changed(BASE, "cv=2").cv == 2.0
    assert changed(BASE, "link=25Gbps").between == Link(3.125e9, 1e-4)
    assert link("2 GB/s", 0.0).bytes_per_s == 2e9


@pytest.mark.parametrize(
    "change",
    ["", "ttft", "ttft=", "ttft=fast", "ttft=-1", "ttft=nan", "colour=red", "gpus=-8", "gpus=7.5.1", "link=25",
     "link=0Gbps", "device=abacus", "attainment=2", "gpus=13", "rate=inf"],
)  # fmt: skip
def test_what_cannot_be_read_is_told(change: str) -> None:
    with pytest.raises(ConfigError) as told:
        changed(BASE, change)
    assert len(told.value.lines()) <= 6 and told.value.fix


def test_answers_are_compared() -> None:
    request = question()
    base = place(request)
    looser = ask(request, "ttft=x4")
    assert looser.answer is not None
    assert looser.answer.best.goodput_rps >= base.best.goodput_rps
    assert "what if ttft=x4" in compare(base, looser)[0] and "goodput" in "".join(compare(base, looser))
    never = ask(request, "ttft=0.001")
    assert never.answer is None and "forbids" in never.why_not
    assert "nothing is possible" in compare(base, never)[0]
