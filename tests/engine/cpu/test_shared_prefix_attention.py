"""Two-phase attention against the plain reference and the flat kernel, over random trees of sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import ForwardBatch, pack_batch
from engine.cpu.attention import CpuAttention
from engine.step_work import StepWork
from kvcache.layout import KvLayout
from tests.support import reference_attention

TOLERANCE = 1e-5  # largest absolute error, values and queries being of the order of 1
LAYER = 1


class Tree:
    """Sequences that share pages as `paths` say: one node per chunk, a tail of `tails[row]` tokens for each row alone.

    What no sequence has written is not-a-number. `rule`: whether the kernel decides what pays, or all runs are taken.
    """

    def __init__(
        self, width: int, kv_heads: int, group: int, paths: Sequence[tuple[int, ...]], tails: Sequence[int],
        rule: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(width + group + len(paths))
        self.layout, self.heads, self.width = KvLayout(2, kv_heads, width, "float32"), kv_heads * group, width
        nodes = sorted({path[: depth + 1] for path in paths for depth in range(len(path))})
        spare = [-(-tail // CHUNK_TOKENS) for tail in tails]
        order = torch.randperm(len(nodes) + sum(spare) + 1).tolist()
        place = {node: order.pop() for node in nodes}
        self.data = torch.full((len(nodes) + sum(spare) + 1, *self.layout.chunk_shape), float("nan"))
        for slab in place.values():
            self.data[slab] = torch.randn(self.layout.chunk_shape)
        self.slabs, self.lengths = [], []
        for path, tail, chunks in zip(paths, tails, spare, strict=True):
            own = [order.pop() for _ in range(chunks)]
            for index, slab in enumerate(own):
                count = min(CHUNK_TOKENS, tail - index * CHUNK_TOKENS)
                self.data[slab, :, :, :, :count] = torch.randn(2, kv_heads, 2, count, width)
            self.slabs.append([place[path[: depth + 1]] for depth in range(len(path))] + own)
            self.lengths.append(len(path) * CHUNK_TOKENS + tail)
        self.pages = CpuAttention(self.layout, self.data, self.heads)
        if not rule:
            self.pages.alone = 0
        self.qkv = torch.randn(max(len(paths), 2), (self.heads + 2 * kv_heads) * width)

    def batch(self, rows: Sequence[int] | None = None) -> ForwardBatch:
        chosen = range(len(self.slabs)) if rows is None else rows
        return pack_batch([StepWork([0], self.lengths[row] - 1, self.slabs[row], "none") for row in chosen])

    def decode(self, batch: ForwardBatch, window: int = 0, rows: Sequence[int] | None = None) -> torch.Tensor:
        """[rows, heads, width]."""
        qkv = self.qkv if rows is None else self.qkv[list(rows)].contiguous()
        out = torch.full((len(qkv), self.heads * self.width), float("nan"))
        self.pages.decode(LAYER, qkv, batch, window, out)
        return out.view(len(qkv), self.heads, self.width)[: len(batch.rows)]

    def flat(self, window: int = 0) -> torch.Tensor:
        batch = self.batch()
        return self.decode(replace(batch, plan=batch.plan.without_costly_runs(1 << 30)), window)

    def expected(self, row: int, window: int = 0) -> torch.Tensor:
        keys, values = reference_attention.gather_pages(self.data, LAYER, self.slabs[row], self.lengths[row])
        q = self.qkv[row, : self.heads * self.width].view(1, self.heads, self.width)
        return reference_attention.attend_reference(q, keys, values, window)[0]

    def check(self, window: int = 0) -> ForwardBatch:
        """Two-phase and flat against each other and the reference."""
        batch = self.batch()
        found, flat = self.decode(batch, window), self.flat(window)
        torch.testing.assert_close(found, flat, rtol=0, atol=TOLERANCE)
        for row in range(len(self.slabs)):
            torch.testing.assert_close(
                found[row].double(), self.expected(row, window), rtol=0, atol=TOLERANCE
            )
        return batch


def paths(rng: random.Random, rows: int, depth: int, most: int) -> list[tuple[int, ...]]:
    """A random tree of `depth` levels: each of up to `most` chunks that a part of the level before goes on with.

    At least two of the rows have something in common.
    """
    found: list[tuple[int, ...]] = [(0,)] * 2 + [()] * (rows - 2)
    for level in range(depth):
        chunks = rng.randint(1, most)
        for row in range(rows):
            if len(found[row]) >= level:  # those that ended earlier have ended
                branch = rng.choice([0, 0, 1, 2]) if level else rng.choice([0, 0, 0, 1])
                found[row] += (branch,) * chunks if rng.random() < 0.8 else ()
    return found


@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_two_phase_matches_reference_and_flat(width: int, group: int) -> None:
    rng = random.Random(width * group)
    chosen = paths(rng, 9, 3, 2)
    tree = Tree(width, 2, group, chosen, [1, 2, 63, 64, 65, 127, 128, 129, rng.randint(1, 300)])
    assert len(tree.check().plan.runs)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("rows", [2, 5, 16, 33, 64])
def test_trees_of_any_depth_and_batch(depth: int, rows: int) -> None:
    rng = random.Random(depth * rows)
    tree = Tree(32, 2, 2, paths(rng, rows, depth, 3), [rng.randint(1, 130) for _ in range(rows)])
    batch = tree.check()
    assert len(batch.plan.runs)


@pytest.mark.parametrize(("width", "group"), [(32, 4), (64, 1), (128, 8), (256, 2)])
def test_long_sequences_and_single_token_suffixes(width: int, group: int) -> None:
    tree = Tree(width, 1, group, [(0,) * 62 + (row % 2,) for row in range(5)], [1, 1, 1, 64, 33])
    assert max(tree.lengths) == 4096
    runs = tree.check().plan.runs.tolist()
    assert [run[:2] for run in runs] == [[0, 62], [62, 63], [62, 63]]
    assert sorted(bottom - top for _, _, top, bottom in runs) == [2, 3, 5]


def test_without_sharing_the_result_is_that_of_each_row_alone() -> None:
    tree = Tree(64, 2, 2, [(row, 0, 0) for row in range(12)], [7 * row + 1 for row in range(12)])
    together = tree.decode(tree.batch())
    assert not len(tree.batch().plan.runs)
    for row in range(12):
        assert torch.equal(tree.decode(tree.batch([row]), rows=[row])[0], together[row])


@pytest.mark.parametrize("window", [1, 64, 130, 200, 257, 1000])
def test_rows_whose_window_hides_the_beginning_read_on_their_own(window: int) -> None:
    rng = random.Random(window)
    chosen = [(0,) * rng.choice([1, 2, 3]) + (rng.randint(0, 1),) for _ in range(14)]
    tree = Tree(32, 2, 2, chosen, [rng.randint(1, 130) for _ in range(14)])
    tree.check(window)
    assert torch.equal(tree.decode(tree.batch(), 1000), tree.decode(tree.batch()))


def test_a_row_does_not_depend_on_how_its_beginning_is_cut_into_runs() -> None:
    """Runs end where others leave the tree; taking up a row's state there must not change a bit of it."""
    common = [(0,) * 6 for _ in range(3)]
    tree = Tree(32, 2, 3, [*common, (0, 0), (0, 0, 0, 1), (0, 1)], [5, 70, 64, 30, 20, 10])
    alone, cut = tree.batch([0, 1, 2]), tree.batch()
    assert len(alone.plan.runs) == 1 and len(cut.plan.runs) == 4
    assert torch.equal(tree.decode(cut)[:3], tree.decode(alone, rows=[0, 1, 2]))


