"""Chooses the network interface on which a worker's KV transfers (UCX) listen."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

from diptych.errors import ConfigError
from services.host.child_environment import ucx_on_loopback

# The environment variable with the network devices of UCX, which NIXL uses.
UCX_DEVICES = "UCX_NET_DEVICES"


def ucx_listen_environment(environ: Mapping[str, str], address: str | None) -> dict[str, str]:
    """Environment for a worker that other machines reach at `address`: UCX listens only on the interface with it.

    Without an address UCX listens on the loopback interface only. A `UCX_NET_DEVICES` set by the operator is kept.

    Raises:
        ConfigError: no interface of this machine has this address.
    """
    if address is None or UCX_DEVICES in environ:
        return ucx_on_loopback(environ)
    return {UCX_DEVICES: interface_of_address(address)} | dict(environ)


def interface_of_address(address: str) -> str:
    """The network interface that has `address`, a name or an IP address.

    Raises:
        ConfigError: no interface has this address.
    """
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError:
        wanted = set()
    for name, addresses in psutil.net_if_addrs().items():
        if wanted & {at.address.partition("%")[0] for at in addresses}:
            return str(name)
    raise ConfigError(
        f"--advertise-host {address} is not an address of this machine",
        f"it resolves to {', '.join(sorted(wanted)) or 'nothing'}, which no network interface has",
        f"give an address of this machine, or name the devices for KV in {UCX_DEVICES}",
    )
