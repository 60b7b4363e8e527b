"""Whatever is added, adopted, aborted and stepped, in any order: no slab is lost, and no token is another's."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from diptych.request import Tenancy
from tests.unit.engine.conservation import EVICTED, HITS, WAYS, Conservation


def test_nothing_is_lost_whatever_happens() -> None:
    """And all of it happens: the examples preempt in both ways, and share."""
    run_state_machine_as_test(Conservation, settings=settings(max_examples=40, stateful_step_count=40))
    assert WAYS["recompute"] and WAYS["park"] and sum(HITS)
    assert EVICTED["prompt"]


def test_the_only_sequence_gives_its_memory_to_a_better_priority() -> None:
    """An example that the machine found: all that hold memory is one sequence, and a better one arrives."""
    machine = Conservation()
    machine.begin(parks=False)
    machine.step(second=False, steps=40)
    machine.abort(which=1, second=False)
    machine._add(190, 190, 1, 100, False, 2, False, Tenancy("a", "", -1), float("inf"))
    book = machine.first.scheduler
    assert [*book.running, *book.adopted] == [book.schedule(machine.first.holdings).preempted]
    machine.slabs_belong_to_the_living()
    machine.the_first_among_the_best_is_never_preempted()
    machine.step(second=False, steps=40)
    machine.tokens_are_those_of_an_undisturbed_run()
    machine.teardown()
