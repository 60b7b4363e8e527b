"""The GPU kernels in Triton's interpreter, on CPU tensors, against the plain reference: the grid of the CPU's tests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip(
    "engine.gpu.attention",
    reason="triton is not installed (it has wheels for Linux only)",
    exc_type=ImportError,
)

from engine.batching.batch import ForwardBatch, pack_batch
from engine.gpu.attention import GpuAttention
from engine.gpu.batch import MAX_PARTS, cut_shared_runs
from engine.gpu.launch import LaunchTuning
from engine.gpu.triton_kernel import INTERPRETED
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from tests.support import reference_attention

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled here: tests/gpu runs them")

EDGES = [1, 2, 63, 64, 65, 127, 128, 129]
CLOSE = {"float32": (2e-5, 2e-6), "float16": (2e-3, 2e-3), "bfloat16": (1e-2, 1e-2)}


class GpuAttentionBench:
    """Random KV of sequences that may begin alike, scattered over a pool whose other rows are not-a-number.

    `shared[n]` = (m, chunks): sequence n begins with the first `chunks` full chunks of sequence m < n.
    """

    def __init__(
        self,
        width: int,
        kv_heads: int,
        group: int,
        lengths: list[int],
        shared: dict[int, tuple[int, int]] | None = None,
        dtype: str = "float32",
        tuning: LaunchTuning | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.layout = KvLayout(2, kv_heads, width, dtype)
        self.lengths, self.heads, self.width = lengths, kv_heads * group, width
        order = torch.randperm(sum(map(self.layout.num_chunks, lengths)) + 1).tolist()
        self.data = torch.full((len(order), *self.layout.chunk_shape), float("nan")).to(getattr(torch, dtype))
        self.slabs: list[list[int]] = []
        for n, length in enumerate(lengths):
            other, chunks = (shared or {}).get(n, (0, 0))
            known = self.slabs[other][:chunks] if chunks else []
            self.slabs.append(known + [order.pop() for _ in range(self.layout.num_chunks(length) - chunks)])
            for token in range(chunks * 64, length):
                fresh = torch.randn(2, kv_heads, 2, width)
                self.data[self.slabs[n][token // 64], :, :, :, token % 64] = fresh.to(self.data.dtype)
        self.pages = GpuAttention(self.layout, self.data, self.heads, tuning)
        rows = torch.randn(max(len(lengths), 2), (self.heads + 2 * kv_heads) * width) * 2
        self.qkv = rows.to(self.data.dtype)

    def batch(self) -> ForwardBatch:
        return pack_batch(
            [
                StepWork([0], length - 1, slabs, "none")
                for length, slabs in zip(self.lengths, self.slabs, strict=True)
            ]
        )

    def decode(self, window: int = 0) -> torch.Tensor:
        """Decode the last token of every sequence, layer 1: [sequences, heads, width]."""
        out = torch.full((len(self.qkv), self.heads * self.width), float("nan")).to(self.data.dtype)
        self.pages.decode(1, self.qkv, self.pages.load(self.batch()), window, out)
        return out[: len(self.lengths)].view(-1, self.heads, self.width)

    def check(self, window: int = 0) -> None:
        found = self.decode(window)
        relative, absolute = CLOSE[self.layout.dtype]
        for n, length in enumerate(self.lengths):
            keys, values = reference_attention.gather_pages(self.data, 1, self.slabs[n], length)
            q = self.qkv[n, : self.heads * self.width].view(1, self.heads, self.width)
            expected = reference_attention.attend_reference(q, keys, values, window)[0]
            torch.testing.assert_close(found[n].double(), expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_decode_matches_reference(width: int, group: int) -> None:
    ragged = torch.randint(130, 300, (1,), generator=torch.Generator().manual_seed(width * group)).tolist()
    programs = 1 if group % 2 else 24  # odd groups in one piece, even ones in splits
    kv_heads = 2 if group < 4 else 1
    GpuAttentionBench(width, kv_heads, group, [1, 64, 65, *ragged], tuning=LaunchTuning(programs, 0)).check()


@pytest.mark.parametrize("programs", [1, 12])
def test_decode_at_every_edge_of_a_page(programs: int) -> None:
    GpuAttentionBench(32, 1, 2, EDGES, tuning=LaunchTuning(programs, 0)).check()


@pytest.mark.parametrize(
    "programs", [1, 64]
)  # in one piece, and in so many that they are merged in two rounds
def test_decode_of_long_sequences(programs: int) -> None:
    GpuAttentionBench(32, 1, 2, [2000, 4096], tuning=LaunchTuning(programs, 0)).check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_in_half_precision_sums_in_float32(dtype: str) -> None:
    GpuAttentionBench(64, 2, 4, [1, 64, 129, 700], {3: (2, 2)}, dtype, LaunchTuning(12, 0)).check()


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 128, 1000])
def test_decode_honours_the_window(window: int) -> None:
    GpuAttentionBench(32, 1, 2, [1, 64, 65, 129, 300, 310], {5: (4, 4)}, tuning=LaunchTuning(40, 0)).check(
        window
    )


def test_decode_survives_extreme_scores() -> None:
    bench = GpuAttentionBench(32, 1, 2, [130, 200], {1: (0, 2)}, tuning=LaunchTuning(8, 0))
    bench.qkv *= 300  # scores in the thousands: all weight on one token, the rest vanishes without nan
    found = bench.decode()
    assert torch.isfinite(found).all()


TREES = {
    "two rows": ([192, 200], {1: (0, 2)}),
    "one prefix for all": ([129, 130, 191, 192, 129], dict.fromkeys(range(1, 5), (0, 2))),
    "levels": ([640, 641, 500, 300, 65, 30], {1: (0, 9), 2: (0, 7), 3: (0, 4), 4: (0, 1)}),
    "two trees": ([200, 300, 200, 400, 129], {2: (0, 3), 3: (1, 4), 4: (1, 2)}),
    "a suffix of one token": ([129, 129, 129], {1: (0, 2), 2: (0, 2)}),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("group", "programs"), [(1, 30), (3, 1), (8, 30)])
def test_shared_runs_are_read_once_and_merged(name: str, group: int, programs: int) -> None:
    lengths, shared = TREES[name]
    bench = GpuAttentionBench(32, 1, group, list(lengths), shared, tuning=LaunchTuning(programs, 0, rows=16))
    assert len(bench.pages.load(bench.batch()).items) > 0
    bench.check()


def test_sharing_that_saves_little_is_left_out() -> None:
    bench = GpuAttentionBench(32, 2, 2, [192, 200], {1: (0, 2)})
    saved = 2 * bench.layout.layer_bytes  # two chunks, read once instead of twice
    for saving, items in ((saved, 1), (saved + 1, 0)):
        bench.pages = GpuAttention(bench.layout, bench.data, bench.heads, LaunchTuning(1, saving))
        assert len(bench.pages.load(bench.batch()).items) == items
        bench.check()


def test_items_cover_every_shared_chunk_once_in_parts_of_their_own() -> None:
    slabs = [[*range(100)], [*range(90), 200], [*range(70), 300], [*range(70), 301, 302], [*range(3), 400]]
    batch = pack_batch([StepWork([0], len(row) * 64 - 1, row, "none") for row in slabs])
    for chunks in (1, 2, 7, 100):
        cut = cut_shared_runs(batch.plan, chunks)
        read: dict[int, list[tuple[int, int]]] = {n: [] for n in range(len(slabs))}
        for first, last, top, bottom, part in cut.items.tolist():
            for row in range(top, bottom):
                read[row] += [(chunk, part) for chunk in range(first, last)]
        for row, pairs in read.items():
            assert [chunk for chunk, _ in sorted(pairs)] == list(range(cut.begins[row]))
            parts = [part for _, part in sorted(pairs)]
            assert sorted(parts) == parts and len(set(parts)) == cut.covers[row] <= MAX_PARTS
        assert np.array_equal(cut.begins, batch.plan.shared)


def test_too_deep_a_tree_is_cut_off_and_stays_exact() -> None:
    depth = MAX_PARTS + 2
    lengths = [64 * (n + 1) + 5 for n in range(depth)]
    bench = GpuAttentionBench(16, 1, 1, lengths, {n: (n - 1, n) for n in range(1, depth)})
    cut = cut_shared_runs(bench.batch().plan, 1)
    assert cut.covers.max() <= MAX_PARTS and cut.begins.max() < bench.batch().plan.shared.max()
    bench.check()


SPANS = [(0, 2), (0, 65), (1, 64), (63, 2), (64, 64), (65, 130), (190, 3)]


@pytest.mark.parametrize(
    ("width", "group", "spans", "window"),
    [
        (32, 3, SPANS, 0),
        (32, 3, SPANS, 1),
        (32, 2, SPANS, 50),
        (80, 1, SPANS, 64),
        (128, 4, [(60, 70)], 0),
        (256, 8, [(0, 5), (60, 70)], 0),
        (256, 8, [(65, 3)], 50),
    ],
)
def test_prefill_matches_reference(width: int, group: int, spans: list[tuple[int, int]], window: int) -> None:
    tuning = LaunchTuning(1, 0, rows=512)
    bench = GpuAttentionBench(width, 2, group, [start + count for start, count in spans], tuning=tuning)
    batch = pack_batch(
        [
            StepWork([0] * count, start, slabs, "none")
            for (start, count), slabs in zip(spans, bench.slabs, strict=True)
        ]
    )
    qkv = torch.randn(len(batch.tokens), (bench.heads + 4) * width)
    out = torch.full((len(qkv), bench.heads * width), float("nan"))
    bench.pages.prefill(1, qkv, bench.pages.load(batch), window, out)
    for span, slabs, length in zip(batch.spans, bench.slabs, bench.lengths, strict=True):
        keys, values = reference_attention.gather_pages(bench.data, 1, slabs, length)
        rows = slice(span.row, span.row + span.count)
        q = qkv[rows, : bench.heads * width].view(span.count, bench.heads, width)
        expected = reference_attention.attend_reference(q, keys, values, window)
        torch.testing.assert_close(out[rows].view(expected.shape).double(), expected, rtol=2e-5, atol=2e-6)


def test_a_mixed_step_writes_every_row_once() -> None:
    bench = GpuAttentionBench(32, 1, 2, [70, 130, 33])
    batch = pack_batch(
        [
            StepWork([0], 69, bench.slabs[0], "none"),
            StepWork([0] * 100, 30, bench.slabs[1], "none"),
            StepWork([0], 32, bench.slabs[2], "none"),
        ]
    )
    step = bench.pages.load(batch)
    qkv, out = torch.randn(102, 4 * 32), torch.full((102, 2 * 32), float("nan"))
    bench.pages.decode(1, qkv, step, 0, out)
    assert torch.isfinite(out[[0, 101]]).all() and torch.isnan(out[1:101]).all()
    bench.pages.prefill(1, qkv, step, 0, out)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("width", "normed"), list(itertools.product([32, 80], [False, True])))
def test_write_rotates_and_stores_only_its_own_rows(width: int, normed: bool) -> None:
    bench = GpuAttentionBench(width, 2, 2, [130])
    before = bench.data.clone()
    step = bench.pages.load(pack_batch([StepWork([0] * 3, 127, bench.slabs[0], "none")]))
    qkv = torch.randn(3, 8 * width)
    plain = qkv.view(3, 8, width).clone()
    angles = torch.rand(130, width // 2)
    norms = (torch.rand(width), torch.rand(width)) if normed else (torch.empty(0), torch.empty(0))
    bench.pages.write(1, qkv, step, (angles.cos(), angles.sin()), norms, 1e-6)
    heads = plain[:, :6]
    if normed:
        weight = torch.cat([norms[0].expand(4, -1), norms[1].expand(2, -1)])
        heads = heads * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angles[127:].cos()[:, None], angles[127:].sin()[:, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(qkv.view(3, 8, width)[:, :6], rotated)
    keys, values = reference_attention.gather_pages(bench.data, 1, bench.slabs[0], 130)
    torch.testing.assert_close(keys[:, 127:].transpose(0, 1), rotated[:, 4:])
    assert torch.equal(values[:, 127:].transpose(0, 1), plain[:, 6:])
    for token in range(127, 130):
        before[bench.slabs[0][token // 64], 1, :, :, token % 64] = 0
        bench.data[bench.slabs[0][token // 64], 1, :, :, token % 64] = 0
    assert torch.equal(before.view(torch.int32), bench.data.view(torch.int32))  # as bits: most of it is nan


def test_a_pool_of_another_type_is_refused() -> None:
    layout = KvLayout(1, 1, 32, "float16")
    with pytest.raises(ValueError, match="float16"):
        GpuAttention(layout, torch.zeros(1, *layout.chunk_shape), 1)
