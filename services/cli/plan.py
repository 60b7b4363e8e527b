"""From settings and a model to the specifications of all parts. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from diptych.config import Config, GatewaySpec, WorkerSpec
from diptych.load import Loaded
from planner.plan_file import PlanFile
from planner.terms import BOTH, within_tpot
from services.cli.model import Model
from services.cli.planned import alone, together
from services.cluster.parts import Plan


def worker_spec(
    config: Config, model: Model, role: str, name: str, channel: str, keys_dir: str, core: int | None
) -> WorkerSpec:
    """What one worker is told."""
    return WorkerSpec(
        worker=name,
        role=role,
        gateway=channel,
        keys_dir=keys_dir,
        model=model.path,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        max_model_len=model.max_model_len,
        kv_bytes=model.kv_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
        swap_bytes=config.swap_space,
        tpot_ms=config.slo_tpot_ms if _within_tpot(config, role) else None,
        tp=config.prefill_tp if role == "prefill" else config.decode_tp,
        pp=config.prefill_pp if role == "prefill" else config.decode_pp,
        core=core,
        threads=config.threads,
        transports=config.transports,
        lease_s=config.kv_lease_s,
        pipelined=config.pipelined_transfer,
        drain_s=config.drain_s,
        step_log=str(config.step_log.absolute()) if config.step_log else None,
        log_level=config.log_level,
    )


def _within_tpot(config: Config, role: str) -> bool:
    """As `planner.terms.within_tpot`, of workers: those of a colocated deployment are called decode workers."""
    does = BOTH if config.colocated else role
    return within_tpot(does, config.enable_chunked_prefill, config.local_prefill)


def gateway_spec(
    config: Config, model: Model, channel: str, keys_dir: str, port: int, api_keys: tuple[str, ...]
) -> GatewaySpec:
    """What the gateway is told."""
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
        prefix_caching=config.enable_prefix_caching,
        revision=config.revision,
        api_keys=api_keys,
        max_model_len=model.max_model_len,
        chat_template=str(config.chat_template.absolute()) if config.chat_template else None,
        slo_ttft_ms=config.slo_ttft_ms,
        slo_tpot_ms=config.slo_tpot_ms,
        request_timeout_s=config.request_timeout_s,
        reader_stall_s=config.reader_stall_s,
        drain_s=config.drain_s,
        max_open_requests=config.max_open_requests,
        max_body_bytes=config.max_body_bytes,
        lease_s=config.kv_lease_s,
        pipelined=config.pipelined_transfer,
        max_queue_wait_s=config.max_queue_wait_s,
        recovery_s=config.recovery_s,
        local_prefill=config.local_prefill,
        admin_key=config.admin_key,
        request_log=str(config.request_log.absolute()) if config.request_log else None,
        replan=config.replan,
        log_level=config.log_level,
    )


def devices(config: Config) -> dict[str, int]:
    """Devices of each worker, by its name."""
    num_prefill, num_decode = config.pools
    size = {"prefill": config.prefill_tp * config.prefill_pp, "decode": config.decode_tp * config.decode_pp}
    counts = {"prefill": num_prefill, "decode": num_decode}
    return {f"{role}-{index}": size[role] for role, count in counts.items() for index in range(count)}


def budget(config: Config) -> int:
    """The most devices that may ever be held."""
    return config.replan_budget or sum(devices(config).values())


def most_workers(config: Config) -> int:
    """How many workers may ever share this machine's memory."""
    sizes = devices(config).values()
    return config.replan_budget // min(sizes) if config.replan_budget else len(sizes)


def cores(config: Config, available: list[int], ranks: Sequence[int]) -> list[int | None]:
    """A core for the first rank of each worker, in turn, with those of its other `ranks` behind it.

    None when pinning is off, a worker has several threads, or computes on a GPU.
    """
    if not config.pin_cores or config.threads > 1 or config.device == "cuda":
        return [None] * len(ranks)
    return [available[sum(ranks[:index]) % len(available)] for index in range(len(ranks))]


def plan(
    loaded: Loaded,
    model: Model,
    folder: Path,
    logs: Path,
    channel_port: int,
    port: int,
    api_keys: tuple[str, ...],
    answer: PlanFile | None = None,
) -> Plan:
    """A whole deployment on this machine. `folder` is private; keys lie in it. `answer` is what was planned, if that
    was: it tells what must be together.
    """
    config = loaded.config
    channel, keys_dir = f"tcp://127.0.0.1:{channel_port}", str(folder / "keys")
    sizes = devices(config)
    pinned = cores(config, sorted(os.sched_getaffinity(0)), list(sizes.values()))
    return Plan(
        workers=tuple(
            worker_spec(config, model, name.split("-")[0], name, channel, keys_dir, core)
            for name, core in zip(sizes, pinned, strict=True)
        ),
        gateway=gateway_spec(config, model, channel, keys_dir, port, api_keys),
        logs=logs,
        groups=alone(sizes) if answer is None else together(answer),
        budget=budget(config),
    )
