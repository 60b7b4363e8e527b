"""Eviction on all ranks of a worker: what rank 0 has them do, and what each does for its own heads.

Ranks profile and evict the heads of their own layers, each in its own part of the same slabs: a sequence takes as many
slabs for its bag as the rank with the most rows needs. The orders travel with those of steps
(`engine.cpu.ranks.orders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import ADA, KeepSpec
from engine.batching.sink_slots import SinkPlan, SinkSlots
from engine.cpu.eviction.evictor import CpuEvictor
from engine.protocols import EvictingRunner, EvictionOrder, EvictionReport
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.ada import LayerTally, add_tallies
from kvcache.eviction.bag_sizes import merge_sizes
from kvcache.eviction.kept_segments import KeptSegment
from kvcache.layout import KvLayout, Shard
from kvcache.pool import KvPool, find_pool


class MarkRows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mark the rows of a sequence whose heads compete; it is answered with a report that has the rank's tally.

    `sinks` is as in `PlanEviction`.
    """

    order: EvictionOrder
    sinks: SinkPlan = SinkPlan()


class PlanEviction(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`EvictingRunner.plan_eviction`; it is answered with a report of the rank's own heads.

    `sinks` has the place of the sequence's first token among the sinks, if its pool has a codec; if it is missing, all
    ranks compute it first. `cuts` says which marks stay in each layer, if rows were marked.
    """

    order: EvictionOrder
    sinks: SinkPlan = SinkPlan()
    cuts: list[int] = []


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
    segments: tuple[KeptSegment, ...] = ()


class ForgetKept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`EvictingRunner.forget_kept`."""

    key: str


KeptOrder = MarkRows | PlanEviction | ApplyEviction | LoadKept | ForgetKept
Reports = Sequence[EvictionReport]
# Has all ranks carry out an order, of which the function does this rank's part, and returns its reports and those of
# the other ranks.
OnRanks = Callable[[KeptOrder, Callable[[], Reports]], tuple[Reports, Reports]]


class RankEvictor:
    """Evicts KV of all pools of a rank; on rank 0 it has the other ranks do the same.

    Args:
        evictors: of all pools of this rank; none, if nothing may be evicted.
        shards: of all ranks.
        sink_slots: which first tokens have a place among the sinks.
        compute_sinks: computes missing sinks; returns its exception, if that failed.
        on_ranks: see `OnRanks`.
    """

    def __init__(
        self,
        evictors: Sequence[CpuEvictor],
        shards: Sequence[Shard],
        sink_slots: SinkSlots,
        compute_sinks: Callable[[SinkPlan], Exception | None],
        on_ranks: OnRanks,
    ) -> None:
        self._evictors, self._shards, self._sink_slots = evictors, shards, sink_slots
        self._compute_sinks, self._on_ranks = compute_sinks, on_ranks

    @property
    def can_evict(self) -> bool:
        """As `EvictingRunner.can_evict`."""
        return bool(self._evictors)

    @property
    def keep_rules(self) -> Sequence[str]:
        """As `EvictingRunner.keep_rules`."""
        return self._evictors[0].rules if self._evictors else ()

    @property
    def cuts_kept(self) -> bool:
        """Whether what is kept of prompts can become segments (`kvcache.eviction.kept_segments`), in all pools."""
        return self.can_evict and all(one.cuts_kept for one in self._evictors)

    def repeat_bag(self, key: str, slabs: Sequence[int]) -> int:
        """As `CpuEvictor.repeat_bag`, of a sequence in these slabs."""
        return self._find_evictor(slabs).repeat_bag(key)

    def list_kernels(self) -> list[Any]:
        """The kernels that nothing but eviction uses, of all pools; none if nothing may be evicted."""
        return [kernel for evictor in self._evictors for kernel in evictor.list_kernels()]

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        """As `EvictingRunner.plan_eviction`, which says when ValueError is raised."""
        layout = self._find_evictor(order.slabs).pool.layout
        sinks = self._sink_slots.plan(order.tokens[:1]) if layout.codec else SinkPlan()
        cuts = list[int]()
        if order.spec.rule == ADA:
            tally = self._merge_tallies(self.evict_on_ranks(MarkRows(order, sinks)))
            is_prompt = len(order.tokens) == order.prompt_tokens
            cuts = tally.cut_prompt(order.spec.threshold) if is_prompt else tally.cut_answer()
        reports = self.evict_on_ranks(PlanEviction(order, sinks, cuts))
        self._sink_slots.keep(sinks)
        return reports[0] if len(reports) == 1 else merge_reports(reports, layout, self._shards)

    def _merge_tallies(self, reports: Reports) -> LayerTally:
        """How many rows compete in each layer of the whole model."""
        tallies = [LayerTally.decode(report.tally) for report in reports]
        starts = [shard.layers[0] for shard in self._shards]
        return add_tallies(tallies, starts, self._shards[-1].layers[1])

    def evict_on_ranks(self, order: KeptOrder) -> list[EvictionReport]:
        """Carry out an order on all ranks; returns the reports that it asks for, by rank.

        Raises ValueError as the method of `EvictingRunner` that the order is named after.
        """
        if not isinstance(order, ForgetKept):
            self._find_evictor(_slabs_of(order))
        own, others = self._on_ranks(order, lambda: self.evict_part(order))
        return [*own, *others]

    def evict_part(self, order: KeptOrder) -> list[EvictionReport]:
        """Carry out an order for this rank's heads; returns the report that it asks for, if any.

        Raises ValueError as the method of `EvictingRunner` that the order is named after.
        """
        if isinstance(order, ForgetKept):
            for one in self._evictors:
                one.forget_sequence(order.key)
            return []
        slabs = _slabs_of(order)
        evictor = self._find_evictor(slabs)
        mine = [slab - evictor.pool.first for slab in slabs]
        match order:
            case MarkRows(asked, sinks):
                tally = evictor.mark_rows(asked, mine, self._find_sink(sinks))
                return [EvictionReport(0, 0, 0, {}, tally=tally)]
            case PlanEviction(asked, sinks, cuts):
                return [evictor.plan_eviction(asked, mine, self._find_sink(sinks), cuts)]
            case ApplyEviction(key):
                evictor.apply_eviction(key, mine)
            case LoadKept(key, boundary, length, _, segments):
                evictor.load_kept(key, boundary, length, mine, segments)
        return []

    def _find_sink(self, sinks: SinkPlan) -> int:
        """The place of a sequence's first token among the sinks, which is computed if it is missing."""
        failure = self._compute_sinks(sinks)
        if failure is not None:
            raise failure
        return sinks.slots[0] if sinks.slots else 0

    def _find_evictor(self, slabs: Sequence[int]) -> CpuEvictor:
        """The evictor of the pool that slabs are in. Raises ValueError if it has none."""
        if not self._evictors:
            raise ValueError("nothing is evicted from this pool: that takes the tokens' kinds")
        return self._evictors[find_pool([one.pool for one in self._evictors], slabs)]


def merge_reports(reports: Reports, layout: KvLayout, shards: Sequence[Shard]) -> EvictionReport:
    """The report of a worker from those of its ranks, which have these `shards`; `layout` is that of one of them."""
    policies: Counter[str] = Counter()
    for report in reports:
        policies.update(report.policies)
    # The last rank has the last layers and the last heads.
    whole = replace(layout, layers=shards[-1].layers[1], kv_heads=shards[-1].heads[1])
    return EvictionReport(
        max(report.bag_slabs for report in reports),
        sum(report.kept_rows for report in reports),
        sum(report.all_rows for report in reports),
        dict(policies),
        merge_sizes(whole, shards, [report.sizes for report in reports]),
    )


def warm_eviction(runner: EvictingRunner, evictor: RankEvictor, pool: KvPool, max_model_len: int) -> None:
    """Evict a short prompt in a pool of the runner by each rule, and decode behind it; nothing of it stays.

    `evictor` is that of the runner.
    """
    for rule in runner.keep_rules:
        _warm_rule(runner, evictor, pool, max_model_len, KeepSpec(0.5, rule=rule))


def _warm_rule(
    runner: EvictingRunner, evictor: RankEvictor, pool: KvPool, max_model_len: int, spec: KeepSpec
) -> None:
    owner, tokens = "warm", [0] * min(CHUNK_TOKENS // 2, max_model_len - 1)
    slabs = pool.take_slabs(1, owner)
    try:
        kept = KeptWork(owner, len(tokens), spec, evicted=False)
        runner.run([StepWork(tokens, 0, slabs, "none", 0, kept)])
        report = runner.plan_eviction(EvictionOrder(owner, tokens, len(tokens), spec, slabs))
        # The plan has a copy of the rows, so that the prompt's slab becomes the ring.
        slabs += pool.take_slabs(report.bag_slabs, owner)
        runner.apply_eviction(owner, slabs[1:])
        runner.run([StepWork([0], len(tokens), slabs, "last", 0, replace(kept, evicted=True))])
        block = [0] * CHUNK_TOKENS
        if len(tokens) + len(block) < max_model_len:
            # The second decision reads frames.
            runner.run([StepWork(block, len(tokens), slabs, "last", 0, replace(kept, evicted=True))])
            runner.plan_eviction(EvictionOrder(owner, tokens + block, len(tokens), spec, slabs))
        if spec.needs_weights and evictor.cuts_kept:
            more = evictor.repeat_bag(owner, slabs)
            again = replace(kept, evicted=True, segment_slabs=more)
            # One row reads segments alone, a block of rows reads them together.
            for rows in ([0], block[: max_model_len - len(tokens)]):
                runner.run([StepWork(rows, len(tokens), [*slabs[1:], *slabs], "last", 0, again)])
    finally:
        runner.forget_kept(owner)
        pool.give_back(slabs, owner)


def _slabs_of(order: MarkRows | PlanEviction | ApplyEviction | LoadKept) -> list[int]:
    """The slabs that an order is about."""
    return order.order.slabs if isinstance(order, MarkRows | PlanEviction) else order.bag_slabs
