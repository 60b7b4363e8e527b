"""What a front forwards: an answer only as fast as its client reads, and bodies that nobody asks for first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Message

from services.gateway.fronts.forwarding import Forwarder, refuse_lost
from services.gateway.fronts.frame_link import new_address, open_unix_listener
from services.gateway.http.connection import CONNECTION_EXTENSION, ClientStalled
from services.gateway.http.request_id import RequestIdMiddleware
from services.gateway.metrics.prometheus import GatewayMetrics

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class StalledConnection:
    """A client that takes the head of an answer, and one part of its body."""

    num_writes, aborted = 0, False

    async def wait_drained(self) -> None:
        self.num_writes += 1
        if self.num_writes > 2:
            raise ClientStalled

    def abort(self) -> None:
        self.aborted = True


@asynccontextmanager
async def relay(answer: Answer) -> AsyncIterator[str]:
    """The address of a server that answers so."""
    address = new_address("test")
    server = await asyncio.start_unix_server(answer, sock=open_unix_listener(address))
    yield address
    server.close()


def refusal() -> ASGIApp:
    return RequestIdMiddleware(refuse_lost, GatewayMetrics(), frozenset({"/f"}))


async def forward(address: str, headers: list[tuple[bytes, bytes]], **extensions: Any) -> list[Message]:
    """What a client is sent whose whole body is `body`."""
    sent, parts = list[Message](), [{"type": "http.request", "body": b"body", "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/f", "raw_path": b"/f", "headers": headers}
    async with asyncio.timeout(30):
        await Forwarder(address, refusal())({**scope, "extensions": extensions}, receive, send)
    return sent


async def test_nothing_is_written_to_a_client_that_has_stalled() -> None:
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1 << 30))
        try:
            while True:
                writer.write(b"x" * (1 << 16))
                await writer.drain()
        except ConnectionError:
            ended.set()
        writer.close()

    connection = StalledConnection()
    async with relay(answer) as address:
        sent = await forward(address, [], **{CONNECTION_EXTENSION: connection})
        async with asyncio.timeout(30):
            await ended.wait()
    assert [one["type"] for one in sent] == ["http.response.start", "http.response.body"]
    assert connection.aborted


async def test_a_body_waits_for_no_answer_unless_the_client_does() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(4) == b"body"
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with relay(answer) as address:
        sent = await forward(address, [(b"content-length", b"4"), (b"expect", b"something else")])
    assert sent[0]["status"] == 204


async def test_a_refusal_has_a_request_id() -> None:
    start, body, *_ = await forward(new_address("test"), [])
    assert start["status"] == 503 and b"relay has ended" in body["body"]
    assert dict(start["headers"])[b"x-request-id"].startswith(b"req")
