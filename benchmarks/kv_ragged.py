"""What eviction per head costs on the CPU: deciding about a prompt, and decoding over ragged heads.

A part of `benchmarks.kv_decode`, which prints it. The embedded model reads source text; figures are ratios of medians:

plan_share      deciding about 1,024 tokens at T = .95 by `zap`, with the copy of kept rows / their prefill
ada_share       the same by `ada`
fastgen_share   the same by `fastgen`
fastgen_prefill a prefill that adds up the attention of all rows for `fastgen` / the same prefill
ragged_ratio    decode attention of all layers and the packing of its step, per row of KV that is read: 16 sequences
                of 1,920 tokens after eviction at T = .95, with half a ring each / the same sequences with all KV
kept_share      rows that these sequences kept, of those behind the boundary (0 tokens)
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

import benchmarks.script_path  # noqa: F401
from benchmarks.engine import EMBEDDED
from diptych.eviction_spec import ADA, FASTGEN, KEEP_RULES, ZAP, KeepSpec
from engine.batching.batch import pack_batch
from engine.cpu.attention import CpuAttention
from engine.cpu.eviction.evictor import CpuEvictor, EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.model.calibration_file import load_surrogate
from engine.model.checkpoint import Checkpoint
from engine.protocols import EvictionOrder
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.policies import PUNCT_KIND, SPECIAL_KIND
from kvcache.pool import KvPool

SEQUENCES, TOKENS, PROMPT, RING, CONTEXT = 16, 1920, 1024, 32, 2048
SPECS = {rule: KeepSpec(0.95, 0, rule) for rule in KEEP_RULES}
SPEC = SPECS[ADA]
SOURCES = Path(__file__).parents[1] / "engine"


def thread_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this thread: what a neighbour takes from the core is not counted."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def read_kinds(tokenizer: Tokenizer) -> NDArray[np.uint8]:
    """The kind of every token: blank or punctuation, or special."""
    kinds = np.zeros(tokenizer.get_vocab_size(), np.uint8)
    for token in range(len(kinds)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        kinds[token] = 0 if text.strip(string.punctuation + string.whitespace) else PUNCT_KIND
    for token in tokenizer.get_added_tokens_decoder():
        kinds[token] = SPECIAL_KIND
    return kinds


class RaggedBenchmark:
    """The embedded model and `SEQUENCES` prompts of source text, each with all its KV and with what is kept of it."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
        text = "\n".join(file.read_text() for file in sorted(SOURCES.rglob("*.py")))
        ids: list[int] = tokenizer.encode(text).ids
        self.prompts = [ids[n * TOKENS : (n + 1) * TOKENS] for n in range(SEQUENCES)]
        files = Checkpoint.resolve(str(EMBEDDED))
        layout = files.layout()
        self.chunks = layout.num_chunks(TOKENS)
        self.pool = KvPool(layout, SEQUENCES * (2 * self.chunks + 2) + self.chunks)
        setup = EvictionSetup(read_kinds(tokenizer), surrogate=load_surrogate(files))
        self.runner = CpuModelRunner.load(files, self.pool, CONTEXT, eviction=setup)
        (attention,) = self.runner._attentions
        assert attention.evictor is not None and isinstance(attention.attention, CpuAttention)
        self.evictor: CpuEvictor = attention.evictor
        self.pages: CpuAttention = attention.attention
        slabs = np.random.default_rng(1).permutation(self.pool.num_slabs).tolist()
        self.whole, self.ragged = list[StepWork](), list[StepWork]()
        self.whole_rows = self.ragged_rows = self.all_rows = self.kept_rows = 0
        for number, prompt in enumerate(self.prompts):
            self._add_sequence(str(number), prompt, slabs)
        self.spare: list[int] = slabs[: self.chunks]
        shape = files.config
        generator = torch.Generator().manual_seed(2)
        self.qkv = torch.randn(
            SEQUENCES, (shape.heads + 2 * layout.kv_heads) * layout.head_dim, generator=generator
        )
        self.out = torch.empty(SEQUENCES, shape.heads * layout.head_dim)

    def _add_sequence(self, key: str, prompt: list[int], free: list[int]) -> None:
        """Prefill one sequence, evict into a bag beside its chunks, and make the works of both."""
        slabs = [free.pop() for _ in range(self.chunks)]
        kept = KeptWork(key, TOKENS, SPEC, False)
        self.runner.run([StepWork(prompt, 0, slabs, "none", prompt[0], kept)])
        report = self.runner.plan_eviction(EvictionOrder(key, prompt, TOKENS, SPEC, slabs))
        bag = [free.pop() for _ in range(report.bag_slabs)]
        self.runner.apply_eviction(key, bag)
        ring = free.pop()
        self.pool.data[ring] = self.pool.data[slabs[0]]
        self.whole.append(StepWork([5], TOKENS - 1, slabs, "none", 5))
        kept = KeptWork(key, TOKENS, SPEC, True)
        self.ragged.append(StepWork([5], TOKENS + RING - 1, [ring, *bag], "none", 5, kept))
        heads = self.pool.layout.layers * self.pool.layout.kv_heads
        self.whole_rows += heads * TOKENS
        self.ragged_rows += report.kept_rows + heads * RING
        self.kept_rows, self.all_rows = self.kept_rows + report.kept_rows, self.all_rows + report.all_rows

    def decode_whole(self) -> None:
        """Attention of all layers over all KV."""
        batch = pack_batch(self.whole)
        for layer in range(self.pool.layout.layers):
            self.pages.decode(layer, self.qkv, batch, 0, self.out)

    def decode_ragged(self) -> None:
        """Attention of all layers over what heads keep."""
        batch, attention = pack_batch(self.ragged), self.evictor.attend_to(self.ragged, [])
        for layer in range(self.pool.layout.layers):
            attention.decode(layer, self.qkv, batch, 0, self.out)

    def prefill(self, kept: KeptWork | None) -> None:
        """A prompt through the whole model."""
        tokens = self.prompts[0][:PROMPT]
        self.runner.run([StepWork(tokens, 0, self.spare, "last", tokens[0], kept)])

    def plan(self, rule: str) -> None:
        """Decide about that prompt."""
        tokens = self.prompts[0][:PROMPT]
        self.runner.plan_eviction(EvictionOrder(rule, tokens, PROMPT, SPECS[rule], self.spare))


