"""Output tokens per second of the engine beside `generate` of transformers: same weights, float32, one thread each.

    python -m benchmarks.engine [--json] [--rounds 3] [--models embedded random]

In process, greedy, `PROMPT` random tokens per sequence and `NEW` output tokens each, at batch 1, 8 and 32. Two models:
the embedded one, and a random Llama of 100 million parameters. Its weights are rounded to bfloat16, as published
checkpoints of its kind are stored; transformers computes with them in float32, and so does the engine, which keeps
them in 16 bits because that loses nothing. `_wide` is the engine with weights that only 32 bits hold.

    vs_transformers_b*   tokens per second of decoding (from the moment at which all sequences have their first token),
                         engine / transformers; the lesser of the two models
    whole_b*             the same of the whole call, prompts included
    overhead_share       of a decode step of the embedded model at batch 16: all that is not `run`, with the encoding of
                         the message to the gateway, / the whole step

Seconds are CPU seconds of the only thread that computes, so that a neighbour's load counts as little as can be; only
`overhead_share` takes wall time, as the worker's metric does. Each round runs all contestants in turn; medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as talk

import benchmarks.script_path  # noqa: F401
from diptych.channel.frames import pack_message
from diptych.messages import Output, Step
from diptych.request import SamplingParams
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool

EMBEDDED = Path(__file__).parents[1] / "models" / "tiny"
PROMPT, NEW, BATCHES, MOST = 128, 64, (1, 8, 32), 32
STEADY = 16  # sequences of which the step is taken apart
AIMS = {1: 3.0, 8: 3.0, 32: 2.0}

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One call: CPU seconds until all have their first token, and from then on; what came out."""

    first_s: float
    rest_s: float
    rest_tokens: int  # written in `rest_s`
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return self.rest_tokens / self.rest_s

    @property
    def whole_s(self) -> float:
        """Seconds of the call."""
        return self.first_s + self.rest_s


def random_llama(folder: Path, dtype: torch.dtype) -> Path:
    """A Llama of 100 million parameters, random, rounded to `dtype`; the tokenizer is the embedded one's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    for file in EMBEDDED.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


class Ours:
    """The engine with its scheduler, sampler and runner; no gateway, no process around it."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        files = Checkpoint.resolve(str(folder))
        layout, length = files.layout(), PROMPT + NEW
        pool = KvPool(layout, MOST * layout.num_chunks(length) + 4)
        runner = CpuModelRunner.load(files, pool, length)
        runner.warm()
        limits = EngineLimits(num_slabs=pool.num_slabs, max_model_len=length)
        self.engine = Engine(runner, Scheduler(limits), KvAllocator(pool), Sampler(runner.vocab_size))

    def __call__(self, prompts: Prompts) -> Run:
        """Greedy output of all prompts at once."""
        engine, clock, sampling = (
            self.engine,
            self.clock,
            SamplingParams(max_tokens=NEW, seed=0, temperature=0.0),
        )
        written: dict[str, list[int]] = {str(place): [] for place in range(len(prompts))}
        begun_s, first_s, early = clock(), math.nan, 0
        for place, prompt in enumerate(prompts):
            engine.add(Sequence(str(place), 1, prompt, sampling, math.inf), begun_s)
        while engine.has_work:
            outputs = [emitted.message for emitted in engine.step(clock)]
            for output in outputs:
                assert isinstance(output, Output), output
                written[output.request] += output.tokens
            # As the worker does: one message per step.
            sending_s = clock()
            pack_message(Step([output for output in outputs if isinstance(output, Output)]))
            engine.record_send_time(clock() - sending_s)
            if math.isnan(first_s) and all(written.values()):
                first_s, early = clock(), sum(map(len, written.values()))
        rest_s, rest = clock() - first_s, len(prompts) * NEW - early
        return Run(first_s - begun_s, rest_s, rest, list(written.values()))

    def parts(self, prompts: Prompts) -> dict[str, float]:
        """Seconds by part of steps that decode; prompts are cut to two tokens, so that reading them hardly counts."""
        begun = self.engine.stats.step_parts
        self([prompt[:2] for prompt in prompts])
        return {part: seconds - begun[part] for part, seconds in self.engine.stats.step_parts.items()}


