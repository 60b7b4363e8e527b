"""What is kept of clients' requests for a replanner: each event once, the latest ones, and those lost are counted."""

from __future__ import annotations

import pytest

from diptych.errors import RequestError
from diptych.slo import Slo
from services.gateway.metrics.prometheus import GatewayMetrics, SequenceRecord
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


def record(prompt: int, tokens: int, ttft_s: float, cached: int = 0) -> SequenceRecord:
    return SequenceRecord(
        "m", prompt, cached, tokens, 0.0, ttft_s, ttft_s + tokens - 1, ttft_s, ttft_s + tokens
    )


def test_requests_are_reported_once_with_lengths_and_verdict() -> None:
    metrics, traffic = GatewayMetrics(Slo(ttft_s=1.0)), TrafficFeed(clock=lambda: 7.0)
    metrics.listener = traffic
    first = record(10, 4, 0.5, cached=3)
    metrics.on_arrived(first)
    metrics.on_ended(first)
    metrics.on_ended(record(20, 2, 1.5))
    metrics.on_failed(record(30, 0, 0.0))
    metrics.on_refused("overloaded")
    received = traffic.events_since("", 0)
    assert received.events == [
        (7.0, ARRIVED, 10, 0, False, 0),
        (7.0, ENDED, 10, 4, True, 3),
        (7.0, ENDED, 20, 2, False, 0),
        (7.0, FAILED, 30, 0, False, 0),
        (7.0, REFUSED, 0, 0, False, 0),
    ]
    assert received.lost == 0 and traffic.events_since(received.boot, received.after).events == []


def test_what_was_not_acknowledged_is_sent_again_and_what_overflowed_is_counted() -> None:
    traffic = TrafficFeed(kept=3)
    traffic.on_arrived(1)
    received = traffic.events_since("", 0)
    assert traffic.events_since("", 0).events == received.events
    for prompt in range(2, 7):
        traffic.on_arrived(prompt)
    again = traffic.events_since(received.boot, received.after)
    assert [event[2] for event in again.events] == [4, 5, 6] and again.lost == 2


def test_who_has_read_from_another_process_begins_anew() -> None:
    traffic = TrafficFeed()
    traffic.on_arrived(1)
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
