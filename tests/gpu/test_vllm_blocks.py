"""Blocks of vLLM on a device, to and from a page-locked buffer, as a rank copies them."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.transfer_buffer import TransferBuffer
from vllm_worker.blocks import BlockRegion
from vllm_worker.buffer import slab_layout
from vllm_worker.exchange import KvExchange
from vllm_worker.port import LoadPlan
from vllm_worker.rank_copies import RankCopies

pytestmark = pytest.mark.gpu

NUM_BLOCKS, PART, NUM_SLABS = 64, 1 << 20, 40
REGIONS = tuple(
    BlockRegion(f"layer {index}", index * NUM_BLOCKS * PART // 8, PART // 8) for index in range(8)
)


@pytest.mark.parametrize("count", [1, 39])
def test_blocks_move_behind_the_work_that_writes_them(device: torch.device, count: int) -> None:
    """A save is queued behind kernels that still run, and one of several megabytes goes in pieces."""
    buffer, exchange = TransferBuffer(slab_layout(PART, 1), NUM_SLABS * PART), KvExchange()
    exchange.attach_buffer(buffer, 1)
    cache = torch.zeros(NUM_BLOCKS * PART, dtype=torch.uint8, device=device)
    rank = RankCopies(cache, REGIONS, NUM_BLOCKS, 0)
    rank.begin_step(exchange.plan_step())
    large = torch.rand((4096, 4096), device=device)
    for _ in range(50):
        large = large @ large / large.norm()
    views = cache.view(8, NUM_BLOCKS, PART // 8)
    views.copy_(torch.randint(1, 256, views.shape, dtype=torch.uint8, device=device))
    old, new = list(range(count)), list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - count, -1))
    exchange.expect("r", "r#1", 64 * count, save=True)
    exchange.finish("r", old, complete=True)
    rank.begin_step(exchange.plan_step())
    exchange.end_step(rank.take_ended(), rank.take_results())
    (saved,) = exchange.take_saved()
    assert saved.num_tokens == 64 * count and exchange.is_saved(saved.slabs, 1) is True
    wanted = views[:, old].cpu()
    for slab, block in zip(saved.slabs, range(count), strict=True):
        raw = torch.frombuffer(buffer.pool.memories[0], dtype=torch.uint8).view(NUM_SLABS, 8, PART // 8)
        assert torch.equal(raw[slab], wanted[:, block])
    exchange.expect("d", "d#1", 64 * count + 1, save=False, load=LoadPlan(saved.slabs, 64 * count))
    exchange.begin_load("d", new, 64 * count)
    rank.begin_step(exchange.plan_step())
    rank.load()
    assert rank.take_results() is None and torch.equal(views[:, new].cpu(), wanted)
    exchange.close()
    buffer.close()
