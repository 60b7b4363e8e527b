"""Blocks of bulk work in this process: a random model, its policies, their runs, and what is predicted of them."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Failed
from diptych.request import SamplingParams
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.offload.disk_file import DiskRate
from engine.cpu.offload.loading import BlockFiles, load_block, measure_model, prepare_weights
from engine.cpu.offload.weight_stream import open_index
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.offload.block_admission import BlockAdmission
from engine.offload.engine import OffloadEngine
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import BlockModel, predict_needs, trim_policy
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from planner.costs.model import dims_on_cpu, find_model
from planner.offload.programme import OffloadPlacement
from planner.types import BulkRates
from services.cli.plan.offload_search import RatedBlocks

TINY = Path(__file__).parents[1] / "models" / "tiny"
# More disk than any block needs.
DISK_BYTES = 1 << 43
# One unit at a time, so that the end of the first step is seen.
SLICE_S = 0.0


@dataclass(frozen=True, slots=True)
class BulkSettings:
    """The model and the work. Sizes are numbers, the rate is bytes per second."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    prompts: int
    prompt_tokens: int
    output_tokens: int
    disk_rate: float
    memory_share: float
    step_tokens: int

    @property
    def max_model_len(self) -> int:
        """The longest sequence."""
        return self.prompt_tokens + self.output_tokens


