"""A pair of instances whose KV has two classes."""

from __future__ import annotations

from planner.costs.step import StepCost
from planner.types import (
    DECODE,
    PREFILL,
    InstancePool,
    KvClass,
    KvClassWork,
    Parallelism,
    Placement,
)

COST = StepCost((0.0101, 1.02e-4, 1.01e-9), ((0.0201, 5.03e-7, 1.01e-4),))
# Raw KV, and KV of a seventh of its bytes: its tokens cost more to prefill, and less to attend to.
RAW = KvClass("raw", 0.5, 700.0, 0.5)
CODED = KvClass("tq4", 0.5, 100.0, 3.5, KvClassWork(token=1.5, square=1.25, context=0.5))
CLASSES = (RAW, CODED)
PAIR = Placement((InstancePool(PREFILL, Parallelism()), InstancePool(DECODE, Parallelism())))
