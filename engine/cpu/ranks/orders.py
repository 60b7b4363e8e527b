"""What rank 0 of a worker has the other ranks do: to compute their part of a step, or to evict from their own heads.

Each order is answered before the next one. Ranks profile and evict the heads of their own layers, each in its own part
of the same slabs: a sequence takes as many slabs for its bag as the rank with the most rows needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from engine.batching.sink_slots import SinkPlan
from engine.protocols import EvictionOrder, EvictionReport
from engine.step_work import StepWork
from kvcache.eviction.bag_sizes import merge_sizes
from kvcache.layout import KvLayout, split_layout


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute a step, whose missing first tokens are computed before it."""

    works: list[StepWork]
    sinks: SinkPlan


class PlanEviction(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`EvictingRunner.plan_eviction`; it is answered with a report of the rank's own heads.

    `sinks` has the place of the sequence's first token among the sinks, if its pool has a codec; if it is missing, all
    ranks compute it first.
    """

    order: EvictionOrder
    sinks: SinkPlan = SinkPlan()


class ApplyEviction(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`EvictingRunner.apply_eviction`."""

    key: str
    bag_slabs: list[int]


class LoadKept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`EvictingRunner.load_kept`."""

    key: str
    boundary: int
    length: int
    bag_slabs: list[int]


class ForgetKept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`EvictingRunner.forget_kept`."""

    key: str


KeptOrder = PlanEviction | ApplyEviction | LoadKept | ForgetKept
RankOrder = RunStep | KeptOrder

_DECODER: msgspec.msgpack.Decoder[RankOrder] = msgspec.msgpack.Decoder(RankOrder)


def encode_order(order: RankOrder) -> bytes:
    """Encode an order for `decode_order`."""
    return msgspec.msgpack.encode(order)


def decode_order(data: bytes) -> RankOrder:
    """The order that `encode_order` encoded. Raises msgspec.MsgspecError if `data` is not one."""
    return _DECODER.decode(data)


def merge_reports(reports: Sequence[EvictionReport], layout: KvLayout, tp: int, pp: int) -> EvictionReport:
    """The report of a worker of `tp` · `pp` ranks from those of its ranks; `layout` is that of all of them."""
    policies: Counter[str] = Counter()
    for report in reports:
        policies.update(report.policies)
    return EvictionReport(
        max(report.bag_slabs for report in reports),
        sum(report.kept_rows for report in reports),
        sum(report.all_rows for report in reports),
        dict(policies),
        merge_sizes(layout, split_layout(layout, tp, pp), [report.sizes for report in reports]),
    )
