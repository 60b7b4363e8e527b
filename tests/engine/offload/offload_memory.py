"""A process of its own that runs a block, and prints how much memory it took: the peak of what the system counted."""

from __future__ import annotations

import gc
import json
import math
import sys
from pathlib import Path

import torch

from diptych.messages import Failed
from diptych.request import SamplingParams
from engine.model.checkpoint import Checkpoint
from engine.model.memory_plan import return_large_blocks
from engine.offload.policy import BlockPolicy
from engine.sequence import Sequence
from tests.engine.offload.offload_runs import BlockRun


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def run_block(model: Checkpoint, policy: BlockPolicy, folder: Path, count: int) -> BlockRun:
    """Run `count` requests with the policy's lengths."""
    run = BlockRun(model, policy, folder)
    return_large_blocks()
    draw = torch.Generator().manual_seed(0)
    requests = []
    for i in range(count):
        prompt = torch.randint(3, 259, (policy.prompt_tokens,), generator=draw).tolist()
        asked = SamplingParams(max_tokens=min(policy.output_tokens, 6), temperature=0.0, seed=i)
        requests.append(Sequence(f"r{i}", 1, prompt, asked, math.inf))
    for seq in requests:
        run.engine.add(seq, 0.0)
    while run.engine.has_work:
        run.step()
    return run


def main() -> None:
    """Warm the kernels with a small block, then measure the one that was asked for."""
    torch.set_num_threads(1)
    model, folder = Checkpoint.resolve(sys.argv[1]), Path(sys.argv[2])
    policy = BlockPolicy(**json.loads(sys.argv[3]))
    small = BlockPolicy(1, 1, 70, 8, 0.0, 0.0, 0.0, kv_codec=policy.kv_codec, overlap=False, step_tokens=8)
    run_block(model, small, folder, 1).runner.close()
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run = run_block(model, policy, folder, policy.sequences)
    peak = status_bytes("VmHWM")
    needs = run.runner.needs
    kv, hidden = run.runner.tiers.kv._disk, run.runner.tiers.hidden._disk
    files = [one.file for one in (kv, hidden) if one is not None]
    streamed = needs.disk["weights"]
    found = {
        "peak_bytes": peak - before,
        "memory_bytes": needs.memory_bytes,
        "parts": needs.memory,
        "disk_bytes": needs.disk_bytes,
        "disk_used_bytes": streamed + sum(one.used_bytes for one in files),
        "failed": sum(isinstance(one.message, Failed) for one in run.outputs),
    }
    run.runner.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