def test_the_order_of_the_batch_changes_nothing() -> None:
    rng = random.Random(3)
    tree = Tree(64, 2, 2, paths(rng, 20, 4, 2), [rng.randint(1, 100) for _ in range(20)])
    whole = tree.decode(tree.batch())
    rows = rng.sample(range(20), 20)
    assert torch.equal(tree.decode(tree.batch(rows), rows=rows), whole[rows])


@pytest.mark.parametrize(("rows", "group", "pays"), [(2, 1, 0), (32, 1, 1), (3, 2, 0), (8, 2, 1), (2, 8, 1)])
def test_few_rows_are_left_to_the_flat_kernel(rows: int, group: int, pays: int) -> None:
    tree = Tree(32, 1, group, [(0, 0)] * rows, [9] * rows, rule=True)
    found = tree.decode(tree.batch())
    assert torch.equal(found, tree.flat()) is not bool(pays)
    torch.testing.assert_close(found, tree.flat(), rtol=0, atol=TOLERANCE)


def test_extreme_scores_do_not_overflow() -> None:
    tree = Tree(32, 1, 2, [(0, 0)] * 8, [3] * 8)
    tree.qkv *= 300
    torch.testing.assert_close(tree.decode(tree.batch()), tree.flat(), rtol=1e-3, atol=1e-3)


def test_a_kernel_that_skips_a_run_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    tree = Tree(32, 1, 2, [(0, 0)] * 8, [3] * 8)
    whole = tree.pages.shared_kernel

    def forgetful(qkv: Any, rows: Any, table: Any, runs: Any, *rest: Any) -> None:
        shorter = runs.copy()
        shorter[:, 1] -= 1
        whole(qkv, rows, table, shorter, *rest)

    monkeypatch.setattr(tree.pages, "shared_kernel", forgetful)
    with pytest.raises(AssertionError, match="not close"):
        tree.check()
