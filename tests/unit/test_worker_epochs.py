"""Fencing on the worker's side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.epochs import Epochs


def test_an_attempt_begins_once() -> None:
    epochs = Epochs()
    assert epochs.begin("a", 0)
    assert not epochs.begin("a", 0)
    assert epochs.begin("a", 1)
    assert not epochs.begin("a", 0)
    assert epochs.late == 2


def test_an_abort_before_its_work_prevents_it() -> None:
    epochs = Epochs()
    assert epochs.holds("a", 3)
    assert not epochs.begin("a", 3)
    assert epochs.begin("a", 4)


def test_orders_of_an_older_attempt_are_dropped_and_counted() -> None:
    epochs = Epochs()
    assert epochs.begin("a", 2)
    assert not epochs.holds("a", 1)
    assert epochs.holds("a", 2)
    assert epochs.holds("a", 2)  # idempotent
    assert epochs.late == 1


def test_memory_is_bounded_and_forgets_the_least_recent() -> None:
    epochs = Epochs(limit=3)
    for name in "abc":
        epochs.begin(name, 5)
    epochs.holds("a", 5)
    epochs.begin("d", 5)
    assert len(epochs) == 3
    assert not epochs.begin("a", 4)  # remembered
    assert epochs.begin("b", 4)  # forgotten


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.booleans()), max_size=40))
def test_nothing_older_than_what_was_heard_ever_counts(orders: list[tuple[str, int, bool]]) -> None:
    epochs, newest, late = Epochs(), {"a": -1, "b": -1}, 0
    for name, epoch, work in orders:
        expected = epoch > newest[name] if work else epoch >= newest[name]
        assert (epochs.begin if work else epochs.holds)(name, epoch) == expected
        late += not expected
        newest[name] = max(newest[name], epoch)
    assert epochs.late == late
