"""What reading shared chunks once is worth: two-phase attention against our own flat kernel on the same pages.

    python -m benchmarks.prefix_attention [--json] [--rounds 7] [--crossover]

One thread, 32 sequences, all layers of a pool in shuffled slabs. A prompt begins with 1,024, 2,048 or 4,096 tokens
that all sequences share; behind it each has tokens of its own, growing from 1 to 256. One measurement adds up decode
steps at five points of that growth, as generating would. The flat kernel reads the very same physical pages, so it also
profits from their being in a cache; the two-phase side pays for its planning in every step. Reported are ratios of
medians over rounds that measure both in turn, in CPU time of the thread.

    speedup_N        flat / two-phase with N shared tokens, for the head shape of the ChunkAttention paper: 32 heads of
                     128, no grouping; its 2,048 shared tokens are 64 MiB a layer, more than a cache holds
    no_share_ratio   flat / two-phase where no two sequences share anything: the cost of looking for it
    shapes           the same for other head shapes. Where the shared pages of a layer fit the cache, and the more so
                     with grouped queries, the flat kernel is bound by arithmetic and not by memory: no speed-up can
                     exceed the share of the machine's peak that the flat kernel leaves unused
    share            2,048 prompt tokens of which 50, 75 or 100 % are shared: flat / two-phase on the same pages, and
                     against the flat kernel on private copies of everything (what serving without sharing reads)
    levels           a tree: 512 tokens shared by all, 512 by each half, 512 by each quarter, 512 by each eighth

With --crossover: flat / two-phase by the number of rows that share 1,024 tokens, with the rule that decides switched
off; where it exceeds 1, `ALONE` in engine/cpu/attention.py should let them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import benchmarks.script_path  # noqa: F401
from diptych.chunks import CHUNK_TOKENS
from engine.batching import prefix_plan
from engine.batching.batch import ForwardBatch, pack_batch
from engine.cpu.attention import CpuAttention
from engine.step_work import StepWork
from kvcache.layout import KvLayout

ROWS = 32
SUFFIXES = (1, 64, 128, 192, 256)
SHAPES = {
    "paper": (1, 32, 1, 128),
    "8 heads x 64": (4, 8, 1, 64),
    "embedded": (6, 4, 2, 32),
    "llama-8b-like": (2, 8, 4, 128),
}  # layers, KV heads, query heads of each, head_dim
Tree = Sequence[tuple[int, int]]  # levels of (chunks, rows that share them), from the root


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step, and the same without a plan."""

    works: list[StepWork]
    batch: ForwardBatch
    flat: ForwardBatch


