"""Small questions to the planner: a model of few layers on made-up devices, whose every figure is a round number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.slo import Slo
from planner.costs.model import ModelDims
from planner.costs.profile import CostProfile
from planner.costs.step import StepCost
from planner.hardware import Device, NodeSpec
from planner.placement.problem import NodeGroup, Problem
from planner.types import CostModel, LinkSpec, Parallelism
from planner.workload.lengths import LognormalLengths
from planner.workload.workload import Workload

SMALL = ModelDims("small", 8, 64, 4, 4, 16, 256, 2, 1000, 4096)
DEVICE = Device("made", 1e12, 1e11, 1e9, 2.0, NodeSpec(4, LinkSpec(1e9, 1e-5), LinkSpec(1e6, 1e-4)))
CHAT = Workload(LognormalLengths(5.0, 0.6, 3.0, 0.6, 0.0, 1500), "")


def costs(prefill: float = 1.0, decode: float = 1.0) -> dict[Parallelism, CostModel]:
    """Seconds, for one, two and four devices; `prefill` and `decode` times the usual ones."""
    return {
        Parallelism(tp, pp): StepCost(
            (0.004 * prefill, 2e-4 * prefill / tp**0.8, 1e-8 * prefill / tp),
            ((0.01 * decode / tp**0.7, 2e-7 * decode / tp, 2e-4 * decode / tp),),
            pp,
            0.0005,
        )
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
    }


def profile(
    device: Device = DEVICE, rooms: int = 20_000, prefill: float = 1.0, decode: float = 1.0
) -> CostProfile:
    made = costs(prefill, decode)
    return CostProfile(SMALL, device, made, {split: rooms * split.devices for split in made}, "made up")


def question(
    nodes: int = 1,
    per_node: int = 4,
    slos: Mapping[str, Slo] | None = None,
    measured: CostProfile | None = None,
    **more: Any,
) -> Problem:
    """A request over `nodes` of `per_node` made-up devices: 60 requests of one seed, as short as that."""
    given: dict[str, Any] = {
        "source": CHAT,
        "seeds": 1,
        "requests": 60,
        "span_s": 0.0,
        "name": "chat",
    } | more
    measured = measured or profile()
    slos = slos or {"": Slo(0.2, 0.03, 0.9)}
    group = NodeGroup(measured.device, nodes, per_node)
    return Problem(SMALL, (group,), {measured.device.name: measured}, slos=slos, **given)


def two_kinds(**more: Any) -> Problem:
    """Two kinds of device at one price: one prefills fast and decodes slowly, the other the other way round."""
    reads, writes = replace(DEVICE, name="reader"), replace(DEVICE, name="writer")
    first = question(measured=profile(reads, prefill=0.2, decode=3.0), **more)
    other = profile(writes, prefill=3.0, decode=0.3)
    return replace(
        first,
        groups=(NodeGroup(reads, 1, 2), NodeGroup(writes, 1, 2)),
        profiles={**first.profiles, "writer": other},
    )
