"""Frames of codes: rows that heads keep have the numbers that they had in their pages, to the bit, however often they
are moved; and attention over them is plain attention over these numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diptych.eviction_spec import KeepSpec
from engine.batching.batch import pack_batch
from engine.cpu.coded.compiled_attention import CompiledAttention
from engine.cpu.coded.kept_store import CodedColumns, CodedStore
from engine.cpu.eviction.evicted_works import EvictedWork, KeptBag
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.kept_rows import FrameFormat, KeptRows, frame_bytes, frames_per_slab, most_bag_slabs
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from tests.engine.cpu.coded_pages import LAYER, QUERIES, make_pair, make_qkv, write
from tests.support import reference_attention

# Pages of several heads, whose codes are whole bytes or not, several pages, and places of outliers that are two bytes.
GRID = (
    ("nuq3-1%", 4, 32, 1), ("nuq3-1%", 2, 32, 2), ("nuq4-1%", 4, 32, 1), ("nuq4-1%", 8, 32, 1), ("nuq2-1%", 3, 32, 1),
    ("nuq3-1%", 3, 4, 1), ("nuq3", 3, 4, 1), ("nuq4-1%", 1, 32, 2), ("nuq4-1%", 9, 32, 1), ("nuq3", 4, 32, 1),
    ("nuq4", 2, 32, 1), ("int8", 2, 32, 1), ("int4.g8", 2, 32, 1), ("bf16", 2, 32, 1), ("fp16", 2, 32, 1),
    ("tq4", 2, 32, 1), ("tq3", 2, 32, 1), ("tq-k8v4", 2, 32, 1),
)  # fmt: skip
SLABS, PROMPT = 40, 200


class KeptBench:
    """A sequence in a coded pool, of which heads keep random rows."""

    def __init__(self, name: str, heads: int, width: int, groups: int, *, window: int = 0) -> None:
        _, self.pages = make_pair(name, heads, width, groups, chunks=SLABS, max_len=512)
        assert isinstance(self.pages, CompiledAttention)
        self.layout, self.rng = self.pages.layout, np.random.default_rng(3)
        self.memory = self.pages._flat.reshape(SLABS, -1)
        self.window = window
        self.store = self.make_store()
        self.qkv = make_qkv(heads * groups, width, PROMPT + 128, extreme=True)
        self.free = self.rng.permutation(SLABS).tolist()

    def make_store(self) -> CodedStore:
        """A store of a pool in the memory of the attention."""
        pool = KvPool(self.layout, SLABS, self.memory.reshape(-1).data)
        return CodedStore(pool, self.pages, [self.window] * self.layout.layers)

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def write_prompt(self) -> list[int]:
        slabs = self.take(self.layout.num_chunks(PROMPT))
        write(self.pages, self.qkv[:PROMPT], [StepWork([5] * PROMPT, 0, slabs, "none", 5)])
        return slabs

    def choose(self, source: CodedColumns, boundary: int, length: int) -> tuple[KeptRows, list[Any]]:
        """Random rows of each head: none, few, most or all of them."""
        shape, heads = (self.layout.layers, self.layout.kv_heads), []
        shares = self.rng.permutation(np.resize([0.0, 0.1, 0.6, 1.0], shape[0] * shape[1]))
        for (layer, head), share in zip(np.ndindex(shape), shares, strict=True):
            columns = source.find_columns(layer, head)
            behind = columns.positions >= boundary
            heads.append(columns.select(behind & (self.rng.random(len(behind)) < share)))
        rows = [one.positions.astype(np.int32) for one in heads]
        policies = np.full(shape, 2, np.uint8)
        return KeptRows.from_heads(self.layout, boundary, length, policies, rows), heads

    def evict(self, source: CodedColumns, boundary: int, length: int) -> KeptBag:
        """Pack random rows into a bag of fresh slabs, which were full of something else."""
        planned, heads = self.choose(source, boundary, length)
        kept, frames = self.store.pack_frames(planned, heads, source)
        again, same = self.store.pack_frames(planned, heads, source)
        assert again.outliers == kept.outliers and np.array_equal(frames, same)
        kept.check()
        bag = self.take(kept.num_slabs)
        self.memory[bag] = 0xA5
        per_slab = frames_per_slab(self.layout)
        for index, slab in enumerate(bag):
            part = frames[index * per_slab : (index + 1) * per_slab].reshape(-1)
            self.memory[slab, : len(part)] = part
        decoded = KeptRows.decode(frames[: kept.lead].tobytes(), self.layout)
        return self.store.open_bag(decoded, bag)

    def expand(self, slabs: list[int], length: int) -> NDArray[np.float32]:
        """What readers of whole chunks see: [layers, kv_heads, 2, length, head_dim]."""
        chunks = [
            self.pages.expand_chunks(layer, np.array(slabs), 0, length, 1)
            for layer in range(self.layout.layers)
        ]
        by_head = np.stack(chunks).transpose(0, 2, 3, 1, 4, 5)
        return by_head.reshape(*by_head.shape[:3], -1, self.layout.head_dim)[:, :, :, :length]

    def check_rows(self, bag: KeptBag, whole: NDArray[np.float32]) -> None:
        for layer, head in np.ndindex(bag.kept.counts.shape):
            positions = bag.kept.head_positions(layer, head)
            found = self.pages.expand_kept(layer, head, bag, 1)
            expected = np.ascontiguousarray(whole[layer, head][:, positions].transpose(1, 0, 2))
            assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("name", "heads", "width", "groups"), GRID)
@pytest.mark.parametrize("boundary", [0, 64])
def test_rows_are_the_same_to_the_bit(name: str, heads: int, width: int, groups: int, boundary: int) -> None:
    """At the end of a prompt; and after 64 tokens of the answer, from the bag and from the ring."""
    bench = KeptBench(name, heads, width, groups)
    slabs = bench.write_prompt()
    whole = bench.expand(slabs, PROMPT)
    bag = bench.evict(bench.store.prompt_columns(slabs, PROMPT, 1), boundary, PROMPT)
    bench.check_rows(bag, whole)
    assert bag.kept.num_slabs <= most_bag_slabs(bench.layout, PROMPT)
    # The answer goes on in a ring; the same rows in whole chunks are what they have to be.
    (ring,), more = bench.take(1), bench.take(2)
    answer = bench.qkv[PROMPT : PROMPT + 64]
    kept = KeptWork("a", PROMPT, KeepSpec(0.5, boundary), True)
    prefix = slabs[: boundary // 64]
    write(bench.pages, answer, [StepWork([5] * 64, PROMPT, [*prefix, ring, *bag.slabs], "none", 5, kept)])
    write(bench.pages, answer, [StepWork([5] * 64, PROMPT, slabs + more, "none", 5)])
    whole = bench.expand(slabs + more, PROMPT + 64)
    source = bench.store.answer_columns(bag, prefix, ring, 1)
    for layer, head in np.ndindex(bag.kept.counts.shape):
        columns = source.find_columns(layer, head)
        keys = source.read_keys(layer, head, columns)
        assert np.array_equal(keys, whole[layer, head, 0][columns.positions])
    bench.check_rows(bench.evict(source, boundary, PROMPT + 64), whole)


@pytest.mark.parametrize("name", ["fp16", "tq4@"])
def test_rows_that_were_never_written_reach_nobody(name: str) -> None:
    """A slab is full of NaN that another sequence left, and half of it is written."""
    bench = KeptBench(name, 2, 32, 1)
    slabs = bench.take(2)
    bench.memory[slabs] = 0xFF
    write(bench.pages, bench.qkv[:80], [StepWork([5] * 80, 0, slabs, "none", 5)])
    with np.errstate(all="raise"):
        chunks = bench.pages.expand_chunks(LAYER, np.array(slabs), 0, 80, 1)
        (ring,) = bench.take(1)
        bench.memory[ring] = 0xFF
        unwritten = bench.pages.expand_chunks(LAYER, np.array([ring]), 2, 3 * 64, 1)
    assert np.isfinite(chunks).all() and not chunks[1, :, :, 16:].any() and chunks[1, :, :, :16].any()
    assert unwritten.shape[0] == 1, "a ring is read whole, and what was not written is left out by position"


def test_outliers_beyond_those_of_the_bag_are_not_read() -> None:
    """Behind the list are bytes that other sequences left in the slab: attention ignores them, a decision refuses."""
    bench = KeptBench("nuq3-1%", 4, 32, 1)
    slabs = bench.write_prompt()
    bag = bench.evict(bench.store.prompt_columns(slabs, PROMPT, 1), 0, PROMPT)
    source = bench.store.answer_columns(bag, [], bench.take(1)[0], 1)
    layer, head = next(
        (layer, head)
        for layer, head in np.ndindex(bag.counts.shape)
        if len(source.read_codes(layer, head, np.arange(int(bag.counts[layer, head]))).outliers)
    )
    slab, place = divmod(int(bag.frames[layer, head]), frames_per_slab(bench.layout))
    end = (place + 1) * frame_bytes(bench.layout)
    for begin in (bag.kept.outliers, 2**32 - 1):
        bench.memory[bag.slabs[slab], end - 4 : end] = np.frombuffer(np.uint32(begin).tobytes(), np.uint8)
        assert np.isfinite(bench.pages.expand_kept(layer, head, bag, 1)).all()
        with pytest.raises(ValueError, match="outliers up to number"):
            source.read_codes(layer, head, np.arange(1))


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize(("name", "heads", "width", "groups"), [
    ("nuq3-1%", 4, 32, 1), ("nuq4-1%", 2, 32, 2), ("int4", 2, 32, 1), ("tq4@", 2, 32, 1), ("bf16", 2, 32, 1),
])  # fmt: skip
def test_attention_is_plain_attention_over_the_rows(
    name: str, heads: int, width: int, groups: int, window: int
) -> None:
    bench = KeptBench(name, heads, width, groups, window=window)
    slabs = bench.write_prompt()
    bag = bench.evict(bench.store.prompt_columns(slabs, PROMPT, 1), 64, PROMPT)
    (ring,), count, more = bench.take(1), 40, bench.take(2)
    kept = KeptWork("a", PROMPT, KeepSpec(0.5, 64), True)
    work = StepWork([5] * count, PROMPT, [slabs[0], ring, *bag.slabs], "none", 5, kept)
    rows = make_qkv(heads * groups, width, count)
    queries = write(bench.pages, rows, [work])
    write(bench.pages, rows, [StepWork([5] * count, PROMPT, slabs + more, "none", 5)])
    whole = torch.from_numpy(bench.expand(slabs + more, PROMPT + count))

    def attend(first: int, last: int) -> torch.Tensor:
        part = StepWork([5] * (last - first), PROMPT + first, work.slabs, "none", 5, kept)
        attention = bench.store.attend_to([EvictedWork(0, part, kept, bag, 1)], [])
        out = torch.full((last - first, QUERIES * heads * groups * width), float("nan"))
        attention.decode(LAYER, queries[first:last], pack_batch([part]), window, out)
        return out

    found = attend(0, count)
    # No row sees another: one by one they have the same bits.
    assert torch.equal(torch.cat([attend(n, n + 1) for n in range(count)]), found)
    for n in range(count):
        seen = []
        for head in range(bench.layout.kv_heads):
            columns = [*range(64), *bag.kept.head_positions(LAYER, head).tolist()]
            columns += range(PROMPT, PROMPT + n + 1)
            columns = [c for c in columns if not window or c > PROMPT + n - window]
            mine = queries[n, head * QUERIES * width : (head + 1) * QUERIES * width].view(1, QUERIES, width)
            keys, values = whole[LAYER, head][:, columns].unsqueeze(1)
            seen.append(reference_attention.attend_reference(mine, keys, values)[0])
        expected = torch.cat(seen).reshape(-1)
        torch.testing.assert_close(found[n].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_frame_costs_no_more_than_its_share_of_the_page() -> None:
    """What heads share is stored once, and outliers only where there are any: 6.E 2 needs frames that are as small."""
    digest = "@0123456789abcdef"
    for codec, share in {
        f"nuq3-1%.g128{digest}": 1.04, f"nuq4-1%.g128{digest}": 1.03, "int4.g32": 1.0, "tq4.s0": 1.0,
    }.items():  # fmt: skip
        layout = KvLayout(6, 4, 32, "float32", codec)
        form, rows = FrameFormat.of_layout(layout), 6 * 4 * 16
        size = frame_bytes(layout) / 16 + form.token_bytes / 4 + (form.outlier_bytes * 2 * form.slots) / 4
        assert size / (layout.chunk_bytes / 64 / 24) <= share, (codec, rows)
