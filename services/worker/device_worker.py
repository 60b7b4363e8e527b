"""Builds the worker that serves requests on a GPU, or on the emulated device, for `role_lifecycle.run_worker`.

`services.worker.model_worker` decides which workers are built here; no other worker imports this module.
"""

from __future__ import annotations

import time

from diptych.chunks import RAW_CLASS
from diptych.process import SupervisorPipe
from diptych.specs import WorkerSpec
from services.worker.role_lifecycle import WorkerParts
from services.worker.step_log import StepRecorder
from worker.build_device import build_device_engine, open_device_saturation, resolve_device_model
from worker.role_tuning import RoleTuning


def build_device_worker(
    spec: WorkerSpec, supervisor: SupervisorPipe, recorder: StepRecorder | None
) -> WorkerParts:
    """Find the model, check that it fits on the device, load it there, and warm up. `recorder` records the steps.

    Raises:
        ConfigError: there is no such device, or it lacks what is asked for.
        ModelError: the model is not found, not supported, or does not fit on the device.
    """
    model, opened = resolve_device_model(spec)
    body = build_device_engine(spec, model, opened, supervisor, recorder)
    fingerprint, identity = model.checkpoint.fingerprint(model.dtype, device_type=spec.device)
    store = open_device_saturation(spec, model, opened, fingerprint)
    return WorkerParts(
        engine=body.engine,
        bulk=body.bulk,
        kv=body.kv,
        pool=body.buffer.pool,
        memories=[body.buffer.memory],
        buffer=body.buffer,
        copies=body.copies,
        fingerprint=fingerprint,
        identity=identity | {"device": opened.name},
        max_model_len=model.plan.max_model_len,
        close=body.close,
        tune_for=RoleTuning(body.engine, body.kv, store, time.monotonic).tune_for,
        kv_losses={one.codec or RAW_CLASS: one.loss_pct for one in model.classes if one.loss_pct is not None},
    )
