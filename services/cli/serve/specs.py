"""From settings and a model to the specifications of all parts. Starts nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError
from diptych.slo import DEFAULT_ATTAINMENT
from diptych.specs import GPU_DEVICES, VLLM, GatewaySpec, StorageShares, WorkerSpec
from planner.placement.plan_file import PlanFile
from planner.types import BOTH, keeps_steps_within_tpot
from services.cli.serve.from_plan import node_groups, one_group_per_worker
from services.cli.serve.offload_plan import with_bulk_plan
from services.cluster.spec import Bundle, DeploymentSpec
from services.host.gpu_probe import GpuShare
from services.host.gpus import gpu_amount
from services.host.model_probe import ProbedModel, calibration_path
from services.host.vllm.settings import find_interpreter, split_vllm_args
from services.worker.prefill_priority import HostLoad, choose_slice_ms


def worker_spec(
    config: Config, model: ProbedModel, role: str, name: str, channel: str, keys_dir: str, core: int | None
) -> WorkerSpec:
    """The specification of one worker process. `core` is the core that it is pinned to; None: not pinned."""
    gpu = model.gpu or GpuShare(1, 0)
    return WorkerSpec(
        worker=name,
        role=role,
        gateway=channel,
        keys_dir=keys_dir,
        model=model.path,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        engine=config.engine,
        vllm_python=str(find_interpreter(config)) if config.engine == VLLM else "",
        vllm_args=split_vllm_args(config) if config.engine == VLLM else (),
        max_model_len=model.max_model_len or None,
        kv_bytes=model.kv_bytes,
        kv_bytes_asked=config.kv_cache_memory_bytes is not None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        gpu_workers=gpu.workers,
        emulated_bytes=gpu.emulated_bytes,
        transfer_buffer_bytes=gpu.buffer_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
        kv_cache_codec=model.kv_cache_codec or config.kv_cache_codec,
        kv_cache_calibration=calibration_path(config),
        swap_bytes=config.swap_space,
        kv_host_bytes=config.kv_host_bytes or 0,
        kv_disk_bytes=config.kv_disk_bytes or 0,
        kv_disk_folder=str(config.kv_disk_folder.absolute()) if config.kv_disk_folder else "",
        kv_keep=config.kv_keep,
        tpot_ms=config.slo_tpot_ms if _within_tpot(config, role) else None,
        bulk_slice_ms=config.bulk_slice_ms,
        bulk_tpot_ms=None if config.slo_ttft_ms is None else config.slo_tpot_ms,
        bulk_only=config.bulk > 0,
        tp=config.prefill_tp if role == "prefill" else config.decode_tp,
        pp=config.prefill_pp if role == "prefill" else config.decode_pp,
        pool_splits=((config.prefill_tp, config.prefill_pp), (config.decode_tp, config.decode_pp)),
        core=core,
        threads=config.threads,
        prefill_slice_ms=prefill_slice_ms(config),
        transports=config.transports,
        lease_s=config.kv_lease_s,
        pipelined=config.pipelined_transfer,
        drain_s=config.drain_s,
        step_log=str(config.step_log.absolute()) if config.step_log else None,
        log_level=config.log_level,
        log_format=config.log_format,
    )


def _within_tpot(config: Config, role: str) -> bool:
    """As `planner.types.keeps_steps_within_tpot`, of workers: those of a colocated deployment are called
    decode workers.
    """
    does = BOTH if config.colocated else role
    return keeps_steps_within_tpot(does, config.enable_chunked_prefill, config.local_prefill)


def gateway_spec(
    config: Config,
    model: ProbedModel,
    channel: str,
    keys_dir: str,
    port: int,
    api_keys: tuple[str, ...],
    priority_keys: tuple[str, ...] = (),
) -> GatewaySpec:
    """The gateway process's specification. `priority_keys` are the `api_keys` that may ask for a priority below 0."""
    num_prefill, num_decode = config.pools
    return GatewaySpec(
        host=config.host,
        port=port,
        channel=channel,
        keys_dir=keys_dir,
        model=model.path,
        served_names=config.served_names,
        num_prefill=num_prefill,
        num_decode=num_decode,
        bulk_only=config.bulk > 0,
        prefix_caching=config.enable_prefix_caching,
        revision=config.revision,
        api_keys=api_keys,
        priority_keys=priority_keys,
        max_model_len=model.max_model_len,
        chat_template=str(config.chat_template.absolute()) if config.chat_template else None,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        unknown_fields=config.unknown_fields,
        generation_config=_generation_config(config),
        slo_ttft_ms=config.slo_ttft_ms,
        slo_tpot_ms=config.slo_tpot_ms,
        slo_target=config.slo_target or DEFAULT_ATTAINMENT,
        request_timeout_s=config.request_timeout_s,
        reader_stall_s=config.reader_stall_s,
        drain_s=config.drain_s,
        max_open_requests=config.max_open_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_body_bytes=config.max_body_bytes,
        max_connections=config.max_connections,
        lease_s=config.kv_lease_s,
        pipelined=config.pipelined_transfer,
        max_queue_wait_s=config.max_queue_wait_s,
        recovery_s=config.recovery_s,
        local_prefill=config.local_prefill,
        decode_overdraft=config.decode_overdraft,
        kv_quality_budget=config.kv_budget_pct,
        kv_keep=config.kv_keep,
        **_access_settings(config, bool(api_keys)),
        request_log=str(config.request_log.absolute()) if config.request_log else None,
        data_dir=str(config.data_dir.absolute()) if isinstance(config.data_dir, Path) else None,
        max_file_bytes=config.max_file_bytes,
        shares=_tenant_shares(config),
        otlp_traces_endpoint=config.otlp_traces_endpoint,
        trace_sample=config.trace_sample,
        replan=config.replan,
        log_level=config.log_level,
        log_format=config.log_format,
    )


