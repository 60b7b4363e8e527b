"""Errors and fleet events are kept within bounds, with ids and without what clients wrote."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.http.error_response import error_response
from services.gateway.http.request_id import RequestIdMiddleware
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import (
    MAX_ERRORS_PER_CODE,
    MAX_ERRORS_SHOWN,
    MAX_FLEET_EVENTS,
    MAX_REASON_CHARS,
    FleetEvents,
    RecentErrors,
)


def failure(reason: FailureReason, message: str = "why") -> RequestFailure:
    return RequestFailure(reason, message, cause="a worker's own text")


def test_the_newest_error_is_first_and_texts_of_clients_are_left_out() -> None:
    errors = RecentErrors()
    errors.add_error(
        1.0, failure(FailureReason.MODEL_NOT_FOUND, "no model 'secret'"), "req_1", "/v1/models/{id}"
    )
    errors.add_error(3.0, failure(FailureReason.NO_WORKERS, "x" * 999), "req_2", "/v1/completions", "cmpl-2")
    first, second = errors.report(4.0)
    assert first == {
        "age_s": 1.0, "request_id": "req_2", "generation": "cmpl-2", "route": "/v1/completions", "status": 503,
        "code": "no_workers", "message": "x" * 499 + "…",
    }  # fmt: skip
    assert (second["age_s"], second["code"], second["message"]) == (3.0, "model_not_found", "")


def test_frequent_errors_do_not_displace_rare_ones() -> None:
    errors = RecentErrors()
    errors.add_error(0.0, failure(FailureReason.INTERNAL_ERROR), "req_rare", "/v1/completions")
    for number in range(1000):
        errors.add_error(number, failure(FailureReason.INVALID_API_KEY), f"req_{number}", "/status")
    kept = errors.report(1000.0)
    assert [one["request_id"] for one in kept] == [
        *(f"req_{999 - back}" for back in range(MAX_ERRORS_PER_CODE)), "req_rare"]  # fmt: skip
    for reason in FailureReason:
        for number in range(20):
            errors.add_error(2000.0 + number, failure(reason), "req", "/")
    assert len(errors.report(3000.0)) == MAX_ERRORS_SHOWN


def test_every_error_response_is_kept_under_its_id_and_route() -> None:
    errors, sent = RecentErrors(), list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(failure(FailureReason.UNKNOWN_URL))(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    layered = RequestIdMiddleware(app, GatewayMetrics(), frozenset({"/status"}), errors)
    scope = {"type": "http", "method": "GET", "path": "/<b>nowhere</b>", "headers": []}
    asyncio.run(layered(scope, receive, send))
    (kept,) = errors.report(0.0)
    assert (b"x-request-id", kept["request_id"].encode()) in sent[0]["headers"]
    assert (kept["route"], kept["status"], kept["code"]) == ("other", 404, "unknown_url")


def test_the_fleet_remembers_who_was_lost_in_which_role() -> None:
    fleet = FleetEvents()
    fleet.add_up(0.0, "decode-0", "decode")
    fleet.add_lost(2.0, "decode-0", "its connection is closed")
    fleet.add_lost(3.0, "unknown", "silent")
    assert [(one["what"], one["worker"], one["role"], one["age_s"]) for one in fleet.report(4.0)] == [
        ("lost", "unknown", "", 1.0),
        ("lost", "decode-0", "decode", 2.0),
        ("up", "decode-0", "decode", 4.0),
    ]
    for number in range(200):
        fleet.add_unfit(5.0 + number, f"decode-{number}", "y" * 999)
    kept = fleet.report(300.0)
    assert len(kept) == MAX_FLEET_EVENTS and len(kept[0]["reason"]) == MAX_REASON_CHARS
