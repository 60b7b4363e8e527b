"""The history counts what happened in the last 15 minutes, drops what is older, and knows the burn rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.slo import Slo
from services.gateway.metrics.recent_history import (
    LATENCY_STEP,
    NUM_BUCKETS,
    OUTCOMES,
    RecentHistory,
    burn_rate,
)
from services.gateway.outcomes import Ending, RequestOutcomes, SequenceRecord


def test_attainment_and_burn_are_over_what_was_asked() -> None:
    history = RecentHistory(bucket_s=10, num_buckets=30)
    for number in range(20):
        history.count_slo(5.0, {"ttft": number % 4 > 0, "all": number % 4 > 0})
    history.count_slo(295.0, {"ttft": True, "all": False})
    report = history.report(295.0, 0.9)
    assert report["objectives"].keys() == {"ttft", "all"}
    ttft = report["objectives"]["ttft"]
    assert ttft["whole"] == {"requests": 21, "attainment": round(16 / 21, 6), "burn": round(5 / 21 / 0.1, 4)}
    assert ttft["recent"] == {"requests": 1, "attainment": 1.0, "burn": 0.0}
    assert report["objectives"]["all"]["recent"]["burn"] == 10.0
    assert (ttft["requests"], ttft["met"]) == ([20, *[0] * 28, 1], [15, *[0] * 28, 1])


def test_what_is_too_old_is_dropped() -> None:
    history = RecentHistory(bucket_s=1, num_buckets=3)
    for second in range(5):
        history.count_ended(second, "answered", tokens=second)
    assert history.report(4.5, 0.9)["tokens"] == [2, 3, 4]
    assert history.report(6.0, 0.9)["tokens"] == [4, 0, 0]
    assert history.report(99.0, 0.9)["answered"] == [0, 0, 0]


def test_the_queue_keeps_its_maxima() -> None:
    history = RecentHistory(bucket_s=1, num_buckets=2)
    for queued, wait_s in ((1, 0.5), (7, 0.25), (2, 0.125)):
        history.sample_queue(0.5, queued, wait_s)
    report = history.report(0.9, 0.9)
    assert (report["queued"], report["predicted_wait_s"]) == ([0, 7], [0, 0.5])


@pytest.mark.parametrize(
    ("attainment", "target", "burn"),
    [(None, 0.9, None), (0.0, 0.9, 10.0), (1.0, 0.999, 0.0), (0.5, 1.0, None)],
)
def test_burn_is_at_most_what_the_target_allows(
    attainment: float | None, target: float, burn: float | None
) -> None:
    assert burn_rate(attainment, target) == (None if burn is None else pytest.approx(burn))


@given(st.lists(st.tuples(st.floats(0, 5000), st.booleans()), max_size=200))
def test_memory_is_bounded_and_nothing_recent_is_lost(events: list[tuple[float, bool]]) -> None:
    history = RecentHistory()
    for at_s, is_met in sorted(events):
        history.count_slo(at_s, {"all": is_met})
    last_s = max((at_s for at_s, _ in events), default=0.0)
    report = history.report(last_s, 0.9)
    assert len(report["queued"]) == NUM_BUCKETS and len(history._buckets) <= NUM_BUCKETS
    first = last_s // 15 - NUM_BUCKETS + 1
    recent = [is_met for at_s, is_met in events if at_s // 15 >= first]
    shown = report["objectives"].get("all", {"requests": [0], "met": [0]})
    assert (sum(shown["requests"]), sum(shown["met"])) == (len(recent), sum(recent))


def test_outcomes_feed_it() -> None:
    now_s, history = [100.0], RecentHistory()
    outcomes = RequestOutcomes(Slo(ttft_s=1.0), [history], clock=lambda: now_s[0])
    answered = SequenceRecord("toy", 8, tokens=5, first_written_s=0.5, first_token_s=0.5, last_token_s=0.75)
    outcomes.end_sequence(answered, Ending.ANSWERED)
    lost, full = (
        RequestFailure(reason, "as the test says")
        for reason in (FailureReason.WORKER_LOST, FailureReason.QUEUE_FULL)
    )
    outcomes.end_sequence(SequenceRecord("toy", 8), Ending.FAILED, lost)
    now_s[0] = 130.0
    outcomes.end_sequence(None, Ending.FAILED, full)
    outcomes.end_sequence(SequenceRecord("toy", 8, arrived_s=129.5), Ending.LEFT)
    outcomes.end_sequence(SequenceRecord("toy", 8, arrived_s=128.5), Ending.LEFT)
    report = history.report(130.0, 0.9)
    assert {name: report[name][-3:] for name in (*OUTCOMES, "tokens")} == {
        "answered": [1, 0, 0], "failed": [1, 0, 0], "refused": [0, 0, 1], "left": [0, 0, 1],
        "not_counted": [0, 0, 1], "tokens": [5, 0, 0]}  # fmt: skip
    # There is no limit of TPOT, so nothing is counted for it.
    assert report["objectives"].keys() == {"ttft", "all"}
    assert report["objectives"]["all"]["met"][-3:] == [1, 0, 0]
    assert report["objectives"]["all"]["requests"][-3:] == [2, 0, 2]


@given(st.lists(st.floats(1e-4, 100), min_size=1, max_size=100))
def test_quantiles_of_latencies_are_at_most_one_step_too_high(latencies: list[float]) -> None:
    history = RecentHistory(bucket_s=10, num_buckets=2)
    for seconds in latencies:
        history.record_latencies(1.0, seconds, None)
    report = history.report(1.0, 0.9)["latencies"]
    assert report.keys() == {"ttft"}
    whole = report["ttft"]["whole"]
    assert whole["answers"] == len(latencies)
    for name, share in (("p50_s", 0.5), ("p90_s", 0.9)):
        exact = sorted(latencies)[math.ceil(share * len(latencies)) - 1]
        assert exact * 0.999 <= whole[name] <= exact * LATENCY_STEP * 1.001
    assert report["ttft"]["p50_s"] == [None, whole["p50_s"]]


def test_latencies_that_are_not_there_are_not_reported() -> None:
    history = RecentHistory(bucket_s=1, num_buckets=2)
    history.record_latencies(0.5, 0.0, None)
    assert history.report(0.5, 0.9)["latencies"]["ttft"]["whole"]["p50_s"] <= 2e-5
    assert history.report(9.5, 0.9)["latencies"] == {}
