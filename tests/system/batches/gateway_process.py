"""Which process of a deployment is its gateway."""

from __future__ import annotations

import contextlib

import psutil

from tests.support.deployment import Served


def gateway_pid(served: Served) -> int | None:
    """The process of the gateway: that which listens. None while there is none."""
    port = int(served.url.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            listens = [one.laddr.port for one in process.net_connections("tcp") if one.status == "LISTEN"]
            if port in listens:
                return int(process.pid)
    return None
