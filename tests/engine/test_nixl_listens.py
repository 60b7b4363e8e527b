"""NIXL listens on a port that gives memory away: it is opened when somebody needs it, and where it was asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from diptych.errors import ConfigError, TransferError
from kvcache.layout import KvLayout, split_layout
from kvtransfer.resharding import unsharded_pool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.transports import links
from kvtransfer.transports.links import OfferedTransports, TransportLinks, TransportNotOpen
from services.host.child_environment import ucx_on_loopback
from services.host.network import UCX_DEVICES, interface_of_address, ucx_listen_environment

ROOT = Path(__file__).parents[2]
LAYOUT = KvLayout(2, 2, 8, "float32")
OPEN = """
import psutil, sys
from kvcache.layout import KvLayout, split_layout
from kvtransfer.transports.links import OfferedTransports
from kvtransfer.shared_memory import SharedMemory
layout = KvLayout(2, 2, 8, "float32")
part = split_layout(layout, 1, 1)[0], SharedMemory(4 * layout.chunk_bytes)
sources = OfferedTransports(("shm", "nixl"), [part], "p")
def listening():
    return sorted(c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN)
print(listening())
assert sources.open_transport("nixl")
print(listening())
"""


def listening(environ: dict[str, str]) -> list[str]:
    """Addresses that a prefill worker listens on, before and after somebody has asked for NIXL."""
    result = subprocess.run(
        [sys.executable, "-c", OPEN], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith("[")]


def test_a_worker_listens_nowhere_until_nixl_is_needed_and_then_on_loopback_alone() -> None:
    environ = ucx_listen_environment({k: v for k, v in os.environ.items() if not k.startswith("UCX_")}, None)
    before, after = listening(environ | {"UCX_TLS": "tcp,self"})
    assert before == "[]"
    assert "127.0.0.1" in after
    assert set(after.strip("[]").replace("'", "").split(", ")) == {"127.0.0.1"}


def test_a_worker_that_others_reach_listens_on_that_interface() -> None:
    assert interface_of_address("127.0.0.1") == "lo" == ucx_listen_environment({}, "127.0.0.1")[UCX_DEVICES]
    assert ucx_listen_environment({}, None) == ucx_on_loopback({}) == {UCX_DEVICES: "lo"}
    assert ucx_listen_environment({UCX_DEVICES: "mlx5_0:1"}, "192.0.2.7") == {UCX_DEVICES: "mlx5_0:1"}, (
        "the operator's"
    )
    for address in ("192.0.2.7", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match="is not an address of this machine"):
            interface_of_address(address)
    others = [name for name, at in psutil.net_if_addrs().items() if name != "lo" and at[0].family == 2]
    for name in others:
        assert interface_of_address(psutil.net_if_addrs()[name][0].address) == name


class Opening:
    """A transport that says when it is opened."""

    opened = 0

    def __init__(self, *_: object) -> None:
        type(self).opened += 1

    def endpoint(self) -> bytes:
        return b"reach me"

    def close(self) -> None: ...


def test_a_transport_on_demand_is_opened_once_somebody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Opening): ...

    monkeypatch.setitem(links.SOURCES, "nixl", Late)
    memory = SharedMemory(4 * LAYOUT.chunk_bytes)
    parts = [(split_layout(LAYOUT, 1, 1)[0], memory)]
    with closing(memory), closing(OfferedTransports(("shm", "nixl"), parts, "p")) as sources:
        endpoints = sources.endpoints()
        assert list(endpoints) == ["shm", "nixl"] and endpoints["shm"] and not endpoints["nixl"]
        assert Late.opened == 0
        assert (
            sources.open_transport("nixl")
            == sources.open_transport("nixl")
            == b"reach me"
            == sources.endpoints()["nixl"]
        )
        assert Late.opened == 1
        with pytest.raises(TransferError, match="not offered"):
            sources.open_transport("pigeon")
    memory = SharedMemory(4 * LAYOUT.chunk_bytes)
    with (
        closing(memory),
        closing(OfferedTransports(("nixl",), [(split_layout(LAYOUT, 1, 1)[0], memory)], "p")) as alone,
    ):
        assert alone.endpoints() == {"nixl": b"reach me"}, "there is no other to try first"


def test_who_reaches_no_open_transport_says_which_one_would_do() -> None:
    own = bytearray(4 * LAYOUT.chunk_bytes)
    with closing(TransportLinks(("shm", "nixl"), unsharded_pool(LAYOUT, memoryview(own)))) as ways:
        with pytest.raises(TransportNotOpen) as caught:
            ways.link_worker("prefill-0", "life", {"shm": b"of another host", "nixl": b""})
        assert caught.value.transport == "nixl" and "has not opened it" in caught.value.why
    with closing(TransportLinks(("shm",), unsharded_pool(LAYOUT, memoryview(own)))) as ways:
        with pytest.raises(TransferError) as refused:
            ways.link_worker("prefill-0", "life", {"shm": b"of another host", "nixl": b""})
        assert not isinstance(refused.value, TransportNotOpen)
