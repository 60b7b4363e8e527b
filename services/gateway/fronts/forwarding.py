"""Forwards what a front does not answer itself to the relay's process, which has the whole API behind a Unix socket.

    client ─▶ front: HttpConnection ─▶ Forwarder ── HTTP/1.1 over a Unix socket ─▶ relay's process: all routes

Nothing is checked or changed here but the headers that belong to a connection. A body is sent as it comes, and an
answer likewise; whoever leaves ends both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.fronts.frame_link import connect_unix
from services.gateway.fronts.relay_client import RELAY_LOST
from services.gateway.http.connection import CONNECTION_EXTENSION, ClientStalled, HttpConnection
from services.gateway.http.error_response import error_response

# Headers that belong to one connection, and those that each server writes by itself.
OF_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
OF_SERVER = frozenset({b"date", b"server"})
READ_BYTES = 64 << 10
# Below, an answer only asks for the body.
FIRST_FINAL_STATUS = 200


class RelayGone(ConnectionError):
    """The relay's process has ended before its answer."""


class Forwarder:
    """An ASGI application that asks the server at `address`; `refusal` answers where that fails."""

    def __init__(self, address: str, refusal: ASGIApp) -> None:
        self._address, self._refusal = address, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = ForwardedExchange(scope, receive, send)
        try:
            await exchange.run(self._address)
        except (OSError, httptools.HttpParserError) as error:
            if exchange.is_answered:
                raise RelayGone("the relay has ended within an answer") from error
            await self._refusal(scope, receive, send)
        except ClientStalled:
            exchange.abort()


async def refuse_lost(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application that answers that the relay's process is gone."""
    await error_response(RELAY_LOST)(scope, receive, send)


class ForwardedExchange:
    """One request and its answer. The parser calls the methods `on_...`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._connection: HttpConnection | None = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
        names = {name for name, _ in scope["headers"]}
        self._is_chunked = b"transfer-encoding" in names and b"content-length" not in names
        # The body may be sent at once, unless the client waits until it is asked for it.
        self._may_send = asyncio.Event()
        if not any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
        ):
            self._may_send.set()
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        # What is to be sent to the client, and whether that is all.
        self._messages: list[Message] = []
        self._is_over = False
        self.is_answered = False

    async def run(self, address: str) -> None:
        """Forward the request, and its answer.

        Raises:
            OSError, httptools.HttpParserError: that fails.
            ClientStalled: the client reads too little of the answer.
        """
        reader, writer = await asyncio.open_unix_connection(sock=await connect_unix(address))
        try:
            writer.write(self._request_head())
            sending = asyncio.create_task(self._send_body(writer))
            answering = asyncio.create_task(self._pass_answer(reader))
            try:
                # The body's task ends when the client has left.
                await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            finally:
                for task in (sending, answering):
                    task.cancel()
                await asyncio.gather(sending, answering, return_exceptions=True)
        finally:
            writer.close()

    def abort(self) -> None:
        """Reset the client's connection, so that it does not take the answer for complete."""
        if self._connection is not None:
            self._connection.abort()

    def _request_head(self) -> bytes:
        """The request line and headers, as they came but for those of the connection."""
        scope, query = self._scope, self._scope.get("query_string", b"")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        headers = [*pass_headers(scope["headers"]), (b"connection", b"close")]
        if self._is_chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), target)]
        lines += [b"%s: %s" % pair for pair in headers]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    async def _send_body(self, writer: asyncio.StreamWriter) -> None:
        """Send the body as it comes; returns when the client has left."""
        await self._may_send.wait()
        while (message := await self._receive())["type"] == "http.request":
            body, is_last = message.get("body", b""), not message.get("more_body", False)
            if self._is_chunked:
                body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + (
                    b"0\r\n\r\n" if is_last else b""
                )
            # An answer may come before the body is read, which then is not wanted any more.
            with contextlib.suppress(ConnectionError):
                writer.write(body)
                await writer.drain()

    async def _pass_answer(self, reader: asyncio.StreamReader) -> None:
        """Pass the answer on as it comes, as fast as the client reads. Raises ClientStalled if it reads too little."""
        while not self._is_over:
            data = await reader.read(READ_BYTES)
            if not data:
                raise RelayGone("the relay has closed the connection")
            self._parser.feed_data(data)
            messages, self._messages = self._messages, []
            for message in messages:
                self.is_answered = True
                if self._connection is not None:
                    await self._connection.wait_drained()
                await self._send(message)

    def on_message_begin(self) -> None:
        """An answer begins, or a request for the body."""
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head of the answer is there."""
        status = self._parser.get_status_code()
        if status < FIRST_FINAL_STATUS:
            return self._may_send.set()
        headers = [pair for pair in pass_headers(self._headers) if pair[0] not in OF_SERVER]
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers})
        if self._scope["method"] == "HEAD":
            self._end_answer()

    def on_body(self, body: bytes) -> None:
        """A part of the answer."""
        self._messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        """The answer is complete, or the request for the body is."""
        if self._parser.get_status_code() >= FIRST_FINAL_STATUS and not self._is_over:
            self._end_answer()

    def _end_answer(self) -> None:
        self._messages.append({"type": "http.response.body", "body": b"", "more_body": False})
        self._is_over = True


def pass_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are passed on."""
    return [(name, value) for name, value in headers if name not in OF_CONNECTION]
