"""The HTTP server: uvicorn with our protocol, on a socket that is bound before anything heavy is loaded.

On SIGTERM or SIGINT it stops accepting, lets open requests go on for `drain_s`, ends what is left with an error that
its clients see, and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from services.cli.ports import claim
from services.gateway.service import Service
from services.gateway.wire import Protocol

BACKLOG = 2048
LAST_WORDS_S = 5.0  # for the errors of a shutdown to be written


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        StartError: the address cannot be bound; names the process that holds it.
    """
    claim(host, port)
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        claim(host, port)  # somebody was faster: this names who
        raise
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return bound


class Server(uvicorn.Server):
    """Drains before it ends. `serving` is called when requests and signals are being taken."""

    def __init__(
        self, app: ASGIApp, service: Service, drain_s: float, serving: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=int(drain_s + LAST_WORDS_S) + 1,
            )
        )
        self._service, self._drain_s, self._serving = service, drain_s, serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, these are not raised again afterwards: having drained is a good end."""
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
        await super().startup(sockets)
        self._serving()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._service.shut)
        await super().shutdown(sockets)
        timer.cancel()
