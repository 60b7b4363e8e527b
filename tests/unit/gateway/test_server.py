"""How a listening gateway takes connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from services.gateway.http import connection_table
from services.gateway.http.access_keys import AccessKeys, BearerKeys
from services.gateway.server import GatewayServer, open_listener

CROWD = 64
LARGE = 2 << 20


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Nobody asks."""


def test_a_crowd_that_connects_is_taken_in_a_few_rounds_of_the_event_loop() -> None:
    async def rounds() -> int:
        """Rounds of the loop that `CROWD` connections take."""
        bound, listening = open_listener("127.0.0.1", 0), asyncio.Event()
        service = SimpleNamespace(draining=False, end_generations=lambda: None)
        server = GatewayServer(nothing, service, 0.1, listening.set)  # type: ignore[arg-type]
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        await listening.wait()
        address = bound.getsockname()
        crowd = [socket.create_connection(address, timeout=10) for _ in range(CROWD)]
        count = 0
        while len(server.connections) < CROWD and count < 10 * CROWD:
            await asyncio.sleep(0)
            count += 1
        for one in crowd:
            one.close()
        server.should_exit = True
        await serving
        with socket.socket() as late:  # no twin of the socket listens on
            assert late.connect_ex(address) != 0
        return count

    assert uvloop.run(rounds()) < CROWD // 2


async def answer_at_length(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer that is written at once, as lists of files and batches are."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(LARGE)})


def test_answers_that_nobody_reads_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_table, "MAX_UNSENT_BYTES", 4 * LARGE)

    async def most_bytes() -> int:
        """The most bytes that wait in the server for clients that do not read."""
        bound, listening = open_listener("127.0.0.1", 0), asyncio.Event()
        service = SimpleNamespace(draining=False, end_generations=lambda: None)
        server = GatewayServer(answer_at_length, service, 0.1, listening.set)  # type: ignore[arg-type]
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        await listening.wait()
        waiting, most = list[socket.socket](), 0
        for _ in range(12):
            waiting.append(one := socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(one, bound.getsockname())
            await loop.sock_sendall(one, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(0.05)
            connections = list(server.connections._entries)
            most = max(most, sum(one.unsent_bytes() for one in connections))  # type: ignore[attr-defined]
        for one in waiting:
            one.close()
        server.should_exit = True
        await serving
        return most

    assert LARGE < uvloop.run(most_bytes()) <= 4 * LARGE


KEY = "sk-" + "k" * 40
HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
# Ends of a head, with a whole request and with one whose body is missing.
WHOLE, HALF = b"\r\n", b"content-length: 1\r\n\r\n"


def read_now(connection: socket.socket) -> bytes:
    """What has been sent to a socket so far, or how it has ended."""
    try:
        return connection.recv(4096) or b"closed"
    except BlockingIOError:
        return b""
    except ConnectionResetError:
        return b"reset"


@asynccontextmanager
async def full_of_requests(keys: AccessKeys) -> AsyncIterator[Callable[..., Awaitable[socket.socket]]]:
    """A server with 8 places that answers nobody: neither the application nor `AuthMiddleware` looks at a request.

    Yields a function that sends a request, over a new connection from an address, and returns once it has arrived.
    """
    num_seen, opened = 0, list[socket.socket]()

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_seen
        num_seen += 1
        await asyncio.Event().wait()

    bound, listening = open_listener("127.0.0.1", 0), asyncio.Event()
    service = SimpleNamespace(draining=False, end_generations=lambda: None)
    server = GatewayServer(hang, service, 0.1, listening.set, 8, keys)  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    await listening.wait()

    async def come(request: bytes, address: str = "127.0.0.1") -> socket.socket:
        one, number, loop = socket.socket(), num_seen, asyncio.get_running_loop()
        opened.append(one)
        one.setblocking(False)
        one.bind((address, 0))
        await loop.sock_connect(one, bound.getsockname())
        await loop.sock_sendall(one, HEAD + request)
        async with asyncio.timeout(30):
            while num_seen == number:
                await asyncio.sleep(0.005)
        return one

    try:
        yield come
    finally:
        for one in opened:
            one.close()
        for task in list(server.server_state.tasks):
            task.cancel()
        server.should_exit = True
        await serving


@pytest.mark.parametrize("end", [WHOLE, HALF])
def test_a_key_counts_from_the_head_on_before_anybody_looks_at_the_request(end: bytes) -> None:
    """Strangers hold all places; a client with a key comes in, and stays while they come again at once."""

    async def play() -> tuple[int, bytes]:
        """How many strangers were cut, and what the client has read when 24 more have come."""
        async with full_of_requests(AccessKeys(BearerKeys([KEY]))) as come:
            strangers = [await come(WHOLE) for _ in range(8)]
            client = await come(f"authorization: Bearer {KEY}\r\n".encode() + end)
            strangers += [await come(WHOLE) for _ in range(24)]
            return sum(read_now(one) == b"reset" for one in strangers), read_now(client)

    assert uvloop.run(play()) == (25, b"")


def test_without_keys_the_address_with_the_most_requests_makes_room() -> None:
    async def play() -> list[bytes]:
        """What two clients have read when 30 have come from one address."""
        async with full_of_requests(AccessKeys()) as come:
            clients = [await come(HALF, address) for address in ("127.0.0.2", "127.0.0.3")]
            for _ in range(30):
                await come(HALF)
            return [read_now(one) for one in clients]

    assert uvloop.run(play()) == [b"", b""]
