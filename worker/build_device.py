"""Builds an engine whose model and KV are on a GPU, or on the emulated device: CPU tensors, and all else as on a GPU.

    resolve ─▶ [weights on the device] ─▶ [largest step measured] ─▶ pool ─▶ runner, sampler, transfer buffer ─▶ engine

No worker on a CPU imports this module.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace

import torch

from diptych.errors import ConfigError
from diptych.kernels.cache import kernel_source_stamp, machine_kernel_folder
from diptych.process import SupervisorPipe
from diptych.specs import EMULATED, WorkerSpec
from engine.batching.sink_slots import DEFAULT_SLOTS
from engine.bulk.budget import BulkTime
from engine.bulk.engine import BulkEngine
from engine.gpu import model_runner
from engine.gpu.decoder import GpuDecoder
from engine.gpu.largest_step import CudaMeter, MemoryMeter, measure_needs
from engine.gpu.model_runner import GpuModelRunner, load_kernels
from engine.gpu.sampler import DeviceSampler
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.device_plan import (
    CONTEXT_BYTES,
    DeviceNeeds,
    DeviceShare,
    check_device_dtype,
    device_dtype,
    plan_device_memory,
    predict_needs,
)
from engine.model.device_step import list_graph_rows
from engine.model.kv_codec import check_device_codec, resolve_kv_classes, split_ranks
from engine.model.memory_plan import (
    AUTO_POOL_REQUESTS,
    MemoryPlan,
    available_memory,
    format_bytes,
    plan_max_length,
)
from engine.model.weights import WeightReader
from engine.protocols import StepObserver
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from kvcache.allocator import KvAllocator
from kvcache.device.copies import DirectCopies, SlabCopies
from kvcache.device.pool import DevicePool
from kvcache.device.stream_copies import open_stream_copies
from kvcache.layout import KvLayout
from kvcache.prefix_tree import PrefixTree
from kvcache.tiers.host import HostTier
from kvtransfer.transfer_buffer import TransferBuffer, min_buffer_bytes
from worker.resolve_model import ResolvedModel, engine_limits, load_grammar_tokens, load_tokenizer
from worker.saturation_store import SaturationStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedDevice:
    """The device of a worker: its name for people, and the worker's share of its memory."""

    device: torch.device
    name: str
    share: DeviceShare
    # Measures what this process holds of it; None: what steps take is reckoned.
    meter: MemoryMeter | None = None

    @property
    def emulated(self) -> bool:
        """Whether it is the emulated device."""
        return self.name == EMULATED


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What a role works with: the engines, the allocator of the device's slabs, and how KV comes and goes."""

    engine: Engine
    # Does bulk work beside `engine`.
    bulk: BulkEngine
    kv: KvAllocator
    # The host memory through which KV is handed over.
    buffer: TransferBuffer
    # Between the device's pool and the buffer.
    copies: SlabCopies

    def close(self) -> None:
        """End the copies. `run_worker` closes the buffer's memory afterwards."""
        self.copies.close()


def open_device(spec: WorkerSpec, dtype: str) -> OpenedDevice:
    """The device of a worker whose weights have the type `dtype`.

    Raises:
        ConfigError: torch was built without CUDA, there is no driver or GPU, or the GPU lacks the type.
    """
    if spec.device == EMULATED:
        total = spec.emulated_bytes or available_memory() // 2
        share = DeviceShare(total, spec.gpu_memory_utilization, spec.gpu_workers, 0)
        return OpenedDevice(torch.device("cpu"), EMULATED, share)
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        why = "torch was built without CUDA" if torch.version.cuda is None else f"torch sees no GPU{seen}"
        fix = "see what nvidia-smi shows and for which CUDA torch was built, or use --device cpu"
        raise ConfigError("there is no device 'cuda' here", why, fix)
    found = torch.cuda.get_device_properties(0)
    check_device_dtype(dtype, found.name, (found.major, found.minor))
    share = DeviceShare(found.total_memory, spec.gpu_memory_utilization, spec.gpu_workers, CONTEXT_BYTES)
    device = torch.device("cuda", 0)
    return OpenedDevice(device, found.name, share, CudaMeter(device))


