"""`python -m tests.support.toy_vllm_process`: a vLLM worker as it is served, with a toy in vLLM's place."""

from __future__ import annotations

import sys

import msgspec

from diptych.process import SupervisorPipe, configure_and_report, run_supervised
from diptych.specs import WorkerSpec
from services.worker.role_lifecycle import run_worker
from services.worker.vllm_parts import build_parts
from tests.support.toy_port import ToyPort

BUFFER_BYTES, NUM_BLOCKS, MAX_MODEL_LEN = 1 << 17, 96, 2048


def main(spec: WorkerSpec, supervisor: SupervisorPipe) -> int:
    """Serve with a toy port until drained; returns the exit status."""
    port = ToyPort(num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN)
    spec = msgspec.structs.replace(spec, transfer_buffer_bytes=BUFFER_BYTES)
    return run_worker(spec, supervisor, build_parts(spec, port))


if __name__ == "__main__":
    configure_and_report()
    sys.exit(run_supervised(main))
