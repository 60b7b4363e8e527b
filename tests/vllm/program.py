"""Runs under vLLM's interpreter: opens vLLM once, runs behaviours on it, and prints a line of JSON per behaviour.

python -m tests.vllm.program MODEL [RANKS [BEHAVIOUR ...]]
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from dataclasses import asdict

from tests.vllm.behaviours import BEHAVIOURS, run_behaviour
from tests.vllm.rig import Rig
from vllm_worker.buffer import open_buffer
from vllm_worker.setup.engine_args import EngineOptions
from vllm_worker.setup.used_names import missing_names
from vllm_worker.setup.vllm_config import open_vllm

# Bytes of one block of the embedded model in float32, and how many of them the engine has: few, so that some sequences
# are preempted, but enough for the longest.
BLOCK_BYTES, NUM_BLOCKS, NUM_SLABS = 6 * 65536, 21, 64
MAX_MODEL_LEN = 1024
TRAITS = ("grammar", "seed", "penalties", "logprobs")


def options_for(model: str, ranks: int = 1, chunked: bool = False) -> EngineOptions:
    """The options of the suite's engine; `chunked`: prompts are prefilled in parts of at most 256 tokens."""
    return EngineOptions(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_bytes=NUM_BLOCKS * BLOCK_BYTES // ranks,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        tp=ranks,
        vllm_args=("--enforce-eager", *(["--enable-chunked-prefill"] if chunked else [])),
    )


def main(model: str, ranks: int, chunked: bool, names: list[str]) -> None:
    """Run `names`, or all behaviours."""
    print(json.dumps({"missing": missing_names()}), flush=True)
    port = open_vllm(options_for(model, ranks, chunked))
    traits = [name for name in TRAITS if port.facts.chunks_seeded or name != "seed"]
    print(json.dumps({"facts": asdict(port.facts)}), flush=True)
    buffer = open_buffer(port.facts, NUM_SLABS * BLOCK_BYTES)
    port.attach_buffer(buffer)
    try:
        for name in names or list(BEHAVIOURS):
            begun_s = time.monotonic()
            try:
                run_behaviour(name, Rig(port, buffer, traits))
                error = ""
            except Exception:
                error = traceback.format_exc()
            print(
                json.dumps({"name": name, "error": error, "seconds": time.monotonic() - begun_s}), flush=True
            )
            if error:
                # The engine may still hold something of it.
                return
    finally:
        port.close()
        buffer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--chunked", action="store_true")
    given = parser.parse_intermixed_args()
    main(given.model, given.ranks, given.chunked, given.names)
