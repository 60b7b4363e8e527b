"""A worker on the emulated device, whose device fails when a test asks for it: `python -m tests.system.failing_device`.

`fail-PART-WORKER` beside the folder of keys holds how often `PART` (of `PARTS`) of that worker fails, as it does when a
GPU fails. Canaries do not make it fail: their prompts and answers are too short. For that, copies of a request have to
hold several chunks: steps are of `STEP_TOKENS`, whatever was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diptych.process import SupervisorPipe, configure_and_report, run_supervised
from engine.torch_import import import_torch

if __name__ == "__main__":
    configure_and_report()
    import_torch()

import torch

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import DeviceLost
from diptych.specs import WorkerSpec
from engine.gpu.model_runner import GpuModelRunner
from engine.gpu.sampler import DeviceSampler
from kvcache.device.copies import DirectCopies
from services.worker.__main__ import main as run_real_worker
from worker.saturation_store import SaturationStore

STEP_TOKENS = 4 * CHUNK_TOKENS
TEXT = "CUDA error: an illegal memory access was encountered"
ERROR = torch.AcceleratorError(TEXT)
# What fails, whether its arguments are of no canary, and what it raises.
PARTS: dict[str, tuple[type[Any], str, Callable[..., bool], BaseException]] = {
    "runner": (GpuModelRunner, "run", lambda works, *_: any(len(one.slabs) > 2 for one in works), ERROR),
    "sampler": (
        DeviceSampler,
        "sample",
        lambda _, rows: any(one.sampling.max_tokens > 9 for one in rows),
        ERROR,
    ),
    "upload": (DirectCopies, "to_device", lambda pairs: len(pairs) > 1, DeviceLost(TEXT)),
    "download": (DirectCopies, "to_host", lambda pairs: len(pairs) > 1, DeviceLost(TEXT)),
}


def fail_file(folder: Path, part: str, worker: str) -> Path:
    """The file that says how often a part of a worker fails."""
    return folder / f"fail-{part}-{worker}"


def install_fault(part: str, asked: Path) -> None:
    """Let `part` fail as `asked` says."""
    kind, name, concerns, error = PARTS[part]
    real = getattr(kind, name)

    def call(self: Any, *arguments: Any, **more: Any) -> Any:
        if asked.exists() and concerns(*arguments) and (left := int(asked.read_text())):
            asked.write_text(str(left - 1))
            raise error
        return real(self, *arguments, **more)

    setattr(kind, name, call)


def main(spec: WorkerSpec, supervisor: SupervisorPipe) -> int:
    """Run the worker, with its faults."""
    SaturationStore.read_tokens = lambda _: STEP_TOKENS  # type: ignore[method-assign, assignment]
    for part in PARTS:
        install_fault(part, fail_file(Path(spec.keys_dir).parent, part, spec.worker))
    return run_real_worker(spec, supervisor)


if __name__ == "__main__":
    sys.exit(run_supervised(main))
