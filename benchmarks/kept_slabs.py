"""How much of what heads drop comes back to the pool: slabs of sequences after their prompt, counted in an engine.

`benchmarks.kv_bytes --only freed` prints it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KeepSpec
from diptych.request import SamplingParams
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.loop import Engine
from engine.model.checkpoint import Checkpoint
from engine.model.tokenizer import ModelTokenizer, read_token_kinds
from engine.protocols import EvictionOrder, EvictionReport
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.pool import KvPool
from models.calibration import held_out_windows

FOLDER = Path(__file__).parents[1] / "models" / "tiny"
MIN_TOKENS, MAX_TOKENS = 1000, 1900
# The model's context, so that prompts have room for an answer.
MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class FreedBytes:
    """Sums over prompts, in bytes: the KV of all rows, the rows that heads dropped, and what the pool got back.

    What it got back is the difference to a sequence that keeps everything, while the next 64 tokens are generated: one
    sequence writes them to its ring, the other one to the rest of its last slab and to a new one.
    """

    whole: int = 0
    pruned: int = 0
    freed: int = 0

    @property
    def freed_ratio(self) -> float | None:
        """Bytes that the pool got back, as a part of those that were dropped; None if nothing was dropped."""
        return self.freed / self.pruned if self.pruned else None


class FreedMeter:
    """An engine of the embedded model that prefills held-out text, one prompt at a time."""

    def __init__(self, prompts: int) -> None:
        """Lengths of the prompts lie at equal distances between `MIN_TOKENS` and `MAX_TOKENS`."""
        checkpoint = Checkpoint.resolve(str(FOLDER))
        self._layout = checkpoint.layout()
        chunks = self._layout.num_chunks(MODEL_LEN) + 2
        pool = KvPool(self._layout, chunks)
        kinds = read_token_kinds(ModelTokenizer.load(FOLDER), checkpoint.config.vocab)
        runner = CpuModelRunner.load(checkpoint, pool, MODEL_LEN, eviction=EvictionSetup(kinds))
        self._reports: list[EvictionReport] = []
        self._plan = runner.plan_eviction
        runner.plan_eviction = self._record_plan  # type: ignore[method-assign]
        self._holdings = KvAllocator(pool)
        limits = EngineLimits(chunks, MODEL_LEN, max_num_batched_tokens=512)
        self._engine = Engine(runner, Scheduler(limits), self._holdings, Sampler(runner.vocab_size))
        step = (MAX_TOKENS - MIN_TOKENS) // max(1, prompts - 1)
        windows = held_out_windows(FOLDER, prompts, MAX_TOKENS)
        self._prompts = [window.tolist()[: MIN_TOKENS + step * at] for at, window in enumerate(windows)]

    def _record_plan(self, order: EvictionOrder) -> EvictionReport:
        self._reports.append(self._plan(order))
        return self._reports[-1]

    def measure(self, threshold: float) -> FreedBytes:
        """The sums over all prompts, each evicted at the end of its prompt with this threshold."""
        whole = pruned = freed = 0
        row = 2 * self._layout.head_dim * 4
        for number, prompt in enumerate(self._prompts):
            sampling = SamplingParams(max_tokens=CHUNK_TOKENS, seed=0, temperature=0.0)
            seq = Sequence(f"p{number}", 1, prompt, sampling, math.inf, keep=KeepSpec(threshold))
            self._engine.add(seq, 0.0)
            while not seq.output:
                self._engine.step(lambda: 0.0)
            report = self._reports[-1]
            # Means over the next 64 tokens, of which the first is position len(prompt).
            chunks = [self._layout.num_chunks(len(prompt) + ahead) for ahead in range(1, CHUNK_TOKENS + 1)]
            plain = sum(chunks) / len(chunks)
            whole += report.all_rows * row
            pruned += (report.all_rows - report.kept_rows) * row
            freed += round((plain - self._holdings.num_held(seq.key)) * self._layout.chunk_bytes)
            self._engine.abort(seq.id, seq.epoch)
        return FreedBytes(whole, pruned, freed)
