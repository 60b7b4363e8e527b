"""Fencing on the worker's side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.fencing import EpochFence


def test_an_attempt_begins_once() -> None:
    epochs = EpochFence()
    assert epochs.begin_attempt("a", 0)
    assert not epochs.begin_attempt("a", 0)
    assert epochs.begin_attempt("a", 1)
    assert not epochs.begin_attempt("a", 0)
    assert epochs.late_messages == 2


def test_an_abort_before_its_work_prevents_it() -> None:
    epochs = EpochFence()
    assert epochs.is_current("a", 3)
    assert not epochs.begin_attempt("a", 3)
    assert epochs.begin_attempt("a", 4)


def test_orders_of_an_older_attempt_are_dropped_and_counted() -> None:
    epochs = EpochFence()
    assert epochs.begin_attempt("a", 2)
    assert not epochs.is_current("a", 1)
    assert epochs.is_current("a", 2)
    assert epochs.is_current("a", 2)  # idempotent
    assert epochs.late_messages == 1


def test_memory_is_bounded_and_forgets_the_least_recent() -> None:
    epochs = EpochFence(limit=3)
    for name in "abc":
        epochs.begin_attempt(name, 5)
    epochs.is_current("a", 5)
    epochs.begin_attempt("d", 5)
    assert len(epochs) == 3
    assert not epochs.begin_attempt("a", 4)  # remembered
    assert epochs.begin_attempt("b", 4)  # forgotten


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.booleans()), max_size=40))
def test_nothing_older_than_what_was_received_ever_counts(orders: list[tuple[str, int, bool]]) -> None:
    epochs, newest, late = EpochFence(), {"a": -1, "b": -1}, 0
    for name, epoch, work in orders:
        expected = epoch > newest[name] if work else epoch >= newest[name]
        assert (epochs.begin_attempt if work else epochs.is_current)(name, epoch) == expected
        late += not expected
        newest[name] = max(newest[name], epoch)
    assert epochs.late_messages == late
