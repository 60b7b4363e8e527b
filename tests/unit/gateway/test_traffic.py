"""What is kept of clients' requests for a replanner: each event once, the latest ones, and those lost are counted."""

from __future__ import annotations

import pytest

from diptych.errors import RequestError
from diptych.metrics import Lived, Metrics, Objectives
from services.gateway.parse import parse
from services.gateway.traffic import ARRIVED, ENDED, FAILED, REFUSED, Told, Totals, Traffic


def lived(prompt: int, tokens: int, ttft_s: float, cached: int = 0) -> Lived:
    return Lived("m", prompt, cached, tokens, 0.0, ttft_s, ttft_s + tokens - 1, ttft_s, ttft_s + tokens)


def test_requests_are_heard_once_with_lengths_and_verdict() -> None:
    metrics, traffic = Metrics(Objectives(ttft_s=1.0)), Traffic(clock=lambda: 7.0)
    metrics.listener = traffic
    first = lived(10, 4, 0.5, cached=3)
    metrics.came(first)
    metrics.ended(first)
    metrics.ended(lived(20, 2, 1.5))
    metrics.missed(lived(30, 0, 0.0))
    metrics.refused("overloaded")
    heard = traffic.since("", 0)
    assert heard.events == [
        (7.0, ARRIVED, 10, 0, False, 0),
        (7.0, ENDED, 10, 4, True, 3),
        (7.0, ENDED, 20, 2, False, 0),
        (7.0, FAILED, 30, 0, False, 0),
        (7.0, REFUSED, 0, 0, False, 0),
    ]
    assert heard.lost == 0 and traffic.since(heard.boot, heard.after).events == []


def test_what_was_not_acknowledged_is_told_again_and_what_overflowed_is_counted() -> None:
    traffic = Traffic(kept=3)
    traffic.arrived(1)
    heard = traffic.since("", 0)
    assert traffic.since("", 0).events == heard.events
    for prompt in range(2, 7):
        traffic.arrived(prompt)
    again = traffic.since(heard.boot, heard.after)
    assert [event[2] for event in again.events] == [4, 5, 6] and again.lost == 2


def test_who_has_heard_another_process_begins_anew() -> None:
    traffic = Traffic()
    traffic.arrived(1)
    assert len(traffic.since("another life", 900).events) == 1


def test_totals_become_steps() -> None:
    totals = Totals()
    assert [totals.news("a", total) for total in (2, 2, 5, 1)] == [2, 0, 3, 1], "the last began anew"


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
        parse(body, Told, 4)
