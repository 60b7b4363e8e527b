"""Part `same`: whether pools of vLLM workers give the tokens of one vLLM alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.gpu_parts.check_part import PYTHON_VARIABLE, PartContext
from benchmarks.load.answer_checks import (
    KINDS as DEVICE_KINDS,
)
from benchmarks.load.answer_checks import (
    AskedRequest,
    ask_all,
    ask_reference,
    compare_answers,
    make_requests,
)
from benchmarks.load.channel_deployment import DEVICE_BOOKS, ChannelAnswer, ChannelDeployment
from diptych.request import Grammar

ALONE, TWO_PAIRS = ("--colocated", "1"), ("--prefill", "2", "--decode", "2")
PAIR = ("--prefill", "1", "--decode", "1")
REST_S = 3.0
COUNTS = ("answers", "identical", "explained", "unexplained", "failed")
# Settings of requests that are not greedy: those of other checks, and the other two kinds of grammar.
SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}'
KINDS = (
    *DEVICE_KINDS,
    {"grammar": Grammar("json_schema", SCHEMA)},
    {"grammar": Grammar("lark", 'start: "(" start ")" | "1"'), "temperature": 0.0},
)


def vllm_flags(*more: str) -> tuple[str, ...]:
    """The flags of workers on vLLM, in float32; `more` are others of vLLM's own."""
    python = os.environ[PYTHON_VARIABLE]
    args = " ".join(("--enforce-eager", *more))
    return ("--engine", "vllm", "--vllm-python", python, f"--vllm-args={args}", "--dtype", "float32")


def measure_same(context: PartContext) -> None:
    """Greedy answers and others of every kind from 2P2D, and fewer from 1P1D with two ranks per worker."""
    share = context.share
    asked = make_requests(int(400 * share), int(200 * share), kinds=KINDS)
    some = make_requests(int(30 * share) + 1, int(20 * share) + 1, seed=1, kinds=KINDS)
    with ChannelDeployment(*ALONE, *vllm_flags()) as deployment:
        reference, wanted = ask_reference(deployment, asked), ask_reference(deployment, some)
    measure_pools(context, "", (*TWO_PAIRS, *vllm_flags()), asked, reference)
    ranks = ("--prefill-tp", "2", "--decode-tp", "2")
    measure_pools(context, "ranks_", (*PAIR, *ranks, *vllm_flags()), some, wanted)


def measure_pools(
    context: PartContext,
    prefix: str,
    flags: Sequence[str],
    asked: Sequence[AskedRequest],
    reference: Sequence[ChannelAnswer],
) -> None:
    """Compare the answers of a deployment with those of the reference; figures are named with `prefix`."""
    with ChannelDeployment(*flags) as deployment:
        found = compare_answers(reference, ask_all(deployment, asked))
        held = deployment.wait_rest(REST_S, DEVICE_BOOKS)
    figures: dict[str, object] = {name: getattr(found, name) for name in COUNTS}
    figures |= {"held": len(held), "held_by": held, "examples": found.examples}
    context.record({f"{prefix}{name}": figure for name, figure in figures.items()})
