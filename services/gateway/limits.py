"""How much a client may ask for, and the middleware that counts a body's bytes while they arrive."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.errors import RequestError
from services.gateway.errors import error_response

MAX_SEQUENCES = 64


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that hold before any work is done; ranges of single numbers are in `schema`."""

    max_body_bytes: int = 8 << 20
    body_s: float = 30.0  # a whole body must have arrived by then
    max_depth: int = 64  # of a JSON body
    max_n: int = 8
    max_prompts: int = 32
    max_sequences: int = MAX_SEQUENCES  # prompts times best_of
    max_stop_chars: int = 256
    max_schema_bytes: int = 64 << 10
    max_schema_depth: int = 32
    max_pattern_chars: int = 1024
    max_stream_bytes: int = 1 << 20  # answer waiting for a slow reader, per stream


class BodyLimit:
    """Reads a body whole, at most `max_bytes` in at most `body_s`, and hands it on as one message."""

    def __init__(self, app: ASGIApp, max_bytes: int, body_s: float) -> None:
        self.app = app
        self.max_bytes, self.body_s = max_bytes, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except RequestError as error:
            response = error_response(error)
            response.headers["connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or None when the client left while sending it."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if len(announced) > 18 or not announced.isdigit() or int(announced) > self.max_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise RequestError(
                f"the body did not arrive within {self.body_s:g} s",
                status=408,
                kind="timeout_error",
                code="body_timeout",
            ) from error

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body is larger than {self.max_bytes} bytes", status=413, code="request_too_large"
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` once and then what the connection says (a disconnect)."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
