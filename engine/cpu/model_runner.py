"""Runs a step on the CPU: takes token ids, returns logits, and stores KV in the slabs of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ModelError
from diptych.eviction_spec import KeepSpec
from engine.batching.batch import ForwardBatch, count_rows, pack_batch
from engine.batching.sink_slots import DEFAULT_SLOTS, SinkPlan, SinkSlots
from engine.cpu.arenas import PoolAttention, pack_groups
from engine.cpu.attention import CpuAttention, PagedAttention
from engine.cpu.coded.attention import CodedPool, SinkRecorder
from engine.cpu.coded.compiled_attention import NO_TABLE, CompiledAttention, build_angles
from engine.cpu.coded.kept_store import CodedStore
from engine.cpu.coded.sink_table import SinkTable
from engine.cpu.decoder import CpuDecoder
from engine.cpu.eviction.evictor import CpuEvictor, EvictionSetup
from engine.cpu.eviction.ragged_attention import KeptStore, RawStore
from engine.cpu.ranks.orders import (
    ApplyEviction,
    ForgetKept,
    KeptOrder,
    LoadKept,
    PlanEviction,
    RunStep,
    encode_order,
    merge_reports,
)
from engine.cpu.ranks.tensor_parallel import FollowerRanks
from engine.cpu.weights.decoder_weights import OnPacked, SectionReader, ignore_progress, read_weights
from engine.cpu.weights.prepared_folder import PreparedFolder
from engine.model.rope import rope_frequencies
from engine.model.weights import WeightReader
from engine.protocols import EvictionOrder, EvictionReport, OnLayersDone
from engine.step_work import KeptWork, RunnerBounds, StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.layout import KvLayout, Shard
from kvcache.page_codecs import build_page_codecs
from kvcache.pool import KvPool

# Imported for types only: the module imports transformers, which ranks that get their configuration from rank 0 do
# not need.
if TYPE_CHECKING:
    from engine.model.checkpoint import Checkpoint


class CpuModelRunner:
    """A loaded model, or one rank's shard of it, bound to a pool. Only one thread at a time may use it.

    `followers` commands the other ranks, if this is rank 0 of several: they compute every step too. `calibration` is
    that of the pool's codec, if it has one; `shard` is the part of the model that a rank has. `sink_slots` is how many
    different first tokens a step may have, at least, if a pool has a codec. `others` are the pools of further KV
    classes with their calibrations: a step may have works in all of them. `eviction` is given to evict KV of them
    (`EvictingRunner`): every rank evicts from its own heads.
    """

    def __init__(
        self,
        decoder: CpuDecoder,
        pool: KvPool,
        max_model_len: int,
        followers: FollowerRanks | None = None,
        *,
        calibration: Calibration | None = None,
        shard: Shard | None = None,
        sink_slots: int = DEFAULT_SLOTS,
        others: Sequence[tuple[KvPool, Calibration | None]] = (),
        eviction: EvictionSetup | None = None,
    ) -> None:
        self.layout: KvLayout = pool.layout
        self.vocab_size = decoder.config.vocab
        self.max_model_len = max_model_len
        # Seconds of the last run that went into checking and packing the step and sending it to other ranks.
        self.prepare_seconds = 0.0
        self._decoder, self._followers = decoder, followers
        # First tokens are kept exactly for all coded pools together: their KV does not depend on the codec. Without a
        # codec they are never used, and take no memory.
        self._sinks, self._sink_slots = SinkTable(pool.layout, sink_slots), SinkSlots(sink_slots)
        shard = shard or Shard((0, pool.layout.layers), (0, pool.layout.kv_heads))
        classes = [(pool, calibration), *others]
        self._pools = [one for one, _ in classes]
        self._frequencies = rope_frequencies(decoder.config.rope, pool.layout.head_dim).double().numpy()
        coded = any(one.layout.codec for one in self._pools)
        # All coded pools together have one table.
        self._angles = build_angles(self._frequencies, max_model_len) if coded else NO_TABLE
        self._eviction = eviction
        self._attentions = [self._attend_to(one, known, shard) for one, known in classes]
        self._evicts = any(one.evictor is not None for one in self._attentions)

    def _attend_to(self, pool: KvPool, calibration: Calibration | None, shard: Shard) -> PoolAttention:
        """The attention over a pool. Raises ConfigError if its codec is of another calibration."""
        decoder, layout = self._decoder, pool.layout
        windows = [layer.window for layer in decoder.layers]
        attention: PagedAttention
        store: KeptStore
        evictor: CpuEvictor | None = None
        if layout.codec:
            codecs = build_page_codecs(layout, calibration, shard)
            coded = CodedPool(layout, pool.data, codecs, self._frequencies, self._sinks)
            attention = compiled = CompiledAttention(coded, decoder.heads, self._angles)
            store = CodedStore(pool, compiled, windows)
        else:
            attention = raw = CpuAttention(layout, pool.data, decoder.heads)
            store = RawStore(pool, raw, windows)
        alone = decoder.placement.world == 1
        if self._eviction is not None:
            evictor = CpuEvictor(pool, store, decoder.heads, windows, self._eviction, alone)
        bounds = RunnerBounds(layout, pool.num_slabs, self.max_model_len, self.vocab_size)
        return PoolAttention(pool.first, bounds, attention, evictor)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        pool: KvPool,
        max_model_len: int,
        calibration: Calibration | None = None,
        sink_slots: int = DEFAULT_SLOTS,
        others: Sequence[tuple[KvPool, Calibration | None]] = (),
        eviction: EvictionSetup | None = None,
        prepared: Path | None = None,
        packed: OnPacked = ignore_progress,
    ) -> CpuModelRunner:
        """Read the weights and bind them to `pool`; `calibration` and `sink_slots` are those of the runner.

        `others` are the pools of further KV classes, with their calibrations; `eviction` is as for the runner. The
        weights are mapped from a file below the folder `prepared`, which other processes share
        (`engine.cpu.weights.prepared_folder`); without a folder they are packed into memory of this process.
        `packed` is called while they are packed.

        Raises:
            ModelError: the checkpoint does not match its config, or the pool is not of this model's layout.
            ConfigError: the pool's codec is of another calibration.
        """
        expected = checkpoint.layout("float32")
        for one in [pool, *[other for other, _ in others]]:
            if replace(one.layout, codec=expected.codec) != expected:
                raise ModelError(
                    "the KV pool does not fit the model",
                    f"pool: {one.layout}\nmodel: {expected}",
                    "make the pool from the model's own layout, in float32 on the CPU",
                )
        source = None if prepared is None else PreparedFolder(prepared, checkpoint.packing_identity())
        with torch.no_grad(), WeightReader(checkpoint.weights) as weights:
            reader = SectionReader(checkpoint.config, weights, packed=packed)
            found = read_weights(reader) if source is None else source.load_weights(reader)
        decoder = CpuDecoder(checkpoint.config, found, max_model_len)
        return cls(
            decoder,
            pool,
            max_model_len,
            calibration=calibration,
            sink_slots=sink_slots,
            others=others,
            eviction=eviction,
        )

    def run(self, step_works: Sequence[StepWork], done: OnLayersDone | None = None) -> list[torch.Tensor]:
        """Compute a step. Returns logits per work, float32 [rows, vocab] with rows = 1, len(tokens) or 0.

        The caller may change the logits. `done` is called after each layer with the number of layers whose KV is
        complete. With several ranks no rank knows how far the others are, so `done` is called once, when all have
        finished.

        Raises:
            ValueError: a work is empty, too long, or has too few slabs, or there are more first tokens than the pool's
                table has room for; nothing was computed.
        """
        began_s = time.perf_counter()
        works, chosen = self._localise_works(step_works)
        if not works:
            return []
        counts = [work.wanted for work in works]
        sinks = self._plan_sinks(works, chosen)
        packed, attention = self._pack_works(works, chosen, sinks)
        if self._followers is None:
            self.prepare_seconds = time.perf_counter() - began_s
            logits = self._forward_step(
                step_works, sinks, lambda: self._decoder.forward(packed, attention, done)
            )
        else:
            self._followers.send_order(encode_order(RunStep(list(step_works), sinks)))
            self.prepare_seconds = time.perf_counter() - began_s
            try:
                logits = self._forward_step(
                    step_works, sinks, lambda: self._decoder.forward(packed, attention, None)
                )
            finally:
                # Also after a failure, so that the other ranks are ready for the next step.
                replies = self._followers.wait_for_replies()
            if replies.error is not None:
                raise replies.error
            if done is not None:
                done(self._decoder.config.layers)
        assert logits is not None
        self._sink_slots.keep(sinks)
        return list(torch.split(logits[: sum(counts)], counts))

    @property
    def can_evict(self) -> bool:
        """As `EvictingRunner.can_evict`."""
        return self._evicts

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        """As `EvictingRunner.plan_eviction`, which says when ValueError is raised."""
        pool, _ = self._find_evictor(order.slabs)
        sinks = self._sink_slots.plan(order.tokens[:1]) if pool.has_sinks else SinkPlan()
        (first, *others) = self._evict_on_ranks(PlanEviction(order, sinks))
        self._sink_slots.keep(sinks)
        if not others:
            return first
        config, placement = self._decoder.config, self._decoder.placement
        whole = replace(pool.bounds.layout, layers=config.layers, kv_heads=config.kv_heads)
        return merge_reports([first, *others], whole, placement.tp, placement.pp)

    def apply_eviction(self, key: str, bag_slabs: list[int]) -> None:
        """As `EvictingRunner.apply_eviction`, which says when ValueError is raised."""
        self._evict_on_ranks(ApplyEviction(key, bag_slabs))

    def load_kept(self, key: str, boundary: int, length: int, bag_slabs: list[int]) -> None:
        """As `EvictingRunner.load_kept`, which says when ValueError is raised."""
        self._evict_on_ranks(LoadKept(key, boundary, length, bag_slabs))

    def forget_kept(self, key: str) -> None:
        """As `EvictingRunner.forget_kept`."""
        if self._evicts:
            self._evict_on_ranks(ForgetKept(key))

    def _evict_on_ranks(self, order: KeptOrder) -> list[EvictionReport]:
        """Carry out an order on all ranks; returns the reports that it asks for, by rank."""
        if not isinstance(order, ForgetKept):
            self._find_evictor(_slabs_of(order))
        if self._followers is None:
            return self.evict_part(order)
        self._followers.send_order(encode_order(order))
        try:
            reports = self.evict_part(order)
        finally:
            replies = self._followers.wait_for_replies()
        if replies.error is not None:
            raise replies.error
        return reports + list(replies.reports)

    def evict_part(self, order: KeptOrder) -> list[EvictionReport]:
        """Carry out an order for this rank's heads; returns the report that it asks for, if any.

        Raises ValueError as the method of `EvictingRunner` that the order is named after.
        """
        if isinstance(order, ForgetKept):
            for one in self._attentions:
                if one.evictor is not None:
                    one.evictor.forget_sequence(order.key)
            return []
        slabs = _slabs_of(order)
        pool, evictor = self._find_evictor(slabs)
        mine = [slab - pool.first for slab in slabs]
        match order:
            case PlanEviction(asked, sinks):
                failure = self._compute_sinks(sinks)
                if failure is not None:
                    raise failure
                return [evictor.plan_eviction(asked, mine, sinks.slots[0] if sinks.slots else 0)]
            case ApplyEviction(key):
                evictor.apply_eviction(key, mine)
            case LoadKept(key, boundary, length):
                evictor.load_kept(key, boundary, length, mine)
        return []

    def _find_evictor(self, slabs: Sequence[int]) -> tuple[PoolAttention, CpuEvictor]:
        """The pool that slabs are in, and its evictor. Raises ValueError if it has none."""
        pool = self._attentions[self._pool_index(slabs)]
        if pool.evictor is None:
            raise ValueError("nothing is evicted from this pool: that takes the tokens' kinds")
        return pool, pool.evictor

    def part(self, step_works: Sequence[StepWork], sinks: SinkPlan) -> None:
        """Compute this rank's shard of a step of rank 0. An error is raised after all ranks have finished the step."""

        def forward() -> torch.Tensor | None:
            works, chosen = self._localise_works(step_works)
            return self._decoder.forward(*self._pack_works(works, chosen, sinks), None)

        self._forward_step(step_works, sinks, forward)

    def _localise_works(self, step_works: Sequence[StepWork]) -> tuple[list[StepWork], list[int]]:
        """The works with slabs numbered within their pools, and the index of each work's pool.

        Raises ValueError if one of them cannot be run.
        """
        chosen = [self._pool_index(work.slabs) for work in step_works]
        works = [
            self._attentions[index].localise(work) for work, index in zip(step_works, chosen, strict=True)
        ]
        for work, index in zip(works, chosen, strict=True):
            self._attentions[index].check_work(work)
        return works, chosen

    def _pool_index(self, slabs: Sequence[int]) -> int:
        """Which pool slabs are in; the first one if in none, whose bounds then refuse them."""
        if len(self._pools) == 1 or not slabs:
            return 0
        slab = min(slabs)
        return next((i for i, pool in enumerate(self._pools) if 0 <= slab - pool.first < pool.num_slabs), 0)

    def _pack_works(
        self, works: Sequence[StepWork], chosen: Sequence[int], sinks: SinkPlan
    ) -> tuple[ForwardBatch, PagedAttention]:
        """The batch of a step, and its attention: that of one pool, or of several."""
        if len(set(chosen)) == 1:
            return self._attentions[chosen[0]].pack_works(works, sinks.slots)
        return pack_groups(works, self._attentions, chosen, sinks.slots)

    def _plan_sinks(self, works: Sequence[StepWork], chosen: Sequence[int]) -> SinkPlan:
        """The sinks that a step needs; none for works in pools without a codec."""
        coded = [self._attentions[index].has_sinks for index in chosen]
        if not any(coded):
            return SinkPlan([0] * len(works)) if len(self._pools) > 1 else SinkPlan()
        tokens = [
            0 if work.sink_token is None else work.sink_token
            for work, kept in zip(works, coded, strict=True)
            if kept
        ]
        plan = self._sink_slots.plan(tokens)
        slots = iter(plan.slots)
        return replace(plan, slots=[next(slots) if kept else 0 for kept in coded])

    def _forward_step(
        self, step_works: Sequence[StepWork], sinks: SinkPlan, forward: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Call `forward` for a step with its exchanges between ranks; the logits are None on ranks without them.

        If sinks are missing, a pass of these tokens alone computes them first. If that or `forward` fails, all
        exchanges are made all the same, so that no rank waits.
        """
        failure = self._compute_sinks(sinks)

        def forward_or_fail() -> torch.Tensor | None:
            if failure is not None:
                raise failure
            return forward()

        with torch.no_grad():
            return self._decoder.communicator.step(forward_or_fail, *count_rows(step_works))

    def _compute_sinks(self, sinks: SinkPlan) -> Exception | None:
        """Compute the missing sinks in a pass of their own; returns its exception, if it failed."""
        if not sinks.missing:
            return None
        decoder, slots = self._decoder, [slot for slot, _ in sinks.missing]
        works = [StepWork([token], 0, [0], "none") for _, token in sinks.missing]

        def forward() -> torch.Tensor | None:
            recorder = SinkRecorder(self.layout, decoder.heads, self._sinks, slots)
            return decoder.forward(pack_batch(works), recorder)

        try:
            with torch.no_grad():
                decoder.communicator.step(forward, *count_rows(works))
        except Exception as error:
            return error
        return None

    def list_eviction_kernels(self) -> list[Any]:
        """The kernels that nothing but eviction uses, of all pools; none if this runner does not evict."""
        evictors = [one.evictor for one in self._attentions if one.evictor is not None]
        return [kernel for evictor in evictors for kernel in evictor.list_kernels()]

    def warm(self, evict: bool = True) -> None:
        """Compile the kernels and touch the weights: run a short prefill, a decode, and decodes that share a chunk.

        With `evict`, a runner that evicts also evicts a short prompt, and decodes behind it.
        """
        for pool, attention in zip(self._pools, self._attentions, strict=True):
            self._warm_pool(pool)
            if evict and attention.evictor is not None and pool.num_slabs > 1:
                self._warm_eviction(pool)

    def _warm_eviction(self, pool: KvPool) -> None:
        owner, spec, tokens = "warm", KeepSpec(0.5), [0] * min(CHUNK_TOKENS // 2, self.max_model_len - 1)
        slabs = pool.take_slabs(1, owner)
        try:
            kept = KeptWork(owner, len(tokens), spec, evicted=False)
            self.run([StepWork(tokens, 0, slabs, "none", 0, kept)])
            report = self.plan_eviction(EvictionOrder(owner, tokens, len(tokens), spec, slabs))
            # The plan has a copy of the rows, so that the prompt's slab becomes the ring.
            slabs += pool.take_slabs(report.bag_slabs, owner)
            self.apply_eviction(owner, slabs[1:])
            self.run([StepWork([0], len(tokens), slabs, "last", 0, replace(kept, evicted=True))])
            block = [0] * CHUNK_TOKENS
            if len(tokens) + len(block) < self.max_model_len:
                # The second decision reads frames.
                self.run([StepWork(block, len(tokens), slabs, "last", 0, replace(kept, evicted=True))])
                self.plan_eviction(EvictionOrder(owner, tokens + block, len(tokens), spec, slabs))
        finally:
            self.forget_kept(owner)
            pool.give_back(slabs, owner)

    def _warm_pool(self, pool: KvPool) -> None:
        tokens = min(CHUNK_TOKENS + 8, self.max_model_len - 2)
        owner = "warm"
        slabs = pool.take_slabs(self.layout.num_chunks(tokens + 2), owner)
        try:
            self.run([StepWork([0] * tokens, 0, slabs, "last")])
            self.run([StepWork([0], tokens, slabs, "last", 0)])
            # All these rows write to the same slab; they are equal, so they store equal KV.
            self.run([StepWork([0], tokens + 1, slabs, "last", 0)] * CHUNK_TOKENS)
        finally:
            pool.give_back(slabs, owner)


def _slabs_of(order: PlanEviction | ApplyEviction | LoadKept) -> list[int]:
    """The slabs that an order is about."""
    return order.order.slabs if isinstance(order, PlanEviction) else order.bag_slabs
