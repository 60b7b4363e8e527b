"""What the middleware keeps about a request in its ASGI scope, for logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.request_ids import RequestIds


def request_ids_of(scope: Mapping[str, Any], sequence: str = "") -> RequestIds:
    """The ids of an HTTP request; `sequence` is the name of its answer, if it has one."""
    state = scope.get("state", {})
    return RequestIds(state.get("request_id", ""), state.get("client_id", ""), sequence)
