"""Runs a step on the CPU: takes token ids, returns logits, and stores KV in the slabs of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ModelError
from engine.batching.batch import ForwardBatch, count_rows, pack_batch, split_results
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
from engine.cpu.eviction.rank_eviction import ApplyEviction, ForgetKept, LoadKept, RankEvictor, warm_eviction
from engine.cpu.fused_step import FusedStep, can_fuse
from engine.cpu.ranks.orders import RunStep, carry_out
from engine.cpu.ranks.tensor_parallel import FollowerRanks
from engine.cpu.weights.decoder_weights import OnPacked, SectionReader, ignore_progress, read_weights
from engine.cpu.weights.prepared_folder import PreparedFolder
from engine.model.rope import rope_frequencies
from engine.model.weights import WeightReader
from engine.protocols import EvictionOrder, EvictionReport, OnLayersDone
from engine.step_work import MAX_FUSED_ROWS, RunnerBounds, StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.eviction.kept_segments import KeptSegment
from kvcache.layout import KvLayout, Shard, split_layout
from kvcache.page_codecs import build_page_codecs
from kvcache.pool import KvPool, find_pool

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
        self._compute_sinks = partial(_compute_sinks, decoder, pool.layout, self._sinks)
        shard = shard or Shard((0, pool.layout.layers), (0, pool.layout.kv_heads))
        classes = [(pool, calibration), *others]
        self._pools = [one for one, _ in classes]
        self._frequencies = rope_frequencies(decoder.config.rope, pool.layout.head_dim).double().numpy()
        coded = any(one.layout.codec for one in self._pools)
        # All coded pools together have one table.
        self._angles = build_angles(self._frequencies, max_model_len) if coded else NO_TABLE
        self._attentions = [self._attend_to(one, known, shard, eviction) for one, known in classes]
        self.fused_step = self._fuse_step()
        self.rank_evictor = RankEvictor(
            [one.evictor for one in self._attentions if one.evictor is not None],
            self._split_shards(),
            self._sink_slots,
            self._compute_sinks,
            partial(carry_out, followers),
        )

    def _fuse_step(self) -> FusedStep | None:
        """What computes steps with few rows; None if that is not possible for this decoder."""
        raw = [one.attention for one in self._attentions if isinstance(one.attention, CpuAttention)]
        return FusedStep(self._decoder, raw[0] if raw else None) if can_fuse(self._decoder) else None

    def _split_shards(self) -> Sequence[Shard]:
        """The shards of all ranks."""
        config, placement = self._decoder.config, self._decoder.placement
        whole = replace(self.layout, layers=config.layers, kv_heads=config.kv_heads)
        return split_layout(whole, placement.tp, placement.pp)

    def _attend_to(
        self, pool: KvPool, calibration: Calibration | None, shard: Shard, eviction: EvictionSetup | None
    ) -> PoolAttention:
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
        if eviction is not None:
            evictor = CpuEvictor(
                pool, store, decoder.heads, windows, eviction, alone, shard, self._frequencies
            )
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
        """Compute a step. Returns logits per work, float32 [rows, vocab] with rows = 1, len(tokens) or 0; or a sum of
        hidden states [1, hidden].

        The caller may change the logits. `done` is called with the number of layers whose KV is complete: after each
        layer, or once, when all are. That is so if the step is one call (`engine.cpu.fused_step`), or has several
        ranks, of which none knows how far the others are.

        Raises:
            ValueError: a work is empty, too long, or has too few slabs, or there are more first tokens than the pool's
                table has room for; nothing was computed.
        """
        began_s = time.perf_counter()
        works, chosen = self._localise_works(step_works)
        if not works:
            return []
        sinks = self._plan_sinks(works, chosen)
        packed, attention = self._pack_works(works, chosen, sinks)
        alone = self._followers is None

        def compute() -> torch.Tensor | None:
            self.prepare_seconds = time.perf_counter() - began_s
            reported = done if alone else None
            return self._forward_step(
                step_works, sinks, lambda: self._forward_batch(packed, attention, reported)
            )

        logits, _ = carry_out(self._followers, RunStep(list(step_works), sinks), compute)
        if done is not None and not alone:
            done(self._decoder.config.layers)
        assert logits is not None
        self._sink_slots.keep(sinks)
        return split_results(logits, works, self._decoder.config.hidden)

    def _forward_batch(
        self, batch: ForwardBatch, attention: PagedAttention, done: OnLayersDone | None
    ) -> torch.Tensor | None:
        """As `CpuDecoder.forward`; with fewer calls, where that is possible."""
        if self.fused_step is not None and len(batch.tokens) <= MAX_FUSED_ROWS:
            return self.fused_step.forward(batch, attention, done)
        return self._decoder.forward(batch, attention, done)

    @property
    def can_pool(self) -> bool:
        """Whether works may ask for hidden states: they travel between ranks as logits do."""
        return self._decoder.config.hidden <= self.vocab_size

    @property
    def can_evict(self) -> bool:
        """As `EvictingRunner.can_evict`."""
        return self.rank_evictor.can_evict

    @property
    def keep_rules(self) -> Sequence[str]:
        """As `EvictingRunner.keep_rules`."""
        return self.rank_evictor.keep_rules

    @property
    def cuts_kept(self) -> bool:
        """Whether what is kept of prompts can become segments, as `EvictionOrder.cuts` asks for."""
        return self.rank_evictor.cuts_kept

    def plan_eviction(self, order: EvictionOrder) -> EvictionReport:
        """As `EvictingRunner.plan_eviction`, which says when ValueError is raised."""
        return self.rank_evictor.plan_eviction(order)

    def apply_eviction(self, key: str, bag_slabs: list[int]) -> None:
        """As `EvictingRunner.apply_eviction`, which says when ValueError is raised."""
        self.rank_evictor.evict_on_ranks(ApplyEviction(key, bag_slabs))

    def load_kept(
        self,
        key: str,
        boundary: int,
        length: int,
        bag_slabs: list[int],
        segments: Sequence[KeptSegment] = (),
    ) -> None:
        """As `EvictingRunner.load_kept`, which says when ValueError is raised."""
        self.rank_evictor.evict_on_ranks(LoadKept(key, boundary, length, bag_slabs, tuple(segments)))

    def forget_kept(self, key: str) -> None:
        """As `EvictingRunner.forget_kept`."""
        if self.can_evict:
            self.rank_evictor.evict_on_ranks(ForgetKept(key))

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
        first = self._attentions[0]
        if len(self._pools) == 1 and not first.first:
            for work in step_works:
                first.check_work(work)
            return list(step_works), [0] * len(step_works)
        chosen = [find_pool(self._pools, work.slabs) for work in step_works]
        works = [
            self._attentions[index].localise(work) for work, index in zip(step_works, chosen, strict=True)
        ]
        for work, index in zip(works, chosen, strict=True):
            self._attentions[index].check_work(work)
        return works, chosen

    def _pack_works(
        self, works: Sequence[StepWork], chosen: Sequence[int], sinks: SinkPlan
    ) -> tuple[ForwardBatch, PagedAttention]:
        """The batch of a step, and its attention: that of one pool, or of several."""
        if len(self._pools) == 1 or len(set(chosen)) == 1:
            return self._attentions[chosen[0]].pack_works(works, sinks.slots)
        return pack_groups(works, self._attentions, chosen, sinks.slots)

    def _plan_sinks(self, works: Sequence[StepWork], chosen: Sequence[int]) -> SinkPlan:
        """The sinks that a step needs; none for works in pools without a codec."""
        if len(self._pools) == 1 and not self._attentions[0].has_sinks:
            return SinkPlan()
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

    def warm(self, evict: bool = True) -> None:
        """Compile the kernels and touch the weights: run a short prefill, a decode, and decodes that share a chunk.

        With `evict`, a runner that evicts also evicts a short prompt, and decodes behind it.
        """
        for pool in self._pools:
            self._warm_pool(pool)
            if evict and self.can_evict and pool.num_slabs > 1:
                warm_eviction(self, self.rank_evictor, pool, self.max_model_len)

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


def _compute_sinks(
    decoder: CpuDecoder, layout: KvLayout, table: SinkTable, sinks: SinkPlan
) -> Exception | None:
    """Compute the missing sinks in a pass of their own, into `table`; returns its exception, if it failed."""
    if not sinks.missing:
        return None
    works = [StepWork([token], 0, [0], "none") for _, token in sinks.missing]

    def forward() -> torch.Tensor | None:
        recorder = SinkRecorder(layout, decoder.heads, table, [slot for slot, _ in sinks.missing])
        return decoder.forward(pack_batch(works), recorder)

    try:
        with torch.no_grad():
            decoder.communicator.step(forward, *count_rows(works))
    except Exception as error:
        return error
    return None
