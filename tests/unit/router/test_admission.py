"""The gateway's bounded queue."""

from __future__ import annotations

import pytest

from router.admission import MAX_WAIT_S, MIN_WAIT_S, UNKNOWN_WAIT_S, Admission, Limits


def test_requests_in_flight_are_bounded() -> None:
    admission = Admission(Limits(max_requests=2))
    for name in ("a", "b"):
        assert admission.refusal(1, 10) is None
        admission.admit(name, 10, 0.0)
    refusal = admission.refusal(1, 10)
    assert refusal is not None and (refusal.status, refusal.code) == (429, "too_many_requests")
    assert refusal.retry_after_s == UNKNOWN_WAIT_S, "nothing has left yet"
    admission.done("a", 1.0)
    assert admission.refusal(1, 10) is None and admission.refusal(2, 10) is not None


def test_unread_prompt_tokens_are_bounded() -> None:
    admission = Admission(Limits(max_queued_tokens=100))
    assert admission.refusal(1, 5000) is None, "alone it may be as long as the model allows"
    admission.admit("a", 90, 0.0)
    refusal = admission.refusal(1, 20)
    assert refusal is not None and refusal.code == "queue_full"
    admission.read("a", 1.0)
    assert admission.refusal(1, 20) is None and admission.in_flight == 1


def test_retry_after_follows_from_how_fast_requests_leave() -> None:
    admission = Admission(Limits(max_requests=4))
    for index in range(4):
        admission.admit(f"r{index}", 1, 0.0)
    for index in range(2):
        admission.done(f"r{index}", 5.0 * (index + 1))
        admission.admit(f"s{index}", 1, 5.0 * (index + 1))
    refusal = admission.refusal(2, 1)
    assert refusal is not None and refusal.retry_after_s == pytest.approx(10.0)


@pytest.mark.parametrize(("pace_s", "wait_s"), [(0.001, MIN_WAIT_S), (1000.0, MAX_WAIT_S)])
def test_retry_after_is_within_bounds(pace_s: float, wait_s: float) -> None:
    admission = Admission(Limits(max_requests=1))
    admission.admit("a", 1, 0.0)
    admission.done("a", pace_s)
    admission.admit("b", 1, pace_s)
    refusal = admission.refusal(1, 1)
    assert refusal is not None and refusal.retry_after_s == wait_s


def test_idle_time_does_not_count_as_work() -> None:
    admission = Admission(Limits(max_requests=1))
    for start_s in (0.0, 1000.0):
        admission.admit("a", 1, start_s)
        admission.done("a", start_s + 4.0)
    admission.admit("b", 1, 2000.0)
    refusal = admission.refusal(1, 1)
    assert refusal is not None and refusal.retry_after_s == pytest.approx(4.0)


def test_many_that_leave_unread_do_not_spoil_the_rate() -> None:
    admission = Admission(Limits(max_requests=1000, max_queued_tokens=100))
    admission.admit("a", 100, 0.0)
    admission.read("a", 10.0)
    admission.done("a", 10.0)
    for index in range(500):
        admission.admit(f"gone{index}", 1, 20.0)
        admission.done(f"gone{index}", 25.0)
    admission.admit("b", 100, 30.0)
    refusal = admission.refusal(1, 50)
    assert refusal is not None and refusal.retry_after_s == pytest.approx(5.0)


def test_leaving_twice_and_unknown_names_do_nothing() -> None:
    admission = Admission()
    admission.admit("a", 10, 0.0)
    for _ in range(2):
        admission.read("a", 1.0)
        admission.done("a", 2.0)
        admission.done("never", 2.0)
        admission.read("never", 2.0)
    assert (admission.in_flight, admission.queued_tokens) == (0, 0)