def _access_settings(config: Config, keyed: bool) -> dict[str, Any]:
    """Who may ask for what, and how they connect: fields of `GatewaySpec`. `keyed`: API keys are required."""
    return {
        "keys_file": str(config.keys.absolute()) if config.keys else None,
        "admin_key": config.admin_key,
        "metrics_keys": metrics_keys(config, keyed),
        "status_keys": status_keys(config, keyed),
        "ssl_certfile": str(config.ssl_certfile.absolute()) if config.ssl_certfile else None,
        "ssl_keyfile": str(config.ssl_keyfile.absolute()) if config.ssl_keyfile else None,
        "root_path": config.root_path or "",
        "gateways": config.gateways,
    }


def check_certificate(loaded: LoadedConfig) -> None:
    """Raises ConfigError if the certificate of the settings cannot be used: before anything is started."""
    config = loaded.config
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        given, missing = ("certfile", "keyfile") if config.ssl_certfile else ("keyfile", "certfile")
        raise ConfigError(
            f"{loaded.origin_of(f'ssl_{given}')} needs --ssl-{missing}",
            "HTTPS takes a certificate and its key",
            f"add --ssl-{missing} FILE, or leave out both",
        )
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        # Imported only here, since it imports cryptography, which plain HTTP does not need.
        from services.gateway.tls.certificates import load_certificate

        load_certificate(config.ssl_certfile, config.ssl_keyfile)


def _tenant_shares(config: Config) -> StorageShares:
    """What files and batches of one API key may take."""
    return StorageShares(
        max_bytes=config.max_tenant_bytes,
        max_files=config.max_tenant_files,
        max_batches=config.max_tenant_batches,
        max_lines=config.max_tenant_lines,
    )


def _generation_config(config: Config) -> str:
    """The setting for the gateway: a name unchanged, or the absolute path of a folder."""
    # "auto" is vLLM's name for it.
    named = {"auto": "model"}.get(config.generation_config, config.generation_config)
    return named if named in ("model", "none") else str(Path(named).absolute())


def metrics_keys(config: Config, keyed: bool) -> tuple[str, ...]:
    """The keys that may read /metrics. None: all clients that may use the model.

    `keyed`: API keys are required. Each stands for a tenant. Tenants must not read about each other if the operator
    has a key of their own.
    """
    if config.metrics_key is None and not (config.admin_key is not None and keyed):
        return ()
    return tuple(key for key in (config.metrics_key, config.admin_key) if key is not None)


def status_keys(config: Config, keyed: bool) -> tuple[str, ...]:
    """The keys that may read /status. None: all clients that may use the model.

    `keyed`: as of `metrics_keys`. With a metrics key and without an admin key nobody has the key that opens it: it is
    made here, for the deployment's own use.
    """
    if not metrics_keys(config, keyed):
        return ()
    return (config.admin_key or secrets.token_hex(24),)


def devices_by_worker(config: Config) -> dict[str, int]:
    """Devices of each worker, by its name."""
    num_prefill, num_decode = config.pools
    size = {"prefill": config.prefill_tp * config.prefill_pp, "decode": config.decode_tp * config.decode_pp}
    counts = {"prefill": num_prefill, "decode": num_decode}
    return {f"{role}-{index}": size[role] for role, count in counts.items() for index in range(count)}


