"""The peak of a run is what was announced: weights, pool and one step, within 5 %."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.cpu.model_runner import CpuModelRunner
from engine.model.checkpoint import Checkpoint
from engine.step_work import StepWork
from kvcache.pool import KvPool
from tests.support.factories import make_folder

SLABS, PROMPT, ROWS = 200, 512, 64
SHARE = 0.05
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 1024}
SMALL = HEADS | {"hidden_size": 64, "intermediate_size": 64}
LARGE = HEADS | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 4096}


def serve(path: str, slabs: int) -> dict[str, int]:
    """Load a model, touch its whole pool, and run the largest steps there are: a prompt, and a full batch."""
    files = Checkpoint.resolve(path)
    plan = files.memory(max_model_len=None, kv_bytes=slabs * files.layout().chunk_bytes)
    pool = KvPool(files.layout(), plan.num_slabs)
    pool.data.fill_(0.5)
    runner = CpuModelRunner.load(files, pool, files.config.context)
    taken = pool.take_slabs(PROMPT // 64 + 1, "r")
    for start in (0, PROMPT - 40):  # behind a prefix as well
        runner.run([StepWork([1] * (PROMPT - start), start, taken, "last")])
    runner.run([StepWork([1], PROMPT, taken, "last")] * ROWS)
    return {"announced": plan.total_bytes, "pool": plan.kv_bytes, "weights": plan.weight_bytes}


def field(name: str) -> int:
    """One of this process's memory figures, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def main(small: str, large: str) -> None:
    """The small model compiles the kernels: memory of the compiler is not memory of the run."""
    torch.set_num_threads(1)
    serve(small, 20)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = field("VmRSS")
    found = serve(large, SLABS)
    print(json.dumps(found | {"peak": field("VmHWM") - before}))


@pytest.mark.timeout(600)
def test_the_peak_is_what_was_announced(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path / name, "llama", **shape) for name, shape in (("s", SMALL), ("l", LARGE))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.model.test_memory_peak", *map(str, folders)],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["pool"] == SLABS * 8 * 8 * 2 * 64 * 64 * 4  # layers, heads, K and V, tokens, head_dim, bytes
    assert found["pool"] + found["weights"] > 0.9 * found["announced"]
    assert abs(found["peak"] / found["announced"] - 1) <= SHARE, found


if __name__ == "__main__":
    main(*sys.argv[1:])
