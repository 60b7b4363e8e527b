"""Whether answers with coded or evicted KV are those of one worker alone: hit, moved, preempted, over two ranks.

    python -m benchmarks.kv_agreement [--json] [--codecs raw nuq4-1% tq4 int8] [--prompts 125] [--tokens 16]
                                      [--paths 2P2D colocated tiers ranks] [--calibration FILE]
                                      [--keep T] [--rule ada|fastgen|zap]

One worker alone is the CPU engine in this process: it prefills a prompt at once and decodes token by token. The same
prompts, cut from held-out text, are then asked of deployments of the embedded model, eight at a time, greedily:

    1P1D         one prefill and one decode worker; only if it is named
    2P2D         two prefill and two decode workers; all prompts twice, so that the second half are prefix hits. In
                 the middle of either half a decode worker is killed
    colocated    one worker with a pool of 20 slabs, swap space, and steps of at most 64 tokens: prompts are cut, and
                 sequences wait for memory
    tiers        one prefill and two decode workers with such pools, and a tier in host memory; all prompts twice, so
                 that what has left the pools is read back. A decode worker is killed as in 2P2D
    ranks        one prefill worker of one rank, one decode worker of two. Left out for codecs whose groups it would
                 cut: `nuq4-1%` needs a calibration for groups of half the heads (`diptych calibrate --group 64`)

With `--keep` below 1 all requests evict with this threshold, by the rule `--rule`, and so does the worker alone. Of
every other prompt that is longer than a chunk, the first chunk always stays. With 80 tokens, answers are
decided upon once more. Where pairs of workers exchange segments, the worker alone has them, too.

    identical_pct      answers all of whose tokens are those of one worker alone
    max_error          largest difference of a log-probability, up to and with the first token that differs
    beyond_2e3_pct     tokens whose log-probability differs by more than 2e-3
    cached_tokens, restored_tokens, preemptions, migrated, moved_bytes    that it happened
    kept_pct         rows that heads kept after the last decision of each answer, with `--keep`
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
from msgspec import structs
from transformers import AutoTokenizer

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import ServedDeployment, serving_deployment
from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import ADA, KEEP_ALL, KEEP_RULES, ZAP, KeepSpec
from engine.cpu.eviction.evictor import EvictionSetup
from engine.model.calibration_file import load_surrogate
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.model.tokenizer import ModelTokenizer, read_token_kinds
from kvcache.layout import KvLayout, split_layout
from models.evaluate import HeldOutText
from tests.support.engine_model import EngineModel, GreedyAnswer

FOLDER = Path(__file__).parents[1] / "models" / "tiny"
LENGTHS = (1, 400)
CLOSE = 2e-3
AT_ONCE = 8
ANSWER_S = 1800.0
MAX_MODEL_LEN = 1024
POOL_SLABS = 20
PATHS = ("1P1D", "2P2D", "colocated", "tiers", "ranks")
# Paths whose prompts are asked twice, and one of whose decode workers is killed each time.
TWICE = ("2P2D", "tiers")
# Paths whose decode workers have what `zap` keeps of a prompt in segments.
CUTTING = ("1P1D", *TWICE)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what may be dropped of its KV."""

    prompt: list[int]
    keep: KeepSpec

    def make_body(self, num_tokens: int) -> dict[str, Any]:
        """The request for a greedy answer of so many tokens."""
        body = {
            "model": "tiny",
            "prompt": self.prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "logprobs": 0,
        }
        if self.keep.evicts:
            body["diptych"] = {"keep": structs.asdict(self.keep)}
        return body | {"ignore_eos": True, "skip_special_tokens": False}


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer of a deployment, the cached tokens of its prompt, and the rows that its heads kept, of all rows."""

    answer: GreedyAnswer
    cached: int
    kept_rows: int
    all_rows: int

    @classmethod
    def parse(cls, body: dict[str, Any]) -> ServedAnswer:
        """From the body of a response."""
        logprobs, usage = body["choices"][0]["logprobs"], body["usage"]
        keep = usage.get("diptych", {}).get("keep") or {"kept_rows": 0, "all_rows": 0}
        return cls(
            GreedyAnswer(logprobs["tokens"], logprobs["token_logprobs"]),
            usage["prompt_tokens_details"]["cached_tokens"],
            keep["kept_rows"],
            keep["all_rows"],
        )


@dataclass(slots=True)
class PathFigures:
    """Answers of one deployment, compared with those of one worker alone."""

    answers: int = 0
    identical: int = 0
    tokens: int = 0
    beyond: int = 0
    max_error: float = 0.0
    cached_tokens: int = 0
    kept_rows: int = 0
    all_rows: int = 0
    happened: dict[str, float] = field(default_factory=dict)

    def add_answer(self, served: ServedAnswer, expected: GreedyAnswer) -> None:
        """Count one answer. Tokens behind the first one that differs follow another text, and are left out."""
        found = served.answer
        self.cached_tokens += served.cached
        self.kept_rows += served.kept_rows
        self.all_rows += served.all_rows
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
        kept = {"kept_pct": round(100 * self.kept_rows / self.all_rows, 1)} if self.all_rows else {}
        return {
            "answers": self.answers,
            "identical_pct": round(100 * self.identical / self.answers, 2),
            "max_error": round(self.max_error, 6),
            "beyond_2e3_pct": round(100 * self.beyond / self.tokens, 3),
            "cached_tokens": self.cached_tokens,
            **kept,
            **self.happened,
        }


def make_questions(count: int, threshold: float, rule: str = ADA) -> list[Question]:
    """Held-out text, each prompt cut from another place."""
    stream, rng = HeldOutText(FOLDER).stream, random.Random(0)
    lengths = [rng.randint(*LENGTHS) for _ in range(count)]
    starts = [rng.randrange(len(stream) - n) for n in lengths]
    keeps = [
        KeepSpec(threshold, CHUNK_TOKENS if number % 2 and length > CHUNK_TOKENS else 0, rule)
        for number, length in enumerate(lengths)
    ]
    return [
        Question(stream[start : start + n], keep if keep.evicts else KEEP_ALL)
        for n, start, keep in zip(lengths, starts, keeps, strict=True)
    ]


def path_flags(path: str, layout: KvLayout) -> tuple[str, ...] | None:
    """Flags of a deployment; None: this layout cannot have it."""
    if path in ("1P1D", "2P2D"):
        return ("--prefill", path[0], "--decode", path[2])
    small = ("--kv-cache-memory-bytes", str(POOL_SLABS * layout.chunk_bytes), "--max-model-len", "512")
    if path == "colocated":
        return ("--colocated", "1", *small, "--swap-space", "1MiB", "--max-num-batched-tokens", "64")
    if path == "tiers":
        return ("--prefill", "1", "--decode", "2", *small, "--kv-host-bytes", "256MiB")
    try:
        split_layout(layout, tp=2, pp=1)
    except ValueError:
        return None
    return ("--prefill", "1", "--decode", "1", "--decode-tp", "2")


async def ask_all(
    deployment: ServedDeployment, questions: Sequence[Question], tokens: int, kill: bool
) -> list[ServedAnswer]:
    """Greedy answers. `kill`: a decode worker, in the middle."""
    gate, done = asyncio.Semaphore(AT_ONCE), 0

    async def ask(question: Question) -> ServedAnswer:
        nonlocal done
        async with gate:
            answer = await client.post("/v1/completions", json=question.make_body(tokens))
            done += 1
            if kill and done == len(questions) // 2:
                await asyncio.to_thread(kill_decode_worker, deployment)
        return ServedAnswer.parse(answer.raise_for_status().json())

    async with httpx.AsyncClient(base_url=deployment.url, timeout=ANSWER_S) as client:
        return await asyncio.gather(*map(ask, questions))


def kill_decode_worker(deployment: ServedDeployment) -> None:
    """Kill the decode worker that runs most; its supervisor starts another one."""
    workers = [one for one in deployment.get("/status")["workers"] if one["role"] == "decode"]
    busiest = max(workers, key=lambda one: int(one["stats"]["running"]))
    os.kill(busiest["pid"], signal.SIGKILL)


def answer_alone(
    model: EngineModel, questions: list[Question], tokens: int, tokenizer: Any, cuts: bool
) -> list[GreedyAnswer]:
    """The answers of one worker alone. `cuts`: what `zap` keeps of prompts is in segments."""
    return [
        model.answer_greedily(
            one.prompt, tokens, tokenizer.decode, model.name_weights(one.keep) if cuts else one.keep, cuts
        )
        for one in questions
    ]


def run_path(
    path: str, flags: tuple[str, ...], questions: list[Question], expected: list[GreedyAnswer]
) -> PathFigures:
    """Ask one deployment, and compare."""
    figures, tokens = PathFigures(), len(expected[0].tokens)
    with serving_deployment(*flags) as deployment:
        deployment.wait_ready()
        for _ in range(2 if path in TWICE else 1):
            answers = uvloop.run(ask_all(deployment, questions, tokens, kill=path in TWICE))
            for found, wanted in zip(answers, expected, strict=True):
                figures.add_answer(found, wanted)
        workers = deployment.get("/status")["workers"]
        preempted = sum(sum(one["stats"]["preemptions"].values()) for one in workers)
        figures.happened = {
            "restored_tokens": deployment.metric("vllm:external_prefix_cache_hits_total"),
            "preemptions": preempted,
            "migrated": deployment.metric("diptych:migrated_streams_total"),
            "moved_bytes": deployment.metric("diptych:transfer_bytes_total"),
        }
    return figures


def measure_codec(
    codec: str, file: str, paths: Sequence[str], questions: list[Question], tokens: int
) -> dict[str, Any]:
    """All figures of one codec; `file` has its calibration, if that is not the model's own."""
    checkpoint = Checkpoint.resolve(str(FOLDER))
    codec_id, calibration = resolve_kv_codec(checkpoint, codec, file)
    coded = ("--kv-cache-codec", codec, *(("--kv-cache-calibration", file) if file else ()))
    layout, evicts = checkpoint.layout(codec=codec_id), questions[0].keep.evicts
    show_progress(f"{codec}: one worker alone")
    kinds = read_token_kinds(ModelTokenizer.load(FOLDER), checkpoint.config.vocab)
    setup = EvictionSetup(kinds, surrogate=load_surrogate(checkpoint)) if evicts else None
    alone = EngineModel(FOLDER, codec_id, calibration, setup)
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    cuts = (False, True) if questions[0].keep.rule == ZAP else (False,)
    expected = {cut: answer_alone(alone, questions, tokens, tokenizer, cut) for cut in cuts}
    found: dict[str, PathFigures] = {}
    for path in paths:
        if (flags := path_flags(path, layout)) is not None:
            show_progress(f"{codec}: {path}")
            found[path] = run_path(
                path, flags + coded, questions, expected[path in CUTTING and len(cuts) > 1]
            )
            show_progress(f"{codec}, {path}: {json.dumps(found[path].summary())}")
    answers = sum(one.answers for one in found.values())
    identical = sum(one.identical for one in found.values())
    return {
        "answers": answers,
        "identical_pct": round(100 * identical / answers, 2),
        "paths": {path: one.summary() for path, one in found.items()},
    }


def parse_threshold(text: str) -> float:
    """A threshold of eviction. Raises ValueError if it is not above 0 and at most 1."""
    return KeepSpec(float(text)).threshold


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
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS[1:]))
    parser.add_argument("--calibration", default="", help="of the codecs that need one")
    parser.add_argument("--prompts", type=int, default=125)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument(
        "--keep", type=parse_threshold, default=1.0, metavar="T", help="threshold of eviction; 1: none"
    )
    parser.add_argument("--rule", choices=KEEP_RULES, default=ADA, help="of eviction")
    options = parser.parse_args()
    load, questions = os.getloadavg()[0], make_questions(options.prompts, options.keep, options.rule)
    codecs = {
        codec: measure_codec(codec, options.calibration, options.paths, questions, options.tokens)
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