class Theirs:
    """`generate` of transformers with its default cache."""

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self.model = model.eval()

    def __call__(self, prompts: Prompts) -> Run:
        """Greedy output of all prompts at once; the first tokens are timed by a call that ends with them."""
        first_s, _ = self._generate(prompts, 1)
        whole_s, tokens = self._generate(prompts, NEW)
        return Run(first_s, whole_s - first_s, len(prompts) * (NEW - 1), tokens)

    def _generate(self, prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        ids = torch.tensor(prompts)
        begun_s = time.thread_time()
        with torch.no_grad():
            made = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return time.thread_time() - begun_s, made[:, ids.shape[1] :].tolist()


def make_prompts(batch: int, seed: int) -> Prompts:
    """Random tokens; every sequence its own."""
    rng = random.Random(seed)
    return [[rng.randrange(8, 4096) for _ in range(PROMPT)] for _ in range(batch)]


def measure(contestants: dict[str, Callable[[Prompts], Run]], rounds: int) -> dict[str, Any]:
    """Figures of one model; `contestants` has "theirs" and "ours"."""
    found: dict[str, Any] = {}
    for batch in BATCHES:
        runs: dict[str, list[Run]] = {name: [] for name in contestants}
        for number in range(rounds + 1):
            for name, call in contestants.items():
                run = call(make_prompts(batch, number))
                if number:  # the first round is warm-up
                    runs[name].append(run)
        rate = {name: median(run.rate for run in each) for name, each in runs.items()}
        whole = {name: median(run.whole_s for run in each) for name, each in runs.items()}
        same = [
            mine == other
            for a, b in zip(runs["ours"], runs["theirs"], strict=True)
            for mine, other in zip(a.tokens, b.tokens, strict=True)
        ]
        for name in runs:
            suffix = name.removeprefix("ours")
            if name != "theirs":
                found[f"vs_transformers_b{batch}{suffix}"] = round(rate[name] / rate["theirs"], 2)
                found[f"whole_b{batch}{suffix}"] = round(whole["theirs"] / whole[name], 2)
        found[f"tokens_per_s_b{batch}"] = {name: round(each, 1) for name, each in rate.items()}
        found[f"same_answers_b{batch}"] = round(sum(same) / len(same), 3)
    return found


def overhead(ours: Ours, rounds: int) -> dict[str, float]:
    """Shares of a decode step at batch `STEADY`, and `overhead_share`."""
    taken = [ours.parts(make_prompts(STEADY, number)) for number in range(rounds + 1)][1:]
    middle = {part: median(one[part] for one in taken) for part in taken[0]}
    total = sum(middle.values())
    shares = {f"{part}_share": round(seconds / total, 4) for part, seconds in middle.items()}
    return {"overhead_share": round(1 - middle["run"] / total, 4), **shares}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=("embedded", "random"), default=["embedded", "random"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    talk.set_verbosity_error()  # type: ignore[no-untyped-call]
    talk.disable_progress_bar()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {}
    if "embedded" in options.models:
        ours = Ours(EMBEDDED)
        found["embedded"] = measure({"theirs": Theirs(EMBEDDED), "ours": ours}, options.rounds)
        found["step_b16"] = overhead(Ours(EMBEDDED, time.perf_counter), 3 * options.rounds)
    if "random" in options.models:
        with tempfile.TemporaryDirectory() as folder:
            narrow = random_llama(Path(folder, "narrow"), torch.bfloat16)
            wide = random_llama(Path(folder, "wide"), torch.float32)
            contestants: dict[str, Callable[[Prompts], Run]] = {
                "theirs": Theirs(narrow),
                "ours": Ours(narrow),
                "ours_wide": Ours(wide),
            }
            found["random"] = measure(contestants, options.rounds)
    models = [found[model] for model in options.models]
    least = {
        f"{figure}_b{batch}": min(model[f"{figure}_b{batch}"] for model in models)
        for figure in ("vs_transformers", "whole")
        for batch in BATCHES
    }
    least |= {"overhead_share": found["step_b16"]["overhead_share"]} if "step_b16" in found else {}
    if options.json:
        print(json.dumps({**least, "rounds": options.rounds, **found}))
        return
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{figure} {value}" for figure, value in figures.items()))
    print("least: " + ", ".join(f"{figure} {value}" for figure, value in least.items()))
    print("aims: " + ", ".join(f"vs_transformers_b{batch} >= {aim}" for batch, aim in AIMS.items()))


if __name__ == "__main__":
    main()
