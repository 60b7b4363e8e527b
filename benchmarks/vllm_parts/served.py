"""Part `served`: one vLLM worker behind Diptych's gateway, beside `vllm serve` with the same flags."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks.engine import EMBEDDED
from benchmarks.gpu_parts.check_part import PYTHON_VARIABLE, PartContext
from benchmarks.load.deployment import serving_deployment
from benchmarks.rivals import Server, endless, load, make_text, running, wait_up
from benchmarks.vllm_parts.tokens import ALONE, vllm_flags
from vllm_worker.setup.engine_args import EngineOptions, build_arguments

STREAMS, REQUESTS_EACH, ROUNDS = 16, 2, 7
MAX_MODEL_LEN, KV_BYTES = 1024, 256 << 20
# A worker's statistics need it; `vllm serve` would write a line per step.
OWN_FLAG = "--enable-logging-iteration-details"


def serve_command(options: EngineOptions, is_cpu: bool) -> list[str]:
    """`vllm serve` with the flags that a worker with these options gives to vLLM, but for the connector."""
    args = build_arguments(replace(options, connector=None), is_cpu)
    args.remove(OWN_FLAG)
    place = args.index("--model")
    model = args[place + 1]
    del args[place : place + 2]
    if is_cpu:
        # As a worker sets it where prompts are prefilled whole.
        args += ["--max-num-batched-tokens", str((options.max_model_len or 0) + options.max_num_seqs)]
    # Braces of JSON are none of the template's.
    shown = [part.replace("{", "{{").replace("}", "}}") for part in args]
    return ["{home}/bin/vllm", "serve", model, "--port", "{port}", *shown]


def measure_served(context: PartContext) -> None:
    """Output tokens per second of both at 16 streams, by turns; both are up, and one is asked at a time."""
    shutil.rmtree(context.folder / "model", ignore_errors=True)
    model = endless(context.folder / "model")
    (model / "kvquant.safetensors").unlink(missing_ok=True)
    sizes = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(KV_BYTES))
    options = EngineOptions(
        str(model),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_bytes=KV_BYTES,
        vllm_args=("--enforce-eager",),
    )
    rounds = max(3, round(ROUNDS * context.share))
    found = compare_servers(
        context,
        model,
        (*ALONE, *vllm_flags(), *sizes),
        serve_command(options, is_cpu=True),
        (STREAMS,),
        rounds,
    )
    context.record({
        "served_ratio": found[f"c{STREAMS}"],
        "served_cpu_ratio": found[f"cpu_c{STREAMS}"],
    })  # fmt: skip


def compare_servers(
    context: PartContext,
    model: Path,
    flags: Sequence[str],
    command: Sequence[str],
    all_streams: Sequence[int],
    rounds: int,
) -> dict[str, float]:
    """Output tokens per second of `diptych serve FLAGS` / of `vllm serve`, by number of streams: medians by turns."""
    home = Path(os.environ[PYTHON_VARIABLE]).parent.parent
    tokenizer, rng = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")), random.Random(0)
    rates = {name: defaultdict[str, list[float]](list) for name in ("ours", "vllm")}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(serving_deployment("--model", str(model), *flags))
        ours.wait_ready()
        listed = ours.get("/v1/models")["data"][0]["id"]
        servers = {"ours": Server(ours.port, listed, psutil.Process(ours.process.pid))}
        log = context.folder / "vllm.log"
        servers["vllm"] = stack.enter_context(running("vllm", home, model, log, command))
        wait_up(servers["vllm"])
        for number in range(rounds + 1):
            for streams in all_streams:
                for name, server in servers.items():
                    texts = [make_text(tokenizer, rng) for _ in range(streams * REQUESTS_EACH)]
                    for figure, value in uvloop.run(load(server, streams, texts)).items():
                        if number:  # the first round is warm-up
                            rates[name][figure].append(value)
    medians = {
        name: {figure: median(values) for figure, values in one.items()} for name, one in rates.items()
    }
    context.record({
        f"{name}_{figure}_per_s": round(value, 1) for name, one in medians.items() for figure, value in one.items()
    })  # fmt: skip
    return {figure: round(value / medians["vllm"][figure], 3) for figure, value in medians["ours"].items()}
