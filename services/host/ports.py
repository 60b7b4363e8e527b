"""Checks whether an address can be listened on, and names the process that occupies it."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

import psutil

from diptych.errors import StartError

# The lowest port that is chosen, and how many are tried before the kernel chooses.
LOWEST_PORT, MAX_TRIES = 20_000, 32
# "LOW HIGH": the kernel gives outgoing connections, and servers that bind port 0, ports between these.
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def format_channel(host: str, port: int) -> str:
    """The address of a channel, tcp://HOST:PORT; an IPv6 address is put in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def claim_port(host: str, port: int, origin: str = "--port", *, channel: bool = False) -> int:
    """Check that `host`:`port` can be bound, and return the port; port 0 gives a free one.

    Nothing holds the port after this. So a free one is chosen where the kernel takes none from, if there are such: else
    any outgoing connection might get it before its process binds it, or while that process starts again.

    `channel`: it is the address of --channel, which a fix then names in place of --host and --port.

    Raises:
        StartError: the port is in use (the error names the process), needs privileges, or the host is not this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartError(
            f"the host {host!r} is not known", error.strerror or str(error), _host_fix(channel)
        ) from None
    if port == 0:
        for chosen in choose_ports(read_given_ports()):
            if _port_is_free(str(address[0]), chosen):
                return chosen
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise _port_error(host, port, error, origin, channel) from None
        return int(probe.getsockname()[1])


def read_given_ports() -> range:
    """The ports that the kernel gives to those who name none; all where the system does not say."""
    try:
        low, high = map(int, _GIVEN_PORTS.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return range(65536)
    return range(low, high + 1)


def choose_ports(given: range) -> list[int]:
    """At most `MAX_TRIES` ports at random, from `LOWEST_PORT` on, that are not in `given`."""
    others = [port for port in range(LOWEST_PORT, 65536) if port not in given]
    return random.SystemRandom().sample(others, min(MAX_TRIES, len(others)))


def _host_fix(channel: bool) -> str:
    """What names an address of this machine."""
    if channel:
        return "name an address of this machine: --channel tcp://ADDRESS:PORT; or leave it out"
    return "--host 127.0.0.1"


def _port_fix(host: str, port: int, channel: bool) -> str:
    """What names another port."""
    return f"--channel {format_channel(host, port)}" if channel else f"--port {port}"


def _port_error(host: str, port: int, error: OSError, origin: str, channel: bool) -> StartError:
    """The error for a port that cannot be bound, with a free port as the fix. `origin` says where the port was set."""
    if error.errno == errno.EADDRINUSE:
        held = port_holder(port) or "a process of another user holds it"
        free = next(
            (other for other in range(port + 1, min(port + 50, 65536)) if _port_is_free(host, other)), None
        )
        other = _port_fix(host, free, channel) if free else "another port"
        return StartError(f"port {port} on {host} is in use", f"{held} (the port is from {origin})",
                          f"stop that process, or use {other}")  # fmt: skip
    if error.errno == errno.EACCES:
        fix = _port_fix(host, 5700 if channel else 8000, channel)
        return StartError(f"port {port} needs privileges", "ports below 1024 are reserved", fix)
    return StartError(f"cannot listen on {host}:{port}", error.strerror or str(error), _host_fix(channel))


def _port_is_free(host: str, port: int) -> bool:
    """Whether the port can be bound now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def port_holder(port: int) -> str:
    """ "process 123 holds it: python -m services.gateway" for the process that listens on `port`; "" if not visible."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listens and connection.pid:
                return f"process {connection.pid} holds it: {_program_name(psutil.Process(connection.pid))}"
    return ""


def _program_name(process: psutil.Process) -> str:
    """The program's name and the module that Python runs; other arguments are left out, as they may hold secrets."""
    name, words = process.name(), process.cmdline()
    module = words[2:3] if name.startswith("python") and words[1:2] == ["-m"] else []
    return " ".join([name, "-m", *module] if module else [name])
