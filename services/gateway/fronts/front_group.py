"""The fronts of a gateway with `--gateways N`: the relay's process starts them, and starts them again when they end.

    one listening socket ─┬─▶ front 0 ─┐
                          └─▶ front 1 ─┴─ Unix sockets ─▶ relay's process: queue, routing, batches, metrics, /status

All fronts accept from one socket, which the relay's process keeps open: nobody who comes while a front starts again is
refused. The relay's process itself answers fronts alone, which forward what is not theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp

from diptych.process import SupervisorPipe
from diptych.specs import GatewaySpec
from services.gateway.fronts.frame_link import new_address, open_unix_listener, refuse_other_user
from services.gateway.fronts.front_peer import FrontPeer
from services.gateway.fronts.merged_metrics import CountSums, MergedRegistry
from services.gateway.http.access_keys import AccessKeys
from services.gateway.http.connection import HttpConnection
from services.gateway.http.stranger_pacing import StrangerPacing
from services.gateway.keys.key_watch import KeyFileWatch
from services.gateway.server import GatewayServer
from services.gateway.service import GatewayService
from services.host.supervision.supervisor import Supervisor, start_error

FRONT_MODULE = "services.gateway.fronts"
STOP_GRACE_S = 1.0
STATUS_WAIT_S = 1.0
# Seconds between two looks at what a front has counted, which is all that is lost if it is killed; and how long an
# answer to `/metrics` waits for it.
COUNT_INTERVAL_S, COUNT_WAIT_S = 2.0, 0.5

log = logging.getLogger(__name__)


class FrontConnection(HttpConnection):
    """A connection of a front, which has paced strangers already. Those of other users are reset."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "strangers": StrangerPacing(0.0)})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless the other end is another user's."""
        super().connection_made(transport)
        if refuse_other_user(transport):
            self.abort()


class RelayServer(GatewayServer):
    """The HTTP server of the relay's process. It drains once the fronts have."""

    connection_class = FrontConnection

    def __init__(self, fronts: FrontGroup, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._fronts = fronts

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the fronts, each when its requests have ended, and then this server."""
        self._service.draining = True
        await self._fronts.stop(self._drain_s + STOP_GRACE_S)
        await super().shutdown(sockets)


class FrontGroup:
    """The fronts of one gateway."""

    def __init__(
        self,
        spec: GatewaySpec,
        service: GatewayService,
        key_watch: KeyFileWatch | None,
        bound: socket.socket,
        pipe: SupervisorPipe,
    ) -> None:
        """`bound` listens for clients. `pipe` is told when the first fronts are ready.

        Raises:
            StartError: this system has no Unix sockets.
        """
        self._spec, self._service, self._key_watch, self._pipe = spec, service, key_watch, pipe
        self._bound = bound
        self._link_address, self._http_address = new_address("relay"), new_address("http")
        self._link_listener, self.listener = map(open_unix_listener, (self._link_address, self._http_address))
        self._peers: dict[str, FrontPeer] = {}
        # What fronts that are gone had counted.
        self._past = CountSums()
        service.fronts = self
        self._supervisors = [self._supervise(f"front-{number}", bound) for number in range(spec.gateways)]
        cores = len(os.sched_getaffinity(0))
        if spec.gateways > cores:
            log.warning(
                "%d processes take HTTP (--gateways), and this machine has %d cores", spec.gateways, cores
            )

    def _supervise(self, name: str, bound: socket.socket) -> Supervisor:
        spec = self._spec
        share = max(1, -(-spec.max_connections // spec.gateways))
        addresses = (address.removeprefix("\0") for address in (self._link_address, self._http_address))
        return Supervisor(
            name,
            [sys.executable, "-m", FRONT_MODULE, name, str(bound.fileno()), *addresses],
            msgspec.json.encode(msgspec.structs.replace(spec, max_connections=share)),
            pass_fds=[bound.fileno()],
        )

    def make_server(self, app: ASGIApp, keys: AccessKeys) -> RelayServer:
        """The server of the relay's process, which listens on `listener`."""
        spec = self._spec
        return RelayServer(self, app, self._service, spec.drain_s, lambda: None, spec.max_connections, keys)

    def chores(self) -> list[Coroutine[Any, Any, None]]:
        """What runs until it is cancelled."""
        return [self._serve_links(), self._watch_starts(), self._count_forever()]

    async def stop(self, grace_s: float) -> None:
        """End all fronts, and kill those that take longer. New clients are refused meanwhile. Idempotent."""
        loop = asyncio.get_running_loop()
        # The event loop's own threads may be fewer, and then some would drain after others.
        with ThreadPoolExecutor(len(self._supervisors)) as threads:
            stops = [loop.run_in_executor(threads, one.stop, grace_s) for one in self._supervisors]
            # Fronts close theirs at once. With this one open, who comes would wait until the last stream has ended.
            self._bound.close()
            await asyncio.gather(*stops)

    def add_peer(self, peer: FrontPeer) -> None:
        """A front has joined; a former life of it is gone."""
        if (before := self._peers.get(peer.name)) is not None:
            before.link.close()
        self._peers[peer.name] = peer

    def remove_peer(self, peer: FrontPeer) -> None:
        """A front is gone."""
        if not self._service.draining:
            self._service.metrics.fronts_lost.inc()
        self._past.add(peer.counts.samples)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]

    @property
    def num_open(self) -> int:
        """HTTP requests that the fronts generate, as they last said."""
        return sum(peer.counts.num_open for peer in self._peers.values())

    def report(self) -> list[dict[str, Any]]:
        """The part of `/status` about the fronts."""
        found = []
        for supervisor in self._supervisors:
            status, peer = supervisor.status(), self._peers.get(supervisor.name)
            found.append(
                {
                    "name": status.name,
                    "state": status.state,
                    "pid": status.pid,
                    "restarts": status.restarts,
                    "sequences": 0 if peer is None else len(peer.open),
                }
            )
        return found

    async def refresh_counts(self) -> None:
        """Ask all fronts what they have counted."""
        await asyncio.gather(*(peer.ask_counts(COUNT_WAIT_S) for peer in list(self._peers.values())))

    async def render_metrics(self, registry: CollectorRegistry) -> bytes:
        """The body of `/metrics`: what all processes have counted."""
        await self.refresh_counts()
        sums = self._past.copy()
        for peer in self._peers.values():
            sums.add(peer.counts.samples)
        return generate_latest(MergedRegistry(registry, sums, self.num_open))

    async def _serve_links(self) -> None:
        """Take the links of fronts, and keep them informed."""

        def make_link() -> asyncio.Protocol:
            return FrontPeer(self._service, self._key_watch, self).link

        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(make_link, sock=self._link_listener)
        try:
            while True:
                await asyncio.sleep(self._spec.beat_s)
                for peer in list(self._peers.values()):
                    peer.send_state(is_beat=True)
        finally:
            server.close()

    async def _watch_starts(self) -> None:
        """Start the fronts, and say when all are ready. Raises DiptychError if one cannot be started."""
        for supervisor in self._supervisors:
            supervisor.start()
        for supervisor in self._supervisors:
            status = supervisor.status()
            while status.state not in ("ready", "failed", "stopped"):
                status = await asyncio.to_thread(supervisor.wait_status, status.version, STATUS_WAIT_S)
            if status.state == "failed":
                raise start_error(status)
        self._pipe.report_progress("ready")

    async def _count_forever(self) -> None:
        while True:
            await asyncio.sleep(COUNT_INTERVAL_S)
            await self.refresh_counts()
