"""A worker like `services.worker` whose tiers are read at 1 MB/s: `python -m benchmarks.load.slow_tier`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from diptych.process import configure_and_report, run_supervised
from engine.torch_import import import_torch

if __name__ == "__main__":
    configure_and_report()
    import_torch()

from kvcache.tiers.chunk_store import ChunkStore
from services.worker.__main__ import main

TIER_BYTES_PER_S = 1e6


def slow_down() -> None:
    """From now on stores are read at `TIER_BYTES_PER_S` at most."""
    read = ChunkStore.read

    def slow_read(store: ChunkStore, address: bytes, views: Sequence[memoryview]) -> None:
        time.sleep(sum(view.nbytes for view in views) / TIER_BYTES_PER_S)
        read(store, address, views)

    ChunkStore.read = slow_read  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    slow_down()
    sys.exit(run_supervised(main))
