"""Whether answers with coded KV are those of one worker alone: hit or miss, moved, preempted, cut off, over two ranks.

    python -m benchmarks.kv_agreement [--json] [--codecs raw nuq4-1% tq4 int8] [--prompts 125] [--tokens 16]
                                      [--paths 2P2D colocated ranks] [--calibration FILE]

One worker alone is the CPU engine in this process: it prefills a prompt at once and decodes token by token. The same
prompts, cut from held-out text, are then asked of deployments of the embedded model, eight at a time, greedily:

    2P2D         two prefill and two decode workers; all prompts twice, so that the second half are prefix hits. In
                 the middle of either half a decode worker is killed
    colocated    one worker with a pool of 20 slabs, swap space, and steps of at most 64 tokens: prompts are cut, and
                 sequences wait for memory
    ranks        one prefill worker of one rank, one decode worker of two. Left out for codecs whose groups it would
                 cut: `nuq4-1%` needs a calibration for groups of half the heads (`diptych calibrate --group 64`)

    identical_pct      answers all of whose tokens are those of one worker alone
    max_error          largest difference of a log-probability, up to and with the first token that differs
    beyond_2e3_pct     tokens whose log-probability differs by more than 2e-3
    cached_tokens, preemptions, migrated, moved_bytes    that it happened
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import uvloop
from transformers import AutoTokenizer

import benchmarks.script_path  # noqa: F401
from benchmarks.kv_engine import EngineModel, GreedyAnswer
from benchmarks.load.deployment import ServedDeployment, serving_deployment
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from kvcache.layout import KvLayout, split_layout
from models.evaluate import HeldOutText

FOLDER = Path(__file__).parents[1] / "models" / "tiny"
LENGTHS = (1, 400)
CLOSE = 2e-3
AT_ONCE = 8
ANSWER_S = 1800.0
MAX_MODEL_LEN = 1024
POOL_SLABS = 20
PATHS = ("2P2D", "colocated", "ranks")


@dataclass(slots=True)
class PathFigures:
    """Answers of one deployment, compared with those of one worker alone."""

    answers: int = 0
    identical: int = 0
    tokens: int = 0
    beyond: int = 0
    max_error: float = 0.0
    cached_tokens: int = 0
    happened: dict[str, float] = field(default_factory=dict)

    def compare(self, found: GreedyAnswer, expected: GreedyAnswer) -> None:
        """Count one answer. Tokens behind the first one that differs follow another text, and are left out."""
        differs = [one != other for one, other in zip(found.tokens, expected.tokens, strict=True)]
        count = differs.index(True) + 1 if any(differs) else len(differs)
        errors = [
            abs(one - other)
            for one, other in zip(found.logprobs[:count], expected.logprobs[:count], strict=True)
        ]
        self.answers += 1
        self.identical += not any(differs)
        self.tokens += count
        self.beyond += sum(error > CLOSE for error in errors)
        self.max_error = max(self.max_error, *errors)

    def summary(self) -> dict[str, float]:
        return {
            "answers": self.answers,
            "identical_pct": round(100 * self.identical / self.answers, 2),
            "max_error": round(self.max_error, 6),
            "beyond_2e3_pct": round(100 * self.beyond / self.tokens, 3),
            "cached_tokens": self.cached_tokens,
            **self.happened,
        }


def make_prompts(count: int) -> list[list[int]]:
    """Held-out text, each prompt cut from another place."""
    stream, rng = HeldOutText(FOLDER).stream, random.Random(0)
    lengths = [rng.randint(*LENGTHS) for _ in range(count)]
    return [stream[start : start + n] for n in lengths for start in [rng.randrange(len(stream) - n)]]


def path_flags(path: str, layout: KvLayout) -> tuple[str, ...] | None:
    """Flags of a deployment; None: this layout cannot have it."""
    if path == "2P2D":
        return ("--prefill", "2", "--decode", "2")
    if path == "colocated":
        pool = str(POOL_SLABS * layout.chunk_bytes)
        small = ("--kv-cache-memory-bytes", pool, "--swap-space", "1MiB", "--max-model-len", "512")
        return ("--colocated", "1", *small, "--max-num-batched-tokens", "64")
    try:
        split_layout(layout, tp=2, pp=1)
    except ValueError:
        return None
    return ("--prefill", "1", "--decode", "1", "--decode-tp", "2")


async def ask_all(
    deployment: ServedDeployment, prompts: Sequence[list[int]], tokens: int, kill: bool
) -> list[tuple[GreedyAnswer, int]]:
    """Greedy answers, and how many tokens of each prompt were cached. `kill`: a decode worker, in the middle."""
    gate, done = asyncio.Semaphore(AT_ONCE), 0

    async def ask(prompt: list[int]) -> tuple[GreedyAnswer, int]:
        nonlocal done
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 0}
        async with gate:
            answer = await client.post(
                "/v1/completions", json=body | {"ignore_eos": True, "skip_special_tokens": False}
            )
            done += 1
            if kill and done == len(prompts) // 2:
                await asyncio.to_thread(kill_decode_worker, deployment)
        answered = answer.raise_for_status().json()
        logprobs, usage = answered["choices"][0]["logprobs"], answered["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return GreedyAnswer(logprobs["tokens"], logprobs["token_logprobs"]), cached

    async with httpx.AsyncClient(base_url=deployment.url, timeout=ANSWER_S) as client:
        return await asyncio.gather(*map(ask, prompts))


def kill_decode_worker(deployment: ServedDeployment) -> None:
    """Kill the decode worker that runs most; its supervisor starts another one."""
    workers = [one for one in deployment.get("/status")["workers"] if one["role"] == "decode"]
    busiest = max(workers, key=lambda one: int(one["stats"]["running"]))
    os.kill(busiest["pid"], signal.SIGKILL)


def run_path(
    path: str, flags: tuple[str, ...], prompts: list[list[int]], expected: list[GreedyAnswer]
) -> PathFigures:
    """Ask one deployment, and compare."""
    figures, tokens = PathFigures(), len(expected[0].tokens)
    with serving_deployment(*flags) as deployment:
        deployment.wait_ready()
        for _ in range(2 if path == "2P2D" else 1):
            for (found, cached), wanted in zip(
                uvloop.run(ask_all(deployment, prompts, tokens, kill=path == "2P2D")), expected, strict=True
            ):
                figures.compare(found, wanted)
                figures.cached_tokens += cached
        workers = deployment.get("/status")["workers"]
        preempted = sum(sum(one["stats"]["preemptions"].values()) for one in workers)
        figures.happened = {
            "preemptions": preempted,
            "migrated": deployment.metric("diptych:migrated_streams_total"),
            "moved_bytes": deployment.metric("diptych:transfer_bytes_total"),
        }
    return figures


def measure_codec(
    codec: str, file: str, paths: Sequence[str], prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """All figures of one codec; `file` has its calibration, if that is not the model's own."""
    checkpoint = Checkpoint.resolve(str(FOLDER))
    codec_id, calibration = resolve_kv_codec(checkpoint, codec, file)
    coded = ("--kv-cache-codec", codec, *(("--kv-cache-calibration", file) if file else ()))
    layout = checkpoint.layout(codec=codec_id)
    show_progress(f"{codec}: one worker alone")
    alone = EngineModel(FOLDER, codec_id, calibration)
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    expected = [alone.answer_greedily(prompt, tokens, tokenizer.decode) for prompt in prompts]
    found: dict[str, PathFigures] = {}
    for path in paths:
        if (flags := path_flags(path, layout)) is not None:
            show_progress(f"{codec}: {path}")
            found[path] = run_path(path, flags + coded, prompts, expected)
    answers = sum(one.answers for one in found.values())
    identical = sum(one.identical for one in found.values())
    return {
        "answers": answers,
        "identical_pct": round(100 * identical / answers, 2),
        "paths": {path: one.summary() for path, one in found.items()},
    }


def show_progress(text: str) -> None:
    """A line beside the output, since a run takes minutes."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--codecs", nargs="+", default=["raw", "nuq4-1%", "tq4", "int8"])
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--calibration", default="", help="of the codecs that need one")
    parser.add_argument("--prompts", type=int, default=125)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    load, prompts = os.getloadavg()[0], make_prompts(options.prompts)
    codecs = {
        codec: measure_codec(codec, options.calibration, options.paths, prompts, options.tokens)
        for codec in options.codecs
    }
    found = {
        "min_identical_pct": min(one["identical_pct"] for one in codecs.values()),
        "load_before": round(load, 2),
        "codecs": codecs,
    }
    print(json.dumps(found, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
