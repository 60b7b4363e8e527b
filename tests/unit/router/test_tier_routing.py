"""What a host stores below the pools counts for all its workers, by the time that it saves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Heartbeat, WorkerStats
from diptych.stats.tiers import TierStats
from router.routing.load_ledger import LoadLedger
from router.routing.policy import RoutingNeed, RoutingView, choose_pair, find_pairs, transfer_s
from router.routing.prefix_index import PrefixIndex
from router.routing.tier_savings import forget_lost_tiers, tier_bytes, tier_name
from tests.unit.router.fleet_views import fleet_of

WORKERS = ("prefill-0", "prefill-1", "decode-0")
# A chunk takes a millisecond from memory, and four from the disk.
CHUNK_BYTES = fleet_of("prefill-0").workers["prefill-0"].hello.chunk_bytes
HOST = TierStats(capacity_bytes=9 * CHUNK_BYTES, read_bytes_per_s=CHUNK_BYTES / 1e-3)
DISK = TierStats(capacity_bytes=99 * CHUNK_BYTES, read_bytes_per_s=CHUNK_BYTES / 4e-3, read_delay_s=2e-3)
TIERS = {"host": HOST, "disk": DISK}
# A chunk is computed in 10 ms.
PREFILL_RATE = CHUNK_TOKENS / 10e-3


def view_of(
    tiers: dict[str, TierStats], split: bool = True, rate: float = PREFILL_RATE, gb_per_s: float = 10.0
) -> RoutingView:
    links = {(source, WORKERS[2]): gb_per_s for source in WORKERS[:2]}
    fleet = fleet_of(*WORKERS, links=links)
    for worker in WORKERS:
        stats = WorkerStats(slabs_total=8, tiers=tiers, prefill_tokens_per_s=rate)
        fleet.on_message(worker, Heartbeat(worker, f"{worker}/1", stats), 0.0)
    return RoutingView(fleet, LoadLedger(), split, index=PrefixIndex())


def need_of(view: RoutingView, chunks: int) -> RoutingNeed:
    names = view.index.name_chunks(list(range(chunks * CHUNK_TOKENS)), "")
    return RoutingNeed(chunks * CHUNK_TOKENS + 9, chunks * CHUNK_TOKENS + 20, chunks=names)


def store(view: RoutingView, need: RoutingNeed, **chunks: int) -> None:
    """Let the tiers of the host have so many of the first chunks."""
    host = view.fleet.workers["prefill-0"].hello.host
    for tier, count in chunks.items():
        view.index.record_sent(tier_name(host, tier), need.chunks[:count], 100)


@pytest.mark.parametrize("split", [True, False])
def test_stored_chunks_count_by_the_time_that_they_save(split: bool) -> None:
    view = view_of(TIERS, split)
    need = need_of(view, 10)
    view.index.record_sent("prefill-0", need.chunks[:4], 100)
    store(view, need, host=6, disk=10)
    spared = {name: view.spared_tokens(name, need) for name in WORKERS}
    # 9 of 10 ms are saved by a chunk of memory, 6 by one of the disk, which takes 2 ms to begin.
    assert spared["prefill-0"] == pytest.approx(CHUNK_TOKENS * (4 + 2 * 0.9 + 4 * 0.6 - 0.2), abs=1)
    assert spared["prefill-1"] == pytest.approx(CHUNK_TOKENS * (6 * 0.9 + 4 * 0.6 - 0.2), abs=1)
    assert view.shared_tokens("prefill-1", need) == 0, "its pool has none of them"


def test_a_tier_that_is_slower_than_computing_counts_nothing() -> None:
    slow = {"host": HOST, "disk": TierStats(capacity_bytes=99 * CHUNK_BYTES, read_bytes_per_s=1e6)}
    view = view_of(slow, rate=CHUNK_TOKENS / 2e-3)
    need = need_of(view, 10)
    store(view, need, host=3, disk=10)
    assert view.spared_tokens("prefill-0", need) == pytest.approx(CHUNK_TOKENS * 3 * 0.5, abs=1)


def test_a_worker_that_does_not_say_how_fast_it_is_saves_nothing() -> None:
    unknown = {name: replace(one, read_bytes_per_s=0.0) for name, one in TIERS.items()}
    for view in (view_of(TIERS, rate=0.0), view_of(unknown)):
        need = need_of(view, 10)
        store(view, need, host=10, disk=10)
        assert view.spared_tokens("prefill-0", need) == 0


def test_without_tiers_nothing_else_counts() -> None:
    view = view_of({})
    need = need_of(view, 10)
    view.index.record_sent("prefill-0", need.chunks[:4], 100)
    store(view, need, host=10)
    assert [view.spared_tokens(name, need) for name in WORKERS] == [4 * CHUNK_TOKENS, 0, 0]
    assert transfer_s("prefill-0", "decode-0", need, view) == transfer_of(view, 11)


def transfer_of(view: RoutingView, chunks: int) -> float:
    """The seconds that the link takes for chunks."""
    link = view.fleet.workers["decode-0"].links["prefill-0"]
    return link.latency_us * 1e-6 + chunks * (CHUNK_BYTES / (link.gb_per_s * 1e9))


def test_what_is_read_back_sooner_is_not_transferred() -> None:
    view = view_of(TIERS, gb_per_s=CHUNK_BYTES / 3e-3 / 1e9)
    need = need_of(view, 10)
    store(view, need, host=6, disk=10)
    # The disk is slower than the link.
    saved_s = 6 * 2e-3
    assert transfer_s("prefill-0", "decode-0", need, view) == pytest.approx(transfer_of(view, 11) - saved_s)


def test_a_fast_link_transfers_all() -> None:
    view = view_of(TIERS, gb_per_s=CHUNK_BYTES / 0.5e-3 / 1e9)
    need = need_of(view, 10)
    store(view, need, host=10, disk=10)
    assert transfer_s("prefill-0", "decode-0", need, view) == pytest.approx(transfer_of(view, 11))


def test_each_tier_of_a_host_has_a_name_and_a_bound() -> None:
    worker_state = view_of(TIERS).fleet.workers["decode-0"]
    host = worker_state.hello.host
    assert tier_bytes(worker_state) == {
        tier_name(host, "host"): 9 * CHUNK_BYTES,
        tier_name(host, "disk"): 99 * CHUNK_BYTES,
    }
    assert tier_bytes(view_of({}).fleet.workers["decode-0"]) == {}


def test_what_a_host_stored_is_forgotten_with_its_last_worker() -> None:
    view = view_of(TIERS)
    need = need_of(view, 10)
    store(view, need, host=10, disk=10)
    names = list(tier_bytes(view.fleet.workers["prefill-0"]))
    view.index.record_sent("prefill-1", need.chunks, 100)
    for lost in WORKERS[:2]:
        del view.fleet.workers[lost]
        forget_lost_tiers(view.index, view.fleet)
        assert [view.index.count_shared(name, need.chunks) for name in names] == [10, 10]
    del view.fleet.workers[WORKERS[2]]
    forget_lost_tiers(view.index, view.fleet)
    assert view.index.holders() == ["prefill-1"], "the caches of workers are forgotten by their own names"


def test_what_a_host_stores_is_looked_up_once_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many links lead to it: a decision with many pairs takes no longer for that."""
    sources = [f"prefill-{number}" for number in range(8)]
    fleet = fleet_of(*sources, "decode-0", links={(source, "decode-0"): 0.01 for source in sources})
    stats = WorkerStats(slabs_total=8, tiers=TIERS, prefill_tokens_per_s=PREFILL_RATE)
    fleet.on_message("decode-0", Heartbeat("decode-0", "decode-0/1", stats), 0.0)
    view = RoutingView(fleet, LoadLedger(), True, index=PrefixIndex())
    need, asked, count = need_of(view, 10), Counter[str](), PrefixIndex.count_shared

    def count_shared(index: PrefixIndex, worker: str, *rest: Any) -> int:
        asked[worker] += 1
        return count(index, worker, *rest)

    monkeypatch.setattr(PrefixIndex, "count_shared", count_shared)
    assert choose_pair(need, view, find_pairs(need, view)) is not None
    host = fleet.workers["decode-0"].hello.host
    assert [asked[tier_name(host, tier)] for tier in TIERS] == [1, 1]