def make_model(folder: Path, settings: BulkSettings) -> Checkpoint:
    """A random Llama in bfloat16. Its tokenizer is that of the embedded model, which nothing here uses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=settings.hidden, num_hidden_layers=settings.layers, intermediate_size=settings.ffn,
        num_attention_heads=settings.heads, num_key_value_heads=settings.kv_heads, vocab_size=settings.vocab,
        max_position_embeddings=max(2048, settings.max_model_len),
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return Checkpoint.resolve(str(folder))


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """What a run took. `decode_s` leaves the first step out, which reads the prompts."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of everything."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens per second behind the first step."""
        return self.decode_tokens / self.decode_s


class BulkBench:
    """A model, its measured rates, and its folder. Runs do not share anything but the prepared weights."""

    def __init__(self, model: Checkpoint, settings: BulkSettings, rates: BulkRates, folder: Path) -> None:
        self.model, self.settings, self.rates, self._folder = model, settings, rates, folder

    def sizes(self, policy: BlockPolicy) -> BlockModel:
        """The sizes of the model with the kinds of a policy."""
        path = prepare_weights(self.model, policy.weight_kind, self._folder)
        layout = self.model.layout()
        return measure_model(self.model, layout, open_index(path), policy, self.settings.max_model_len)

    def base_policy(self, rows: int = 1, batches: int = 1, **shares: Any) -> BlockPolicy:
        """A policy for sequences of the settings' lengths."""
        one = self.settings
        return BlockPolicy(
            rows, batches, one.prompt_tokens, one.output_tokens, step_tokens=one.step_tokens, **shares
        )

    @property
    def weight_bytes(self) -> int:
        """All weights, as they are packed."""
        sizes = self.sizes(self.base_policy())
        return sum(sizes.layer_bytes) + sizes.end_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory that bulk work may take."""
        return int(self.settings.memory_share * self.weight_bytes)

    def fits(self, policy: BlockPolicy) -> bool:
        """Whether a policy keeps within the memory."""
        return predict_needs(self.sizes(policy), policy).memory_bytes <= self.memory_bytes

    def naive_policy(self) -> BlockPolicy:
        """One batch at a time, all weights read for each: the largest batch that fits, with its KV in memory if any."""
        rows = sorted({*range(1, 33), self.settings.prompts})
        for kv in (1.0, 0.0):
            fitting = [
                policy
                for count in rows
                for hidden in (1.0, 0.0)
                if self.fits(policy := self.base_policy(
                    count, 1, weights_in_memory=0.0, kv_in_memory=kv, hidden_in_memory=hidden
                ))
            ]  # fmt: skip
            if fitting:
                return fitting[-1]
        raise SystemExit("not even one sequence fits into the memory: raise --memory-share")

    def requests(self, count: int, decode: bool = True) -> list[Sequence]:
        """Random prompts."""
        draw, one = torch.Generator().manual_seed(count), self.settings
        found = []
        for i in range(count):
            prompt = torch.randint(0, one.vocab, (one.prompt_tokens,), generator=draw).tolist()
            asked = SamplingParams(max_tokens=one.output_tokens if decode else 1, temperature=0.0, seed=i)
            found.append(Sequence(f"r{i}", 1, prompt, asked, math.inf))
        return found

    def run(self, policy: BlockPolicy, rate: float | None, count: int, capped: bool = True) -> BlockTimes:
        """Run `count` prompts in a block; raises RuntimeError if one fails."""
        files = BlockFiles(
            self._folder,
            self._folder,
            memory_bytes=self.memory_bytes if capped else None,
            rate=None if rate is None else DiskRate(rate),
        )
        runner = load_block(self.model, policy, files, self.settings.max_model_len)
        schedule = BlockAdmission(policy, self.settings.max_model_len, max_waiting=count)
        engine = OffloadEngine(runner, schedule, Sampler(runner.vocab_size), runner.vocab_size, SLICE_S)
        for seq in self.requests(count):
            engine.add(seq, time.monotonic())
        return _time_engine(engine, runner.close, lambda: runner.steps)

    def run_resident(self, count: int) -> BlockTimes:
        """Run `count` prompts in the resident engine, with all the memory it wants."""
        chunks = count * -(-self.settings.max_model_len // CHUNK_TOKENS)
        pool = KvPool(self.model.layout(), chunks)
        runner = CpuModelRunner.load(self.model, pool, self.settings.max_model_len, prepared=self._folder)
        limits = EngineLimits(
            chunks, self.settings.max_model_len, max_num_seqs=count, max_waiting=count,
            max_num_batched_tokens=max(self.settings.step_tokens, count),
        )  # fmt: skip
        engine = Engine(runner, Scheduler(limits), KvAllocator(pool), Sampler(runner.vocab_size))
        for seq in self.requests(count):
            engine.add(seq, time.monotonic())
        return _time_engine(engine, lambda: None, lambda: 2)

    # ---- prediction: what `diptych serve --bulk-profile` does

    @property
    def blocks(self) -> RatedBlocks:
        """The product's search and predictions under the settings' caps. The disk has room for everything."""
        held = {
            name: min(getattr(self.rates, name), self.settings.disk_rate)
            for name in ("disk_read", "disk_write")
        }
        rates = replace(self.rates, **held)
        dims = dims_on_cpu(find_model(str(self.model.path)))
        return RatedBlocks(dims, rates, self.settings.max_model_len, self.memory_bytes, DISK_BYTES)

    def predict(self, policy: BlockPolicy) -> OffloadPlacement:
        """What a policy is predicted to take."""
        return self.blocks.predict(policy)

    def choose_policy(self) -> BlockPolicy:
        """The programme's policy, trimmed as a worker trims it."""
        base = self.base_policy()
        policy, _ = self.blocks.search(base, self.settings.prompts)
        return trim_policy(self.sizes, policy, self.memory_bytes, DISK_BYTES, self.settings.max_model_len)


def _time_engine(engine: Any, close: Callable[[], None], steps: Callable[[], int]) -> BlockTimes:
    """Run an engine until it is empty."""
    begun_s, first_s, tokens, early = time.monotonic(), 0.0, 0, 0
    while engine.has_work:
        for one in engine.step(time.monotonic):
            if isinstance(one.message, Failed):
                raise RuntimeError(one.message.message)
            tokens += len(one.message.tokens)
        if not first_s and steps() > 1:
            first_s, early = time.monotonic(), tokens
    ended_s = time.monotonic()
    close()
    return BlockTimes(tokens, ended_s - begun_s, tokens - early, ended_s - (first_s or begun_s))
