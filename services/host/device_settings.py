"""The settings of workers on GPUs: their defaults there, and what such workers do not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError
from diptych.specs import GPU_DEVICES, VLLM
from services.host.vllm.settings import check_own_engine, check_vllm_settings

# Settings that mean nothing to a worker on CPUs.
GPU_SETTINGS = ("gpu_memory_utilization", "transfer_buffer_bytes")
# On a GPU 512 tokens of a prompt take as long as 128, so steps are larger; and more sequences decode together.
GPU_DEFAULTS: Mapping[str, Any] = {"max_num_batched_tokens": 4096, "max_num_seqs": 256}
# On CUDA one thread serves, and another one waits for copies and hashes.
CUDA_DEFAULTS: Mapping[str, Any] = {**GPU_DEFAULTS, "threads": 2}


def apply_device(loaded: LoadedConfig) -> LoadedConfig:
    """The settings with the defaults of their device and engine. Call it after a plan is applied.

    Raises:
        ConfigError: a setting is for another device or engine, or asks for what such workers do not do.
    """
    config, origins = loaded.config, loaded.origins
    if config.engine == VLLM:
        check_vllm_settings(loaded)
        if config.device != "cuda":
            return loaded
    else:
        check_own_engine(loaded)
    if config.device not in GPU_DEVICES:
        if given := [name for name in GPU_SETTINGS if name in origins]:
            raise ConfigError(
                f"{origins[given[0]]} has no effect",
                "it is for workers on GPUs, and these compute on the CPU",
                "add --device cuda, or leave it out",
            )
        _check_yields(loaded)
        return loaded
    if "prefill_yields" in origins:
        raise ConfigError(
            f"{origins['prefill_yields']} has no effect",
            "it is for prompts that are computed on CPU cores, and these are on GPUs",
            "leave it out, or use --device cpu",
        )
    if config.engine != VLLM:
        _check_served(config)
    defaults = CUDA_DEFAULTS if config.device == "cuda" else GPU_DEFAULTS
    given_defaults = {name: value for name, value in defaults.items() if name not in origins}
    if "max_num_batched_tokens" in origins and "max_num_seqs" not in origins:
        given_defaults["max_num_seqs"] = min(
            given_defaults["max_num_seqs"], max(config.max_num_seqs, config.max_num_batched_tokens)
        )
    return LoadedConfig(config.model_copy(update=given_defaults), origins)


def _check_yields(loaded: LoadedConfig) -> None:
    """Raises ConfigError if prompts are always to yield, and no worker's can."""
    config = loaded.config
    why = ""
    if config.colocated or config.bulk:
        why = "no worker has prompts alone"
    elif config.threads > 1 or config.prefill_tp * config.prefill_pp > 1:
        why = "several threads or ranks compute a prompt, and do not yield"
    if config.prefill_yields == "always" and why:
        fix = "leave it out, or use prefill workers with one thread and one rank"
        raise ConfigError(f"{loaded.origin_of('prefill_yields')} has no effect", why, fix)


def _check_served(config: Config) -> None:
    """Raises ConfigError for what workers on GPUs do not do."""
    if config.bulk:
        raise ConfigError(
            "bulk workers compute on the CPU",
            f"--device {config.device} is for prefill, decode and colocated workers",
            "leave out --device; or serve batches beside requests, without --bulk",
        )
    splits = ("prefill_tp", "prefill_pp", "decode_tp", "decode_pp")
    if split := next((name for name in splits if getattr(config, name) > 1), None):
        flag = f"--{split.replace('_', '-')}"
        raise ConfigError(
            f"{flag} {getattr(config, split)} splits a worker over several GPUs",
            "a worker computes on one GPU, without tensor or pipeline parallelism (docs/gpu.md)",
            f"use {flag} 1 and more workers, or --device cpu",
        )
    if config.kv_keep < 1:
        raise ConfigError(
            f"--kv-keep {config.kv_keep:g} evicts KV",
            "workers on GPUs do not evict (docs/gpu.md)",
            "leave out --kv-keep, or use --device cpu",
        )
    if config.kv_host_bytes:
        raise ConfigError(
            f"--kv-host-bytes {config.kv_host_bytes} stores KV that left the pools",
            "workers on GPUs do not store it yet (docs/gpu.md)",
            "leave out --kv-host-bytes, or use --device cpu",
        )
    codecs = config.kv_cache_codec
    if "," in codecs or codecs.strip().split(":")[0] == "auto":
        raise ConfigError(
            f"--kv-cache-codec {codecs} asks for several KV classes",
            "the pool of a worker on a GPU has one codec (docs/gpu.md)",
            "name one, for example --kv-cache-codec tq4, or use --device cpu",
        )
