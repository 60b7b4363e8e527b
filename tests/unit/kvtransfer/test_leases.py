"""The ledger of leases against a model of it, and the fencing rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.errors import OutOfSlabs, StaleTicket
from kvtransfer import leases
from kvtransfer.leases import LeaseLedger


def ledger(lease_s: float = 10.0, max_leases: int = 100) -> LeaseLedger:
    return LeaseLedger(lease_s, max_leases)


def test_release_gives_back_once() -> None:
    held = ledger()
    assert held.grant_lease("a", 1, [3, 4], 0.0) is None
    assert (len(held), held.slabs) == (1, 2)
    lease = held.release_lease("a", 1)
    assert lease is not None and lease.slabs == (3, 4)
    assert held.release_lease("a", 1) is None
    assert (len(held), held.slabs, held.late_messages) == (0, 0, 0)


def test_an_older_epoch_frees_nothing() -> None:
    held = ledger()
    held.grant_lease("a", 2, [1], 0.0)
    assert held.release_lease("a", 1) is None
    assert held.renew_leases([("a", 1)], 5.0) == 1
    assert (held.slabs, held.late_messages) == (1, 2)


def test_a_newer_epoch_ends_the_older_one() -> None:
    held = ledger()
    held.grant_lease("a", 1, [1], 0.0)
    older = held.grant_lease("a", 2, [2], 0.0)
    assert older is not None and older.slabs == (1,)
    lease = held.release_lease("a", 3)
    assert lease is not None and lease.slabs == (2,)


def test_an_offer_after_its_end_is_stale() -> None:
    """The abort overtook the prefill: the worker must not lease KV that nobody will fetch."""
    held = ledger()
    assert held.release_lease("a", 1) is None
    with pytest.raises(StaleTicket):
        held.grant_lease("a", 1, [1], 0.0)
    assert held.grant_lease("a", 2, [1], 0.0) is None
    with pytest.raises(StaleTicket):
        held.grant_lease("a", 2, [5], 0.0)
    assert (held.late_messages, held.slabs) == (2, 1)


def test_time_ends_what_is_not_renewed() -> None:
    held = ledger(lease_s=10.0)
    held.grant_lease("a", 1, [1], 0.0)
    held.grant_lease("b", 1, [2], 0.0)
    assert held.next_expiry_s() == 10.0
    assert held.renew_leases([("a", 1), ("gone", 1)], 9.0) == 1
    assert held.expire_leases(9.9) == []
    assert [lease.request for lease in held.expire_leases(10.0)] == ["b"]
    assert held.release_lease("b", 1) is None
    assert (held.num_expired, held.slabs) == (1, 1)
    with pytest.raises(StaleTicket):
        held.grant_lease("b", 1, [9], 11.0)


def test_both_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_REMEMBERED", 8)
    held = ledger(max_leases=2)
    held.grant_lease("a", 1, [1], 0.0)
    held.grant_lease("b", 1, [2], 0.0)
    with pytest.raises(OutOfSlabs):
        held.grant_lease("c", 1, [3], 0.0)
    assert held.grant_lease("b", 2, [4], 0.0) is not None  # a replacement needs no room
    for number in range(100):
        held.release_lease(f"r{number}", 1)
    assert len(held._ended) == 8


Event = st.tuples(
    st.sampled_from(["offer", "renew", "release", "expire"]),
    st.sampled_from("abc"),
    st.integers(0, 4),
    st.integers(1, 3),
)


@given(st.lists(Event, max_size=60))
def test_slabs_are_conserved(events: list[tuple[str, str, int, int]]) -> None:
    """Whatever comes in whatever order: each slab is in the ledger or was handed back, once."""
    held, now_s, fresh = ledger(lease_s=3.0, max_leases=2), 0.0, 0
    inside: set[int] = set()
    newest: dict[str, int] = {}
    for kind, request, epoch, count in events:
        now_s += 0.5
        back = []
        if kind == "offer":
            slabs = list(range(fresh, fresh + count))
            fresh += count
            try:
                back = [held.grant_lease(request, epoch, slabs, now_s)]
            except (StaleTicket, OutOfSlabs):
                continue
            assert epoch > newest.get(request, -1)
            inside |= set(slabs)
            newest[request] = epoch
        elif kind == "renew":
            held.renew_leases([(request, epoch)], now_s)
        elif kind == "release":
            back = [held.release_lease(request, epoch)]
            assert all(lease is None or lease.epoch <= epoch for lease in back)
            newest[request] = max(newest.get(request, -1), epoch) if back[0] else newest.get(request, -1)
        else:
            back = list(held.expire_leases(now_s))
        for lease in back:
            if lease is not None:
                assert set(lease.slabs) <= inside
                inside -= set(lease.slabs)
        assert held.slabs == len(inside)
        assert len(held) <= 2
