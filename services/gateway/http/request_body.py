"""Reads request bodies, only when a route asks for them, and limits each body and the memory of all bodies.

    AuthMiddleware, admission, content type ─▶ `async with request.state.body as body` ─▶ parse, tokenize ─▶ released

A request that is refused before its body is read costs no memory for it. `UnreadBodyMiddleware` then closes the
connection, since the unread bytes would be taken for the next request.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.http.connection import CONNECTION_EXTENSION

# Seconds for which an unread body is discarded, so that the client can read the refusal.
LINGER_S = 2.0
LINGER_BYTES = 1 << 20
# Before a request is refused, a body of at most SMALL_BODY_BYTES is waited for, for at most SMALL_BODY_TIMEOUT_S. The
# connection can then be reused.
SMALL_BODY_BYTES = 64 << 10
SMALL_BODY_TIMEOUT_S = 0.1
BODY_NOT_SENT = "the body did not arrive: the client closed the connection"


class BodyMemory:
    """Counts the bytes of all bodies that are held.

    A tenant may hold at most as many bytes as are still free for all. So one tenant alone can fill half of the memory,
    and there is always room for another tenant.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the sum. It must be at least twice the largest body, so that one body always fits."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._by_tenant: Counter[str] = Counter()

    def hold_bytes(self, tenant: str, num_bytes: int) -> None:
        """Count `num_bytes` more of a body.

        Raises:
            RequestError: 503, they do not fit. They are not counted in this case.
        """
        if self._by_tenant[tenant] + num_bytes > self.max_bytes - self.held_bytes:
            problem = "request bodies fill the memory that the gateway has for them"
            raise RequestError(RequestFailure(FailureReason.BODY_MEMORY_FULL, problem))
        self.held_bytes += num_bytes
        self._by_tenant[tenant] += num_bytes

    def release_bytes(self, tenant: str, num_bytes: int) -> None:
        """Stop counting `num_bytes` of a body."""
        self.held_bytes -= num_bytes
        self._by_tenant[tenant] -= num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class RequestBody:
    """The body of one request, as an asynchronous context manager that can be entered once.

    Entering it reads the whole body; leaving it releases the memory.
    """

    def __init__(
        self, scope: Scope, receive: Receive, memory: BodyMemory, max_bytes: int, body_s: float
    ) -> None:
        self._headers, self._receive, self._memory = scope["headers"], receive, memory
        self._tenant: str = scope.get("state", {}).get("tenant", "")
        self._max_bytes, self._body_s = max_bytes, body_s
        self._num_bytes = 0

    def limit_bytes(self, max_bytes: int) -> RequestBody:
        """Bound the body further, for a route that needs no more; to be called before the body is read."""
        self._max_bytes = min(self._max_bytes, max_bytes)
        return self

    async def __aenter__(self) -> bytes:
        """Read the body.

        Raises:
            RequestError: 413 if the body is too large; 408 if it did not arrive in time; 503 if memory is full.
        """
        announced = next((value for name, value in self._headers if name == b"content-length"), b"0")
        if len(announced) > 18 or not announced.isdigit() or int(announced) > self._max_bytes:
            raise self._too_large_error()
        try:
            async with asyncio.timeout(self._body_s):
                return await self._read_whole()
        except TimeoutError as error:
            self._release_memory()
            problem = f"the body did not arrive within {self._body_s:g} s"
            raise RequestError(RequestFailure(FailureReason.BODY_TIMEOUT, problem)) from error
        except BaseException:
            self._release_memory()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release_memory()

    async def _read_whole(self) -> bytes:
        """The whole body. Raises RequestError if it is too large, incomplete, or does not fit into memory."""
        # The value of a BytesIO can be taken without a copy.
        gathered = io.BytesIO()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                # This error is only logged, since the client is gone.
                raise RequestError(RequestFailure(FailureReason.BODY_INCOMPLETE, BODY_NOT_SENT))
            part: bytes = message.get("body", b"")
            if self._num_bytes + len(part) > self._max_bytes:
                raise self._too_large_error()
            self._memory.hold_bytes(self._tenant, len(part))
            self._num_bytes += len(part)
            if not message.get("more_body", False) and not gathered.tell():
                return part
            gathered.write(part)
            if not message.get("more_body", False):
                return gathered.getvalue()

    def _release_memory(self) -> None:
        self._memory.release_bytes(self._tenant, self._num_bytes)
        self._num_bytes = 0

    def _too_large_error(self) -> RequestError:
        """The error (413) for a body above the limit."""
        return RequestError(body_too_large_failure(self._max_bytes))


def body_too_large_failure(max_bytes: int) -> RequestFailure:
    """The failure (413) of a request whose body has more than `max_bytes`."""
    return RequestFailure(FailureReason.REQUEST_TOO_LARGE, f"the body is larger than {max_bytes} bytes")


class RequestBodyMiddleware:
    """ASGI middleware: gives each request a `RequestBody` as `state.body`, and reads nothing itself."""

    def __init__(self, app: ASGIApp, memory: BodyMemory, max_bytes: int, body_s: float) -> None:
        self.app, self.memory = app, memory
        self._max_bytes, self._body_s = max_bytes, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = RequestBody(scope, receive, self.memory, self._max_bytes, self._body_s)
            scope.setdefault("state", {})["body"] = body
        await self.app(scope, receive, send)


class UnreadBodyMiddleware:
    """ASGI middleware: closes the connection after an answer that leaves a part of its request's body unread.

    The whole answer is sent first, and what still arrives is discarded for a moment. Closing a connection with unread
    bytes resets it, and a reset can make the client lose the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = (
            scope.get("extensions", {}).get(CONNECTION_EXTENSION) if scope["type"] == "http" else None
        )
        if connection is None:
            return await self.app(scope, receive, send)
        closing = late = False

        async def closed(message: Message) -> None:
            nonlocal closing, late
            if message["type"] == "http.response.start" and connection.has_unread_body(scope):
                # With 408 the body did not arrive in time, so waiting for it again is useless.
                late = message["status"] == 408
                if is_small_body(scope) and not late:
                    await discard_body(receive, SMALL_BODY_BYTES, SMALL_BODY_TIMEOUT_S)
                closing = connection.has_unread_body(scope)
            if message["type"] == "http.response.start" and closing:
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            elif closing and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                if not late:
                    await discard_body(receive, LINGER_BYTES, LINGER_S)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self.app(scope, receive, closed)


def is_small_body(scope: Scope) -> bool:
    """Whether the client announces a small body, and sends it without waiting for `100 Continue`."""
    headers = dict(scope["headers"])
    announced = headers.get(b"content-length", b"")
    return (
        announced.isdigit()
        and len(announced) < 9
        and int(announced) <= SMALL_BODY_BYTES
        and b"expect" not in headers
    )


async def discard_body(receive: Receive, max_bytes: int, seconds: float) -> None:
    """Drop the rest of a body, for at most `seconds` or `max_bytes`, until it is complete or the client is gone."""
    num_bytes = 0
    try:
        async with asyncio.timeout(seconds):
            while num_bytes <= max_bytes:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                num_bytes += len(message.get("body", b""))
    except TimeoutError:
        return
