"""An engine of the embedded model whose pool is too small for its prompts, with tiers below it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from diptych.errors import DiptychError
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.messages import Output
from diptych.request import SamplingParams
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.prefix_restores import PrefixRestores
from engine.sampling.sampler import Sampler
from engine.scheduling.new_token_ratio import MeasuredRate
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.layout import Shard, split_layout
from kvcache.pool import KvPool
from kvcache.prefix_tree import PrefixTree, root_key
from kvcache.tiers.chunk_store import ChunkStore
from kvtransfer.resharding import ShardedPool
from tests.support.waiting import wait_for
from worker.tiers.worker_tiers import WorkerTiers

TINY = Path(__file__).parents[3] / "models" / "tiny"
MODEL_LEN, NEW_TOKENS = 512, 8
MIB = 1 << 20


class TieredEngine:
    """One engine with `num_slabs` slabs. `folder` is for its tiers; None: there are none."""

    def __init__(
        self,
        codec: str,
        folder: Path | None,
        num_slabs: int = 24,
        disk: bool = False,
        host_bytes: int = 64 * MIB,
    ) -> None:
        model = Checkpoint.resolve(str(TINY))
        codec_id, calibration = resolve_kv_codec(model, codec)
        self.layout = model.layout(codec=codec_id)
        self.pool = KvPool(self.layout, num_slabs)
        self.kv = KvAllocator(self.pool, PrefixTree())
        setup = (
            EvictionSetup(torch.zeros(model.config.vocab, dtype=torch.uint8).numpy())
            if codec == "raw"
            else None
        )
        runner = CpuModelRunner.load(model, self.pool, MODEL_LEN, calibration, eviction=setup)
        limits = EngineLimits(num_slabs, MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=512)
        self.engine = Engine(runner, Scheduler(limits), self.kv, Sampler(runner.vocab_size))
        self.tiers: WorkerTiers | None = None
        if folder is not None:
            whole = Shard((0, self.layout.layers), (0, self.layout.kv_heads))
            self.sharded = ShardedPool(self.layout, [(whole, self.pool.memory)])
            host = ChunkStore(folder / "host", host_bytes, "a", removes=True)
            below = ChunkStore(folder / "disk", 64 * MIB, "a") if disk else None
            self.tiers = WorkerTiers(self.sharded, self.kv, host, below)
            self.tiers.open()
            # Computing is taken for slow, so that what is stored is read back.
            self.engine.restores = PrefixRestores(
                self.kv,
                self.tiers,
                {self.layout.kv_class: self.layout.chunk_bytes},
                MeasuredRate(100.0),
                self.engine.note_taken,
            )

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()

    def request(self, prompt: Many[int], scope: str = "", keep: KeepSpec = KEEP_ALL) -> Sequence:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0, logprobs=0)
        root = root_key("the model", scope, self.layout.codec)
        name = f"r{id(prompt)}-{time.monotonic_ns()}"
        return Sequence(name, 1, list(prompt), sampling, math.inf, root=root, keep=keep)

    def answer(
        self, prompt: Many[int], scope: str = "", keep: KeepSpec = KEEP_ALL
    ) -> tuple[list[int], list[float], int]:
        """The tokens that follow a prompt, their log-probabilities, and how many tokens of it were cached."""
        seq = self.request(prompt, scope, keep)
        self.engine.add(seq, time.monotonic())
        tokens, scores, cached = list[int](), list[float](), 0
        news, deadline_s = threading.Event(), time.monotonic() + 60
        self.engine.notify(news.set)
        while len(self.engine.scheduler):
            assert time.monotonic() < deadline_s
            news.clear()
            due_s = self.engine.restores.tend(time.monotonic())
            if not self.engine.has_work:
                news.wait(max(0.0, (deadline_s if due_s is None else due_s) - time.monotonic()))
                continue
            for output in self.engine.step(time.monotonic):
                message = output.message
                if not isinstance(message, Output):
                    raise DiptychError(message.code, message.message)
                tokens += message.tokens
                scores += [one.logprob for one in message.logprobs or ()]
                cached = max(cached, message.cached_tokens)
        return tokens, scores, cached

    def settle(self) -> None:
        """Wait until what was released is stored, and drop all that the pool has cached."""
        assert self.tiers is not None
        wait_for(lambda: not self._is_storing(), 30, 0.005)
        assert self.kv.used == 0 and not self.engine.restores.is_busy
        self.kv.evict_cached()
        self.kv.check_books()

    def _is_storing(self) -> bool:
        assert self.tiers is not None
        waiting = any(one.waiting_chunks for one in self.tiers.stats.values())
        return waiting or any(tier.thread._busy_since_s is not None for tier in self.tiers._tiers.values())


def prompt_of(number: int, length: int = 300) -> list[int]:
    """The tokens of a prompt."""
    random = torch.Generator().manual_seed(number)
    return [int(token) for token in torch.randint(3, 4000, (length,), generator=random)]


def shards_of(engine: TieredEngine, tp: int) -> tuple[Shard, ...]:
    """How `tp` ranks split the KV of an engine."""
    return split_layout(engine.layout, tp, 1)
