"""Part `served`: one vLLM worker behind Diptych's gateway, beside `vllm serve` with the same flags."""

from __future__ import annotations

import contextlib
import os
import random
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks.engine import EMBEDDED
from benchmarks.gpu_parts.check_part import PartContext
from benchmarks.load.deployment import serving_deployment
from benchmarks.rivals import Server, endless, load, make_text, running, wait_up
from benchmarks.vllm_parts.tokens import ALONE, PYTHON_VARIABLE, vllm_flags

STREAMS, REQUESTS_EACH, ROUNDS = 16, 2, 7


def measure_served(context: PartContext) -> None:
    """Output tokens per second of both at 16 streams, by turns; both are up, and one is asked at a time."""
    home = Path(os.environ[PYTHON_VARIABLE]).parent.parent
    rounds, rng = max(3, round(ROUNDS * context.share)), random.Random(0)
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    model = endless(context.folder / "model")
    (model / "kvquant.safetensors").unlink(missing_ok=True)
    rates, cpu_rates = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(
            serving_deployment("--model", str(model), *ALONE, *vllm_flags(), "--max-model-len", "1024")
        )
        ours.wait_ready()
        listed = ours.get("/v1/models")["data"][0]["id"]
        servers = {"ours": Server(ours.port, listed, psutil.Process(ours.process.pid))}
        servers["vllm"] = stack.enter_context(running("vllm", home, model, context.folder / "vllm.log"))
        wait_up(servers["vllm"])
        for number in range(rounds + 1):
            for name, server in servers.items():
                texts = [make_text(tokenizer, rng) for _ in range(STREAMS * REQUESTS_EACH)]
                found = uvloop.run(load(server, STREAMS, texts))
                if number:  # the first round is warm-up
                    rates[name].append(found[f"c{STREAMS}"])
                    cpu_rates[name].append(found[f"cpu_c{STREAMS}"])
    context.record({
        "served_ratio": round(median(rates["ours"]) / median(rates["vllm"]), 3),
        "served_cpu_ratio": round(median(cpu_rates["ours"]) / median(cpu_rates["vllm"]), 3),
        "served_per_s": {name: round(median(values), 1) for name, values in rates.items()},
    })  # fmt: skip
