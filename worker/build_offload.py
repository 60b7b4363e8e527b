"""Builds the block engine of a worker that only does bulk work: its policy, its files, its engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch

from diptych.chunks import RAW_CLASS
from diptych.errors import StartError
from diptych.kernels.cache import machine_kernel_folder
from diptych.process import SupervisorPipe
from diptych.specs import WorkerSpec
from engine.cpu.offload.loading import BlockFiles, load_block, measure_model, prepare_weights
from engine.cpu.offload.runner import CpuOffloadRunner
from engine.cpu.offload.weight_stream import open_index
from engine.cpu.weights.decoder_weights import OnPacked, ignore_progress
from engine.cpu.weights.prepared_name import free_disk_bytes
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.model.memory_plan import available_memory, plan_max_length, return_large_blocks
from engine.offload.block_admission import BlockAdmission
from engine.offload.engine import OffloadEngine
from engine.offload.policy import BlockPolicy, default_policy, names_shape, parse_policy
from engine.offload.sizes import BlockModel, fit_policy, trim_policy
from engine.sampling.sampler import Sampler
from worker.resolve_model import load_grammar_tokens, load_tokenizer

# The shares of the memory and the disk there is that blocks may take, unless the caps say otherwise.
MEMORY_SHARE, DISK_SHARE = 0.8, 0.5
# Lines that may wait at the worker, for each one in its block.
WAITING_SHARE = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OffloadParts:
    """What a bulk worker works with."""

    checkpoint: Checkpoint
    engine: OffloadEngine
    schedule: BlockAdmission
    runner: CpuOffloadRunner


def build_offload_engine(spec: WorkerSpec, supervisor: SupervisorPipe) -> OffloadParts:
    """Prepare the weights, decide what lies where, and put the engine together.

    Raises:
        ConfigError: a cap is too small, and the error names the least; or the policy or its codec is wrong.
        ModelError: the model is not found, or not supported.
        StartError: the files of bulk work cannot be made.
    """
    torch.set_num_threads(spec.threads)
    checkpoint = Checkpoint.resolve(spec.model, spec.revision)
    length = plan_max_length(checkpoint.name, checkpoint.config, spec.max_model_len)
    files = _find_files(spec, checkpoint, length)
    packed = partial(supervisor.report_progress, "load")
    policy = choose_policy(spec, checkpoint, files, length, packed)
    log.info("the policy of bulk work: %s", policy)
    runner = load_block(checkpoint, policy, files, length, spec.kv_cache_calibration, packed)
    tokenizer = load_tokenizer(checkpoint.path)
    sampler = Sampler(runner.vocab_size, load_grammar_tokens(checkpoint.path, tokenizer))
    supervisor.report_progress("load")
    supervisor.report_progress("warm", 0)
    sampler.warm()
    return_large_blocks()
    supervisor.report_progress("warm")
    schedule = BlockAdmission(policy, length, max_waiting=WAITING_SHARE * policy.sequences)
    engine = OffloadEngine(runner, schedule, sampler, runner.vocab_size, spec.bulk_slice_ms / 1000)
    return OffloadParts(checkpoint, engine, schedule, runner)


def _find_files(spec: WorkerSpec, checkpoint: Checkpoint, length: int) -> BlockFiles:
    """Where the files of bulk work lie, and the caps. Raises StartError if there is no folder."""
    folder = machine_kernel_folder()
    if folder is None:
        why = "its own folder cannot be used; the log says why"
        raise StartError(
            "bulk work has no place for its files", why, "set NUMBA_CACHE_DIR to a private folder"
        )
    memory, disk = spec.bulk_memory_bytes, spec.bulk_disk_bytes
    if memory is None:
        memory = int(MEMORY_SHARE * available_memory())
    if disk is None:
        kind = parse_policy(spec.bulk_policy, default_policy(length)).weight_kind
        disk = int(DISK_SHARE * free_disk_bytes(folder, checkpoint, kind))
    return BlockFiles(folder, folder, memory, disk)


def choose_policy(
    spec: WorkerSpec,
    checkpoint: Checkpoint,
    files: BlockFiles,
    length: int,
    packed: OnPacked = ignore_progress,
) -> BlockPolicy:
    """The policy that was asked for; if it does not name the block's shape, the largest one that fits.

    Of one that was planned, a little less lies in memory if it needs more than was predicted. `packed` is called while
    weights are packed.

    Raises:
        ConfigError: it cannot be read, or not even the smallest block fits.
    """
    asked = parse_policy(spec.bulk_policy, default_policy(length))
    shaped = names_shape(spec.bulk_policy)
    if shaped and not spec.bulk_planned:
        return asked
    codec, _ = resolve_kv_codec(checkpoint, asked.kv_codec or RAW_CLASS, spec.kv_cache_calibration)
    index = open_index(prepare_weights(checkpoint, asked.weight_kind, files.prepared, packed))
    measure = partial(_measure, checkpoint, codec, index, length)
    assert files.memory_bytes is not None and files.disk_bytes is not None
    find_policy = trim_policy if shaped else fit_policy
    return find_policy(measure, asked, files.memory_bytes, files.disk_bytes, length)


def _measure(
    checkpoint: Checkpoint, codec: str, index: object, length: int, policy: BlockPolicy
) -> BlockModel:
    return measure_model(checkpoint, checkpoint.layout(codec=codec), index, policy, length)  # type: ignore[arg-type]
