"""How a listening gateway takes connections."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from services.gateway.http import connection_table
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
