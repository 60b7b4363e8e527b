"""Runs under vLLM's interpreter: a worker on vLLM whose gateway is a test.

python -m tests.support.vllm_worker_process FD NAME ROLE MODEL RANKS

As in `services.worker.vllm_process`, vLLM is opened before anything imports numba. Its ranks import this file, too.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from vllm_worker.setup.engine_args import EngineOptions
from vllm_worker.setup.vllm_config import open_vllm

# Bytes of one block of the embedded model in float32, over its layers and ranks.
BLOCK_BYTES = 6 * 65536
MAX_MODEL_LEN, NUM_BLOCKS = 2048, 70


def main(fd: int, name: str, role: str, model: str, ranks: int) -> None:
    """Open vLLM, and serve."""
    options = EngineOptions(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_bytes=NUM_BLOCKS * BLOCK_BYTES // ranks,
        max_num_seqs=8,
        tp=ranks,
        vllm_args=("--enforce-eager",),
    )
    port = open_vllm(options)
    from tests.support.vllm_worker_serving import PipeLink, serve

    serve(name, role, PipeLink(Connection(fd)), port)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
