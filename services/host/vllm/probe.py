"""Asks vLLM about a model under vLLM's own interpreter, and plans the memory of its workers, before any is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from diptych.chunks import CHUNK_TOKENS
from diptych.config.options import Config
from diptych.errors import ConfigError, ModelError, size_setting
from diptych.specs import DEFAULT_UTILIZATION
from engine.model.device_plan import plan_transfer_buffer
from engine.model.memory_plan import AUTO_POOL_REQUESTS, USABLE_SHARE, format_bytes
from engine.sequence import num_chunks
from services.host.gpu_probe import GpuShare
from services.host.gpus import find_gpus, workers_per_gpu
from services.host.vllm.interpreter import vllm_environment
from services.host.vllm.links import link_model
from services.host.vllm.settings import split_vllm_args

PREFLIGHT_MODULE = "vllm_worker.preflight"
# Host memory that each worker takes beside weights and KV: vLLM and its libraries.
PROCESS_BYTES = 1 << 30


class VllmRequest(msgspec.Struct, frozen=True):
    """What decides whether vLLM serves a model, beside what `services.host.model_probe.ProbeRequest` has."""

    python: str
    args: tuple[str, ...] = ()
    # "cpu" or "cuda".
    device: str = "cpu"
    dtype: str = "auto"
    utilization: float = DEFAULT_UTILIZATION
    # Workers on a GPU, as Ray places them; 0: those of this machine share its GPUs evenly.
    workers: int = 0
    # Size of the transfer buffer; None: automatic.
    buffer_bytes: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True


class VllmFacts(msgspec.Struct, frozen=True):
    """What vLLM says of a model (`vllm_worker.preflight.inspect_model`)."""

    version: str
    device: str
    dtype: str
    max_model_len: int
    architecture: str
    layers: int
    # Bytes of a block over all layers and ranks.
    block_bytes: int


class VllmPlan(msgspec.Struct, frozen=True):
    """A model that vLLM serves: its folder as vLLM reads it, and the memory of each worker."""

    path: Path
    facts: VllmFacts
    # Bytes of the KV of each worker; 0 on a GPU, where vLLM takes its share of the memory, unless it was asked for.
    kv_bytes: int
    share: GpuShare

    @property
    def summary(self) -> str:
        """A short description for the user."""
        facts, pool = self.facts, f", KV {format_bytes(self.kv_bytes)} per worker" if self.kv_bytes else ""
        return (
            f"{facts.architecture.removesuffix('ForCausalLM')}, context {facts.max_model_len:,}{pool}, "
            f"vLLM {facts.version} on {facts.device}, {facts.dtype}"
        )


def make_vllm_request(config: Config) -> VllmRequest:
    """The part of the question about a model that is about vLLM; a gateway by itself has no interpreter."""
    return VllmRequest(
        str(config.vllm_python.expanduser().absolute()) if config.vllm_python else "",
        split_vllm_args(config),
        "cuda" if config.device == "cuda" else "cpu",
        config.dtype,
        config.gpu_memory_utilization,
        buffer_bytes=config.transfer_buffer_bytes,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
    )


def plan_on_vllm(
    request: VllmRequest,
    name: str,
    folder: Path,
    *,
    tp: int,
    max_model_len: int | None,
    kv_bytes: int | None,
    step_tokens: int,
    step_rows: int,
    num_workers: int,
    host_bytes: int,
) -> VllmPlan:
    """The plan of one of `num_workers` workers on this machine, whose share of the host's memory is `host_bytes`.

    Raises:
        ConfigError: the interpreter, its vLLM or its arguments are refused.
        ModelError: vLLM refuses the model, or it does not fit in memory.
        StartError: no folder of links can be made.
    """
    path = link_model(folder, os.environ)
    workers = 1
    if request.device == "cuda":
        # Within a cluster Ray decides which GPUs a process sees, and has said so to this one.
        gpus = find_gpus({} if request.workers else os.environ, own_torch=False)
        workers = request.workers or workers_per_gpu(num_workers * tp, len(gpus))
        _check_ranks(tp, num_workers, workers, len(gpus))
    facts = ask_vllm(
        request.python,
        {
            "model": str(path),
            "device": request.device,
            "dtype": request.dtype,
            "max_model_len": max_model_len,
            # vLLM counts that of each rank.
            "kv_bytes": None if kv_bytes is None else kv_bytes // tp,
            "gpu_memory_utilization": None if request.device == "cpu" else request.utilization / workers,
            "max_num_seqs": step_rows,
            "max_num_batched_tokens": step_tokens,
            "tp": tp,
            "prefix_caching": request.prefix_caching,
            "chunked_prefill": request.chunked_prefill,
            "vllm_args": list(request.args),
        },
    )
    # vLLM keeps one block for padding.
    one = (num_chunks(facts.max_model_len) + 1) * facts.block_bytes
    usable = int(host_bytes * USABLE_SHARE)
    buffer = _plan_buffer(request, name, facts, tp, usable)
    if request.device == "cuda":
        return VllmPlan(path, facts, kv_bytes or 0, GpuShare(workers, buffer))
    taken = buffer + _weight_bytes(path) + PROCESS_BYTES
    pool = kv_bytes if kv_bytes is not None else min(AUTO_POOL_REQUESTS * one, max(usable - taken, one))
    _check_pool(name, facts, pool, one, usable - taken, asked=kv_bytes is not None)
    return VllmPlan(path, facts, pool, GpuShare(1, buffer))


def _check_ranks(tp: int, num_workers: int, sharing: int, num_gpus: int) -> None:
    """Raises ConfigError if ranks of one worker would share a GPU: each needs one of its own."""
    if tp > 1 and sharing > 1:
        raise ConfigError(
            f"{num_workers} workers of {tp} ranks need {num_workers * tp} GPUs",
            f"there are {num_gpus}, and each rank of vLLM needs one of its own",
            "use a smaller --prefill-tp and --decode-tp, or fewer workers",
        )


def _plan_buffer(request: VllmRequest, name: str, facts: VllmFacts, tp: int, host_bytes: int) -> int:
    """The size of the transfer buffer. Raises ModelError if it is too small or too large."""
    # Imported only here, since it imports numpy, which the process that starts all others does without.
    from vllm_worker.buffer import slab_layout

    layout = slab_layout(facts.block_bytes // tp, tp)
    return plan_transfer_buffer(
        name, layout, facts.max_model_len, asked=request.buffer_bytes, host_bytes=host_bytes
    )


def _check_pool(name: str, facts: VllmFacts, pool: int, one: int, room: int, asked: bool) -> None:
    """Raises ModelError if the KV of a worker does not hold one request, or not fit in memory."""
    if one <= pool <= max(room, 0):
        return
    longest = max(0, min(pool, room) if asked else room) // facts.block_bytes * CHUNK_TOKENS
    ways = [f"use --max-model-len {longest} or less" if longest else "use a smaller model or fewer workers"]
    if asked and one <= room:
        ways.insert(0, f"use --kv-cache-memory-bytes {size_setting(one)} or more")
    raise ModelError(
        f"{name} does not fit in memory",
        f"KV {format_bytes(pool)}; beside weights and buffer {format_bytes(max(0, room))} are left for each worker; "
        f"one request of {facts.max_model_len} tokens needs {format_bytes(one)}",
        ", or ".join(ways),
    )


def _weight_bytes(path: Path) -> int:
    """Bytes of the files with weights."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def ask_vllm(python: str, question: dict[str, Any]) -> VllmFacts:
    """The answer of `vllm_worker.preflight` under the interpreter `python`.

    Raises:
        ConfigError: the interpreter cannot be run, or it or vLLM refuses what was asked.
        StartError: no folder of links can be made.
    """
    try:
        done = subprocess.run(
            [python, "-m", PREFLIGHT_MODULE],
            input=msgspec.json.encode(question),
            capture_output=True,
            check=False,
            env=vllm_environment(1, os.environ),
        )
    except OSError as error:
        raise _unusable(python, error.strerror or str(error)) from None
    try:
        reply = msgspec.json.decode(done.stdout.strip().rsplit(b"\n", 1)[-1])
        if refusal := reply.get("error"):
            raise ConfigError(refusal["what"], refusal["why"], refusal["fix"])
        return msgspec.convert(reply["facts"], VllmFacts)
    except (msgspec.MsgspecError, AttributeError, KeyError):
        raise _unusable(python, _last_words(done.stderr.decode("utf-8", "replace").splitlines())) from None


def _unusable(python: str, why: str) -> ConfigError:
    return ConfigError(
        f"--vllm-python {python} cannot be used",
        why,
        "name the python of an environment that has vLLM: make vllm makes one in .vllm/",
    )


def _last_words(lines: Sequence[str]) -> str:
    """The last line of what a program has printed."""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it prints nothing")
