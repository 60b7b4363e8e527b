"""What a step that only decodes takes beside its kernels, and beside the layered path, which gives the same bits.

    python -m benchmarks.engine_step [--json] [--rounds 30] [--batches 1 8 32]

In process, the embedded model, sequences of `LENGTH` tokens; CPU seconds of the only thread, in turns, medians.

    step_over_kernels_b*   a step / its products and attention alone, called one after another from machine code
    layered_over_step_b*   the same step by the layered path, which steps with many rows take / a step
    step_ms_b*             a step, in milliseconds
    same_bits              the share of batches of 1 to 64 rows whose logits are equal to the bit on both paths
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numba
import torch

import benchmarks.script_path  # noqa: F401
from benchmarks.engine import EMBEDDED
from engine.batching.batch import pack_batch
from engine.cpu.fused_step import NUM_PRODUCTS, FusedStep, multiply_row
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.native_calls import call_kernel
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.pool import KvPool

LENGTH, MOST, REPEATS = 128, 64, 10


@numba.njit(nogil=True)
def run_kernels(
    layers: Any, matrices: Any, ends: Any, sizes: Any, eps: float, rotary: Any, scratch: Any, batch: Any,
    pool: Any, logits: Any,
) -> None:  # fmt: skip
    """The products and the attention of `engine.cpu.fused_step.run_step`, and nothing else."""
    _, delta, normed, qkv, mixed, wide, narrow, tops, totals = scratch
    _, _, rows, lengths, table, _, done = batch
    for n in range(layers.shape[0]):
        first = NUM_PRODUCTS * n
        multiply_row(matrices[first], normed.reshape(-1), qkv.reshape(-1))
        call_kernel(
            ends[3],
            (
                qkv, rows, lengths, table, done, tops, totals, pool, sizes[0], n * sizes[1], sizes[2],
                sizes[3], sizes[4], mixed,
            ),
        )  # fmt: skip
        multiply_row(matrices[first + 1], mixed.reshape(-1), delta.reshape(-1))
        multiply_row(matrices[first + 2], normed.reshape(-1), wide.reshape(-1))
        multiply_row(matrices[first + 3], narrow.reshape(-1), delta.reshape(-1))
    multiply_row(matrices[matrices.shape[0] - 1], normed.reshape(-1), logits.reshape(-1))


class StepBench:
    """A runner with sequences that share nothing, and the next decode of each."""

    def __init__(self) -> None:
        files = Checkpoint.resolve(str(EMBEDDED))
        layout = files.layout()
        chunks = layout.num_chunks(LENGTH + 1)
        pool = KvPool(layout, MOST * chunks)
        self.runner = CpuModelRunner.load(files, pool, LENGTH + 1)
        self.runner.warm()
        assert self.runner.fused_step is not None, "steps are not fused on this machine"
        self.fused: FusedStep = self.runner.fused_step
        self.works = []
        for number in range(MOST):
            slabs = list(range(number * chunks, (number + 1) * chunks))
            tokens = [(7 * number + place) % 4000 for place in range(LENGTH)]
            self.runner.run([StepWork(tokens, 0, slabs, "none")])
            self.works.append(StepWork([number], LENGTH, slabs, "last"))

    def run(self, works: Sequence[StepWork], fused: FusedStep | None) -> torch.Tensor:
        """The logits of a step."""
        self.runner.fused_step = fused
        return torch.cat(self.runner.run(works))

    def measure(self, rows: int, rounds: int) -> dict[str, float]:
        """The ratios at a batch of so many rows."""
        works = self.works[:rows]
        arguments = self.fused.step_arguments(pack_batch(works), torch.empty(rows, self.runner.vocab_size))
        ways: dict[str, Callable[[], Any]] = {
            "kernels": lambda: run_kernels(*arguments),
            "step": lambda: self.run(works, self.fused),
            "layered": lambda: self.run(works, None),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, call in ways.items():
                begun_s = time.thread_time()
                for _ in range(REPEATS):
                    call()
                if number:  # the first round is warm-up
                    seconds[name].append((time.thread_time() - begun_s) / REPEATS)
        middle = {name: median(each) for name, each in seconds.items()}
        return {
            f"step_over_kernels_b{rows}": round(middle["step"] / middle["kernels"], 3),
            f"layered_over_step_b{rows}": round(middle["layered"] / middle["step"], 3),
            f"step_ms_b{rows}": round(1e3 * middle["step"], 3),
        }

    def compare_bits(self) -> float:
        """The share of batches that give equal logits on both paths."""
        batches = [self.works[:rows] for rows in range(1, MOST + 1)]
        equal = [torch.equal(self.run(works, self.fused), self.run(works, None)) for works in batches]
        return sum(equal) / len(equal)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench, found = StepBench(), dict[str, float]()
    for rows in options.batches:
        found |= bench.measure(min(rows, MOST), options.rounds)
    found["same_bits"] = bench.compare_bits()
    print(
        json.dumps(found) if options.json else "\n".join(f"{name} {value}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()
