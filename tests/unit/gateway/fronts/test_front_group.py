"""The relay's process and its fronts: what becomes of the port while they drain."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.fronts.front_group import FrontGroup
from tests.support.gateway_process import specification


async def test_who_comes_while_fronts_drain_is_refused(tmp_path: Any) -> None:
    service: Any = SimpleNamespace(fronts=None, draining=False)
    pipe: Any = None
    with socket.create_server(("127.0.0.1", 0)) as bound:
        group = FrontGroup(specification(tmp_path, gateways=1), service, None, bound, pipe)
        address, may_end = bound.getsockname(), asyncio.Event()
        loop = asyncio.get_running_loop()

        class Draining:
            """A front that has closed the port and still has a stream."""

            def stop(self, grace_s: float) -> None:
                asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(grace_s)

        group._supervisors = [Draining()]  # type: ignore[list-item]
        stopping = asyncio.create_task(group.stop(30.0))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 5)
        assert not stopping.done()
        may_end.set()
        await stopping
    group._link_listener.close()
    group.listener.close()