def measure_eviction(rounds: int) -> dict[str, float]:
    """The figures above, of medians over rounds, and the medians in milliseconds."""
    bench = RaggedBenchmark()
    records = {rule: KeptWork(rule, PROMPT, spec, False) for rule, spec in SPECS.items()}
    for kept in records.values():
        bench.prefill(kept)

    def prefill_anew() -> None:
        bench.runner.forget_kept(FASTGEN)
        bench.prefill(records[FASTGEN])

    calls: dict[str, Callable[[], object]] = {
        "whole": bench.decode_whole,
        "ragged": bench.decode_ragged,
        "prefill": lambda: bench.prefill(None),
        "fastgen_prefill": prefill_anew,
        **{rule: partial(bench.plan, rule) for rule in KEEP_RULES},
    }
    for call in calls.values():
        call()
    taken = {name: list[float]() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(thread_seconds(call))
    middle = {name: median(times) for name, times in taken.items()}
    per_row = middle["ragged"] / bench.ragged_rows, middle["whole"] / bench.whole_rows
    return {
        "plan_share": round(middle[ZAP] / middle["prefill"], 4),
        "ada_share": round(middle[ADA] / middle["prefill"], 4),
        "fastgen_share": round(middle[FASTGEN] / middle["prefill"], 4),
        "fastgen_prefill": round(middle["fastgen_prefill"] / middle["prefill"], 3),
        "ragged_ratio": round(per_row[0] / per_row[1], 3),
        "kept_share": round(bench.kept_rows / bench.all_rows, 3),
    } | {f"{name}_ms": round(1e3 * value, 2) for name, value in middle.items()}
