"""What is kept of clients' requests for a replanner: each event once, the latest ones, and those lost are counted."""

from __future__ import annotations

import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.slo import Slo
from services.gateway.metrics.traffic_feed import (
    ARRIVED,
    ENDED,
    FAILED,
    REFUSED,
    CounterTotals,
    ReplanReport,
    TrafficFeed,
)
from services.gateway.openai.parse_body import parse_body
from services.gateway.outcomes import Ending, RequestOutcomes, SequenceRecord


def record(prompt: int, tokens: int, ttft_s: float, cached: int = 0) -> SequenceRecord:
    return SequenceRecord(
        "m", prompt, cached, tokens, 0.0, ttft_s, ttft_s + tokens - 1, ttft_s, ttft_s + tokens
    )


def failed(reason: FailureReason) -> RequestFailure:
    return RequestFailure(reason, "as the test says")


def test_requests_are_reported_once_with_lengths_and_outcome() -> None:
    traffic = TrafficFeed(clock=lambda: 7.0)
    outcomes = RequestOutcomes(Slo(ttft_s=1.0), [traffic], clock=lambda: 7.0)
    first = record(10, 4, 0.5, cached=3)
    outcomes.add_arrival(first)
    outcomes.end_sequence(first, Ending.ANSWERED)
    outcomes.end_sequence(record(20, 2, 1.5), Ending.ANSWERED)
    outcomes.end_sequence(record(30, 0, 0.0), Ending.FAILED, failed(FailureReason.WORKER_LOST))
    outcomes.end_sequence(None, Ending.FAILED, failed(FailureReason.OVERLOADED))
    received = traffic.events_since("", 0)
    assert received.events == [
        (7.0, ARRIVED, 10, 0, False, 0),
        (7.0, ENDED, 10, 4, True, 3),
        (7.0, ENDED, 20, 2, False, 0),
        (7.0, FAILED, 30, 0, False, 0),
        (7.0, REFUSED, 0, 0, False, 0),
    ]
    assert received.lost == 0 and traffic.events_since(received.boot, received.after).events == []


def test_what_clients_bring_about_calls_for_no_worker() -> None:
    traffic = TrafficFeed(clock=lambda: 7.0)
    outcomes = RequestOutcomes(Slo(ttft_s=1.0), [traffic], clock=lambda: 7.0)
    expired = SequenceRecord("m", 10, arrived_s=6.9, client_deadline_s=6.9)
    outcomes.add_arrival(expired)
    outcomes.end_sequence(expired, Ending.FAILED, failed(FailureReason.DEADLINE_EXCEEDED))
    for reason in (FailureReason.REQUEST_QUARANTINED, FailureReason.INVALID_GRAMMAR, FailureReason.DISPLACED):
        outcomes.end_sequence(SequenceRecord("m", 10, arrived_s=6.9), Ending.FAILED, failed(reason))
    outcomes.end_sequence(SequenceRecord("m", 10, arrived_s=6.9), Ending.LEFT)
    outcomes.end_sequence(None, Ending.FAILED, failed(FailureReason.TENANT_REQUESTS_FULL))
    assert traffic.events_since("", 0).events == []
    outcomes.end_sequence(SequenceRecord("m", 10, arrived_s=5.0), Ending.LEFT)
    assert traffic.events_since("", 0).events == [(7.0, FAILED, 10, 0, False, 0)]


def test_what_was_not_acknowledged_is_sent_again_and_what_overflowed_is_counted() -> None:
    traffic = TrafficFeed(kept=3)
    traffic.on_arrived(SequenceRecord("m", 1), 7.0)
    received = traffic.events_since("", 0)
    assert traffic.events_since("", 0).events == received.events
    for prompt in range(2, 7):
        traffic.on_arrived(SequenceRecord("m", prompt), 7.0)
    again = traffic.events_since(received.boot, received.after)
    assert [event[2] for event in again.events] == [4, 5, 6] and again.lost == 2


def test_who_has_read_from_another_process_begins_anew() -> None:
    traffic = TrafficFeed()
    traffic.on_arrived(SequenceRecord("m", 1), 7.0)
    assert len(traffic.events_since("another life", 900).events) == 1


def test_totals_become_steps() -> None:
    totals = CounterTotals()
    assert [totals.take_increase("a", total) for total in (2, 2, 5, 1)] == [2, 0, 3, 1], "the last began anew"


@pytest.mark.parametrize(
    "body",
    [
        b'{"after":-1}',
        b'{"pools":[-1,1]}',
        b'{"decisions":{"first":-1}}',
        b'{"actions":{"flip":{"done":-2}}}',
    ],
)
def test_totals_are_not_negative(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_body(body, ReplanReport, 4)
