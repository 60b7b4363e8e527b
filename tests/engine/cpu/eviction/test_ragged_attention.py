"""Decode rows whose heads keep different tokens, against plain attention over the tokens that each head has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from diptych.eviction_spec import KeepSpec
from engine.batching.batch import pack_batch
from engine.cpu.attention import CpuAttention
from engine.cpu.eviction.evictor import CpuEvictor, EvictionSetup
from engine.cpu.eviction.ragged_attention import RawStore, build_ragged_kernel
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.kept_rows import FRAME_TOKENS, KeptRows, frames_per_slab
from kvcache.eviction.policies import FULL
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from tests.support import reference_attention

LAYERS, LAYER = 2, 1
KINDS = np.zeros(300, np.uint8)


@dataclass(frozen=True)
class RaggedSequence:
    """A sequence of random KV [layers, kv_heads, 2, tokens, width], of which heads keep random rows."""

    key: str
    kv: torch.Tensor
    kept: KeptRows
    slabs: list[int]
    prompt: int

    def work(self, start: int, count: int = 1) -> StepWork:
        spec = KeepSpec(0.9, self.kept.boundary)
        return StepWork(
            [5] * count, start, self.slabs, "last", 5, KeptWork(self.key, self.prompt, spec, True)
        )


class RaggedBench:
    """Sequences of `lengths` (prompt, decided, tokens), scattered over a pool whose other rows are not-a-number."""

    def __init__(
        self, width: int, group: int, lengths: list[tuple[int, int, int]], boundary: int = 64, *,
        window: int = 0, full: bool = False, kv_heads: int = 2, seed: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.layout = KvLayout(LAYERS, kv_heads, width, "float32")
        self.pool = KvPool(self.layout, 80)
        self.pool.data.fill_(float("nan"))
        self.width, self.heads, self.window = width, kv_heads * group, window
        self.pages = CpuAttention(self.layout, self.pool.data, self.heads)
        setup = EvictionSetup(KINDS)
        store = RawStore(self.pool, self.pages, [0, window])
        self.evictor = CpuEvictor(self.pool, store, self.heads, [0, window], setup)
        free = rng.permutation(80).tolist()
        self.sequences = list[RaggedSequence]()
        for number, (prompt, decided, tokens) in enumerate(lengths):
            kv = torch.randn(LAYERS, kv_heads, 2, tokens, width)
            policies = np.full((LAYERS, kv_heads), FULL if full else 2, np.uint8)
            heads = [
                np.flatnonzero(rng.random(decided - boundary) < (1 if full else share)).astype(np.int32)
                + boundary
                for share in rng.permutation(np.linspace(0, 1, LAYERS * kv_heads))
            ]
            kept = KeptRows.from_heads(self.layout, boundary, decided, policies, heads)
            slabs = [free.pop() for _ in range(boundary // 64 + 1 + kept.num_slabs)]
            self.sequences.append(RaggedSequence(str(number), kv, kept, slabs, prompt))
            self._store(self.sequences[-1], tokens)
        self.qkv = torch.randn(max(len(lengths) * 64, 2), (self.heads + 2 * kv_heads) * width) * 2

    def _store(self, one: RaggedSequence, tokens: int) -> None:
        """Write a sequence's KV where it belongs, token by token, and load its bag."""
        data, chunks = self.pool.data, one.kept.boundary // 64
        for token in range(one.kept.boundary):
            data[one.slabs[token // 64], :, :, :, token % 64] = one.kv[:, :, :, token]
        for token in range(one.kept.length, tokens):
            data[one.slabs[chunks], :, :, :, token % 64] = one.kv[:, :, :, token]
        per_slab, bag = frames_per_slab(self.layout), one.slabs[chunks + 1 :]
        frames = data.view(80, per_slab, 2, FRAME_TOKENS, self.width)
        encoded = np.frombuffer(one.kept.encode(), np.float32).reshape(
            one.kept.lead, 2, FRAME_TOKENS, self.width
        )
        for f in range(one.kept.lead):
            frames[bag[f // per_slab], f % per_slab] = torch.from_numpy(encoded[f].copy())
        for layer, head in np.ndindex(one.kept.counts.shape):
            for row, token in enumerate(one.kept.head_positions(layer, head).tolist()):
                f = one.kept.first_frame(layer, head) + row // FRAME_TOKENS
                frame = frames[bag[f // per_slab], f % per_slab]
                frame[:, row % FRAME_TOKENS] = one.kv[layer, head, :, token]
        self.evictor.load_kept(one.key, one.kept.boundary, one.kept.length, bag)

    def decode(self, works: list[StepWork], queries: torch.Tensor) -> torch.Tensor:
        """Attention of the rows of `works`: [rows, heads, width]."""
        attention = self.evictor.attend_to(works, [])
        out = torch.full((len(queries), self.heads * self.width), float("nan"))
        attention.decode(LAYER, queries, pack_batch(works), self.window, out)
        return out.view(len(queries), self.heads, self.width)

    def expected(self, one: RaggedSequence, position: int, query: torch.Tensor) -> torch.Tensor:
        """The same by plain attention, head by head, over the tokens that a head has at `position`."""
        group, found = self.heads // self.layout.kv_heads, list[torch.Tensor]()
        q = query[: self.heads * self.width].view(self.heads, self.width)
        for head in range(self.layout.kv_heads):
            tokens = [*range(one.kept.boundary), *one.kept.head_positions(LAYER, head).tolist()]
            tokens += range(one.kept.length, position + 1)
            if self.window:
                tokens = [token for token in tokens if token > position - self.window]
            keys, values = one.kv[LAYER, head][:, tokens].unsqueeze(1)
            mine = q[head * group : (head + 1) * group].unsqueeze(0)
            found.append(reference_attention.attend_reference(mine, keys, values)[0])
        return torch.cat(found)


LENGTHS = [(70, 70, 71), (65, 65, 129), (100, 164, 200), (300, 300, 363), (500, 564, 628), (64, 64, 65)]


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 50, 200])
def test_ragged_rows_match_plain_attention(width: int, group: int, window: int) -> None:
    bench = RaggedBench(width, group, LENGTHS, window=window, seed=width * group)
    works = [one.work(tokens - 1) for one, (_, _, tokens) in zip(bench.sequences, LENGTHS, strict=True)]
    found = bench.decode(works, bench.qkv[: len(works)])
    for n, (one, work) in enumerate(zip(bench.sequences, works, strict=True)):
        expected = bench.expected(one, work.start, bench.qkv[n])
        torch.testing.assert_close(found[n].double(), expected, rtol=2e-5, atol=2e-6)


def test_a_prompt_without_a_boundary_has_only_frames_and_ring() -> None:
    bench = RaggedBench(32, 2, [(40, 40, 104), (3, 3, 4)], boundary=0)
    works = [bench.sequences[0].work(40, 64), bench.sequences[1].work(3)]
    found = bench.decode(works, bench.qkv[:65])
    for n in range(64):
        expected = bench.expected(bench.sequences[0], 40 + n, bench.qkv[n])
        torch.testing.assert_close(found[n].double(), expected, rtol=2e-5, atol=2e-6)
    expected = bench.expected(bench.sequences[1], 3, bench.qkv[64])
    torch.testing.assert_close(found[64].double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [0, 100])
def test_a_row_has_the_same_bits_alone_in_a_block_and_beside_others(window: int) -> None:
    bench = RaggedBench(32, 2, LENGTHS, window=window)
    one = bench.sequences[3]
    block = bench.decode([one.work(300, 63)], bench.qkv[:63])
    for n in range(63):
        assert torch.equal(bench.decode([one.work(300 + n)], bench.qkv[n : n + 1])[0], block[n])
    beside = [bench.sequences[2].work(164, 36), one.work(300, 63), bench.sequences[4].work(600)]
    assert torch.equal(
        bench.decode(beside, bench.qkv[torch.tensor([*range(70, 106), *range(63), 200])])[36:99], block
    )


def test_heads_that_keep_everything_agree_with_the_ordinary_kernel() -> None:
    bench = RaggedBench(32, 2, [(300, 300, 340)], full=True)
    (one,) = bench.sequences
    slabs = [one.slabs[0], *[slab for slab in range(80) if slab not in one.slabs][:5]]
    for token in range(64, 340):
        bench.pool.data[slabs[token // 64], :, :, :, token % 64] = one.kv[:, :, :, token]
    ragged = bench.decode([one.work(339)], bench.qkv[:1])
    out = torch.empty(1, bench.heads * bench.width)
    ordinary = pack_batch([StepWork([5], 339, slabs, "last")])
    bench.pages.decode(LAYER, bench.qkv[:1], ordinary, 0, out)
    torch.testing.assert_close(ragged.view(1, -1), out, rtol=0, atol=1e-5)


def test_the_kernel_has_one_type_however_many_rows_and_sequences_a_step_has() -> None:
    """Another type would be compiled while the worker serves, and every request would wait for it."""
    bench = RaggedBench(32, 2, LENGTHS[:2])
    one, other = (
        sequence.work(tokens - 1)
        for sequence, (_, _, tokens) in zip(bench.sequences, LENGTHS[:2], strict=True)
    )
    block = bench.sequences[1].work(65, 8)
    for works in ([one], [block], [one, other], [one, block]):
        bench.decode(works, bench.qkv[: sum(len(work.tokens) for work in works)])
    kernel: Any = build_ragged_kernel(32)
    assert len(kernel.signatures) == 1
