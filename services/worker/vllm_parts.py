"""Builds the worker whose engine is vLLM, for `role_lifecycle.run_worker`. Only `services.worker.vllm_process` does.

open_vllm ─▶ port ─┬─ VllmEngine ─────▶ the worker's loop
                   └─ transfer buffer ─▶ roles: KV is offered from it, and pulled into it
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from diptych.channel.keys import load_transfer_key
from diptych.specs import WorkerSpec
from engine.model.checkpoint import folder_fingerprint
from services.worker.role_lifecycle import WorkerParts
from services.worker.step_log import StepLog, StepRecorder
from vllm_worker.buffer import open_buffer
from vllm_worker.engine import VllmEngine
from vllm_worker.port import EnginePort, PortFacts
from vllm_worker.roles import VllmRoles
from worker.watchdog import LIMIT_S, STUCK_S

# Where vLLM prefills prompts whole, a step may take this long for each of its tokens before it counts as hanging.
SLOW_TOKEN_S = 0.1


def build_parts(spec: WorkerSpec, port: EnginePort) -> WorkerParts:
    """The parts of a worker over `port`, with which they are closed.

    Raises:
        ConfigError: the transfer buffer is too small for one request, or the log of steps cannot be opened.
    """
    facts = port.facts
    recorder = StepRecorder(StepLog(spec.step_log, spec.worker)) if spec.step_log else None
    buffer = open_buffer(facts, spec.transfer_buffer_bytes)
    port.attach_buffer(buffer)
    engine = VllmEngine(port, observer=recorder)
    fingerprint, identity = folder_fingerprint(spec.model, Path(spec.model), describe_engine(facts))
    roles = VllmRoles(spec, engine, buffer, load_transfer_key(spec.keys_dir), fingerprint)
    parts = WorkerParts(
        engine=engine,
        kv=None,
        pool=buffer.pool,
        memories=[buffer.memory],
        fingerprint=fingerprint,
        identity=identity,
        max_model_len=facts.max_model_len,
        close=port.close,
        roles=roles,
        waiting_tokens=2 * facts.max_num_batched_tokens,
        stuck_s=max(STUCK_S, facts.max_num_batched_tokens * SLOW_TOKEN_S / 4),
        limit_s=max(LIMIT_S, facts.max_num_batched_tokens * SLOW_TOKEN_S),
    )
    return parts if recorder is None else _with_step_log(spec.worker, parts, recorder, facts)


def _with_step_log(worker: str, parts: WorkerParts, recorder: StepRecorder, facts: PortFacts) -> WorkerParts:
    """The parts of a worker whose steps and roles are logged; vLLM fills a step with all that fits into it."""

    def close() -> None:
        recorder.log.close()
        parts.close()

    def log_role(role: str) -> None:
        recorder.log_role(worker, role, facts.max_num_batched_tokens)

    return replace(parts, close=close, tune_for=log_role)


def describe_engine(facts: PortFacts) -> dict[str, str]:
    """What two vLLM workers must have in common to exchange KV, beside the model; `Hello.identity` shows it."""
    return {
        "engine": "vllm",
        "vllm": facts.version,
        "attention": facts.attention_backend,
        "device": facts.device,
        "dtype": facts.dtype,
        "ranks": str(facts.ranks),
        "kv_blocks": describe_blocks(facts),
    } | {name.replace(" ", "_"): value for name, value in facts.identity.items()}


def describe_blocks(facts: PortFacts) -> str:
    """The bytes that each rank's layers have in a block, in words: `6x65536`, or `3x65536+3x32768`."""
    counts: dict[int, int] = {}
    for part in facts.parts:
        counts[part.block_bytes] = counts.get(part.block_bytes, 0) + 1
    return "+".join(f"{count}x{size}" for size, count in counts.items())
