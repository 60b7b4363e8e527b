"""A health check of a worker's container: exit status 0 if a process here is connected to the gateway's channel.

    python -m services.host.channel_probe

The channel is that of `DIPTYCH_CHANNEL`. Only the kernel's table of connections is read, nothing is sent: the gateway
admits workers alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED = "01"


def is_connected(port: int, tables: Iterable[Path] = TABLES) -> bool:
    """Whether a TCP connection to `port` of some host is established from this network namespace."""
    for table in tables:
        lines = table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else []
        for line in lines:
            # The columns are: number, local address, remote address, state. Ports are hexadecimal.
            _, _, remote, state, *_ = line.split()
            if state == ESTABLISHED and int(remote.rpartition(":")[2], 16) == port:
                return True
    return False


def main(environ: Mapping[str, str] = os.environ) -> int:
    """The exit status: 0 connected, 1 not, 2 there is no channel to look for."""
    port = urlsplit(environ.get("DIPTYCH_CHANNEL", "")).port
    if port is None:
        print("error: DIPTYCH_CHANNEL names no channel such as tcp://gateway:5700", file=sys.stderr)
        return 2
    if not is_connected(port):
        print(f"not connected to the gateway's channel (port {port})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
