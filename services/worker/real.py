"""The worker that serves: a model's weights, its pools and its engine, as `services.worker.compose.run` takes them."""

from __future__ import annotations

from diptych.config import WorkerSpec
from kvtransfer.memory import SharedMemory
from services.worker.compose import Built
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
    return Built(
        engine=body.engine,
        holdings=body.holdings,
        parts=body.pool,
        memories=memories,
        fingerprint=fingerprint,
        identity=identity,
        max_model_len=found.plan.max_model_len,
        close=body.close,
        suit=Tuning(body.engine, body.holdings).suit,
    )
