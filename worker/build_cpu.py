"""Builds an engine from a worker's specification: model files, KV pools, ranks, model runner and sampler."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diptych.kernels.cache import kernel_source_stamp, machine_kernel_folder
from diptych.process import SupervisorPipe, exit_fatally
from diptych.specs import WorkerSpec
from engine.bulk.budget import BulkTime
from engine.bulk.engine import BulkEngine
from engine.cpu import attention, matmul
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.ranks.tensor_parallel import RankPlacement
from engine.cpu.weights.decoder_weights import OnPacked
from engine.loop import Engine
from engine.model.calibration_file import calibration_path, load_surrogate
from engine.model.checkpoint import Checkpoint
from engine.model.tokenizer import ModelTokenizer, read_token_kinds
from engine.protocols import StepObserver
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree
from kvcache.tiers.host import HostArenas, HostTier
from kvtransfer.resharding import PoolArena, ShardedPool
from kvtransfer.shared_memory import SharedMemory
from worker.eviction_kernels import EvictionKernels
from worker.ranks import RankClass, RankEviction, RankProcesses, RankSpec, load_leader
from worker.resolve_model import (
    ResolvedModel,
    engine_limits,
    load_grammar_tokens,
    load_tokenizer,
    max_evicting,
)
from worker.role_tuning import choose_step_clock, computes_in_one_thread
from worker.saturation_store import SaturationStore
from worker.unit_thread import UnitThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a role works with: the engines, the allocator of their KV slabs, and the pools of all ranks."""

    engine: Engine
    # Does bulk work beside `engine`.
    bulk: BulkEngine
    kv: KvAllocator | KvArenas
    pool: ShardedPool
    # The processes of the other ranks; None if the worker has one rank.
    ranks: RankProcesses | None
    # The KV classes in which the engine can evict, and the rules by which it can.
    keep_classes: tuple[str, ...] = ()
    keep_rules: tuple[str, ...] = ()
    # What evicts, if that is not loaded at the start.
    eviction_kernels: EvictionKernels | None = None

    def start_later(self) -> None:
        """The worker serves: begin with what the start did not need."""
        if self.eviction_kernels is not None:
            self.eviction_kernels.start()

    def close(self) -> None:
        """End the other ranks, and what was begun after the start."""
        if self.eviction_kernels is not None:
            self.eviction_kernels.close()
        if self.ranks is not None:
            self.ranks.close()


def build_engine(
    spec: WorkerSpec,
    model: ResolvedModel,
    memories: Sequence[SharedMemory],
    supervisor: SupervisorPipe,
    observer: StepObserver | None = None,
) -> EngineParts:
    """Load the weights, warm up, and put the engine together over `memories`, one per rank.

    `supervisor` reports the progress to the supervisor. `observer` is notified of every step that the engine runs.

    Raises:
        ModelError: the checkpoint cannot be read.
        StartError: a rank could not start.
    """
    pool = ShardedPool(
        model.layout,
        [(shard, memory.view) for shard, memory in zip(model.shards, memories, strict=True)],
        model.sized_layouts,
    )
    # By KV class, then by rank.
    pools = [_class_pools(pool, arena) for arena in pool.arenas]
    kv = _build_arenas(pools, spec.prefix_caching)
    ranks = RankProcesses(spec.worker, partial(exit_fatally, supervisor)) if len(memories) > 1 else None
    tokenizer, packed = load_tokenizer(model.checkpoint.path), partial(supervisor.report_progress, "load")
    eviction = _eviction_setup(spec, model, tokenizer) if _has_eviction_memory(spec, model) else None
    try:
        if ranks is None:
            runner = _load_single(model, [by_rank[0] for by_rank in pools], eviction, packed)
        else:
            runner = load_leader(_leader_spec(spec, model, eviction), model.shards, memories, ranks, packed)
        sampler = Sampler(runner.vocab_size, load_grammar_tokens(model.checkpoint.path, tokenizer))
        supervisor.report_progress("load")
        supervisor.report_progress("warm", 0)
        runner.warm(evict=not _evicts_later(spec))
        sampler.warm()
        scheduler = Scheduler(engine_limits(spec, model))
        supervisor.report_progress("warm")
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    host = _build_host(pools, model, spec.swap_bytes) if spec.swap_bytes else None
    engine = Engine(runner, scheduler, kv, sampler, host, observer)
    alone = UnitThread() if computes_in_one_thread(spec) else None
    bulk = BulkEngine(runner, scheduler.limits, kv, sampler, _bulk_time(spec), choose_step_clock(spec), alone)
    kernels = None
    if eviction is not None and _evicts_later(spec):
        kernels = EvictionKernels(_leader_spec(spec, model, None), runner.rank_evictor.list_kernels)
        engine.decisions.preparation = bulk.decisions.preparation = kernels
    keeps = (model.kv_classes, eviction.rules) if eviction else ((), ())
    return EngineParts(engine, bulk, kv, pool, ranks, *keeps, kernels)


def _evicts_later(spec: WorkerSpec) -> bool:
    """Whether only a request can ask for eviction, so that its kernels are not needed at the start.

    Without a folder for kernels no other process can compile them.
    """
    return spec.kv_keep >= 1 and machine_kernel_folder() is not None


