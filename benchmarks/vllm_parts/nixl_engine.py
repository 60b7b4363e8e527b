"""Runs under vLLM's interpreter: one vLLM with its own NIXL connector, in one process, steered by lines of JSON.

python -m benchmarks.vllm_parts.nixl_engine MODEL

{"kind": "prefill", "name", "prompt"}             ─▶ {"name", "tokens", "params"}
{"kind": "decode", "name", "prompt", "params"}    ─▶ {"name", "tokens"}
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

from benchmarks.vllm_parts.timed_steps import say_steps

MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_BYTES = 2048, 70, 6 * 65536


def open_engine(model: str) -> tuple[Any, Any]:
    """vLLM's engine in this process, and its scheduler."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    args = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=64,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_num_seqs=8,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu"
        ),
    )
    engine = LLMEngine.from_engine_args(args)
    return engine, engine.engine_core.engine_core.scheduler


def read_line(wait: bool) -> dict[str, Any] | None:
    """The next order; None if there is none, and nobody waits for it. Ends the process at the end of the input."""
    if not wait and not select.select([sys.stdin], [], [], 0)[0]:
        return None
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    order: dict[str, Any] = json.loads(line)
    return order


def run(model: str) -> None:
    """Serve until the input ends."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_SGL_KERNEL", "0")
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

    say_steps(NixlConnector)
    engine, scheduler = open_engine(model)
    print(json.dumps({"ready": True}), flush=True)
    while True:
        order = read_line(wait=not scheduler.has_requests())
        if order is not None:
            prefills = order["kind"] == "prefill"
            params = {"do_remote_decode": True, "do_remote_prefill": False} if prefills else order["params"]
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=1 if prefills else order["max_tokens"],
                ignore_eos=True,
                extra_args={"kv_transfer_params": params},
            )
            prompt: dict[str, Any] = {"prompt_token_ids": order["prompt"], "cache_salt": order["salt"]}
            engine.add_request(order["name"], prompt, sampling)
        for output in engine.step():
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            answer: dict[str, Any] = {"name": name, "tokens": tokens, "finished": output.finished}
            if output.finished:
                answer["params"] = output.kv_transfer_params
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    run(sys.argv[1])
