"""The decode side of a transport, and its pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcache.layout import KvLayout, Shard, split_layout
from kvcache.slab_ledger import SlabLedger
from kvtransfer.digests import ChunkDigester
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffOutcome,
    PullChunks,
    ReserveSlabs,
    hand_off,
    perform_effects,
)
from kvtransfer.resharding import ShardedPool
from kvtransfer.transports import nixl
from kvtransfer.transports.links import TransportLinks
from tests.engine.transport.transport_source import (
    KEY,
    LAYOUT,
    WHOLE,
    SpreadChunks,
)

TRANSPORTS = ["shm", "nixl"]
NUM_SLABS = 16


class DecodeSide:
    """The decode side as the worker has it: a pool, links, and a hand-off per ticket."""

    def __init__(self, *transports: str, split: tuple[int, int] = WHOLE, layout: KvLayout = LAYOUT) -> None:
        self.pool = SlabLedger(NUM_SLABS)
        parts = [(shard, own_memory(shard, layout)) for shard in split_layout(layout, *split)]
        self.memories = [memory for _, memory in parts]
        self.links = TransportLinks(transports, ShardedPool(layout, parts))
        self.spread = SpreadChunks(layout, parts)
        self.decoding: list[int] = []
        self.stall(60.0)  # a machine that is busy with other things does not stall a read

    def stall(self, after_s: float) -> None:
        """When a read over NIXL is given up."""
        for puller in self.links._pullers.values():
            if isinstance(puller, nixl.NixlPuller):
                puller._stall_s = after_s

    def fetch(self, ticket: Any, extra: int = 1) -> HandoffOutcome:
        def commit(effect: CommitSlabs) -> None:
            self.decoding = list(effect.slabs)

        owner = f"{ticket.context.request}#{ticket.context.epoch}"
        table: dict[type[Any], Callable[[Any], Any]] = {
            ReserveSlabs: lambda effect: self.pool.take_slabs(effect.num_slabs, owner),
            PullChunks: lambda effect: self.links.pull_slabs(effect.ticket, effect.pairs),
            CommitSlabs: commit,
            FreeSlabs: lambda effect: self.pool.give_back(list(effect.slabs), owner),
        }
        self.decoding = []
        seal = ChunkDigester(KEY, ticket.context)
        outcome = perform_effects(hand_off(ticket, len(ticket.chunks) + extra, seal.matches_chunk), table)
        self.pool.check_books()
        assert isinstance(outcome, HandoffOutcome)
        assert bool(self.decoding) == (outcome.error is None)
        return outcome

    def finish(self, ticket: Any) -> None:
        self.pool.give_back(self.decoding, f"{ticket.context.request}#{ticket.context.epoch}")


def own_memory(shard: Shard, layout: KvLayout) -> memoryview:
    """A rank's part of the pool."""
    return memoryview(bytearray(NUM_SLABS * layout.shard_layout(shard).chunk_bytes))


def wait_for_state(pid: int, state: str) -> None:
    """Until every thread of a process is in `state` (T: stopped), as the kernel tells it."""
    while any(
        Path(f"/proc/{pid}/task/{task}/stat").read_text().rsplit(")", 1)[1].split()[0] != state
        for task in os.listdir(f"/proc/{pid}/task")
    ):
        time.sleep(0.001)