def _load_single(
    model: ResolvedModel, pools: Sequence[KvPool], eviction: EvictionSetup | None, packed: OnPacked
) -> CpuModelRunner:
    """The runner of a worker with one rank, over its pools by KV class. Raises ModelError."""
    return CpuModelRunner.load(
        model.checkpoint,
        pools[0],
        model.plan.max_model_len,
        model.calibration,
        model.plan.sink_slots,
        [(pool, one.calibration) for pool, one in zip(pools[1:], model.classes[1:], strict=True)],
        eviction=eviction,
        prepared=machine_kernel_folder(),
        packed=packed,
    )


def _class_pools(pool: ShardedPool, arena: PoolArena) -> list[KvPool]:
    """The pool of one KV class on each rank."""
    pools = []
    for rank, (shard, memory) in enumerate(zip(pool.shards, pool.memories, strict=True)):
        at, span = arena.span.offsets[rank], arena.span
        view = memory[at : at + span.num_slabs * arena.slab_bytes[rank]]
        pools.append(KvPool(arena.layout.shard_layout(shard), span.num_slabs, view, span.first))
    return pools


def _build_arenas(pools: Sequence[Sequence[KvPool]], caching: bool) -> KvAllocator | KvArenas:
    """The books of all classes, kept on rank 0; with one class its allocator alone."""
    arenas = {
        by_rank[0].layout.kv_class: KvAllocator(by_rank[0], PrefixTree() if caching else None)
        for by_rank in pools
    }
    return KvArenas(arenas) if len(arenas) > 1 else next(iter(arenas.values()))


def _build_host(
    pools: Sequence[Sequence[KvPool]], model: ResolvedModel, swap_bytes: int
) -> HostTier | HostArenas:
    """The host tier; with several classes each has the share of it that it has of the pool."""
    tiers = {
        by_rank[0].layout.kv_class: HostTier(by_rank, int(swap_bytes * one.share), by_rank[0].first)
        for by_rank, one in zip(pools, model.classes, strict=True)
    }
    return HostArenas(tiers) if len(tiers) > 1 else next(iter(tiers.values()))


def _leader_spec(spec: WorkerSpec, model: ResolvedModel, eviction: EvictionSetup | None) -> RankSpec:
    """The specification of rank 0, from which those of the other ranks are derived."""
    return RankSpec(
        worker=spec.worker,
        placement=RankPlacement(0, spec.tp, spec.pp),
        shard=model.shards[0],
        config=model.checkpoint.config,
        weights={name: str(path) for name, path in model.checkpoint.weights.items()},
        prepared=_prepared_source(model.checkpoint),
        dtype=model.dtype,
        classes=_rank_classes(spec, model),
        sink_slots=model.plan.sink_slots,
        eviction=None if eviction is None else RankEviction.of(eviction),
        max_model_len=model.plan.max_model_len,
        core=spec.core,
        threads=spec.threads,
        log_level=spec.log_level,
        log_format=spec.log_format,
    )


def _prepared_source(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """The folder of prepared files, and the identity of the weights; None if there is no such folder."""
    folder = machine_kernel_folder()
    return None if folder is None else (str(folder), checkpoint.packing_identity())


def _rank_classes(spec: WorkerSpec, model: ResolvedModel) -> tuple[RankClass, ...]:
    """The KV classes as the ranks get them: each rank reads the calibrations itself, from the same file."""
    classes = []
    for one, num_slabs in zip(model.classes, model.class_slabs, strict=True):
        source = None
        if one.calibration is not None:
            path = calibration_path(model.checkpoint, spec.kv_cache_calibration)
            source = (str(path), one.calibration.model)
        classes.append(RankClass(num_slabs, one.codec, source))
    return tuple(classes)


def _has_eviction_memory(spec: WorkerSpec, model: ResolvedModel) -> bool:
    """Whether there is memory for a sequence that evicts; if not, that is logged."""
    if max_evicting(spec, model):
        return True
    log.warning("no KV can be evicted: too little memory is left beside the KV pool (docs/eviction.md)")
    return False


def _bulk_time(spec: WorkerSpec) -> BulkTime:
    """How long bulk work may take."""
    return BulkTime(spec.bulk_slice_ms / 1000, spec.bulk_tpot_s)


def open_saturation_store(spec: WorkerSpec, model: ResolvedModel, fingerprint: str) -> SaturationStore:
    """The file in which the measured saturation of such a worker is kept between starts."""
    split = (spec.tp, spec.pp, spec.threads, *_machine_identity())
    lengths = (spec.max_num_batched_tokens, model.plan.max_model_len, model.class_slabs[0])
    return SaturationStore(machine_kernel_folder(), fingerprint, *split, *lengths, model.codec)


def _machine_identity() -> tuple[object, ...]:
    """What the speed of steps depends on besides the model: the kernels' sources, the cores, and the machine's boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return (kernel_source_stamp(matmul), kernel_source_stamp(attention), len(os.sched_getaffinity(0)), boot)


def _eviction_setup(
    spec: WorkerSpec, model: ResolvedModel, tokenizer: ModelTokenizer | None
) -> EvictionSetup | None:
    """What a worker's runner needs to evict KV; None without a tokenizer."""
    if tokenizer is None:
        return None
    surrogate = load_surrogate(model.checkpoint, spec.kv_cache_calibration)
    kinds = read_token_kinds(tokenizer, model.checkpoint.config.vocab)
    return EvictionSetup(kinds, surrogate=surrogate)
