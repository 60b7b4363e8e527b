"""Every refusal and failure as an OpenAI error body with the headers that official clients act upon.

Texts come from `RequestError` only; of an unexpected exception a client sees the request id, and the log the rest.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from diptych.errors import RequestError

JSON = "application/json"


def error_response(error: RequestError) -> Response:
    """The HTTP answer. `x-should-retry` keeps official clients from sending a hopeless request three times."""
    headers = {"x-should-retry": "true" if error.retry else "false", "cache-control": "no-store"}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1000)))
    return Response(msgspec.json.encode(error.body()), error.status, headers, media_type=JSON)


def internal_error(request_id: str) -> RequestError:
    return RequestError(
        f"the server failed on this request; its log has the details under {request_id}",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def not_found(path: str, method: str) -> RequestError:
    return RequestError(f"unknown route: {method[:16]} {path[:100]}", status=404, code="unknown_url")


def not_allowed(path: str, method: str) -> RequestError:
    return RequestError(
        f"{method[:16]} is not allowed for {path[:100]}", status=405, code="method_not_allowed"
    )


def shutting_down() -> RequestError:
    return RequestError(
        "the server is shutting down",
        status=503,
        kind="server_error",
        code="server_shutting_down",
        retry=True,
        retry_after_s=2.0,
    )
