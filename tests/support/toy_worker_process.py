"""As `vllm_worker_process`, with a toy in vLLM's place, under any interpreter that has our packages."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from tests.support.toy_port import ToyPort
from tests.support.vllm_worker_serving import PipeLink, serve

if __name__ == "__main__":
    port = ToyPort(num_blocks=70, max_model_len=2048, step_tokens=2048)
    serve(sys.argv[2], sys.argv[3], PipeLink(Connection(int(sys.argv[1]))), port)