class Bench:
    """A pool of random KV for one head shape, large enough for the largest of its trees."""

    def __init__(self, shape: tuple[int, int, int, int], slabs: int) -> None:
        torch.manual_seed(0)
        layers, kv_heads, group, width = shape
        layout, heads = KvLayout(layers, kv_heads, width, "float32"), kv_heads * group
        self.data = torch.empty(slabs, *layout.chunk_shape).uniform_(-1, 1)
        self.order = torch.randperm(slabs).tolist()
        self.pages = CpuAttention(layout, self.data, heads)
        self.qkv = torch.randn(ROWS, (heads + 2 * kv_heads) * width)
        self.out = torch.zeros(ROWS, heads * width)

    def steps(self, tree: Tree, suffixes: Sequence[int] = SUFFIXES, rows: int = ROWS) -> list[Step]:
        """Steps of `rows` sequences that share as `tree` says and have `suffixes` tokens of their own behind it."""
        left = iter(self.order)
        slabs: list[list[int]] = [[] for _ in range(rows)]
        for chunks, sharing in [*tree, (-(-max(suffixes) // CHUNK_TOKENS), 1)]:
            for first in range(0, rows, sharing):
                piece = [next(left) for _ in range(chunks)]
                for row in slabs[first : first + sharing]:
                    row += piece
        depth = sum(chunks for chunks, _ in tree) * CHUNK_TOKENS
        return [
            self._step([StepWork([0], depth + suffix - 1, row, "none") for row in slabs])
            for suffix in suffixes
        ]

    def flat(self, steps: Sequence[Step]) -> None:
        """All layers, every row on its own."""
        for step in steps:
            for layer in range(self.pages.layout.layers):
                self.pages.decode(layer, self.qkv, step.flat, 0, self.out)

    def two_phase(self, steps: Sequence[Step]) -> None:
        """The same, planned and in two phases."""
        for step in steps:
            full = [work.start // CHUNK_TOKENS for work in step.works]
            prefix_plan.sort_by_prefix([work.slabs for work in step.works], full)
            prefix_plan.plan_prefixes(step.batch.table, np.array(full))
            for layer in range(self.pages.layout.layers):
                self.pages.decode(layer, self.qkv, step.batch, 0, self.out)

    def _step(self, works: list[StepWork]) -> Step:
        batch = pack_batch(works)
        return Step(works, batch, replace(batch, plan=batch.plan.without_costly_runs(ROWS + 1)))


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this thread: what a neighbour takes from the core is not counted."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def compare(bench: Bench, steps: Sequence[Step], rounds: int) -> float:
    """Flat / two-phase; their results are compared first."""
    bench.flat(steps)
    expected = bench.out.clone()
    bench.two_phase(steps)
    torch.testing.assert_close(bench.out, expected, rtol=1e-4, atol=1e-5)
    return ratio(lambda: bench.flat(steps), lambda: bench.two_phase(steps), rounds)


def ratio(slow: Callable[[], object], fast: Callable[[], object], rounds: int) -> float:
    """Median time of `slow` / that of `fast`, measured in turn, each as often before the other as behind it."""
    taken: tuple[list[float], list[float]] = [], []
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            taken[side].append(seconds((slow, fast)[side]))
    return round(median(taken[0]) / median(taken[1]), 3)


def shape_figures(name: str, rounds: int) -> dict[str, float]:
    """`speedup_*` and `no_share_ratio` of one head shape."""
    bench = Bench(SHAPES[name], 64 + ROWS * 12)
    found = {
        f"speedup_{tokens}": compare(bench, bench.steps([(tokens // CHUNK_TOKENS, ROWS)]), rounds)
        for tokens in (1024, 2048, 4096)
    }
    private = bench.steps([(8, 1)])
    return found | {"no_share_ratio": compare(bench, private, 5 * rounds)}


def share_figures(rounds: int) -> dict[str, float]:
    """Partly shared prompts, a tree, and copies instead of sharing; 8 heads x 64, one layer."""
    bench = Bench((1, 8, 1, 64), ROWS * 36 + 32)
    found = {}
    for percent, common in ((50, 16), (75, 24), (100, 32)):
        suffix = (2048 - common * CHUNK_TOKENS) or 1
        steps = bench.steps([(common, ROWS)], [suffix])
        found[f"share_{percent}"] = compare(bench, steps, rounds)
        copies = bench.steps([(common, 1)], [suffix])
        found[f"copies_{percent}"] = ratio(
            partial(bench.flat, copies), partial(bench.two_phase, steps), rounds
        )
    levels = [(8, ROWS), (8, ROWS // 2), (8, ROWS // 4), (8, ROWS // 8)]
    return found | {"levels": compare(bench, bench.steps(levels), rounds)}


def crossover(rounds: int) -> dict[str, dict[str, float]]:
    """Flat / two-phase by rows, for the shapes on which the rule was set."""
    found: dict[str, dict[str, float]] = {}
    for width in (32, 64, 128):
        for group in (1, 2, 4, 8):
            bench = Bench((1, 4, group, width), ROWS + 16)
            bench.pages.alone = 0
            found[f"head_dim {width}, {group} per KV head"] = {
                str(rows): compare(bench, bench.steps([(16, rows)], [32], rows), rounds)
                for rows in (2, 3, 4, 5, 6, 8, 12, 16, 32)
            }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--crossover", action="store_true", help="measure from how many rows on sharing pays")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.crossover:
        print(json.dumps(crossover(options.rounds), indent=None if options.json else 1))
        return
    shapes = {name: shape_figures(name, options.rounds) for name in SHAPES}
    least = min(figures["no_share_ratio"] for figures in shapes.values())
    found = {**shapes["paper"], "no_share_ratio": least, "rows": ROWS, "shapes": shapes}
    found |= {"share": share_figures(options.rounds)}
    print(json.dumps(found, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
