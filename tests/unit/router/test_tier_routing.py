"""What a host stores below the pools counts for all its workers that prefill, by what it saves."""

from __future__ import annotations

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Heartbeat, WorkerStats
from diptych.stats.tiers import TierStats
from router.routing.load_ledger import LoadLedger
from router.routing.policy import (
    RESTORED_SHARE,
    RoutingNeed,
    RoutingView,
    forget_lost_tiers,
    tiers_bytes,
    tiers_name,
)
from router.routing.prefix_index import PrefixIndex
from tests.unit.router.fleet_views import fleet_of

WORKERS = ("prefill-0", "prefill-1", "decode-0")
TIERS = {"host": TierStats(capacity_bytes=1000), "disk": TierStats(capacity_bytes=9000)}


def view_of(tiers: dict[str, TierStats], split: bool = True) -> RoutingView:
    fleet = fleet_of(*WORKERS)
    for worker in WORKERS:
        stats = WorkerStats(slabs_total=8, tiers=tiers)
        fleet.on_message(worker, Heartbeat(worker, f"{worker}/1", stats), 0.0)
    return RoutingView(fleet, LoadLedger(), split, index=PrefixIndex())


def need_of(view: RoutingView, chunks: int) -> RoutingNeed:
    names = view.index.name_chunks(list(range(chunks * CHUNK_TOKENS)), "")
    return RoutingNeed(chunks * CHUNK_TOKENS + 9, chunks * CHUNK_TOKENS + 20, chunks=names)


@pytest.mark.parametrize("split", [True, False])
def test_stored_chunks_count_less_than_those_in_the_pool(split: bool) -> None:
    view = view_of(TIERS, split)
    need = need_of(view, 10)
    view.index.record_sent("prefill-0", need.chunks[:4], 100)
    view.index.record_sent(tiers_name(view.fleet.workers["prefill-0"]), need.chunks, 100)
    stored = {name: view.shared_tokens(name, need) for name in WORKERS}
    assert stored["prefill-0"] == int(CHUNK_TOKENS * (4 + 6 * RESTORED_SHARE))
    assert stored["prefill-1"] == int(CHUNK_TOKENS * 10 * RESTORED_SHARE)
    assert stored["decode-0"] == (0 if split else stored["prefill-1"]), "what is handed over is pulled"


def test_without_tiers_nothing_else_counts() -> None:
    view = view_of({})
    need = need_of(view, 10)
    view.index.record_sent("prefill-0", need.chunks[:4], 100)
    assert [view.shared_tokens(name, need) for name in WORKERS] == [4 * CHUNK_TOKENS, 0, 0]
    assert tiers_name(view.fleet.workers["prefill-0"]) == ""


def test_the_largest_tier_has_all_that_is_stored() -> None:
    assert tiers_bytes(view_of(TIERS).fleet.workers["decode-0"]) == 9000


def test_what_a_host_stored_is_forgotten_with_its_last_worker() -> None:
    view = view_of(TIERS)
    need = need_of(view, 10)
    tiers = tiers_name(view.fleet.workers["prefill-0"])
    view.index.record_sent(tiers, need.chunks, 100)
    view.index.record_sent("prefill-1", need.chunks, 100)
    for lost in WORKERS[:2]:
        del view.fleet.workers[lost]
        forget_lost_tiers(view.index, view.fleet)
        assert view.index.count_shared(tiers, need.chunks) == 10
    del view.fleet.workers[WORKERS[2]]
    forget_lost_tiers(view.index, view.fleet)
    assert view.index.holders() == ["prefill-1"], "the caches of workers are forgotten by their own names"
