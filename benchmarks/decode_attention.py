"""How close the paged decode kernel comes to the speed of memory, and how far it leaves gather + SDPA behind.

    python -m benchmarks.decode_attention [--json] [--rounds 15]

One thread. For each head shape, 16 sequences of 1,024 tokens lie in a pool in shuffled slabs, and all layers are
decoded once per measurement, as a step does, so no KV is in a cache when it is read. Reported are ratios of medians
over rounds, each round measuring all contestants in turn (a machine that is slow for a while is slow for all of them):

    bandwidth_ratio   KV bytes read per second by the kernel / bytes copied per second by numpy (a copy of N bytes
                      counts as N, although it moves 2 N: N are read and N written), N as large as the KV
    read_ratio        the same / bytes summed per second by numpy, which reads and never writes: the honest ceiling
    vs_gather_sdpa    time of gathering the pages into contiguous tensors + torch's SDPA / time of the kernel

The top-level figures are the smaller ones of the two shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as nnf

import benchmarks.script_path  # noqa: F401
from engine.batching.batch import ForwardBatch, pack_batch
from engine.cpu.attention import CpuAttention
from engine.step_work import StepWork
from kvcache.layout import KvLayout

SEQUENCES, TOKENS = 16, 1024
SHAPES = {
    "embedded": (6, 4, 8, 32),
    "llama-8b-like": (4, 8, 32, 128),
}  # layers, KV heads, query heads, head_dim


@dataclass(frozen=True, slots=True)
class Bench:
    """One head shape, ready to run."""

    pages: CpuAttention
    batch: ForwardBatch
    slabs: list[torch.Tensor]
    qkv: torch.Tensor  # [sequences, (heads + 2 * kv_heads) * head_dim]
    out: torch.Tensor  # [sequences, heads * head_dim]

    @property
    def kv_bytes(self) -> int:
        """KV that one pass over all layers reads."""
        return SEQUENCES * TOKENS * self.pages.layout.bytes_per_token

    def paged(self) -> None:
        """All layers through the paged kernel."""
        for layer in range(self.pages.layout.layers):
            self.pages.decode(layer, self.qkv, self.batch, 0, self.out)

    def gathered(self) -> None:
        """All layers the plain way: pages into contiguous keys and values, then SDPA over all sequences at once."""
        width, heads = self.pages.layout.head_dim, self.pages.heads
        q = self.qkv[:, : heads * width].view(SEQUENCES, heads, 1, width)
        for layer in range(self.pages.layout.layers):
            pairs = [gather(self.pages, layer, slabs) for slabs in self.slabs]
            keys, values = (torch.stack(side) for side in zip(*pairs, strict=True))
            mixed = nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            self.out.copy_(mixed.view(SEQUENCES, -1))


def gather(pages: CpuAttention, layer: int, slabs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence's tokens, each [kv_heads, tokens, head_dim], copied out of its pages."""
    kept = pages.data[:, layer].index_select(0, slabs)  # [chunks, kv_heads, 2, 64, head_dim]
    keys, values = kept.permute(2, 1, 0, 3, 4).reshape(2, pages.layout.kv_heads, -1, pages.layout.head_dim)
    return keys, values


def make_bench(layers: int, kv_heads: int, heads: int, width: int) -> Bench:
    """Random KV in shuffled slabs."""
    torch.manual_seed(0)
    layout = KvLayout(layers, kv_heads, width, "float32")
    chunks = layout.num_chunks(TOKENS)
    data = torch.randn(SEQUENCES * chunks, *layout.chunk_shape)
    slabs = torch.randperm(SEQUENCES * chunks).view(SEQUENCES, chunks)
    works = [StepWork([0], TOKENS - 1, row.tolist(), "none") for row in slabs]
    qkv = torch.randn(SEQUENCES, (heads + 2 * kv_heads) * width)
    out = torch.empty(SEQUENCES, heads * width)
    return Bench(CpuAttention(layout, data, heads), pack_batch(works), list(slabs), qkv, out)


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this thread: what a neighbour takes from the core is not counted."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict[str, float]:
    """Ratios of medians for one head shape; the contestants' results are compared first."""
    bench = make_bench(*shape)
    source = np.ones(bench.kv_bytes // 4, np.float32)
    target = np.zeros_like(source)
    bench.paged()
    mine = bench.out.clone()
    bench.gathered()
    torch.testing.assert_close(mine, bench.out, rtol=1e-4, atol=1e-5)
    contestants: dict[str, Callable[[], object]] = {
        "paged": bench.paged,
        "copy": lambda: np.copyto(target, source),
        "read": lambda: source.sum(),
        "gathered": bench.gathered,
    }
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            taken[name].append(seconds(call))
    middle = {name: median(times) for name, times in taken.items()}
    return {
        "bandwidth_ratio": round(middle["copy"] / middle["paged"], 3),
        "read_ratio": round(middle["read"] / middle["paged"], 3),
        "vs_gather_sdpa": round(middle["gathered"] / middle["paged"], 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = {name: measure(shape, options.rounds) for name, shape in SHAPES.items()}
    figures = ("bandwidth_ratio", "vs_gather_sdpa")
    least = {figure: min(found[figure] for found in shapes.values()) for figure in figures}
    if options.json:
        print(json.dumps({**least, "sequences": SEQUENCES, "tokens": TOKENS, "shapes": shapes}))
        return
    for name, found in shapes.items():
        print(f"{name}: " + ", ".join(f"{figure} {value}" for figure, value in found.items()))
    print("least: " + ", ".join(f"{figure} {value}" for figure, value in least.items()))


if __name__ == "__main__":
    main()
