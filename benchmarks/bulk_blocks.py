"""Blocks of bulk work in this process: a random model, its policies, their runs, and the rates that predict them."""

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
from engine.attention.batch import pack_batch
from engine.block.engine import BlockEngine
from engine.block.policy import BlockPolicy
from engine.block.schedule import BlockSchedule
from engine.block.sizes import BlockModel, predict_needs
from engine.cpu.attention import CpuAttention
from engine.cpu.block.disk_file import DiskRate
from engine.cpu.block.loading import BlockFiles, load_block, measure_model, prepare_weights
from engine.cpu.block.weight_stream import open_index
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.sampling.sampler import Sampler
from engine.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from engine.step_work import StepWork
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from planner.offload.machines import HostMachine
from planner.offload.programme import OffloadPlacement, search_placement
from planner.offload.terms import BlockShape, OffloadModel, OffloadWorkload

TINY = Path(__file__).parents[1] / "models" / "tiny"
ROWS, BATCHES = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# A unit's slice; the engine is asked for the next one at once.
SLICE_S = 1.0


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
    """A model and its folder. Runs do not share anything but the prepared weights."""

    def __init__(self, model: Checkpoint, settings: BulkSettings, folder: Path) -> None:
        self.model, self.settings, self._folder = model, settings, folder

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
        schedule = BlockSchedule(policy, self.settings.max_model_len, max_waiting=count)
        engine = BlockEngine(runner, schedule, Sampler(runner.vocab_size), runner.vocab_size, SLICE_S)
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

    # ---- prediction

    def measure_machine(self) -> HostMachine:
        """The machine as the programme needs it: what one layer takes, measured with rows, contexts and prompts."""
        one = self.settings
        pool = KvPool(replace(self.model.layout(), layers=1), max(64, 8 * one.max_model_len // 64 + 64))
        runner = CpuModelRunner.load(self.model, KvPool(self.model.layout(), 1), one.max_model_len)
        decoder = runner._decoder
        pages = CpuAttention(pool.layout, pool.data, decoder.heads)
        layer = decoder.layers[0]

        def layer_s(works: list[StepWork]) -> float:
            batch = pack_batch(works)
            x = decoder.embed_tokens(batch.tokens)
            return _best_s(lambda: decoder.compute_layer(0, layer, x, torch.zeros_like(x), batch, pages))

        def decode_s(rows: int, context: int) -> float:
            chunks = -(-context // CHUNK_TOKENS)
            works = [
                StepWork([1], context - 1, list(range(row * chunks, (row + 1) * chunks)), "last", 1)
                for row in range(rows)
            ]
            return layer_s(works)

        few, many = decode_s(2, 1), decode_s(16, 1)
        row_s = max((many - few) / 14, 1e-9)
        pass_s = max(few - 2 * row_s, 1e-9)
        context = min(one.max_model_len, 8 * CHUNK_TOKENS)
        model = self.offload_model()
        read = 8 * context * model.token_kv_bytes
        attention_s = max(decode_s(8, context) - decode_s(8, 1), 1e-9)
        count = min(one.prompt_tokens, one.step_tokens)
        prompt = StepWork([1] * count, 0, list(range(-(-count // CHUNK_TOKENS))), "last", 1)
        # A row of a prompt is cheaper than a decoding row, since its attention is tiled.
        prompt_s = layer_s([prompt])
        pairs = count * count / 2 * model.attention_flops
        rows_s = min(prompt_s * 0.95, pass_s + count * row_s)
        logits_in = torch.zeros(16, one.hidden)
        end_row_s = _best_s(lambda: decoder.compute_logits(logits_in, torch.zeros(16, one.hidden))) / 16
        return HostMachine(
            memory_bytes=self.memory_bytes,
            disk_bytes=1e13,
            disk_read=one.disk_rate,
            disk_write=one.disk_rate,
            measured_weights=model.layer_weights,
            pass_s=pass_s,
            row_s=row_s,
            attention=read / attention_s,
            prompt_attention=pairs / max(prompt_s - rows_s, 1e-9),
            end_row_s=end_row_s,
            step_tokens=one.step_tokens,
        )

    def offload_model(self) -> OffloadModel:
        """The model as the programme needs it."""
        one, sizes = self.settings, self.sizes(self.base_policy())
        return OffloadModel(
            one.layers, one.hidden, one.heads, one.kv_heads, one.hidden // one.heads, one.ffn, 3,
            weight_bytes=2.0, kv_bytes=4.0, hidden_bytes=4.0, end_bytes=sizes.end_bytes + sizes.table_bytes,
        )  # fmt: skip

    def choose_policy(self, machine: HostMachine) -> tuple[BlockPolicy, OffloadPlacement]:
        """The programme's policy for the memory, and what it predicts."""
        one = self.settings
        work = OffloadWorkload(one.prompt_tokens, one.output_tokens)
        blocks = [BlockShape(r, b) for r in ROWS for b in BATCHES if r * b <= one.prompts]
        found = search_placement(machine, [self.offload_model()], work, blocks)
        weights, kv, hidden = (min(1.0, max(0.0, float(found.shares[3 * kind]))) for kind in range(3))
        policy = self.base_policy(
            found.block.rows, found.block.batches, weights_in_memory=_whole_share(weights, one.layers),
            kv_in_memory=_whole_share(kv, one.layers * found.block.batches),
            hidden_in_memory=_whole_share(hidden, found.block.batches),
        )  # fmt: skip
        return policy, found


def _whole_share(share: float, count: int) -> float:
    """The share that is a whole number of `count` pieces, rounded down."""
    return math.floor(share * count + 1e-6) / count


def _best_s(call: Callable[[], object], times: int = 7) -> float:
    """The median time of a call, in seconds."""
    found = []
    with torch.no_grad():
        for _ in range(times):
            begun_s = time.perf_counter()
            call()
            found.append(time.perf_counter() - begun_s)
    return sorted(found)[times // 2]


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
