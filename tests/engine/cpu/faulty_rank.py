"""`python -m tests.engine.cpu.faulty_rank`: a rank of a worker that runs out of memory, once, in the middle
of a step.
"""

from __future__ import annotations

import sys

from diptych.process import configure_process
from engine.torch_import import import_torch

if __name__ == "__main__":
    configure_process()
    import_torch()

import torch

from engine.cpu.ranks.tensor_parallel import RankGroup
from worker.ranks import main

FAULTY_SUM = 4  # which of all sums


def fail_once() -> None:
    """Let one exchange of this process never begin."""
    sound, calls = RankGroup.sum, iter(range(1, 1 << 30))

    def sum_or_fail(group: RankGroup, x: torch.Tensor) -> torch.Tensor:
        if next(calls) == FAULTY_SUM:
            raise MemoryError("no memory for activations")
        return sound(group, x)

    RankGroup.sum = sum_or_fail  # type: ignore[assignment]


if __name__ == "__main__":
    fail_once()
    sys.exit(main())
