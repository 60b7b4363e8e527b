"""Makes error responses in their route's format, with the headers that official clients act upon, and their log lines.

Clients see only texts of a `RequestFailure`. For an unexpected exception they see the request id, and the log has the
details. Each error is logged with the request id and its cause: server errors always, client errors at most
`MAX_CLIENT_LINES_PER_S` times a second for each code.
"""

from __future__ import annotations

import logging
import math
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import RequestIds
from diptych.logs.shown_text import quote_text
from services.gateway.http.error_shapes import error_json
from services.gateway.http.log_rate_limit import LogRateLimit
from services.gateway.http.request_scope import keep_failure, request_ids_of
from services.gateway.metrics.recent_events import RecentErrors

JSON_TYPE = "application/json"
MAX_CLIENT_LINES_PER_S = 10

log = logging.getLogger(__name__)
client_log = logging.getLogger(f"{__name__}.client")
client_log.addFilter(LogRateLimit(1.0, MAX_CLIENT_LINES_PER_S))


def record_failure(scope: Scope, failure: RequestFailure, generation: str = "") -> None:
    """Log why an HTTP request fails, under its id, and keep it for `/status` and for its trace.

    `generation` is the name under which workers know the request.
    """
    keep_failure(scope, failure)
    state = scope.get("state", {})
    errors: RecentErrors | None = state.get("recent_errors")
    if errors is not None:
        errors.add_error(time.monotonic(), failure, state["request_id"], state["route"], generation)
    log_failure(request_ids_of(scope, generation), failure)


def log_failure(ids: RequestIds, failure: RequestFailure) -> None:
    """Log why the request with these ids fails."""
    logger = log if failure.status >= 500 else client_log
    what = f"{failure.message} (cause: {failure.cause})" if failure.cause else failure.message
    about = about_request(ids, failure.code)
    logger.warning("fails with %d %s: %s", failure.status, failure.code, what, extra=about)


class ErrorResponse(Response):
    """An error response that logs its failure when it is sent."""

    def __init__(self, failure: RequestFailure, generation: str, headers: dict[str, str]) -> None:
        super().__init__(b"", failure.status, headers, media_type=JSON_TYPE)
        self._failure, self._generation = failure, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_failure(scope, self._failure, self._generation)
        request_id = scope.get("state", {}).get("request_id")
        self.body = error_json(scope.get("path", ""), self._failure, request_id)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(failure: RequestFailure, generation: str = "") -> Response:
    """The response for `failure`. Its `x-should-retry` keeps official clients from repeating a hopeless request.

    `generation` is the name of the generation that failed, for the log.
    """
    headers = {
        "x-should-retry": "true" if failure.client_may_retry else "false",
        "cache-control": "no-store",
    }
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    if failure.retry_after_s is not None:
        # Never too early: who waits as long shall succeed.
        headers["retry-after"] = str(max(1, math.ceil(failure.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(failure.retry_after_s * 1000)))
    return ErrorResponse(failure, generation, headers)


def internal_failure(request_id: str) -> RequestFailure:
    """The failure of a request on which the gateway itself failed (500)."""
    problem = f"the server failed on this request; its log has the details under {request_id}"
    return RequestFailure(FailureReason.INTERNAL_ERROR, problem)


def unknown_route_failure(path: str, method: str) -> RequestFailure:
    """The failure of a request for a path that does not exist (404)."""
    return RequestFailure(FailureReason.UNKNOWN_URL, f"unknown route: {method} {path}")


def method_not_allowed_failure(path: str, method: str) -> RequestFailure:
    """The failure of a request with a method that its path does not have (405)."""
    return RequestFailure(FailureReason.METHOD_NOT_ALLOWED, f"{quote_text(method)} is not allowed for {path}")


SHUTTING_DOWN = RequestFailure(FailureReason.SERVER_SHUTTING_DOWN, "the server is shutting down")
