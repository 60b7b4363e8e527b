"""What chunks that a host stores below the pools of its workers are worth to a prompt (pure).

`PrefixIndex` knows the tiers of hosts by names of their own. A worker that reads a chunk back, instead of computing it
or pulling it, saves the difference. How fast it does all of this it says in its heartbeats, and how much it reads back
is decided by its own function (`diptych.stats.tier_rates.choose_restore`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from diptych.stats.tier_rates import TierRate, choose_restore, reported_rates
from router.routing.prefix_index import ChunkNames, PrefixIndex
from router.workers.fleet import Fleet
from router.workers.kv_classes import pool_size
from router.workers.worker_state import WorkerState

# How the names begin by which `PrefixIndex` knows the tiers of hosts; no worker has such a name.
TIERS_PREFIX = "tier "


def tier_name(host: str, tier: str) -> str:
    """The name by which `PrefixIndex` knows what a host stores in one of its tiers."""
    return f"{TIERS_PREFIX}{tier} {host}"


def tier_bytes(worker_state: WorkerState) -> dict[str, int]:
    """The bytes that each tier of a worker's host may have, by the name of the tier in `PrefixIndex`.

    What leaves memory is on the disk already, so that what a host is sent is recorded for all of its tiers.
    """
    host = worker_state.hello.host
    return {tier_name(host, tier): one.capacity_bytes for tier, one in worker_state.stats.tiers.items()}


def forget_lost_tiers(index: PrefixIndex, fleet: Fleet) -> None:
    """Forget what hosts without a worker had stored: their memory is gone, and a disk may come back elsewhere."""
    present = {worker_state.hello.host for worker_state in fleet.workers.values()}
    for name in index.holders():
        if name.startswith(TIERS_PREFIX) and name.split(" ", 2)[2] not in present:
            index.forget_worker(name)


class StoredChunks(NamedTuple):
    """The leading chunks of a prompt that a worker lacks and its host stores, by tier; how fast these are read, and the
    bytes of a chunk.
    """

    runs: list[tuple[str, int]]
    rates: Mapping[str, TierRate]
    chunk_bytes: int

    def saved_s(self, chunk_s: float) -> float:
        """The seconds that the worker saves by reading some of them back, if each takes `chunk_s` otherwise: to compute
        it, or to pull it.
        """
        return choose_restore(self.runs, self.chunk_bytes, self.rates, chunk_s).saved_s if self.runs else 0.0


def stored_chunks(
    worker_state: WorkerState, index: PrefixIndex, chunks: ChunkNames, kv_class: str
) -> StoredChunks:
    """What the host of a worker stores of the chunks of a prompt behind the first ones, which its pool has.

    `kv_class` is the class of KV at this worker, `index` what workers and hosts are assumed to have.
    """
    runs, rates = list[tuple[str, int]](), reported_rates(worker_state.stats.tiers)
    at = index.count_shared(worker_state.name, chunks, kv_class) if rates else 0
    for tier in rates:
        end = index.count_shared(tier_name(worker_state.hello.host, tier), chunks, kv_class)
        if end > at:
            runs.append((tier, end - at))
            at = end
    return StoredChunks(runs, rates, pool_size(worker_state.hello, kv_class).chunk_bytes)
