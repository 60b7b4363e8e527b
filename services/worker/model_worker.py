"""Builds the worker that serves requests: weights, KV pools and engine of a model, for `role_lifecycle.run_worker`."""

from __future__ import annotations

from collections.abc import Callable

from diptych.chunks import RAW_CLASS
from diptych.process import SupervisorPipe
from diptych.specs import WorkerSpec
from engine.scheduling.scheduler import Scheduler
from kvcache.class_shares import split_auto
from kvtransfer.shared_memory import SharedMemory
from services.worker.role_lifecycle import WorkerParts
from services.worker.step_log import StepLog, StepRecorder
from worker.build_cpu import build_engine, open_saturation_store
from worker.resolve_model import resolve_model
from worker.role_tuning import RoleTuning, choose_step_clock


def build_worker(spec: WorkerSpec, supervisor: SupervisorPipe) -> WorkerParts:
    """Find the model, allocate its KV pools, load the weights and warm up.

    Raises:
        ConfigError: this machine lacks the device, the dtype or enough cores for the ranks.
        ModelError: the model is not found, not supported, cannot be split this way, or does not fit.
        StartError: a rank could not start.
    """
    found = resolve_model(spec)
    memories = [SharedMemory(size) for size in found.pool_sizes]
    recorder = StepRecorder(StepLog(spec.step_log, spec.worker)) if spec.step_log else None
    body = build_engine(spec, found, memories, supervisor, recorder)
    fingerprint, identity = found.checkpoint.fingerprint(found.dtype)
    close = body.close
    suit: Callable[[str], None] = RoleTuning(
        body.engine, body.kv, open_saturation_store(spec, found, fingerprint), choose_step_clock(spec)
    ).tune_for
    if recorder is not None:
        close = _run_both(recorder.log.close, close)
        suit = _tune_and_log(suit, recorder, spec.worker, body.engine.scheduler)
    return WorkerParts(
        engine=body.engine,
        bulk=body.bulk,
        kv=body.kv,
        pool=body.pool,
        memories=memories,
        fingerprint=fingerprint,
        identity=identity,
        max_model_len=found.plan.max_model_len,
        close=close,
        tune_for=suit,
        kv_losses={one.codec or RAW_CLASS: one.loss_pct for one in found.classes if one.loss_pct is not None},
        kv_auto=split_auto(spec.kv_cache_codec)[0],
        keep_classes=body.keep_classes,
        start_later=body.start_later,
    )


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
