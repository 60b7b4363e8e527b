"""Runs under vLLM's interpreter: what one vLLM alone answers, without a connector.

    python -m tests.vllm.reference MODEL < REQUESTS

REQUESTS is a JSON list of `[prompt tokens, fields of SamplingParams]`; each answer is a line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import msgspec

from diptych.request import SamplingParams
from tests.vllm.program import options_for
from vllm_worker.port import PortRequest
from vllm_worker.setup.vllm_config import open_vllm


def main(model: str) -> None:
    """Answer the requests on standard input, one after another."""
    asked = json.load(sys.stdin)
    port = open_vllm(replace(options_for(model), connector=None))
    for number, (prompt, fields) in enumerate(asked):
        sampling = msgspec.convert({"seed": 1, **fields}, SamplingParams, strict=False)
        port.add(PortRequest(f"r{number}#1", prompt, [], sampling))
        tokens: list[int] = []
        while port.has_work:
            tokens += [token for output in port.step() for token in output.tokens]
        print(json.dumps({"name": str(number), "tokens": tokens}), flush=True)
    port.close()


if __name__ == "__main__":
    main(sys.argv[1])
