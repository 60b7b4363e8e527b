"""The books of the slab pool: conservation under any order of calls. No memory, no torch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych.errors import OutOfSlabs
from kvcache.slab_ledger import SlabLedger

OWNERS = st.sampled_from(["a#0", "a#1", "b#0"])


class SlabLedgerMachine(RuleBasedStateMachine):
    """The pool against a dict of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabLedger(7)
        self.held: dict[str, list[int]] = {"a#0": [], "a#1": [], "b#0": []}

    @rule(owner=OWNERS, n=st.integers(0, 8))
    def take(self, owner: str, n: int) -> None:
        if n > self.pool.free:
            before = self.pool.count_by_owner()
            with pytest.raises(OutOfSlabs):
                self.pool.take_slabs(n, owner)
            assert self.pool.count_by_owner() == before
        else:
            self.held[owner] += self.pool.take_slabs(n, owner)

    @rule(owner=OWNERS, data=st.data())
    def give(self, owner: str, data: st.DataObject) -> None:
        slabs = data.draw(st.lists(st.sampled_from(self.held[owner] or [-1]), unique=True))
        if -1 not in slabs:
            self.pool.give_back(slabs, owner)
            self.held[owner] = [slab for slab in self.held[owner] if slab not in slabs]

    @rule(owner=OWNERS, new=OWNERS)
    def move(self, owner: str, new: str) -> None:
        moving, self.held[owner] = self.held[owner], []
        self.pool.change_owner(moving, owner, new)
        self.held[new] = self.held[new] + moving

    @rule(owner=OWNERS, slab=st.integers(-1, 7))
    def steal(self, owner: str, slab: int) -> None:
        if slab not in self.held[owner]:
            with pytest.raises(ValueError, match="not owned"):
                self.pool.give_back([slab], owner)
            with pytest.raises(ValueError, match="not owned"):
                self.pool.change_owner([slab], owner, "b#0")

    @invariant()
    def conserved(self) -> None:
        self.pool.check_books()
        all_held = [slab for slabs in self.held.values() for slab in slabs]
        assert len(set(all_held)) == len(all_held) == self.pool.used == 7 - self.pool.free
        assert self.pool.count_by_owner() == {
            owner: len(slabs) for owner, slabs in self.held.items() if slabs
        }


TestBooks: Any = SlabLedgerMachine.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_last_given_is_first_taken() -> None:
    pool = SlabLedger(5)
    first = pool.take_slabs(3, "a")
    assert first == [0, 1, 2]
    pool.give_back([1, 0], "a")
    assert pool.take_slabs(2, "b") == [1, 0]


def test_one_failed_slab_leaves_all_where_they_were() -> None:
    pool = SlabLedger(4)
    mine, theirs = pool.take_slabs(2, "a"), pool.take_slabs(1, "b")
    with pytest.raises(ValueError, match="not owned"):
        pool.give_back(mine + theirs, "a")
    with pytest.raises(ValueError, match="twice"):
        pool.give_back([mine[0], mine[0]], "a")
    assert pool.count_by_owner() == {"a": 2, "b": 1}
    pool.check_books()


@pytest.mark.parametrize("damage", ["lost", "twice", "both", "count"])
def test_check_finds_broken_books(damage: str) -> None:
    pool = SlabLedger(4)
    pool.take_slabs(2, "a")
    if damage == "lost":
        pool._idle.pop()
    elif damage == "twice":
        pool._idle.append(pool._idle[0])
    elif damage == "both":
        pool._owner[pool._idle[0]] = "b"
    else:
        pool._count["a"] += 1
    with pytest.raises(AssertionError):
        pool.check_books()


def test_every_slab_says_whose_it_is() -> None:
    pool = SlabLedger(2)
    pool.take_slabs(1, "a")
    assert (pool.owner_of(0), pool.owner_of(1)) == ("a", None)
    for slab in (-1, 2):
        with pytest.raises(ValueError, match=f"no slab {slab}"):
            pool.owner_of(slab)


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slab"):
        SlabLedger(0)
