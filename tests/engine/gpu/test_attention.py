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

from engine.batching.batch import pack_batch
from engine.gpu.attention import GpuAttention
from engine.gpu.batch import cut_shared_runs
from engine.gpu.launch import LaunchTuning
from engine.gpu.triton_kernel import INTERPRETED
from engine.model.device_step import MAX_PARTS
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from tests.engine.gpu.attention_bench import EDGES, SPANS, TREES, AttentionBench

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled here: tests/gpu runs them")


def open_bench(
    width: int,
    kv_heads: int,
    group: int,
    lengths: list[int],
    shared: dict[int, tuple[int, int]] | None = None,
    dtype: str = "float32",
    tuning: LaunchTuning | None = None,
) -> AttentionBench:
    return AttentionBench(
        lambda layout, data, heads: GpuAttention(layout, data, heads, tuning),
        width, kv_heads, group, lengths, shared, dtype,
    )  # fmt: skip


@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_decode_matches_reference(width: int, group: int) -> None:
    ragged = torch.randint(130, 300, (1,), generator=torch.Generator().manual_seed(width * group)).tolist()
    programs = 1 if group % 2 else 24  # odd groups in one piece, even ones in splits
    kv_heads = 2 if group < 4 else 1
    open_bench(width, kv_heads, group, [1, 64, 65, *ragged], tuning=LaunchTuning(programs, 0)).check()


@pytest.mark.parametrize("programs", [1, 12])
def test_decode_at_every_edge_of_a_page(programs: int) -> None:
    open_bench(32, 1, 2, EDGES, tuning=LaunchTuning(programs, 0)).check()


@pytest.mark.parametrize(
    "programs", [1, 64]
)  # in one piece, and in so many that they are merged in two rounds
def test_decode_of_long_sequences(programs: int) -> None:
    open_bench(32, 1, 2, [2000, 4096], tuning=LaunchTuning(programs, 0)).check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_in_half_precision_sums_in_float32(dtype: str) -> None:
    open_bench(64, 2, 4, [1, 64, 129, 700], {3: (2, 2)}, dtype, LaunchTuning(12, 0)).check()


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 128, 1000])
def test_decode_honours_the_window(window: int) -> None:
    open_bench(32, 1, 2, [1, 64, 65, 129, 300, 310], {5: (4, 4)}, tuning=LaunchTuning(40, 0)).check(window)


def test_decode_survives_extreme_scores() -> None:
    bench = open_bench(32, 1, 2, [130, 200], {1: (0, 2)}, tuning=LaunchTuning(8, 0))
    bench.qkv *= 300  # scores in the thousands: all weight on one token, the rest vanishes without nan
    found = bench.decode()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("group", "programs"), [(1, 30), (3, 1), (8, 30)])
def test_shared_runs_are_read_once_and_merged(name: str, group: int, programs: int) -> None:
    lengths, shared = TREES[name]
    bench = open_bench(32, 1, group, list(lengths), shared, tuning=LaunchTuning(programs, 0, rows=16))
    assert len(bench.pages.load(bench.batch()).items) > 0
    bench.check()


def test_sharing_that_saves_little_is_left_out() -> None:
    bench = open_bench(32, 2, 2, [192, 200], {1: (0, 2)})
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
    bench = open_bench(16, 1, 1, lengths, {n: (n - 1, n) for n in range(1, depth)})
    cut = cut_shared_runs(bench.batch().plan, 1)
    assert cut.covers.max() <= MAX_PARTS and cut.begins.max() < bench.batch().plan.shared.max()
    bench.check()


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
    bench = open_bench(width, 2, group, [start + count for start, count in spans], tuning=tuning)
    bench.check_prefill(spans, window)


def test_a_mixed_step_writes_every_row_once() -> None:
    bench = open_bench(32, 1, 2, [70, 130, 33])
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
    bench = open_bench(width, 2, 2, [130])
    bench.check_write(normed)


def test_a_pool_of_another_type_is_refused() -> None:
    layout = KvLayout(1, 1, 32, "float16")
    with pytest.raises(ValueError, match="float16"):
        GpuAttention(layout, torch.zeros(1, *layout.chunk_shape), 1)
