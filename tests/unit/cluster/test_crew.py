"""How far orders to workers are: flips that come true, fail, or are undone; starts and stops."""

from __future__ import annotations

from planner.decide import DRAINING, READY, STARTING, TURNING
from planner.terms import BOTH
from services.cluster.crew import DONE, FAILED, FLIP, GONE, START, STOP, UNDO, Crew, Outcome, Seen

FLIP_S, START_S, TRIAL_S = 30.0, 100.0, 5.0


def seen(role: str = "decode", state: str = "up", life: str = "a", linked: bool = True) -> list[Seen]:
    return [Seen("w", role, state, life, linked, 3.0)]


def crew(split: bool = True) -> Crew:
    one = Crew(split, FLIP_S, START_S, TRIAL_S)
    one.joined("w", "decode", 0.0)
    return one


def ready() -> Crew:
    one = crew()
    one.look(seen(), {}, 1.0)
    one.flipped("w", "prefill", 10.0)
    return one


def state(crew: Crew) -> tuple[str, str]:
    (worker,) = crew.workers()
    return worker.role, worker.state


def test_a_worker_is_starting_until_it_is_linked_and_then_ready() -> None:
    one = crew()
    assert state(one) == ("decode", STARTING)
    assert one.look([], {}, 1.0) == [] == one.look(seen(linked=False), {}, 2.0)
    assert one.look(seen(), {"w": "ready"}, 3.0) == [Outcome("w", START, DONE)]
    assert state(one) == ("decode", READY) and one.workers()[0].load == 3.0
    one.look(seen(linked=False), {}, 4.0)
    assert state(one) == ("decode", READY), "a link that is made anew is not a start"
    one.look([], {}, 5.0)
    assert state(one) == ("decode", STARTING), "lost, and its supervisor is at work"


def test_in_a_colocated_deployment_workers_do_both() -> None:
    one = crew(split=False)
    one.look(seen(), {}, 1.0)
    assert state(one) == (BOTH, READY)


def test_a_start_fails_by_its_supervisor_or_by_time() -> None:
    one = crew()
    failed, gone = one.look([], {"w": "failed"}, 1.0)
    assert (failed.action, failed.outcome, gone.outcome) == (START, FAILED, GONE) and not one.workers()
    one = crew()
    outcomes = one.look([], {"w": "starting"}, START_S + 1)
    assert [(o.action, o.outcome) for o in outcomes] == [(START, FAILED), ("", GONE)]


def test_a_flip_is_done_once_the_worker_is_linked_in_its_new_role() -> None:
    one = ready()
    for other in (seen(state="draining"), [], seen("prefill", life="b", linked=False)):
        assert one.look(other, {}, 12.0) == [] and state(one) == ("prefill", TURNING)
    assert one.look(seen("prefill", life="b"), {}, 13.0) == [Outcome("w", FLIP, DONE)]
    assert state(one) == ("prefill", READY)


def test_a_worker_that_died_before_it_turned_has_failed_to() -> None:
    one = ready()
    assert one.look(seen(), {}, 11.0) == [], "the order is on its way"
    (failed,) = one.look(seen(life="b"), {}, 12.0)
    assert (failed.action, failed.outcome) == (FLIP, FAILED) and "old role" in failed.why
    assert one.look(seen(life="b"), {}, 13.0) == [] and state(one) == ("decode", READY)


def test_a_flip_that_takes_too_long_has_failed_and_is_taken_as_it_is() -> None:
    one = ready()
    (failed,) = one.look(seen(state="draining"), {}, 10.0 + FLIP_S + 1)
    assert (failed.action, failed.outcome) == (FLIP, FAILED)
    one.look(seen(state="draining"), {}, 50.0)
    assert state(one) == ("decode", DRAINING)
    one.look(seen("prefill", life="b"), {}, 60.0)
    assert state(one) == ("prefill", READY)


def test_a_worker_that_nobody_links_to_turns_back() -> None:
    one = ready()
    assert one.look(seen("prefill", "unfit", "b", False), {}, 12.0) == []
    (undo,) = one.look(seen("prefill", "unfit", "b", False), {}, 12.0 + TRIAL_S + 1)
    assert (undo.action, undo.outcome, undo.role) == (FLIP, UNDO, "decode")
    one.flipped("w", "decode", 19.0, UNDO)
    assert state(one) == ("decode", TURNING)
    assert one.look(seen(life="c"), {}, 20.0) == [Outcome("w", UNDO, DONE)]
    assert state(one) == ("decode", READY)


def test_turning_back_may_fail_too() -> None:
    one = ready()
    one.look(seen("prefill", "unfit", "b", False), {}, 12.0)
    one.flipped("w", "decode", 20.0, UNDO)
    (failed,) = one.look(seen("decode", "unfit", "c", False), {}, 20.0 + FLIP_S + 1)
    assert (failed.action, failed.outcome) == (UNDO, FAILED)


def test_a_worker_that_is_stopped_drains_and_is_gone() -> None:
    one = crew()
    one.look(seen(), {}, 1.0)
    one.stopped("w", 2.0)
    for other in (seen(state="draining"), []):
        assert one.look(other, {"w": "ready"}, 3.0) == [] and state(one) == ("decode", DRAINING)
    assert one.look([], {"w": "retired"}, 4.0) == [Outcome("w", STOP, DONE), Outcome("w", "", GONE)]
    assert one.workers() == ()


def test_somebody_elses_order_is_seen() -> None:
    one = crew()
    one.look(seen(), {}, 1.0)
    one.look(seen(state="draining"), {}, 2.0)
    assert state(one) == ("decode", DRAINING)
    one.look(seen("prefill", life="b"), {}, 3.0)
    assert state(one) == ("prefill", READY)
    assert [o.outcome for o in one.look([], {"w": "retired"}, 4.0)] == [GONE]


def test_a_stop_that_nobody_remembers_has_failed() -> None:
    """A gateway that is started anew knows of no drain."""
    one = crew()
    one.look(seen(), {}, 1.0)
    one.stopped("w", 2.0)
    assert one.look(seen(state="draining"), {}, 3.0) == [] and state(one) == ("decode", DRAINING)
    assert one.look(seen(), {}, 2.0 + FLIP_S) == [] and state(one) == ("decode", DRAINING)
    (failed,) = one.look(seen(), {}, 3.0 + FLIP_S)
    assert (failed.action, failed.outcome) == (STOP, FAILED) and state(one) == ("decode", READY)
    assert one.look(seen(), {}, 4.0 + FLIP_S) == []
