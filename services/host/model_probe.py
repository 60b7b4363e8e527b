"""Finds a model and checks that it fits, before any worker is started. Imports neither torch nor transformers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import msgspec

from diptych.chunks import CHUNK_TOKENS
from diptych.config.options import Config
from diptych.errors import ConfigError, ModelError
from diptych.model_config import CONFIG_FILE
from diptych.specs import GPU_DEVICES, VLLM
from engine.model.checkpoint import (
    CHECKPOINT_FILES,
    DESCRIPTION_FILES,
    Checkpoint,
    find_model,
    find_tokenized,
    is_folder_name,
)
from engine.model.kv_codec import (
    KvClassChoice,
    check_auto,
    expand_auto,
    format_kv_classes,
    largest_codec,
    resolve_kv_classes,
    split_ranks,
)
from engine.model.memory_plan import (
    USABLE_SHARE,
    MemoryPlan,
    available_memory,
    format_bytes,
    plan_max_length,
)
from engine.model.pool_split import split_pool
from engine.sequence import num_chunks
from kvcache.class_shares import split_auto
from kvcache.layout import KvLayout
from kvcache.tiers.tier_checks import TierRequest, check_tiers
from services.host.child_environment import child_environment
from services.host.gpu_probe import GpuRequest, GpuShare, plan_on_gpu
from services.host.held_memory import held_memory, reused_memory, tier_request
from services.host.supervision.supervisor import ErrorReport
from services.host.vllm.probe import VllmRequest, make_vllm_request, plan_on_vllm

# The name of the model that is part of the project.
EMBEDDED_MODEL = "tiny"


class ProbeRequest(msgspec.Struct, frozen=True):
    """Which model to look for, and the settings that decide whether it fits. Sizes are in bytes or tokens."""

    model: str
    revision: str | None
    max_model_len: int | None
    kv_bytes: int | None
    # Number of workers whose memory is planned on this machine; 0 with only a gateway, or with bulk workers.
    num_workers: int
    # (tp, pp) of each role.
    splits: dict[str, tuple[int, int]] = {}
    # Bytes of host memory that each worker may use for parked sequences.
    swap_bytes: int = 0
    # Most tokens of a step.
    step_tokens: int = 512
    # Most rows of a step that need logits.
    step_rows: int = 64
    # How KV is coded, and the file with the codec's constants (`WorkerSpec`).
    kv_cache_codec: str = "raw"
    kv_cache_calibration: str = ""
    # Growth of perplexity, in percent, that classes chosen by the router may cost; None: not set.
    kv_quality_budget: float | None = None
    # Threshold of eviction for all requests that give none (`Config.kv_keep`).
    kv_keep: float = 1.0
    # Whether weights are needed though no memory is planned for them: of bulk workers, which find out what fits.
    weights: bool = False
    # The memory that workers of this deployment hold on this machine is shared anew (`held_memory.WORKER_OF`).
    deployment: str = ""
    # For workers on GPUs; None: they compute on the CPU.
    gpu: GpuRequest | None = None
    # For workers whose engine is vLLM, on any device; `gpu` is None then.
    vllm: VllmRequest | None = None
    # What hosts store of KV below the pools; None: nothing.
    tiers: TierRequest | None = None


class ProbedModel(msgspec.Struct, frozen=True):
    """A model that was found and fits: its folder, and the context length and KV memory that were chosen for it."""

    path: str
    # A short description for the user.
    summary: str
    has_chat_template: bool
    max_model_len: int
    # Bytes of each worker's KV pool; 0 if only a gateway is started.
    kv_bytes: int
    num_layers: int = 0
    # Canonical ids of the codecs of KV, with shares if there are several; empty without one. A worker that finds
    # another calibration later is refused.
    kv_cache_codec: str = ""
    # What each worker on a GPU, or with vLLM, gets; None of others.
    gpu: GpuShare | None = None


class ProbeReply(msgspec.Struct, frozen=True):
    """Either the model that was found, or the error."""

    model: ProbedModel | None = None
    error: ErrorReport | None = None


def probe_model(probe: ProbeRequest) -> ProbedModel:
    """Find a model, and divide this machine's memory among the workers that will load it. No tensor is read.

    Raises:
        ConfigError: this machine has too few cores for the ranks, or KV cannot be coded, or evicted, this way.
        ModelError: the model is not found, incomplete, not supported, cannot be split this way, or does not fit; the
            error shows the memory arithmetic. Or its calibration cannot be read.
    """
    if probe.vllm is not None:
        return _probe_on_vllm(probe, probe.vllm)
    if probe.num_workers == 0:
        return _probe_without_weights(probe)
    checkpoint = Checkpoint.resolve(resolve_embedded(probe.model), probe.revision)
    asked, budget = probe.kv_cache_codec, probe.kv_quality_budget
    codecs = expand_auto(checkpoint, asked, probe.kv_cache_calibration, budget)
    classes = resolve_kv_classes(checkpoint, codecs, probe.kv_cache_calibration)
    check_auto(classes, asked, budget)
    _check_splits(probe, checkpoint, classes)
    _check_eviction(probe, checkpoint)
    if probe.tiers is not None:
        sizes = [checkpoint.layout(codec=one.codec).chunk_bytes for one in classes]
        held, reused = held_memory(probe.deployment), reused_memory(probe.tiers, probe.deployment)
        check_tiers(probe.tiers, max(sizes), available_memory() + held, reused)
    available = _memory_share(probe)
    if probe.gpu is not None:
        return _probe_on_gpu(probe, probe.gpu, checkpoint, classes, available)
    memory = checkpoint.memory(
        max_model_len=probe.max_model_len,
        kv_bytes=probe.kv_bytes,
        codec=largest_codec(checkpoint, classes),
        coded=any(one.codec for one in classes),
        available_bytes=available,
        tp=max((tp for tp, _ in probe.splits.values()), default=1),
        ranks=max((tp * pp for tp, pp in probe.splits.values()), default=1),
        step_tokens=probe.step_tokens,
        step_rows=probe.step_rows,
        evicting_seqs=probe.step_rows if probe.kv_keep < 1 else 0,
    )
    layouts = [checkpoint.layout(codec=one.codec) for one in classes]
    shares = [one.share for one in classes]
    counts = split_pool(checkpoint.name, memory, layouts, shares, asked=probe.kv_bytes is not None)
    for layout, slabs, share in zip(layouts, counts, shares, strict=True):
        _check_evicting_pool(probe, memory, layout, slabs, share)
    _check_swap_space(probe, memory, available)
    return _describe_model(checkpoint, memory, format_kv_classes(classes, codecs))


def _describe_model(
    checkpoint: Checkpoint, memory: MemoryPlan, codecs: str, gpu: GpuShare | None = None
) -> ProbedModel:
    """The answer for a model that fits, with the canonical ids of its codecs."""
    config = checkpoint.config
    # A tied table counts twice in `parameters`.
    again = config.vocab * config.hidden if config.tied else 0
    description = (
        f"{config.architecture.removesuffix('ForCausalLM')}, {(config.parameters - again) / 1e6:,.1f} M parameters, "
        f"context {memory.max_model_len:,}, KV {format_bytes(memory.kv_bytes)} of "
        f"{format_bytes(memory.total_bytes)} per worker"
    )
    return ProbedModel(
        str(checkpoint.path),
        description,
        has_chat_template(checkpoint.path),
        memory.max_model_len,
        memory.kv_bytes,
        config.layers,
        codecs,
        gpu,
    )


def _probe_on_gpu(
    probe: ProbeRequest,
    ask: GpuRequest,
    checkpoint: Checkpoint,
    classes: tuple[KvClassChoice, ...],
    available: int,
) -> ProbedModel:
    """The answer for workers on GPUs; `available` bytes of the host are a worker's. Raises as `probe_model` does."""
    memory, share = plan_on_gpu(
        ask,
        checkpoint,
        classes[0].codec,
        max_model_len=probe.max_model_len,
        kv_bytes=probe.kv_bytes,
        step_tokens=probe.step_tokens,
        step_rows=probe.step_rows,
        num_workers=probe.num_workers,
        host_bytes=available,
        swap_bytes=probe.swap_bytes,
    )
    return _describe_model(checkpoint, memory, classes[0].codec, share)


