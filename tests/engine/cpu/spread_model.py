"""A model that is spread over ranks, each a process of its own."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msgspec.structs import replace

from diptych.errors import DiptychError
from engine.cpu.model_runner import CpuModelRunner
from engine.cpu.ranks.tensor_parallel import RankPlacement
from engine.model.checkpoint import Checkpoint
from kvcache.layout import Shard
from kvcache.pool import KvPool
from kvtransfer.shared_memory import SharedMemory
from worker.ranks import RankClass, RankProcesses, RankSpec, load_leader

SLABS, CONTEXT = 12, 512


@dataclass
class SpreadModel:
    """A model over several ranks, this process being rank 0."""

    runner: CpuModelRunner
    ranks: RankProcesses
    pools: list[tuple[Shard, KvPool]]
    lost: queue.SimpleQueue[DiptychError]  # what the worker would have ended with


@contextmanager
def spread(
    folder: Path, tp: int, pp: int, module: str = "worker.ranks", slabs: int = SLABS,
    kv: RankClass | None = None, **changes: Any,
) -> Iterator[SpreadModel]:  # fmt: skip
    """Started, and gone at the end; `changes` go to the orders of all ranks. `kv` is the class of the KV, with
    its slabs; raw without it.
    """
    files, kv = Checkpoint.resolve(str(folder)), kv or RankClass(slabs)
    layout, parts, slabs = files.layout(codec=kv.codec), files.split(tp, pp, kv.codec), kv.num_slabs
    memories = [SharedMemory(slabs * layout.shard_layout(shard).chunk_bytes) for shard in parts]
    pools = [
        (shard, KvPool(layout.shard_layout(shard), slabs, memory.view))
        for shard, memory in zip(parts, memories, strict=True)
    ]
    lost: queue.SimpleQueue[DiptychError] = queue.SimpleQueue()
    ranks = RankProcesses("test", lost.put, module)
    try:
        first = replace(orders(files, tp, pp), classes=(kv,), **changes)
        runner = load_leader(first, parts, memories, ranks)
        yield SpreadModel(runner, ranks, pools, lost)
    finally:
        ranks.close()
        assert not dist.is_initialized()
        for memory in memories:
            memory.close()


def orders(files: Checkpoint, tp: int, pp: int) -> RankSpec:
    """Rank 0's."""
    return RankSpec(
        worker="test",
        placement=RankPlacement(0, tp, pp),
        shard=files.split(tp, pp)[0],
        config=files.config,
        weights={name: str(file) for name, file in files.weights.items()},
        dtype="float32",
        max_model_len=CONTEXT,
        classes=(RankClass(SLABS),),
    )


# Two ranks add in another order, which moves a number over the edge of a code now and then. What follows from it is
# different, too (docs/codecs.md), so the differences of one text are few and large, or many and small.
CLOSE, FAR = 1e-2, 0.25