def resolve_device_model(spec: WorkerSpec) -> tuple[ResolvedModel, OpenedDevice]:
    """Find the model and check by arithmetic that it fits on the device. No weights are read yet.

    Raises:
        ConfigError: there is no such device, it lacks the dtype, or the specification asks for what workers on a
            device do not do.
        ModelError: the model is not found, not supported, or does not fit on the device together with the KV of one
            request of `max_model_len` tokens; or its calibration cannot be read.
    """
    _check_served(spec)
    dtype = device_dtype(spec.dtype)
    opened = open_device(spec, dtype)
    torch.set_num_threads(spec.threads)
    checkpoint = Checkpoint.resolve(spec.model, spec.revision)
    classes = resolve_kv_classes(checkpoint, spec.kv_cache_codec, spec.kv_cache_calibration)
    if len(classes) > 1:
        why = f"--kv-cache-codec {spec.kv_cache_codec} names several"
        raise ConfigError("the pool of a worker on a GPU has one codec", why, "name one")
    check_device_codec(classes[0].codec)
    shards = split_ranks(checkpoint, classes, 1, 1)
    plan = _plan_pool(spec, checkpoint, opened, checkpoint.layout(dtype, classes[0].codec))
    return ResolvedModel(checkpoint, plan, dtype, shards, classes, (plan.num_slabs,)), opened


def _check_served(spec: WorkerSpec) -> None:
    """Raises ConfigError for what a worker on a device does not do."""
    refused = {
        "tensor and pipeline parallelism": spec.tp * spec.pp > 1,
        "eviction": spec.kv_keep < 1,
        "bulk workers": spec.bulk_only,
    }
    for name, asked in refused.items():
        if asked:
            what = f"there are no {name} on a GPU" if name.endswith("s") else f"there is no {name} on a GPU"
            raise ConfigError(what, "a worker computes on one GPU (docs/gpu.md)", "use --device cpu")
    if spec.max_num_seqs > spec.max_num_batched_tokens:
        raise ConfigError(
            f"a step of {spec.max_num_batched_tokens} tokens is too small for {spec.max_num_seqs} requests",
            "every running request may decode one token in it",
            f"use --max-num-batched-tokens {spec.max_num_seqs} or more, or a smaller --max-num-seqs",
        )


def _plan_pool(
    spec: WorkerSpec,
    checkpoint: Checkpoint,
    opened: OpenedDevice,
    layout: KvLayout,
    measured: DeviceNeeds | None = None,
) -> MemoryPlan:
    """The pool beside what was measured, or by arithmetic. Raises ModelError if it does not fit."""
    config = checkpoint.config
    length = plan_max_length(checkpoint.name, config, spec.max_model_len)
    needs = measured or predict_needs(
        config, layout, length, step_tokens=spec.max_num_batched_tokens, step_rows=spec.max_num_seqs
    )
    asked = spec.kv_bytes_asked or opened.emulated
    return plan_device_memory(
        checkpoint.name,
        config,
        layout,
        opened.share,
        needs,
        max_model_len=spec.max_model_len,
        kv_bytes=spec.kv_bytes if asked else None,
        max_requests=AUTO_POOL_REQUESTS if opened.emulated else None,
    )