def _probe_on_vllm(probe: ProbeRequest, ask: VllmRequest) -> ProbedModel:
    """The answer for workers whose engine is vLLM, which decides what it serves. Raises as `probe_model` does.

    Without workers on this machine, vLLM need not be here: the longest context is then what the gateway reads.
    """
    folder = find_tokenized(resolve_embedded(probe.model), probe.revision, bool(probe.num_workers))
    if probe.num_workers == 0:
        chat = has_chat_template(folder)
        return ProbedModel(str(folder), "served by vLLM", chat, probe.max_model_len or 0, 0)
    plan = plan_on_vllm(
        ask,
        probe.model,
        folder,
        tp=max((tp for tp, _ in probe.splits.values()), default=1),
        max_model_len=probe.max_model_len,
        kv_bytes=probe.kv_bytes,
        step_tokens=probe.step_tokens,
        step_rows=probe.step_rows,
        num_workers=probe.num_workers,
        host_bytes=_memory_share(probe),
    )
    return ProbedModel(
        str(plan.path),
        plan.summary,
        has_chat_template(folder),
        plan.facts.max_model_len,
        plan.kv_bytes,
        plan.facts.layers,
        gpu=plan.share,
    )


def _memory_share(probe: ProbeRequest) -> int:
    """Bytes for one worker: an equal share of what is free and what the deployment's other workers hold already."""
    tiers = probe.tiers.host_bytes if probe.tiers else 0
    free = available_memory() - tiers + reused_memory(probe.tiers, probe.deployment)
    return min(free, (free + held_memory(probe.deployment)) // probe.num_workers)


def _probe_without_weights(probe: ProbeRequest) -> ProbedModel:
    """Find config and tokenizer of a model, and its longest context; the weights are not looked at."""
    patterns = CHECKPOINT_FILES if probe.weights else DESCRIPTION_FILES
    path, config = find_model(resolve_embedded(probe.model), probe.revision, patterns)
    length = plan_max_length(probe.model, config, probe.max_model_len)
    description = f"{config.architecture.removesuffix('ForCausalLM')}, context {length:,}"
    return ProbedModel(str(path), description, has_chat_template(path), length, 0, config.layers)


def _check_eviction(probe: ProbeRequest, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if KV is to be evicted by default, and workers like these cannot."""
    if probe.kv_keep >= 1:
        return
    said = f"--kv-keep {probe.kv_keep} evicts KV of all requests"
    if split_auto(probe.kv_cache_codec)[0]:
        raise ConfigError(
            f"{said}, and --kv-cache-codec {probe.kv_cache_codec} lets the router choose their KV class",
            "what a request keeps is decided in one class, so it has to be named (docs/eviction.md)",
            "name the classes without auto; or leave out --kv-keep, and let requests that name a class ask for 'keep'",
        )
    # Imported only here, since it imports numpy, which the process that starts all others does without.
    from engine.model.tokenizer import ModelTokenizer

    try:
        ModelTokenizer.load(checkpoint.path)
    except ModelError as error:
        raise ModelError(
            f"{said}, and the tokenizer cannot be read: it says which tokens are special or punctuation",
            error.what,
            f"{error.fix}; or leave out --kv-keep",
        ) from None


def _check_splits(probe: ProbeRequest, checkpoint: Checkpoint, classes: tuple[KvClassChoice, ...]) -> None:
    """Raise ConfigError or ModelError if the model or its KV cannot be split as a role's workers are."""
    for role, (tp, pp) in probe.splits.items():
        try:
            split_ranks(checkpoint, classes, tp, pp)
        except (ConfigError, ModelError) as error:
            raise type(error)(error.what, error.why, f"{error.fix} (--{role}-tp, --{role}-pp)") from None


def _check_evicting_pool(
    probe: ProbeRequest, memory: MemoryPlan, layout: KvLayout, slabs: int, share: float
) -> None:
    """Raise ConfigError if KV is to be evicted by default, and the pool of a class, of so many slabs, is too small for
    the longest request then. `share` is its share of the pool of all classes.

    It would serve shorter ones, and refuse the longest, which it takes without eviction.
    """
    if probe.kv_keep >= 1:
        return
    # Imported only here, since it imports numpy.
    from kvcache.eviction.rank_bags import most_rank_extra

    length = memory.max_model_len
    extra = most_rank_extra(layout, probe.splits.values() or [(1, 1)], length)
    need = num_chunks(length) + extra
    if slabs >= need:
        return
    ways = ["leave out --kv-keep"]
    if slabs > extra:
        ways.insert(0, f"use --max-model-len {(slabs - extra) * CHUNK_TOKENS} or less")
    kv_bytes = need * layout.chunk_bytes if share == 1 else math.ceil((need + 1) * layout.chunk_bytes / share)
    if kv_bytes <= memory.max_kv_bytes:
        ways.insert(0, f"use --kv-cache-memory-bytes {kv_bytes} or more")
    raise ConfigError(
        f"--kv-keep {probe.kv_keep} evicts KV of all requests, and the pool of {layout.kv_class} is too small for"
        " one of full length",
        f"{length} tokens need up to {need} slabs, {extra} of them to evict (docs/eviction.md); the pool has {slabs}",
        ", or ".join(ways),
    )


def _check_swap_space(probe: ProbeRequest, memory: MemoryPlan, available: int) -> None:
    """Raise ConfigError if the swap space does not fit beside weights and KV pool.

    The memory is only allocated when requests are parked, so without this check it would fail much later.
    """
    rest = int(available * USABLE_SHARE) - memory.fixed_bytes - memory.kv_bytes
    if probe.swap_bytes > max(0, rest):
        raise ConfigError(
            f"a swap space of {format_bytes(probe.swap_bytes)} per worker does not fit in memory",
            f"beside weights {format_bytes(memory.weight_bytes)} and KV pool {format_bytes(memory.kv_bytes)}, "
            f"{format_bytes(max(0, rest))} of usable {format_bytes(int(available * USABLE_SHARE))} are left",
            f"lower --swap-space to {max(0, rest) >> 20}MiB or less, or the KV pool (--kv-cache-memory-bytes)",
        )


def resolve_embedded(name: str) -> str:
    """The folder of the embedded model if `name` is its name, else `name` itself.

    Raises:
        ModelError: the embedded model is not installed.
    """
    if name != EMBEDDED_MODEL:
        return name
    found = importlib.util.find_spec("models")
    folders = list(found.submodule_search_locations or []) if found else []
    path = Path(folders[0]) / EMBEDDED_MODEL if folders else Path("models") / EMBEDDED_MODEL
    if not (path / CONFIG_FILE).is_file():
        fix = "name another model: diptych serve OWNER/NAME"
        raise ModelError("the embedded model is not installed", f"looked in {path}", fix)
    return str(path)


def has_chat_template(path: Path) -> bool:
    """Whether a model folder contains a chat template."""
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    try:
        return "chat_template" in json.loads((path / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False


def calibration_path(config: Config) -> str:
    """The calibration file of these settings, as workers get it; empty: that of the model's folder."""
    return str(config.kv_cache_calibration.absolute()) if config.kv_cache_calibration else ""


def probe_request(config: Config, num_workers: int) -> ProbeRequest:
    """The question for the model of these settings, for `num_workers` workers that share a machine's memory."""
    return ProbeRequest(
        config.model,
        config.revision,
        config.max_model_len,
        config.kv_cache_memory_bytes,
        num_workers,
        {"prefill": (config.prefill_tp, config.prefill_pp), "decode": (config.decode_tp, config.decode_pp)},
        config.swap_space,
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.kv_cache_codec,
        calibration_path(config),
        config.kv_quality_budget,
        config.kv_keep,
        weights=config.bulk > 0,
        tiers=tier_request(
            config.kv_host_bytes, config.kv_disk_bytes, config.kv_disk_folder, config.keys_dir
        ),
        gpu=_gpu_request(config) if config.device in GPU_DEVICES and config.engine != VLLM else None,
        vllm=make_vllm_request(config) if config.engine == VLLM else None,
    )


def _gpu_request(config: Config) -> GpuRequest:
    """The part of the question that is about GPUs."""
    return GpuRequest(
        config.device,
        config.dtype,
        config.gpu_memory_utilization,
        buffer_bytes=config.transfer_buffer_bytes,
    )


async def resolve_model(config: Config, num_workers: int, bulk_weights: bool = True) -> ProbedModel:
    """Find the model of these settings for `num_workers` workers on this machine; with 0 no weights are needed, but for
    bulk workers, whose memory is not planned, with `bulk_weights`.

    A model from the hub may have to be downloaded, and vLLM takes long to answer, which cannot be cancelled within a
    process. Such a model is therefore probed by another process, `services.host.model_probe_main`.

    Raises:
        ConfigError: this machine has too few cores for the ranks, or KV cannot be coded this way.
        ModelError: the model is not found, incomplete, not supported, cannot be split this way, or does not fit; the
            error shows the memory arithmetic. Or its calibration cannot be read.
    """
    probe = probe_request(config, num_workers)
    probe = msgspec.structs.replace(probe, weights=probe.weights and bulk_weights)
    asks_vllm = probe.vllm is not None and num_workers > 0
    if (config.model == EMBEDDED_MODEL or is_folder_name(config.model)) and not asks_vllm:
        return probe_model(probe)
    return await _probe_in_process(probe)


async def _probe_in_process(probe: ProbeRequest) -> ProbedModel:
    """Run `probe_model` in a child process, which is killed if this task is cancelled."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.host.model_probe_main",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_environment(1, os.environ), start_new_session=True,
    )  # fmt: skip
    try:
        out, err = await process.communicate(msgspec.json.encode(probe))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    try:
        answer = msgspec.json.decode(out.strip().rsplit(b"\n", 1)[-1], type=ProbeReply)
    except msgspec.MsgspecError:
        last = err.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ModelError(f"the model {probe.model} cannot be read", *(line[:300] for line in last)) from None
    if answer.model is None:
        error = answer.error or ErrorReport(f"the model {probe.model} cannot be read")
        raise ModelError(error.what, error.why, error.fix)
    return answer.model
