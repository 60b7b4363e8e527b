"""What the middleware and the routes keep about a request in its ASGI scope, for logs and traces."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from diptych.failure_statuses import RequestFailure
from diptych.logs.request_ids import RequestIds
from services.gateway.tracing.spans import RequestTrace


def request_ids_of(scope: Mapping[str, Any], sequence: str = "") -> RequestIds:
    """The ids of an HTTP request; `sequence` is the name of its answer, if it has one."""
    state = scope.get("state", {})
    return RequestIds(state.get("request_id", ""), state.get("client_id", ""), sequence)


def trace_of(scope: Mapping[str, Any]) -> RequestTrace | None:
    """The trace of an HTTP request; None if it is not traced."""
    trace: RequestTrace | None = scope.get("state", {}).get("trace")
    return trace


def failure_of(scope: Mapping[str, Any]) -> RequestFailure | None:
    """Why an HTTP request was refused or has failed, if it has."""
    failure: RequestFailure | None = scope.get("state", {}).get("failure")
    return failure


def keep_failure(scope: MutableMapping[str, Any], failure: RequestFailure) -> None:
    """Keep why an HTTP request was refused or has failed."""
    scope.setdefault("state", {})["failure"] = failure
