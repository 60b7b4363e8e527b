"""Plans the memory of workers on GPUs before any of them is started: on the device, and in the host's memory."""

from __future__ import annotations

import os

import msgspec

from diptych.errors import ConfigError
from diptych.specs import DEFAULT_UTILIZATION, EMULATED
from engine.model.checkpoint import Checkpoint
from engine.model.device_plan import (
    DeviceShare,
    check_device_dtype,
    device_dtype,
    plan_device_memory,
    plan_transfer_buffer,
    predict_needs,
)
from engine.model.kv_codec import check_device_codec
from engine.model.memory_plan import (
    AUTO_POOL_REQUESTS,
    USABLE_SHARE,
    MemoryPlan,
    format_bytes,
    plan_max_length,
)
from services.host.gpus import find_gpus, workers_per_gpu

# Of a worker's share of the host's memory, an emulated device pretends that so much is its own.
EMULATED_SHARE = 0.5


class GpuRequest(msgspec.Struct, frozen=True):
    """What decides whether a model fits on a GPU, beside what `ProbeRequest` has."""

    device: str
    dtype: str
    utilization: float = DEFAULT_UTILIZATION
    # Workers on a GPU, as Ray places them; 0: those of this machine share its GPUs evenly.
    workers: int = 0
    # Size of the transfer buffer; None: automatic.
    buffer_bytes: int | None = None


class GpuShare(msgspec.Struct, frozen=True):
    """What each worker gets, as in `WorkerSpec`."""

    workers: int
    buffer_bytes: int
    emulated_bytes: int = 0


def plan_on_gpu(
    ask: GpuRequest,
    checkpoint: Checkpoint,
    codec: str,
    *,
    max_model_len: int | None,
    kv_bytes: int | None,
    step_tokens: int,
    step_rows: int,
    num_workers: int,
    host_bytes: int,
    swap_bytes: int,
) -> tuple[MemoryPlan, GpuShare]:
    """The plan of one of `num_workers` workers on this machine, whose share of the host's memory is `host_bytes`.

    Raises:
        ConfigError: there is no GPU, or it lacks the type of the weights, or kernels for the codec; or the swap space
            does not fit.
        ModelError: the model, its longest request or the buffer does not fit; with the arithmetic.
    """
    check_device_codec(codec)
    dtype = device_dtype(ask.dtype)
    layout, usable = checkpoint.layout(dtype, codec), int(host_bytes * USABLE_SHARE)
    workers, emulated = 1, 0
    if ask.device == EMULATED:
        emulated = int(usable * EMULATED_SHARE)
        share = DeviceShare(emulated, ask.utilization, 1, 0)
        usable -= emulated
    else:
        # Within a cluster Ray decides which GPUs a process sees, and has said so to this one.
        gpus = find_gpus({} if ask.workers else os.environ)
        for gpu in gpus:
            check_device_dtype(dtype, gpu.name, gpu.capability)
        workers = ask.workers or workers_per_gpu(num_workers, len(gpus))
        # Which of them a worker gets is not known yet.
        share = DeviceShare(min(gpu.total_bytes for gpu in gpus), ask.utilization, workers)
    length = plan_max_length(checkpoint.name, checkpoint.config, max_model_len)
    plan = plan_device_memory(
        checkpoint.name,
        checkpoint.config,
        layout,
        share,
        predict_needs(checkpoint.config, layout, length, step_tokens=step_tokens, step_rows=step_rows),
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
        max_requests=AUTO_POOL_REQUESTS if emulated else None,
    )
    buffer = plan_transfer_buffer(checkpoint.name, layout, length, asked=ask.buffer_bytes, host_bytes=usable)
    if swap_bytes > max(0, usable - buffer):
        left = max(0, usable - buffer)
        raise ConfigError(
            f"a swap space of {format_bytes(swap_bytes)} per worker does not fit in host memory",
            f"beside the transfer buffer of {format_bytes(buffer)}, {format_bytes(left)} are left",
            f"lower --swap-space to {left >> 20}MiB or less",
        )
    return plan, GpuShare(workers, buffer, emulated)
