"""The worker that serves: a model's weights, its pools and its engine, as `services.worker.compose.run` takes them."""

from __future__ import annotations

from collections.abc import Callable

from diptych.config import WorkerSpec
from kvtransfer.memory import SharedMemory
from services.worker.compose import Built
from services.worker.steps import Recorded, StepLog
from worker.build import Tuning, find, make_engine
from worker.start import Voice


def build(spec: WorkerSpec, voice: Voice) -> Built:
    """Find the model, make its pools, load it and warm it up.

    Raises:
        ConfigError: the device, the dtype or so many ranks are not to be had here.
        ModelError: the model is not found, not supported, cannot be split like this, or does not fit.
        StartError: a rank could not start.
    """
    found = find(spec)
    memories = [SharedMemory(size) for size in found.sizes]
    body = make_engine(spec, found, memories, voice)
    fingerprint, identity = found.files.fingerprint(found.dtype)
    engine, close = body.engine, body.close
    suit: Callable[[str], None] = Tuning(engine, body.holdings).suit
    if spec.step_log:
        recorded = Recorded.of(engine, StepLog(spec.step_log, spec.worker))
        engine, close, suit = recorded, _then(recorded.log.close, close), _told(recorded, spec.worker, suit)
    return Built(
        engine=engine,
        holdings=body.holdings,
        parts=body.pool,
        memories=memories,
        fingerprint=fingerprint,
        identity=identity,
        max_model_len=found.plan.max_model_len,
        close=close,
        suit=suit,
    )


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _told(engine: Recorded, worker: str, suit: Callable[[str], None]) -> Callable[[str], None]:
    def both(role: str) -> None:
        suit(role)
        engine.suit(worker, role)

    return both