def build_device_engine(
    spec: WorkerSpec,
    model: ResolvedModel,
    opened: OpenedDevice,
    supervisor: SupervisorPipe,
    observer: StepObserver | None = None,
) -> DeviceParts:
    """Load the weights onto the device, plan the pool with what is left, warm up, and put the engine together.

    `supervisor` reports the progress to the supervisor. `observer` is notified of every step that the engine runs.
    Raises:
        ModelError: the checkpoint cannot be read, or the pool that was asked for does not fit beside it.
    """
    decoder = _load_decoder(model, opened)
    supervisor.report_progress("load")
    supervisor.report_progress("warm", 0)
    tokenizer = load_tokenizer(model.checkpoint.path)
    grammar_tokens = load_grammar_tokens(model.checkpoint.path, tokenizer)
    sampler = DeviceSampler(Sampler(decoder.config.vocab, grammar_tokens), opened.device)
    if opened.meter is not None:
        model = _plan_anew(spec, model, opened, decoder, sampler, opened.meter)
    pool = DevicePool(model.layout, model.num_slabs, opened.device)
    runner = _open_runner(model, decoder, pool)
    runner.warm(list_graph_rows(spec.max_num_seqs))
    sampler.warm()
    least = min_buffer_bytes(model.layout, model.plan.max_model_len)
    buffer = TransferBuffer(model.layout, spec.transfer_buffer_bytes or least)
    copies = _open_copies(pool, buffer, opened)
    supervisor.report_progress("warm")
    kv = KvAllocator(pool, PrefixTree() if spec.prefix_caching else None)
    scheduler = Scheduler(engine_limits(spec, model))
    host = HostTier((), spec.swap_bytes, storages=[pool]) if spec.swap_bytes else None
    engine = Engine(runner, scheduler, kv, sampler, host, observer)
    bulk = BulkEngine(
        runner,
        scheduler.limits,
        kv,
        sampler,
        BulkTime(spec.bulk_slice_ms / 1000, spec.bulk_tpot_s),
        time.monotonic,
    )
    return DeviceParts(engine, bulk, kv, buffer, copies)


def _open_copies(pool: DevicePool, buffer: TransferBuffer, opened: OpenedDevice) -> SlabCopies:
    """What copies KV between the pool and the buffer."""
    if opened.device.type == "cpu":
        return DirectCopies(pool, buffer.memory.view)
    return open_stream_copies(pool, buffer.memory.view)


def _open_runner(model: ResolvedModel, decoder: GpuDecoder, pool: DevicePool) -> GpuModelRunner:
    """What runs steps over a pool."""
    return GpuModelRunner(
        decoder,
        model.layout,
        pool.data,
        model.plan.max_model_len,
        calibration=model.calibration,
        sink_slots=model.plan.sink_slots or DEFAULT_SLOTS,
    )


def _plan_anew(
    spec: WorkerSpec,
    model: ResolvedModel,
    opened: OpenedDevice,
    decoder: GpuDecoder,
    sampler: DeviceSampler,
    meter: MemoryMeter,
) -> ResolvedModel:
    """The model with the pool that fits beside loaded weights and the largest steps, which are measured.

    Raises:
        ModelError: the pool that was asked for, or one request of full length, does not fit.
    """
    weight_bytes, step_bytes = measure_needs(
        lambda: _open_runner(model, decoder, DevicePool(model.layout, 1, opened.device)),
        sampler,
        meter,
        tokens=spec.max_num_batched_tokens,
        rows=spec.max_num_seqs,
    )
    # Tables beside a coded pool were there while the steps ran.
    needs = DeviceNeeds(weight_bytes, step_bytes, model.plan.sink_slots)
    plan = _plan_pool(spec, model.checkpoint, opened, model.layout, needs)
    log.info(
        "%s: %s of weights and %s of steps were measured (%s and %s reckoned), so the pool has %s",
        opened.name,
        *map(
            format_bytes,
            (weight_bytes, step_bytes, model.plan.weight_bytes, model.plan.step_bytes, plan.kv_bytes),
        ),
    )
    return replace(model, plan=plan, class_slabs=(plan.num_slabs,))


def _load_decoder(model: ResolvedModel, opened: OpenedDevice) -> GpuDecoder:
    """The model on the device. Raises ModelError if the checkpoint cannot be read."""
    with torch.no_grad(), WeightReader(model.checkpoint.weights) as weights:
        return GpuDecoder(
            model.checkpoint.config,
            weights,
            model.plan.max_model_len,
            opened.device,
            getattr(torch, model.dtype),
            load_kernels(opened.emulated),
        )


def open_device_saturation(
    spec: WorkerSpec, model: ResolvedModel, opened: OpenedDevice, fingerprint: str
) -> SaturationStore:
    """The file in which the measured saturation of such a worker is kept between starts."""
    stamp, lengths = (
        kernel_source_stamp(model_runner),
        (spec.max_num_batched_tokens, model.plan.max_model_len),
    )
    return SaturationStore(
        machine_kernel_folder(), fingerprint, opened.name, stamp, *lengths, model.num_slabs, model.codec
    )
