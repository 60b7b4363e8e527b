"""What chunks that a host stores below the pools of its workers are worth to a prompt (pure).

`PrefixIndex` knows the tiers of hosts by names of their own. A worker that reads a chunk back, instead of computing it
or pulling it, saves the difference. How fast it does all of this it says in its heartbeats, and how much it reads back
is decided by its own function (`diptych.stats.tier_rates.choose_restore`).
"""

from __future__ import annotations

from diptych.stats.tier_rates import choose_restore, reported_rates
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


def saved_s(
    worker_state: WorkerState,
    index: PrefixIndex,
    chunks: ChunkNames,
    kv_class: str,
    known: int,
    chunk_s: float,
) -> float:
    """The seconds that a worker saves by reading leading chunks back that it lacks.

    Args:
        worker_state: the worker.
        index: what workers and hosts are assumed to have.
        chunks: the names of the chunks of a prompt.
        kv_class: the class of KV at this worker.
        known: how many of the leading chunks it has in its pool.
        chunk_s: the seconds that a chunk takes otherwise: to compute it, or to pull it.
    """
    runs, at, rates = list[tuple[str, int]](), known, reported_rates(worker_state.stats.tiers)
    for tier in rates:
        end = index.count_shared(tier_name(worker_state.hello.host, tier), chunks, kv_class)
        if end > at:
            runs.append((tier, end - at))
            at = end
    return choose_restore(runs, pool_size(worker_state.hello, kv_class).chunk_bytes, rates, chunk_s).saved_s
