"""The part of a check that needs a GPU and an environment with vLLM: its workers beside vLLM alone, in bfloat16."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.gpu_parts.check_part import PYTHON_VARIABLE, PartContext
from benchmarks.gpu_parts.pair import LLAMA_1B, write_checkpoint
from benchmarks.load.answer_checks import NEAR, ask_all, ask_reference, compare_answers, make_requests
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelDeployment
from benchmarks.vllm_parts.served import MAX_MODEL_LEN, compare_servers, serve_command
from benchmarks.vllm_parts.tokens import ALONE, KINDS, PAIR, REST_S
from diptych.errors import ConfigError
from tests.support.gpu_pages import Place
from vllm_worker.setup.engine_args import EngineOptions

GREEDY, OTHERS, STREAMS, ROUNDS = 100, 50, (64, 256), 2
DTYPE = "bfloat16"
# Both servers are up at once.
SHARE_OF_MEMORY = 0.4


def vllm_python() -> str:
    """The interpreter with vLLM. Raises ConfigError if none is named."""
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        raise ConfigError(
            "the part `vllm` needs an interpreter that has vLLM",
            f"{PYTHON_VARIABLE} names none",
            f"{PYTHON_VARIABLE}=/path/to/python make gpu-check",
        )
    return python


def measure_vllm(context: PartContext) -> None:
    """Tokens of 1P1D beside those of one vLLM worker; then tokens per second of one worker over `vllm serve`."""
    flags = ("--engine", "vllm", "--vllm-python", vllm_python(), "--device", "cuda", "--dtype", DTYPE)
    asked = make_requests(GREEDY, OTHERS, kinds=KINDS)
    # Graphs are left out where only tokens count: they take most of a start.
    eager = (*flags, "--vllm-args=--enforce-eager")
    with ChannelDeployment(*ALONE, *eager) as deployment:
        reference = ask_reference(deployment, asked)
    with ChannelDeployment(*PAIR, *eager) as deployment:
        found = compare_answers(reference, ask_all(deployment, asked), NEAR[DTYPE])
        held = deployment.wait_rest(REST_S, DEVICE_BOOKS)
    context.record({
        "vllm_answers": found.answers, "vllm_explained": found.explained, "vllm_unexplained": found.unexplained,
        "vllm_failed": found.failed, "vllm_held": len(held), "vllm_examples": found.examples,
    })  # fmt: skip
    folder = context.folder / "vllm_model"
    folder.mkdir(exist_ok=True)
    model = write_checkpoint(
        folder, LLAMA_1B, Place(torch.device("cuda"), DTYPE, rounds=1, layers=LLAMA_1B.layers)
    )
    ratios = measure_ratios(context, model, flags)
    context.record({"vllm_host_ratio": min(ratios)})


def measure_ratios(context: PartContext, model: Path, flags: tuple[str, ...]) -> list[float]:
    """Tokens per second of one worker behind the gateway / of `vllm serve` with the same flags, by streams."""
    rows = max(STREAMS)
    options = EngineOptions(
        str(model),
        dtype=DTYPE,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=SHARE_OF_MEMORY,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
    )
    sizes = (
        *("--max-model-len", str(MAX_MODEL_LEN), "--gpu-memory-utilization", str(SHARE_OF_MEMORY)),
        *("--max-num-seqs", str(rows), "--max-num-batched-tokens", str(options.max_num_batched_tokens)),
    )
    command = serve_command(options, is_cpu=False)
    found = compare_servers(context, model, (*ALONE, *flags, *sizes), command, STREAMS, ROUNDS)
    return [found[f"c{streams}"] for streams in STREAMS]
