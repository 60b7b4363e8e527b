"""The gateway's bounded queue."""

from __future__ import annotations

import pytest

from diptych.failure_statuses import UNKNOWN_WAIT_S
from router.requests.admission import (
    MAX_WAIT_S,
    MIN_WAIT_S,
    Admission,
    AdmissionLimits,
)


def test_requests_in_flight_are_bounded() -> None:
    admission = Admission(AdmissionLimits(max_requests=2))
    for name in ("a", "b"):
        assert admission.find_refusal(1, 10, 0.0) is None
        admission.admit_request(name, 10, 0.0)
    refusal = admission.find_refusal(1, 10, 0.0)
    assert refusal is not None and (refusal.status, refusal.code) == (429, "too_many_requests")
    assert refusal.retry_after_s == UNKNOWN_WAIT_S, "nothing has left yet"
    admission.mark_ended("a", 1.0)
    assert admission.find_refusal(1, 10, 1.0) is None and admission.find_refusal(2, 10, 1.0) is not None


def test_prompt_tokens_that_wait_are_bounded() -> None:
    admission = Admission(AdmissionLimits(max_queued_tokens=100))
    assert admission.find_refusal(1, 5000, 0.0) is None, "alone it may be as long as the model allows"
    admission.admit_request("a", 90, 0.0)
    refusal = admission.find_refusal(1, 20, 0.0)
    assert refusal is not None and refusal.code == "queue_full"
    admission.mark_prefilled("a", 1.0)
    assert admission.find_refusal(1, 20, 1.0) is None and admission.in_flight == 1


def reading(pace_s: float, num_unprefilled: int, max_wait_s: float = 30.0) -> Admission:
    """A hundred prompts of 10 tokens were read, one every `pace_s`, until now; so many are left."""
    admission = Admission(AdmissionLimits(max_requests=10_000, max_wait_s=max_wait_s))
    for index in range(100 + num_unprefilled):
        admission.admit_request(f"r{index}", 10, 0.0)
    for index in range(100):
        admission.mark_prefilled(f"r{index}", pace_s * (index + 1))
    return admission


def test_a_wait_that_would_be_too_long_is_foreseen() -> None:
    now_s = 100 * 0.5
    assert reading(0.5, 50).predicted_wait_s(now_s) == pytest.approx(25.0)
    assert reading(0.5, 50).find_refusal(1, 10, now_s) is None
    refusal = reading(0.5, 100).find_refusal(1, 10, now_s)
    assert refusal is not None and (refusal.status, refusal.code) == (429, "queue_too_long")
    assert refusal.retry_after_s == pytest.approx(20.0), "by then the wait is no longer than is allowed"
    assert reading(0.5, 0).find_refusal(1, 10**9, now_s) is None, "nobody is ahead of it"


def test_the_shortest_prompt_of_a_burst_says_nothing_of_the_longest() -> None:
    admission = Admission()
    for length in (1, 2, 63, 64, 1000, 1900):
        admission.admit_request(f"r{length}", length, 0.0)
    admission.mark_prefilled("r1", 0.03)
    assert admission.predicted_wait_s(0.03) == 0.0
    assert admission.find_refusal(1, 1000, 0.03) is None
    admission.mark_prefilled("r2", 0.04)
    assert admission.find_refusal(1, 1000, 0.04) is None


def test_tiny_prompts_do_not_make_a_long_one_look_slow() -> None:
    admission = Admission()
    for index in range(102):
        admission.admit_request(f"r{index}", 1, 0.0)
    for index in range(100):
        admission.mark_prefilled(f"r{index}", 0.03 * (index + 1))
    assert admission.predicted_wait_s(3.0) == pytest.approx(2 * 0.03), "two of the same are left"
    admission.admit_request("long", 1000, 3.0)
    assert admission.predicted_wait_s(3.0) == pytest.approx(0.03 * 1002 / 64), (
        "not 0.03 s for each of its tokens"
    )
    assert admission.find_refusal(1, 10, 3.0) is None


def test_a_pause_that_lasts_is_part_of_the_wait() -> None:
    admission = reading(0.5, 50)
    assert admission.find_refusal(1, 10, 54.0) is None
    refusal = admission.find_refusal(1, 10, 56.0)
    assert refusal is not None and refusal.code == "queue_too_long"


def test_without_room_for_those_who_write_the_wait_follows_from_how_fast_they_end() -> None:
    admission = reading(0.01, 50)
    for index in range(
        50
    ):  # others wait meanwhile, and every two seconds one is given the room of one that ends
        admission.mark_ended(f"r{index}", 1.0 + 2.0 * (index + 1))
        admission.mark_prefilled(f"r{100 + index}", 1.0 + 2.0 * (index + 1))
        admission.admit_request(f"s{index}", 10, 1.0 + 2.0 * (index + 1))
    assert admission.predicted_wait_s(101.0) == pytest.approx(100.0, rel=0.1)
    burst = reading(0.01, 20)  # the pools fill up quickly, then somebody ends every five seconds
    for index in range(4):
        burst.mark_ended(f"r{index}", 1.0 + 5.0 * (index + 1))
    assert burst.predicted_wait_s(21.0) == pytest.approx(20 * 5.0, rel=0.1)


