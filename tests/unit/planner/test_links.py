"""The way of KV: what was measured, what was asked for, or what the devices have."""

from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from planner.hardware import Node
from planner.links import wanted, way
from planner.terms import DECODE, PREFILL, Link, Pool, Split

FAST, SLOW = Node(8, Link(300.0, 1.0), Link(5.0, 2.0)), Node(4, Link(30.0, 3.0), Link(3.0, 4.0))
READS, WRITES = Pool(PREFILL, Split(4)), Pool(DECODE, Split(2, 3))
MEASURED, ASKED, NONE = Link(7.0, 0.5), Link(9.0, 0.25), Link()


def test_within_a_node_each_device_sends_over_its_own_link() -> None:
    moving = [(READS, FAST), (WRITES, FAST)]
    assert way(moving, NONE, True) == Link(4 * 300.0, 1.0)
    assert way(moving, MEASURED, True) == MEASURED
    assert way(moving, MEASURED, True, ASKED) == MEASURED, "what is between nodes is not within one"


def test_between_nodes_an_instance_has_one_link() -> None:
    moving = [(READS, FAST), (WRITES, SLOW)]
    assert way(moving, NONE, False) == Link(3.0, 4.0), "the slower of the two"
    assert way(moving, MEASURED, False) == MEASURED
    assert way(moving, MEASURED, False, ASKED) == ASKED


def test_where_nothing_moves_there_is_no_way_to_wait_for() -> None:
    assert way([], MEASURED, False, ASKED) == Link()


def test_a_flag_that_is_no_link_is_told() -> None:
    assert wanted(None, 1.0) is None
    assert wanted("25Gbps", 0.5) == Link(3.125e9, 0.5)
    for text in ("", "fast", "0Gbps", "1.2.3Gbps"):
        with pytest.raises(ConfigError, match="cannot be read") as told:
            wanted(text, 0.0)
        assert len(told.value.lines()) <= 6
