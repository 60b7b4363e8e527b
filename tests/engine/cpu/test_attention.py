"""Paged attention on the CPU against the plain reference, over a grid of shapes and at every edge of a page."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batching.batch import pack_batch
from engine.cpu.attention import CpuAttention
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from tests.support import reference_attention

EDGES = [1, 2, 63, 64, 65, 127, 128, 129]
NONE = np.empty(0, np.float32)


class AttentionBench:
    """Random KV of several sequences, scattered over a pool whose other rows are not-a-number."""

    def __init__(self, width: int, kv_heads: int, group: int, lengths: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.layout = KvLayout(2, kv_heads, width, "float32")
        self.lengths, self.heads, self.width = lengths, kv_heads * group, width
        counts = [self.layout.num_chunks(length) for length in lengths]
        order = torch.randperm(sum(counts) + 1).tolist()
        self.slabs = [[order.pop() for _ in range(count)] for count in counts]
        self.data = torch.full((sum(counts) + 1, *self.layout.chunk_shape), float("nan"))
        for slabs, length in zip(self.slabs, lengths, strict=True):
            for token in range(length):
                self.data[slabs[token // 64], :, :, :, token % 64] = torch.randn(2, kv_heads, 2, width)
        self.pages = CpuAttention(self.layout, self.data, self.heads)
        self.qkv = torch.randn(max(len(lengths), 2), (self.heads + 2 * kv_heads) * width) * 2

    def decode(self, window: int = 0, only: list[int] | None = None) -> torch.Tensor:
        """Decode the last token of the sequences (`only` these, in that order), layer 1: [sequences, heads, width]."""
        chosen = list(range(len(self.lengths))) if only is None else only
        batch = pack_batch([StepWork([0], self.lengths[n] - 1, self.slabs[n], "none") for n in chosen])
        qkv = self.qkv[chosen].contiguous()
        out = torch.full((len(chosen), self.heads * self.width), float("nan"))
        self.pages.decode(1, qkv, batch, window, out)
        return out.view(len(chosen), self.heads, self.width)

    def expected(self, n: int, window: int = 0) -> torch.Tensor:
        keys, values = reference_attention.gather_pages(self.data, 1, self.slabs[n], self.lengths[n])
        q = self.qkv[n, : self.heads * self.width].view(1, self.heads, self.width)
        return reference_attention.attend_reference(q, keys, values, window)[0]


@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_decode_matches_reference(width: int, group: int) -> None:
    ragged = torch.randint(130, 700, (2,), generator=torch.Generator().manual_seed(width * group)).tolist()
    bench = AttentionBench(width, 2, group, EDGES + ragged)
    found = bench.decode()
    for n in range(len(bench.lengths)):
        torch.testing.assert_close(found[n].double(), bench.expected(n), rtol=2e-5, atol=2e-6)


def test_decode_of_long_sequences() -> None:
    bench = AttentionBench(32, 4, 2, [1984, 2000, 2048])
    found = bench.decode()
    for n in range(3):
        torch.testing.assert_close(found[n].double(), bench.expected(n), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 128, 1000])
def test_decode_honours_the_window(window: int) -> None:
    bench = AttentionBench(32, 2, 2, [*EDGES, 300])
    found = bench.decode(window)
    for n in range(len(bench.lengths)):
        torch.testing.assert_close(found[n].double(), bench.expected(n, window), rtol=2e-5, atol=2e-6)


def test_decode_survives_extreme_scores() -> None:
    bench = AttentionBench(32, 1, 2, [130])
    bench.qkv *= 300  # scores in the thousands: all weight on one token, the rest vanishes without nan
    torch.testing.assert_close(bench.decode()[0].double(), bench.expected(0), rtol=1e-3, atol=1e-3)


def test_decode_is_bitwise_independent_of_companions() -> None:
    bench = AttentionBench(64, 2, 4, [*EDGES, 500])
    together = bench.decode()
    backwards = bench.decode(only=list(range(len(bench.lengths)))[::-1])
    assert torch.equal(together, backwards.flip(0))
    for n in range(len(bench.lengths)):
        assert torch.equal(together[n], bench.decode(only=[n])[0])


def prefill(width: int, group: int, start: int, count: int, window: int) -> None:
    """The last `count` of start + count tokens against the reference; what is behind them is not-a-number."""
    bench = AttentionBench(width, 2, group, [start + count])
    rows = torch.randn(count, (bench.heads + 2 * 2) * width)
    batch = pack_batch([StepWork([0] * count, start, bench.slabs[0], "none")])
    out = torch.full((count, bench.heads * width), float("nan"))
    bench.pages.prefill(1, rows, batch.spans[0], window, out)
    keys, values = reference_attention.gather_pages(bench.data, 1, bench.slabs[0], start + count)
    queries = rows[:, : bench.heads * width].view(count, bench.heads, width)
    expected = reference_attention.attend_reference(queries, keys, values, window)
    torch.testing.assert_close(out.view(count, bench.heads, width).double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("start", "count"), [(0, 2), (0, 65), (1, 64), (63, 2), (64, 64), (65, 130), (190, 3)]
)
@pytest.mark.parametrize("window", [0, 1, 50, 64])
def test_prefill_matches_reference(start: int, count: int, window: int) -> None:
    prefill(32, 3, start, count, window)


@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 7, 8])
def test_prefill_of_every_shape(width: int, group: int) -> None:
    prefill(width, group, 100, 71, 0)
    prefill(width, group, 0, 37, 0)


@pytest.mark.parametrize(
    ("start", "count", "window"), [(0, 700, 0), (1984, 64, 0), (4000, 96, 0), (1000, 300, 200)]
)
def test_prefill_behind_long_prefixes(start: int, count: int, window: int) -> None:
    prefill(32, 2, start, count, window)


def test_prefill_does_not_depend_on_how_a_prompt_is_cut() -> None:
    bench = AttentionBench(64, 2, 2, [400])
    rows = torch.randn(400, (bench.heads + 2 * 2) * 64)

    def run(cuts: list[int]) -> torch.Tensor:
        out = torch.empty(400, bench.heads * 64)
        for start, end in zip([0, *cuts], [*cuts, 400], strict=True):
            batch = pack_batch([StepWork([0] * (end - start), start, bench.slabs[0], "none")])
            bench.pages.prefill(1, rows[start:end], batch.spans[0], 0, out[start:end])
        return out

    whole = run([])
    for cuts in ([64], [2, 5, 68], [128, 256], [399 - 1]):
        assert torch.equal(run(cuts), whole), cuts


def test_write_rotates_and_stores_only_its_own_rows() -> None:
    bench = AttentionBench(32, 2, 2, [130])
    before = bench.data.clone()
    batch = pack_batch([StepWork([0] * 3, 127, bench.slabs[0], "none")])
    qkv = torch.randn(3, 8 * 32)
    plain = qkv.view(3, 8, 32).clone()
    angles = torch.rand(130, 16)
    bench.pages.write(1, qkv, batch, (angles.cos().numpy(), angles.sin().numpy()), (NONE, NONE), 1e-6)
    first, second = plain[:, :6].chunk(2, dim=-1)
    cos, sin = angles[127:].cos()[:, None], angles[127:].sin()[:, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(qkv.view(3, 8, 32)[:, :6], rotated)
    keys, values = reference_attention.gather_pages(bench.data, 1, bench.slabs[0], 130)
    torch.testing.assert_close(keys[:, 127:].transpose(0, 1), rotated[:, 4:])
    assert torch.equal(values[:, 127:].transpose(0, 1), plain[:, 6:])
    for token in range(127, 130):
        before[bench.slabs[0][token // 64], 1, :, :, token % 64] = 0
        bench.data[bench.slabs[0][token // 64], 1, :, :, token % 64] = 0
    assert torch.equal(before.view(torch.int32), bench.data.view(torch.int32))  # as bits: most of it is nan


def test_other_dtypes_are_refused() -> None:
    layout = KvLayout(1, 1, 32, "float16")
    with pytest.raises(ValueError, match="float32"):
        CpuAttention(layout, torch.zeros(1, *layout.chunk_shape, dtype=torch.float16), 1)