def device_budget(config: Config) -> int:
    """The most devices that may ever be held."""
    return config.replan_budget or sum(devices_by_worker(config).values())


def max_workers(config: Config) -> int:
    """How many workers may ever share this machine's memory."""
    sizes = devices_by_worker(config).values()
    return config.replan_budget // min(sizes) if config.replan_budget else len(sizes)


def num_probed(config: Config) -> int:
    """For how many workers the model has to fit into memory; bulk workers find out themselves what fits."""
    return 0 if config.bulk else max_workers(config)


def assign_cores(config: Config, available: list[int], ranks: Sequence[int]) -> list[int | None]:
    """A core for the first rank of each worker, one after another, with those of its other `ranks` behind it.

    None when pinning is off, a worker has several threads, or computes on a GPU.
    """
    if not config.pin_cores or config.threads > 1 or config.device in GPU_DEVICES:
        return [None] * len(ranks)
    return [available[sum(ranks[:index]) % len(available)] for index in range(len(ranks))]


def prefill_slice_ms(config: Config) -> float:
    """The time slice with which prompts are computed; 0 where more than one thread of a worker, or a GPU, does.

    Of a node of a Ray cluster nothing is known but the worker itself.
    """
    ranks = config.prefill_tp * config.prefill_pp
    if config.device in GPU_DEVICES or config.engine == VLLM or config.threads > 1 or ranks > 1:
        return 0.0
    cores, alone = len(os.sched_getaffinity(0)), config.role is not None or config.ray_address is not None
    threads = device_budget(config) if not alone else config.host_workers if config.role is not None else 1
    return choose_slice_ms(config.prefill_yields, HostLoad(cores, threads, has_gateway=not alone))


def with_gpus(
    bundle_groups: tuple[tuple[Bundle, ...], ...], config: Config, gpu: GpuShare | None
) -> tuple[tuple[Bundle, ...], ...]:
    """The bundles of workers on this machine's GPUs, each with its share of one; others are left as they are."""
    if config.device != "cuda" or gpu is None:
        return bundle_groups
    share = gpu_amount(gpu.workers)
    return tuple(
        tuple(
            # Only vLLM splits a worker over several GPUs, and gives each rank one of its own.
            replace(
                bundle, resources=(("CPU", 1.0), ("GPU", max(share, bundle.devices * float(share == 1.0))))
            )
            for bundle in bundles
        )
        for bundles in bundle_groups
    )


def with_default_data_dir(gateway: GatewaySpec, config: Config, environ: Mapping[str, str]) -> GatewaySpec:
    """`gateway` with the user's folder for files and batches, if the settings name none and do not turn them off.

    Bulk workers serve batches alone, so without that folder nothing is served at all.
    """
    if config.data_dir is not None:
        return gateway
    try:
        data_home = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    except RuntimeError:
        # This user has no home folder.
        return gateway
    folder = Path(data_home, "diptych", "batches").absolute()
    return msgspec.structs.replace(gateway, data_dir=str(folder), data_dir_optional=not config.bulk)


def deployment_spec(
    loaded: LoadedConfig,
    model: ProbedModel,
    folder: Path,
    logs: Path,
    channel_port: int,
    port: int,
    api_keys: tuple[str, ...],
    plan: PlanFile | None = None,
    priority_keys: tuple[str, ...] = (),
) -> DeploymentSpec:
    """A whole deployment on this machine. `folder` is private; keys lie in it. `plan` is what was planned, if that
    was: it tells what must be together.

    Raises:
        ConfigError: bulk workers cannot be given the policy that was asked for, or not even the smallest block fits.
        ModelError: their KV is to be coded with a calibration that is not there.
    """
    config = loaded.config
    channel, keys_dir = f"tcp://127.0.0.1:{channel_port}", str(folder / "keys")
    sizes = devices_by_worker(config)
    pinned = assign_cores(config, sorted(os.sched_getaffinity(0)), list(sizes.values()))
    spec = DeploymentSpec(
        workers=tuple(
            worker_spec(config, model, name.split("-")[0], name, channel, keys_dir, core)
            for name, core in zip(sizes, pinned, strict=True)
        ),
        gateway=with_default_data_dir(
            gateway_spec(config, model, channel, keys_dir, port, api_keys, priority_keys), config, os.environ
        ),
        logs=logs,
        node_groups=with_gpus(
            one_group_per_worker(sizes) if plan is None else node_groups(plan), config, model.gpu
        ),
        device_budget=device_budget(config),
    )
    return with_bulk_plan(spec, config, model) if config.bulk else spec
