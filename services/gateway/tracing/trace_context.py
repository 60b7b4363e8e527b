"""The headers `traceparent` and `tracestate` of W3C Trace Context, and the ids of traces and spans.

Source: https://www.w3.org/TR/trace-context/, sections 3.2 (traceparent) and 3.3 (tracestate).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

PARENT_HEADER, STATE_HEADER, RESPONSE_HEADER = b"traceparent", b"tracestate", b"traceresponse"
PARENT_PATTERN = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
FORBIDDEN_VERSION = b"ff"
MAX_STATE_CHARS = 512
STATE_PATTERN = re.compile(rb"[ -~\t]*")
SAMPLED_FLAG = 1

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of somebody's trace: its ids as bytes, whether it is sampled, and the trace's vendor state."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True
    state: str = ""

    @property
    def header(self) -> bytes:
        """The value that names this span in `traceparent` and `traceresponse`."""
        return b"00-%s-%s-%02x" % (
            self.trace_id.hex().encode(),
            self.span_id.hex().encode(),
            SAMPLED_FLAG * self.sampled,
        )


def new_span_id() -> bytes:
    """A random id for a span, never all zeros."""
    return secrets.token_bytes(7) + b"\x01"


def new_trace_id() -> bytes:
    """A random id for a trace, never all zeros."""
    return secrets.token_bytes(15) + b"\x01"


def parse_traceparent(headers: Headers) -> TraceContext | None:
    """The client's span that a request belongs to; None without a valid `traceparent`.

    As the standard says, a header that is malformed, or there twice, counts as none, and `tracestate` with it.
    """
    given = [value for name, value in headers if name == PARENT_HEADER]
    match = PARENT_PATTERN.fullmatch(given[0].strip()) if len(given) == 1 else None
    if match is None or match[1] == FORBIDDEN_VERSION or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = bytes.fromhex(match[2].decode()), bytes.fromhex(match[3].decode())
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & SAMPLED_FLAG), _parse_state(headers))


def _parse_state(headers: Headers) -> str:
    """The trace's vendor state, which is passed on unread; "" if it is too long or not printable."""
    joined = b",".join(value for name, value in headers if name == STATE_HEADER)
    fits = len(joined) <= MAX_STATE_CHARS and STATE_PATTERN.fullmatch(joined)
    return joined.decode() if fits else ""
