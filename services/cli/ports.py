"""Whether an address can be listened on, and who is in the way."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from diptych.errors import StartError

SHOWN = 100  # characters of a command line in a message


def claim(host: str, port: int, origin: str = "--port") -> int:
    """Check that `host`:`port` can be bound now; returns the port, a free one for 0.

    Raises:
        StartError: it is in use (naming the process that holds it), not ours to bind, or not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartError(
            f"the host {host!r} is not known", error.strerror or str(error), "--host 127.0.0.1"
        ) from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise _refused(host, port, error, origin) from None
        return int(probe.getsockname()[1])


def _refused(host: str, port: int, error: OSError, origin: str) -> StartError:
    if error.errno == errno.EADDRINUSE:
        held = holder(port) or "a process of another user holds it"
        free = next((other for other in range(port + 1, min(port + 50, 65536)) if _free(host, other)), None)
        other = f"--port {free}" if free else "another --port"
        return StartError(f"port {port} on {host} is in use", f"{held} (the port is from {origin})",
                          f"stop that process, or use {other}")  # fmt: skip
    if error.errno == errno.EACCES:
        return StartError(f"port {port} needs privileges", "ports below 1024 are reserved", "--port 8000")
    return StartError(f"cannot listen on {host}:{port}", error.strerror or str(error), "--host 127.0.0.1")


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def holder(port: int) -> str:
    """ "process 123 holds it: command line" for the process that listens on `port`; "" when it cannot be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} holds it: {command[:SHOWN]}"
    return ""
