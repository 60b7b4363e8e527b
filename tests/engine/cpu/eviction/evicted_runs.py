"""For tests of eviction on the CPU: sequences that run as the engine loop runs them, and plain torch for them."""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diptych.eviction_spec import KeepSpec, decision_tokens
from engine.cpu import matmul
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.protocols import EvictionOrder, EvictionReport
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.kept_rows import KeptRows, frame_bytes, frames_per_slab, map_frames
from kvcache.eviction.policies import PUNCT_KIND, SPECIAL_KIND
from kvcache.pool import KvPool

FOLDER = Path(__file__).parents[4] / "models" / "tiny"
CONTEXT = 1024
OURS = "masked_columns"


def source_tokens(count: int) -> list[int]:
    """The first tokens of a source file, which the embedded model knows how to read."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(Path(matmul.__file__).read_text()).ids[:count]
    assert len(ids) == count
    return ids


def token_kinds() -> NDArray[np.uint8]:
    """Kinds of the embedded model's tokens: the first ten are special, and blank or punctuation is punctuation."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    kinds = np.zeros(4096, np.uint8)
    for token in range(len(kinds)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        kinds[token] = SPECIAL_KIND if token < 10 else 0
        kinds[token] |= PUNCT_KIND if not text.strip(string.punctuation + string.whitespace) else 0
    return kinds


SETUP = EvictionSetup(token_kinds())


def make_runner(
    num_slabs: int = 60, first: int = 0, setup: EvictionSetup | None = SETUP
) -> tuple[CpuModelRunner, KvPool]:
    """The embedded model over a pool, whose unused rows are not-a-number."""
    files = Checkpoint.resolve(str(FOLDER))
    pool = KvPool(files.layout(), num_slabs, first=first)
    pool.data.fill_(float("nan"))
    return CpuModelRunner.load(files, pool, CONTEXT, eviction=setup), pool


class EvictedRun:
    """One sequence on a runner: its prompt is prefilled, then it is evicted, decoded and evicted again.

    `works` makes the work of its next tokens; `finish` says that they have KV, and evicts at decision points.
    """

    def __init__(
        self,
        runner: CpuModelRunner,
        pool: KvPool,
        tokens: list[int],
        prompt: int,
        spec: KeepSpec,
        key: str = "a",
    ) -> None:
        self.runner, self.pool, self.tokens, self.prompt = runner, pool, tokens, prompt
        self.spec, self.key, self.computed = spec, key, 0
        self.slabs = pool.take_slabs(pool.layout.num_chunks(prompt), key)
        self.evicted = False
        self.reports = list[EvictionReport]()
        self.maps = list[KeptRows]()

    def next_work(self, count: int, logits: str = "all") -> StepWork:
        """The work of the next `count` tokens."""
        kept = KeptWork(self.key, self.prompt, self.spec, self.evicted)
        start = self.computed
        return StepWork(
            self.tokens[start : start + count], start, list(self.slabs), logits, self.tokens[0], kept
        )

    def finish(self, work: StepWork) -> None:
        """The work was run."""
        self.computed += len(work.tokens)
        if self.computed >= self.prompt and decision_tokens(self.prompt, self.computed) == self.computed:
            self.evict()

    def evict(self) -> None:
        """Plan, give back slabs, take those of the bag, apply."""
        order = EvictionOrder(
            self.key, self.tokens[: self.computed], self.prompt, self.spec, list(self.slabs)
        )
        report = self.runner.plan_eviction(order)
        assert report == self.runner.plan_eviction(order)
        chunks = self.spec.boundary_chunks
        kept = self.slabs[: chunks + self.evicted]
        self._give_back(self.slabs[len(kept) :])
        bag = self.pool.take_slabs(report.bag_slabs + (not self.evicted), self.key)
        self.slabs, self.evicted = kept + bag, True
        self.runner.apply_eviction(self.key, self.slabs[chunks + 1 :])
        self.reports.append(report)
        self.maps.append(read_map(self.pool, self.slabs[chunks + 1 :]))
        self.maps[-1].check()

    def _give_back(self, slabs: list[int]) -> None:
        for slab in slabs:
            self.pool.data[slab - self.pool.first].fill_(float("nan"))
        self.pool.give_back(slabs, self.key)

    def run(self, counts: list[int]) -> torch.Tensor:
        """Run steps of so many tokens: the logits of all of them."""
        rows = list[torch.Tensor]()
        for count in counts:
            work = self.next_work(count)
            rows += self.runner.run([work])
            self.finish(work)
        return torch.cat(rows)


def read_map(pool: KvPool, slabs: list[int]) -> KeptRows:
    """The map at the beginning of a bag."""
    frame = frame_bytes(pool.layout)
    used = frames_per_slab(pool.layout) * frame
    data = b"".join(pool.slab_bytes(slab)[:used].tobytes() for slab in slabs)
    return KeptRows.decode(data[: map_frames(data[:frame], pool.layout, len(slabs)) * frame], pool.layout)


def visible_columns(run: EvictedRun, total: int) -> torch.Tensor:
    """Which columns each row attends to under the decisions of a run, [layers, kv_heads, total, total]."""
    layout = run.pool.layout
    seen = torch.ones(total, total).tril().bool().repeat(layout.layers, layout.kv_heads, 1, 1)
    for kept in run.maps:
        rows = slice(kept.length, min(total, kept.length + 64))
        for layer, head in np.ndindex(kept.counts.shape):
            dropped = torch.ones(kept.length, dtype=torch.bool)
            dropped[: kept.boundary] = False
            dropped[torch.from_numpy(kept.head_positions(layer, head).astype(np.int64))] = False
            seen[layer, head, rows, : kept.length] &= ~dropped
    return seen


@contextmanager
def masked_attention(model: Any, seen: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Within, a model of transformers attends only to what `seen` says.

    Yields the attention of each layer once it has run, pooled over query groups: [kv_heads, tokens, tokens] float64.
    """
    pooled = list[torch.Tensor]()

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        keys, values = (x[0].double().repeat_interleave(group, dim=0) for x in (key, value))
        scores = query[0].double() @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
        allowed = seen[module.layer_idx].repeat_interleave(group, dim=0)
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        pooled.append(weights.view(-1, group, *weights.shape[1:]).mean(dim=1))
        return (weights @ values).transpose(0, 1)[None].to(query.dtype), None

    functions: Any = ALL_ATTENTION_FUNCTIONS
    functions[OURS] = attend
    before, model.config._attn_implementation = model.config._attn_implementation, OURS
    try:
        yield pooled
    finally:
        model.config._attn_implementation = before
        del functions[OURS]
