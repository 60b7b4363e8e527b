"""Connections that are open while a test looks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

WAIT_S = 90.0  # far beyond what anything takes


@contextlib.contextmanager
def held(
    port: int, count: int, behave: Callable[[socket.socket], None], receive_bytes: int | None = None
) -> Iterator[list[socket.socket]]:
    """So many connections to this port, each of which has behaved so."""
    with contextlib.ExitStack() as opened:
        connections = []
        for _ in range(count):
            connection = opened.enter_context(socket.socket())
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.settimeout(WAIT_S)
            connection.connect(("127.0.0.1", port))
            behave(connection)
            connections.append(connection)
        yield connections


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
