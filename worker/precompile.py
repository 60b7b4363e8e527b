"""`python -m worker.precompile`: compiles the CPU kernels for the embedded model, so that the first start is fast.

`make install` ends with it. Other models use the same kernels, except for those that depend on the head dimension or
the weights' dtype. A worker compiles missing kernels when it warms up (`diptych.kernel_cache`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.sampling.sampler import Sampler
from kvcache.pool import KvPool
from kvtransfer.stream_copy import LINE_BYTES, copy_bytes_at

EMBEDDED_MODEL = Path(__file__).parents[1] / "models" / "tiny"
NUM_SLABS = 4
# Tokens of the longest sequence. The rotary tables have this many positions.
NUM_TOKENS = 128


def precompile_kernels() -> None:
    """Run every kernel once."""
    files = Checkpoint.resolve(str(EMBEDDED_MODEL))
    runner = CpuModelRunner.load(files, KvPool(files.layout(), NUM_SLABS), NUM_TOKENS)
    runner.warm()
    Sampler(runner.vocab_size).warm()
    room = np.zeros(3 * LINE_BYTES, np.uint8)
    # Lines that are not aligned would be copied by memmove, not by the kernel.
    aligned = -room.ctypes.data % LINE_BYTES
    copy_bytes_at(room.ctypes.data + aligned, room.ctypes.data + aligned + LINE_BYTES, LINE_BYTES)


if __name__ == "__main__":
    precompile_kernels()
