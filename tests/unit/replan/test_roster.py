"""How far orders to workers are: flips that come true, fail, or are undone; starts and stops."""

from __future__ import annotations

from planner.replan.decide import DRAINING, READY, STARTING, SWITCHING
from planner.types import BOTH
from services.replan.roster import (
    DONE,
    FAILED,
    FLIP,
    GONE,
    START,
    STOP,
    UNDO,
    ObservedWorker,
    OrderOutcome,
    Roster,
)

FLIP_S, START_S, TRIAL_S = 30.0, 100.0, 5.0


def seen(
    role: str = "decode", state: str = "up", life: str = "a", linked: bool = True
) -> list[ObservedWorker]:
    return [ObservedWorker("w", role, state, life, linked, 3.0)]


def make_roster(split: bool = True) -> Roster:
    one = Roster(split, FLIP_S, START_S, TRIAL_S)
    one.add_started("w", "decode", 0.0)
    return one


def ready() -> Roster:
    one = make_roster()
    one.update_workers(seen(), {}, 1.0)
    one.record_flip("w", "prefill", 10.0)
    return one


def state(roster: Roster) -> tuple[str, str]:
    (worker,) = roster.workers()
    return worker.role, worker.state


def test_a_worker_is_starting_until_it_is_linked_and_then_ready() -> None:
    one = make_roster()
    assert state(one) == ("decode", STARTING)
    assert one.update_workers([], {}, 1.0) == [] == one.update_workers(seen(linked=False), {}, 2.0)
    assert one.update_workers(seen(), {"w": "ready"}, 3.0) == [OrderOutcome("w", START, DONE)]
    assert state(one) == ("decode", READY) and one.workers()[0].load == 3.0
    one.update_workers(seen(linked=False), {}, 4.0)
    assert state(one) == ("decode", READY), "a link that is made anew is not a start"
    one.update_workers([], {}, 5.0)
    assert state(one) == ("decode", STARTING), "lost, and its supervisor is at work"


def test_in_a_colocated_deployment_workers_do_both() -> None:
    one = make_roster(split=False)
    one.update_workers(seen(), {}, 1.0)
    assert state(one) == (BOTH, READY)


def test_a_start_fails_by_its_supervisor_or_by_time() -> None:
    one = make_roster()
    failed, gone = one.update_workers([], {"w": "failed"}, 1.0)
    assert (failed.action, failed.outcome, gone.outcome) == (START, FAILED, GONE) and not one.workers()
    one = make_roster()
    outcomes = one.update_workers([], {"w": "starting"}, START_S + 1)
    assert [(o.action, o.outcome) for o in outcomes] == [(START, FAILED), ("", GONE)]


def test_a_flip_is_done_once_the_worker_is_linked_in_its_new_role() -> None:
    one = ready()
    for other in (seen(state="draining"), [], seen("prefill", life="b", linked=False)):
        assert one.update_workers(other, {}, 12.0) == [] and state(one) == ("prefill", SWITCHING)
    assert one.update_workers(seen("prefill", life="b"), {}, 13.0) == [OrderOutcome("w", FLIP, DONE)]
    assert state(one) == ("prefill", READY)


def test_a_worker_that_died_before_it_switched_has_failed_to() -> None:
    one = ready()
    assert one.update_workers(seen(), {}, 11.0) == [], "the order is on its way"
    (failed,) = one.update_workers(seen(life="b"), {}, 12.0)
    assert (failed.action, failed.outcome) == (FLIP, FAILED) and "old role" in failed.why
    assert one.update_workers(seen(life="b"), {}, 13.0) == [] and state(one) == ("decode", READY)


def test_a_flip_that_takes_too_long_has_failed_and_is_taken_as_it_is() -> None:
    one = ready()
    (failed,) = one.update_workers(seen(state="draining"), {}, 10.0 + FLIP_S + 1)
    assert (failed.action, failed.outcome) == (FLIP, FAILED)
    one.update_workers(seen(state="draining"), {}, 50.0)
    assert state(one) == ("decode", DRAINING)
    one.update_workers(seen("prefill", life="b"), {}, 60.0)
    assert state(one) == ("prefill", READY)


def test_a_worker_that_nobody_links_to_switches_back() -> None:
    one = ready()
    assert one.update_workers(seen("prefill", "unfit", "b", False), {}, 12.0) == []
    (undo,) = one.update_workers(seen("prefill", "unfit", "b", False), {}, 12.0 + TRIAL_S + 1)
    assert (undo.action, undo.outcome, undo.role) == (FLIP, UNDO, "decode")
    one.record_flip("w", "decode", 19.0, UNDO)
    assert state(one) == ("decode", SWITCHING)
    assert one.update_workers(seen(life="c"), {}, 20.0) == [OrderOutcome("w", UNDO, DONE)]
    assert state(one) == ("decode", READY)


def test_switching_back_may_fail_too() -> None:
    one = ready()
    one.update_workers(seen("prefill", "unfit", "b", False), {}, 12.0)
    one.record_flip("w", "decode", 20.0, UNDO)
    (failed,) = one.update_workers(seen("decode", "unfit", "c", False), {}, 20.0 + FLIP_S + 1)
    assert (failed.action, failed.outcome) == (UNDO, FAILED)


def test_a_worker_that_is_stopped_drains_and_is_gone() -> None:
    one = make_roster()
    one.update_workers(seen(), {}, 1.0)
    one.record_stop("w", 2.0)
    for other in (seen(state="draining"), []):
        assert one.update_workers(other, {"w": "ready"}, 3.0) == [] and state(one) == ("decode", DRAINING)
    assert one.update_workers([], {"w": "retired"}, 4.0) == [
        OrderOutcome("w", STOP, DONE),
        OrderOutcome("w", "", GONE),
    ]
    assert one.workers() == ()


def test_somebody_elses_order_is_seen() -> None:
    one = make_roster()
    one.update_workers(seen(), {}, 1.0)
    one.update_workers(seen(state="draining"), {}, 2.0)
    assert state(one) == ("decode", DRAINING)
    one.update_workers(seen("prefill", life="b"), {}, 3.0)
    assert state(one) == ("prefill", READY)
    assert [o.outcome for o in one.update_workers([], {"w": "retired"}, 4.0)] == [GONE]


def test_a_stop_that_nobody_remembers_has_failed() -> None:
    """A gateway that is started anew knows of no drain."""
    one = make_roster()
    one.update_workers(seen(), {}, 1.0)
    one.record_stop("w", 2.0)
    assert one.update_workers(seen(state="draining"), {}, 3.0) == [] and state(one) == ("decode", DRAINING)
    assert one.update_workers(seen(), {}, 2.0 + FLIP_S) == [] and state(one) == ("decode", DRAINING)
    (failed,) = one.update_workers(seen(), {}, 3.0 + FLIP_S)
    assert (failed.action, failed.outcome) == (STOP, FAILED) and state(one) == ("decode", READY)
    assert one.update_workers(seen(), {}, 4.0 + FLIP_S) == []
