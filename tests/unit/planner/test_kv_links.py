"""The way of KV: what was measured, what was asked for, or what the devices have."""

from __future__ import annotations

import pytest

from diptych.errors import ConfigError
from planner.hardware import NodeSpec
from planner.kv_links import choose_kv_link, parse_link_flag
from planner.types import DECODE, PREFILL, InstancePool, LinkSpec, Parallelism

FAST, SLOW = (
    NodeSpec(8, LinkSpec(300.0, 1.0), LinkSpec(5.0, 2.0)),
    NodeSpec(4, LinkSpec(30.0, 3.0), LinkSpec(3.0, 4.0)),
)
READS, WRITES = InstancePool(PREFILL, Parallelism(4)), InstancePool(DECODE, Parallelism(2, 3))
MEASURED, ASKED, NONE = LinkSpec(7.0, 0.5), LinkSpec(9.0, 0.25), LinkSpec()


def test_within_a_node_each_device_sends_over_its_own_link() -> None:
    moving = [(READS, FAST), (WRITES, FAST)]
    assert choose_kv_link(moving, NONE, True) == LinkSpec(4 * 300.0, 1.0)
    assert choose_kv_link(moving, MEASURED, True) == MEASURED
    assert choose_kv_link(moving, MEASURED, True, ASKED) == MEASURED, (
        "what is between nodes is not within one"
    )


def test_between_nodes_an_instance_has_one_link() -> None:
    moving = [(READS, FAST), (WRITES, SLOW)]
    assert choose_kv_link(moving, NONE, False) == LinkSpec(3.0, 4.0), "the slower of the two"
    assert choose_kv_link(moving, MEASURED, False) == MEASURED
    assert choose_kv_link(moving, MEASURED, False, ASKED) == ASKED


def test_where_nothing_moves_there_is_no_way_to_wait_for() -> None:
    assert choose_kv_link([], MEASURED, False, ASKED) == LinkSpec()


def test_a_flag_that_is_no_link_is_refused() -> None:
    assert parse_link_flag(None, 1.0) is None
    assert parse_link_flag("25Gbps", 0.5) == LinkSpec(3.125e9, 0.5)
    for text in ("", "fast", "0Gbps", "1.2.3Gbps"):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            parse_link_flag(text, 0.0)
        assert len(caught.value.lines()) <= 6
