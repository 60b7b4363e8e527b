"""Builds the worker that serves requests: weights, KV pools and engine of a model, for `role_lifecycle.run_worker`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from diptych.channel.keys import load_transfer_key
from diptych.chunks import RAW_CLASS
from diptych.process import SupervisorPipe
from diptych.specs import GPU_DEVICES, WorkerSpec
from engine.prefix_restores import PrefixRestores
from engine.scheduling.scheduler import Scheduler
from kvcache.class_shares import split_auto
from kvtransfer.shared_memory import SharedMemory
from services.worker.role_lifecycle import WorkerParts
from services.worker.step_log import StepLog, StepRecorder
from worker.build_cpu import build_engine, open_saturation_store
from worker.resolve_model import resolve_model
from worker.role_tuning import RoleTuning, choose_step_clock
from worker.tiers.build_tiers import build_tiers


def build_worker(spec: WorkerSpec, supervisor: SupervisorPipe) -> WorkerParts:
    """Find the model, allocate its KV pools, load the weights and warm up, on the CPU or on the device asked for.

    Raises:
        ConfigError: this machine lacks the device, the dtype or enough cores for the ranks.
        ModelError: the model is not found, not supported, cannot be split this way, or does not fit.
        StartError: a rank could not start.
    """
    recorder = StepRecorder(StepLog(spec.step_log, spec.worker)) if spec.step_log else None
    if spec.device in GPU_DEVICES:
        # Imported only here: a worker on the CPU needs nothing of it.
        from services.worker.device_worker import build_device_worker

        parts = build_device_worker(spec, supervisor, recorder)
    else:
        parts = _build_cpu_worker(spec, supervisor, recorder)
    return parts if recorder is None else _with_step_log(spec, parts, recorder)


def _build_cpu_worker(
    spec: WorkerSpec, supervisor: SupervisorPipe, recorder: StepRecorder | None
) -> WorkerParts:
    """The worker on the CPU. Raises as `build_worker`."""
    found = resolve_model(spec)
    memories = [SharedMemory(size) for size in found.pool_sizes]
    body = build_engine(spec, found, memories, supervisor, recorder)
    try:
        tiers = (
            build_tiers(spec, load_transfer_key(spec.keys_dir), body.pool, body.kv)
            if spec.kv_host_bytes
            else None
        )
    except BaseException:
        body.close()
        raise
    if tiers is not None:
        engine, sizes = (
            body.engine,
            {arena.layout.kv_class: arena.layout.chunk_bytes for arena in body.pool.arenas},
        )
        engine.restores = PrefixRestores(engine.kv, tiers, sizes, engine.prefill_rate, engine.note_taken)
    fingerprint, identity = found.checkpoint.fingerprint(found.dtype)
    tuning = RoleTuning(
        body.engine, body.kv, open_saturation_store(spec, found, fingerprint), choose_step_clock(spec)
    )
    return WorkerParts(
        engine=body.engine,
        bulk=body.bulk,
        kv=body.kv,
        pool=body.pool,
        memories=memories,
        fingerprint=fingerprint,
        identity=identity,
        max_model_len=found.plan.max_model_len,
        close=body.close if tiers is None else _run_both(tiers.close, body.close),
        tune_for=tuning.tune_for,
        kv_losses={one.codec or RAW_CLASS: one.loss_pct for one in found.classes if one.loss_pct is not None},
        kv_auto=split_auto(spec.kv_cache_codec)[0],
        keep_classes=body.keep_classes,
        keep_rules=body.keep_rules,
        start_later=body.start_later,
    )


def _with_step_log(spec: WorkerSpec, parts: WorkerParts, recorder: StepRecorder) -> WorkerParts:
    """The parts of a worker whose steps and roles are logged."""
    suit = _tune_and_log(parts.tune_for, recorder, spec.worker, parts.own_engine.scheduler)
    return replace(parts, close=_run_both(recorder.log.close, parts.close), tune_for=suit)


def _run_both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    """A function that calls both functions in order."""

    def both() -> None:
        first()
        second()

    return both


def _tune_and_log(
    suit: Callable[[str], None], recorder: StepRecorder, worker: str, scheduler: Scheduler
) -> Callable[[str], None]:
    """A function that tunes the engine for a role and then writes the role to the step log."""

    def both(role: str) -> None:
        suit(role)
        recorder.log_role(worker, role, scheduler.limits.saturation_tokens)

    return both
