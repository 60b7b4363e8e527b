"""What forbids a promise: prefill, decode, or the link of pairs; and which promise is the nearest that is possible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from diptych.errors import ConfigError
from diptych.slo import Slo
from planner.costs.profile_file import built_in_profile
from planner.hardware import find_device
from planner.kv_links import parse_link
from planner.placement.feasibility import check_feasible, slo_too_tight, tightest_slo
from planner.placement.problem import NodeGroup, Problem
from planner.placement.solve import solve_placement
from planner.types import LinkSpec
from planner.workload.workload import synthetic_workload
from tests.unit.planner.small_problems import question

FAST, SLOW = LinkSpec(1e9, 1e-5), LinkSpec(1e6, 1e-4)


def pairs(
    slo: Slo, between: LinkSpec, affinity: str = "high", families: tuple[str, ...] = ("disaggregated",)
) -> Problem:
    """Pairs on two nodes."""
    return question(nodes=2, families=families, affinity=affinity, slos={"": slo}, node_link=between)


def test_the_link_is_what_forbids_a_promise_of_pairs() -> None:
    slo = Slo(0.2, 0.02, 0.9)
    with pytest.raises(ConfigError, match="meets TPOT 20 ms for 90%") as caught:
        check_feasible(pairs(slo, SLOW))
    assert caught.value.why.startswith("the link forbids it: KV comes over 0.008 Gb/s; alone on ")
    assert "a faster link, or --family colocated" in caught.value.fix and len(caught.value.lines()) <= 6
    check_feasible(pairs(slo, FAST))  # nothing is, where the link is fast,
    check_feasible(pairs(slo, SLOW, affinity="auto"))  # or where KV may stay within a node,
    check_feasible(
        pairs(slo, SLOW, families=("colocated", "disaggregated"))
    )  # or where nothing need be moved
    with pytest.raises(ConfigError, match="TPOT 1 ms") as caught:
        check_feasible(pairs(Slo(0.2, 0.001, 0.9), SLOW))
    assert caught.value.why.startswith("decode, bound by memory bandwidth")
    with pytest.raises(ConfigError, match="TTFT 1 ms") as caught:
        check_feasible(pairs(Slo(0.001, 0.02, 0.9), SLOW))
    assert caught.value.why.startswith("prefill compute")


def test_what_is_named_as_the_nearest_over_a_link_is_possible() -> None:
    request = replace(pairs(Slo(0.2, 0.006, 0.9), LinkSpec(1e7, 1e-4)), requests=200)
    with pytest.raises(ConfigError, match="no placement") as caught:
        solve_placement(request)
    tpot_ms = float(caught.value.fix.partition("--slo-tpot-ms ")[2].partition(";")[0])
    best = solve_placement(replace(request, slos={"": Slo(0.2, tpot_ms / 1e3, 0.9)})).best_candidate
    assert best.goodput_rps > 0.0 and best.family == "disaggregated"
    assert tightest_slo(request).tpot_s > 1.5 * tightest_slo(request).written_s


def test_a_link_may_forbid_only_both_together() -> None:
    """The fastest readers and the fastest writers have each other over a link that takes what is left."""
    request = pairs(Slo(0.2, 0.03, 0.9), LinkSpec(1e7))
    found = tightest_slo(request, share=0.9)
    slo = Slo(found.ttft_s, found.tpot_s, 0.9)
    tight = replace(request, slos={"": slo})
    bare = tightest_slo(tight, share=0.9)
    assert bare.factor > 1.0 == bare.unmoved
    with pytest.raises(ConfigError, match="together") as caught:
        check_feasible(tight)
    assert "KV comes over 0.08 Gb/s, and the link forbids it" in caught.value.why


def test_a_large_model_over_a_thin_link() -> None:
    a100 = find_device("A100-80G")
    opt = built_in_profile("OPT-66B", a100)
    request = Problem(
        opt.model, (NodeGroup(a100, 2, 8),), {a100.name: opt}, synthetic_workload("sharegpt"),
        {"": Slo(math.inf, 0.04)},
        seeds=1, requests=200, affinity="high", families=("disaggregated",), node_link=parse_link("1Gbps", 0.0),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="no placement of OPT-66B") as caught:
        solve_placement(request)
    assert "the link forbids it: KV comes over 1 Gb/s" in caught.value.why


def test_what_passes_at_no_rate_names_the_resource_that_has_least_to_spare() -> None:
    for slo, says in (
        (Slo(0.2, 0.011, 0.9), "decode leaves nothing to spare for TPOT"),
        (Slo(0.05, 1.0, 0.9), "prefill leaves nothing to spare for TTFT"),
    ):
        error = slo_too_tight(question(slos={"": slo}))
        assert says in error.why and len(error.lines()) <= 6
    linked = slo_too_tight(pairs(Slo(10.0, 0.5, 0.9), SLOW))
    assert linked.why.startswith("the link leaves nothing to spare for TPOT") and "0.008 Gb/s" in linked.why


def test_units_that_no_rate_helps_are_counted() -> None:
    """A single device writes no token in 8 ms, so that it is not even tried."""
    answer = solve_placement(question(slos={"": Slo(1.0, 0.008, 0.9)}))
    assert answer.dropped["tpot"] >= 1