def test_a_service_with_little_to_do_says_nothing_of_its_speed() -> None:
    admission = Admission(AdmissionLimits(max_requests=1000))
    for index in range(50):  # ten seconds for ten tokens, one after the other
        admission.admit_request(f"r{index}", 10, 10.0 * index)
        admission.mark_prefilled(f"r{index}", 10.0 * index + 9.0)
        admission.mark_ended(f"r{index}", 10.0 * index + 9.5)
    for index in range(500):
        assert admission.find_refusal(1, 1000, 500.0) is None or admission.queued_tokens > 1_048_000
        admission.admit_request(f"s{index}", 1000, 500.0)


def test_retry_after_follows_from_how_fast_requests_leave() -> None:
    admission = Admission(AdmissionLimits(max_requests=4))
    for index in range(4):
        admission.admit_request(f"r{index}", 1, 0.0)
    for index in range(2):
        admission.mark_ended(f"r{index}", 5.0 * (index + 1))
        admission.admit_request(f"s{index}", 1, 5.0 * (index + 1))
    refusal = admission.find_refusal(2, 1, 10.0)
    assert refusal is not None and refusal.retry_after_s == pytest.approx(10.0)


@pytest.mark.parametrize(("pace_s", "wait_s"), [(0.001, MIN_WAIT_S), (1000.0, MAX_WAIT_S)])
def test_retry_after_is_within_bounds(pace_s: float, wait_s: float) -> None:
    admission = Admission(AdmissionLimits(max_requests=1))
    admission.admit_request("a", 1, 0.0)
    admission.mark_ended("a", pace_s)
    admission.admit_request("b", 1, pace_s)
    refusal = admission.find_refusal(1, 1, pace_s)
    assert refusal is not None and refusal.retry_after_s == wait_s


def test_idle_time_does_not_count_as_work() -> None:
    admission = Admission(AdmissionLimits(max_requests=1))
    for start_s in (0.0, 1000.0):
        admission.admit_request("a", 1, start_s)
        admission.mark_ended("a", start_s + 4.0)
    admission.admit_request("b", 1, 2000.0)
    refusal = admission.find_refusal(1, 1, 2000.0)
    assert refusal is not None and refusal.retry_after_s == pytest.approx(4.0)


def test_many_that_leave_before_prefill_do_not_spoil_the_rate() -> None:
    admission = reading(0.5, 0)
    for index in range(500):
        admission.admit_request(f"gone{index}", 10, 60.0)
    for index in range(500):
        admission.mark_ended(f"gone{index}", 65.0)
    for index in range(40):
        admission.admit_request(f"s{index}", 10, 70.0)
    assert admission.predicted_wait_s(70.0) == pytest.approx(20.0)


def test_leaving_twice_and_unknown_names_do_nothing() -> None:
    admission = Admission()
    admission.admit_request("a", 10, 0.0)
    for _ in range(2):
        admission.mark_prefilled("a", 1.0)
        admission.mark_ended("a", 2.0)
        admission.mark_ended("never", 2.0)
        admission.mark_prefilled("never", 2.0)
    assert (admission.in_flight, admission.queued_tokens, admission.num_unprefilled) == (0, 0, 0)


@pytest.mark.parametrize(
    ("tenant", "own", "others", "is_clients"),
    [("greedy", 14, 0, True), ("modest", 1, 15, False), ("", 16, 0, False)],
)
def test_a_refusal_is_a_tenant_s_own_fault_above_its_share_alone(
    tenant: str, own: int, others: int, is_clients: bool
) -> None:
    """Without keys, or for a tenant within its share, the service is full."""
    admission = Admission(AdmissionLimits(max_requests=16))
    for number in range(own):
        admission.admit_request(f"own-{number}", 0, 0.0, tenant)
    for number in range(others):
        admission.admit_request(f"other-{number}", 0, 0.0, f"other-{number % 3}")
    for number in range(own + others):
        # Nothing can be displaced any more.
        admission.mark_begun(f"own-{number}")
        admission.mark_begun(f"other-{number}")
    refusal = admission.find_refusal(1, 0, 1.0, tenant)
    assert refusal is not None and refusal.code == "too_many_requests"
    assert refusal.is_clients_fault == is_clients


def test_with_more_tenants_than_fit_the_service_is_full() -> None:
    admission = Admission(AdmissionLimits(max_requests=2))
    for tenant in ("ann", "bob"):
        admission.admit_request(tenant, 0, 0.0, tenant)
        admission.mark_begun(tenant)
    refusal = admission.find_refusal(1, 0, 1.0, "cyd")
    assert refusal is not None and not refusal.is_clients_fault
