"""The connection under a response: how much of it the client has not taken yet, and how to cut it.

uvicorn ends a response well or closes the connection after all that is buffered has left. Neither is right for a reader
who takes nothing, or for an answer that must not look complete, so its protocol is extended a little here. It also
bounds what uvicorn does not: the size of a request's head and the time it may take to arrive.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from diptych.errors import RequestError

HEAD_BYTES = 64 << 10  # of a request: line and headers
HEAD_S = 15.0  # in which they must have arrived
BUFFER_BYTES = 16 << 10  # of an answer, in this process, per connection
KERNEL_BYTES = 128 << 10  # and in the kernel
LOOKS = 4  # times within `stall_s` that one looks whether the client took something
RESET = struct.pack("ii", 1, 0)  # on, 0 seconds
EXTENSION = "diptych.connection"


class Stalled(Exception):
    """The client has taken nothing for too long."""


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with bounds on heads and buffers, and itself in every request's scope."""

    _head_bytes = 0  # of the request line and whole headers
    _raw_bytes = 0  # that arrived before the head was complete
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._raw_bytes = self._raw_bytes + len(data) if self._head_timer is not None else 0
        if self._raw_bytes > HEAD_BYTES and not self.transport.is_closing():  # one endless header
            self._head_bytes = self._raw_bytes
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._expect_head()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: self}

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        large = self._head_bytes > HEAD_BYTES
        status, phrase = (431, b"Request Header Fields Too Large") if large else (400, b"Bad Request")
        error = RequestError(
            f"the request's line and headers are larger than {HEAD_BYTES} bytes"
            if large
            else "this is not HTTP",
            status=status,
            code="headers_too_large" if large else "invalid_http",
        )
        body = msgspec.json.encode(error.body())
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, phrase, len(body), body)
        )
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("head too large")  # the parser turns this into `send_400_response`

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def unsent(self) -> int:
        """Bytes of answers that the kernel has not taken."""
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Reset the connection: what is buffered is dropped, and the client sees that the answer is not complete."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None and not self.transport.is_closing():
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)  # the kernel drops its part too
        self.transport.abort()

    async def drained(self, stall_s: float, high: int = BUFFER_BYTES) -> None:
        """Wait while more than `high` bytes are buffered.

        Raises:
            Stalled: nothing was taken for `stall_s`.
        """
        if not self.transport.is_closing():
            self.transport.set_write_buffer_limits(high=high)
        least, idle = self.unsent(), 0
        while self.flow.write_paused:
            try:
                async with asyncio.timeout(stall_s / LOOKS):
                    await self.flow.drain()
            except TimeoutError:
                left = self.unsent()
                least, idle = min(left, least), idle + 1 if left >= least else 0
                if idle >= LOOKS:
                    raise Stalled from None


class Wire:
    """One response. `send` waits for a slow reader, but not for one who takes nothing at all for `stall_s`."""

    def __init__(self, scope: Scope, send: Send, stall_s: float) -> None:
        self._connection: Protocol | None = scope.get("extensions", {}).get(EXTENSION)
        self._send, self._stall_s = send, stall_s
        self.started = False

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, body: bytes) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """Complete the response, once the client has taken all of it but what the kernel holds."""
        if self._connection is not None:
            await self._connection.drained(self._stall_s, high=0)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        """End the response so that no client takes it for complete."""
        if self._connection is not None:
            self._connection.abort()

    async def _put(self, message: Message) -> None:
        if self._connection is not None:
            await self._connection.drained(self._stall_s)
        await self._send(message)
