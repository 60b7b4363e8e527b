"""How a listening gateway takes connections."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import uvloop
from starlette.types import Receive, Scope, Send

from services.gateway.server import GatewayServer, open_listener

CROWD = 64


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
