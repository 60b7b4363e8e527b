"""The JSON of errors: OpenAI's, and on `/v1/messages` Anthropic's."""

from __future__ import annotations

import msgspec

from diptych.failure_statuses import RequestFailure
from services.gateway.openai.schemas.messages_objects import MessageErrorReply, MessageProblem

MESSAGES = "/v1/messages"
# Anthropic's types by status.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Whether a path is one of Anthropic's routes, or below them."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def message_error(failure: RequestFailure, request_id: str | None) -> MessageErrorReply:
    """Anthropic's error for a failure, with our field and code beside."""
    kind = TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    return MessageErrorReply(MessageProblem(kind, failure.message, failure.param, failure.code), request_id)


def error_json(path: str, failure: RequestFailure, request_id: str | None = None) -> bytes:
    """The body of an error on the route `path`."""
    if is_messages_path(path):
        return msgspec.json.encode(message_error(failure, request_id or None))
    return msgspec.json.encode(failure.error_body())
