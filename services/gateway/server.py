"""Runs the HTTP server: uvicorn with Diptych's connection class, on a socket that is bound before the model is loaded.

On SIGTERM or SIGINT the server stops accepting connections and lets open requests continue for `drain_s` seconds. It
then ends the remaining requests with an error that their clients see, and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from diptych.file_limits import raise_open_file_limit
from services.gateway.http.access_keys import AccessKeys
from services.gateway.http.connection import KEEP_ALIVE_S, HttpConnection
from services.gateway.http.connection_table import ConnectionTable, max_open_connections
from services.gateway.http.stranger_pacing import HANDSHAKE_INTERVAL_S, StrangerPacing
from services.gateway.service import GatewayService
from services.gateway.tls.tls_layer import CertificateSource, TlsLayer
from services.host.ports import claim_port

MAX_CONNECTIONS = 4096
MAX_BACKLOG = 2048
# Connections that are accepted in one round of the event loop: uvloop accepts one for each listening socket.
LISTENING_DESCRIPTORS = 16
# The backlog's share of the descriptor limit. A whole backlog may be accepted at once.
BACKLOG_SHARE = 0.125
# Seconds that a shutdown waits until clients have been sent their errors.
ERROR_FLUSH_S = 5.0


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket for `host` and `port`.

    Raises:
        StartError: the address cannot be bound; the error names the process that holds it.
    """
    claim_port(host, port)
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        # Raises an error that names the process which has bound the port meanwhile.
        claim_port(host, port)
        raise
    bound.listen(backlog_size(raise_open_file_limit()))
    bound.setblocking(False)
    return bound


def backlog_size(descriptors: int) -> int:
    """How many connections may wait to be accepted by a process that may have `descriptors` open files."""
    return max(1, min(MAX_BACKLOG, int(descriptors * BACKLOG_SHARE)))


def secure_connections(
    make_connection: Callable[..., asyncio.Protocol], certificates: CertificateSource
) -> Callable[..., asyncio.Protocol]:
    """What makes a connection like `make_connection` does, within TLS."""
    handshakes = StrangerPacing(HANDSHAKE_INTERVAL_S)

    def make_secure(*arguments: Any, **named: Any) -> asyncio.Protocol:
        return TlsLayer(make_connection(*arguments, **named), certificates, handshakes)

    return make_secure


class GatewayServer(uvicorn.Server):
    """A uvicorn server that drains before it ends. It calls `serving` once it takes requests and handles signals."""

    connection_class: type[HttpConnection] = HttpConnection

    def __init__(
        self,
        app: ASGIApp,
        service: GatewayService,
        drain_s: float,
        serving: Callable[[], None] = lambda: None,
        max_connections: int = MAX_CONNECTIONS,
        keys: AccessKeys | None = None,
        certificates: CertificateSource | None = None,
    ) -> None:
        """At most `max_connections` are open at a time, or fewer if the process has not enough descriptors.

        `keys` tell clients from strangers; without any, all are clients. With `certificates` it speaks HTTPS.
        """
        descriptors = raise_open_file_limit()
        self.connections = ConnectionTable(max_open_connections(max_connections, descriptors))
        make_connection: Callable[..., asyncio.Protocol] = functools.partial(
            self.connection_class,
            connections=self.connections,
            keys=keys or AccessKeys(),
            strangers=StrangerPacing(),
        )
        if certificates is not None:
            make_connection = secure_connections(make_connection, certificates)
        super().__init__(
            uvicorn.Config(
                app,
                http=make_connection,  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=backlog_size(descriptors),
                timeout_graceful_shutdown=int(drain_s + ERROR_FLUSH_S) + 1,
            )
        )
        self._service, self._drain_s, self._serving = service, drain_s, serving
        self._duplicates: list[socket.socket] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM. Unlike uvicorn, do not raise them again: a drained server exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, with `LISTENING_DESCRIPTORS` descriptors for each socket.

        uvloop accepts one connection per descriptor in a round of the event loop. With a single descriptor, a client
        that comes together with many others would wait one round for each of them.
        """
        self._duplicates = [bound.dup() for bound in sockets or [] for _ in range(LISTENING_DESCRIPTORS - 1)]
        await super().startup([*sockets, *self._duplicates] if sockets else sockets)
        self._serving()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and wait until all open requests have ended.

        Requests still open after `drain_s` seconds end with an error that their clients see.
        """
        self._service.draining = True
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._service.end_generations)
        await super().shutdown([*(sockets or []), *self._duplicates])
        timer.cancel()
