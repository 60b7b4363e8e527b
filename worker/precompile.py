"""`python -m worker.precompile [eviction [PARENT]]`: compiles CPU kernels, so that workers only load them.

Without an argument: the kernels that a default start loads, for the embedded model. `make install` ends with it. Other
models use the same kernels, except for those that depend on the head dimension or the weights' dtype. A worker compiles
what is still missing when it warms up (`diptych.kernels.cache`).

`eviction [PARENT]`: the kernels with which one kind of worker evicts KV. Standard input has its `RankSpec`. Workers
start this once they serve (`worker.eviction_kernels`); PARENT is the worker's process id.
"""

from __future__ import annotations

import os
import sys

from diptych.process import EXIT_FATAL, configure_process
from engine.torch_import import import_torch

if __name__ == "__main__" and len(sys.argv) > 1:
    configure_process()
    # At the lowest priority this may run for the first time when the worker is gone.
    if len(sys.argv) > 2 and sys.argv[2] != str(os.getppid()):
        sys.exit(EXIT_FATAL)
    import_torch()

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from diptych.logs.log_format import configure_logging
from engine.cpu.decoder import CpuDecoder
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.weights.decoder_weights import SectionReader, read_weights
from engine.model.checkpoint import Checkpoint
from engine.model.weights import WeightReader
from engine.sampling.sampler import Sampler
from kvcache.codecs.calibration import Calibration, read_calibration
from kvcache.layout import KvLayout
from kvcache.pool import KvPool
from kvtransfer.copy_hash import load_kernels
from kvtransfer.stream_copy import LINE_BYTES, copy_bytes_at
from worker.ranks import RankSpec

EMBEDDED_MODEL = Path(__file__).parents[1] / "models" / "tiny"
NUM_SLABS = 4
# Tokens of the longest sequence. The rotary tables have this many positions.
NUM_TOKENS = 128
# The size of a model that has the heads of another one: its layers, its hidden and MLP size, and its vocabulary.
SMALL_LAYERS, SMALL_SIZE = 2, 64
# Slabs of each KV class in which a short prompt is evicted.
NUM_EVICTION_SLABS = 8


def precompile_kernels() -> None:
    """Run every kernel that a default start loads once."""
    checkpoint = Checkpoint.resolve(str(EMBEDDED_MODEL))
    runner = CpuModelRunner.load(checkpoint, KvPool(checkpoint.layout(), NUM_SLABS), NUM_TOKENS)
    runner.warm()
    Sampler(runner.vocab_size).warm()
    room = np.zeros(3 * LINE_BYTES, np.uint8)
    # Lines that are not aligned would be copied by memmove, not by the kernel.
    aligned = -room.ctypes.data % LINE_BYTES
    copy_bytes_at(room.ctypes.data + aligned, room.ctypes.data + aligned + LINE_BYTES, LINE_BYTES)
    load_kernels()


class _RandomWeights(WeightReader):
    """Small random numbers as the weights of any model: kernels do not depend on them."""

    def _gather_rows(
        self, names: list[tuple[str, int, slice]], rest: tuple[int, ...], columns: slice
    ) -> torch.Tensor:
        rows = sum(len(range(first)[kept]) for _, first, kept in names)
        return 0.1 * torch.randn(rows, *(len(range(size)[columns]) for size in rest))


def precompile_evictions(spec: RankSpec) -> None:
    """Evict KV of each class once, in a small model with the heads of that of `spec`."""
    layers = min(SMALL_LAYERS, spec.config.layers)
    config = replace(
        spec.config, layers=layers, windows=spec.config.windows[:layers],
        hidden=SMALL_SIZE, mlp=SMALL_SIZE, vocab=SMALL_SIZE,
    )  # fmt: skip
    pools: list[tuple[KvPool, Calibration | None]] = []
    for one in spec.classes:
        layout = KvLayout(layers, config.kv_heads, config.head_dim, spec.dtype, one.codec)
        calibration = None
        if one.calibration is not None:
            file, model = one.calibration
            calibration = read_calibration(Path(file), model)
        pools.append((KvPool(layout, NUM_EVICTION_SLABS, first=NUM_EVICTION_SLABS * len(pools)), calibration))
    (pool, calibration), *others = pools
    with torch.no_grad():
        decoder = CpuDecoder(config, read_weights(SectionReader(config, _RandomWeights({}))), NUM_TOKENS)
    setup = EvictionSetup(np.zeros(config.vocab, np.uint8))
    CpuModelRunner(
        decoder, pool, NUM_TOKENS, calibration=calibration, others=others, eviction=setup
    ).warm(evict=True)  # fmt: skip


def main(what: str = "", parent: str = "") -> None:
    """The program: compile the kernels of a default start, or those of `what`, for the process `parent`."""
    if not what:
        return precompile_kernels()
    if what != "eviction":
        sys.exit(f"worker.precompile knows no {what!r}, only 'eviction'")
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    configure_logging(spec.log_level, spec.log_format, f"{spec.worker} kernels")
    torch.set_num_threads(1)
    precompile_evictions(spec)


if __name__ == "__main__":
    main(*sys.argv[1:])
