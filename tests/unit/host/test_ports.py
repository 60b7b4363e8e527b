"""What is said of an address that cannot be listened on names the setting that it is from."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from diptych.errors import StartError
from services.host import ports
from services.host.ports import claim_port, format_channel


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port_of_a_channel_is_fixed_by_another_channel(busy: int) -> None:
    with pytest.raises(StartError) as caught:
        claim_port("127.0.0.1", busy, "--channel", channel=True)
    assert "use --channel tcp://127.0.0.1:" in caught.value.fix and "--port" not in caught.value.fix
    with pytest.raises(StartError) as caught:
        claim_port("127.0.0.1", busy)
    assert "use --port " in caught.value.fix


@pytest.mark.parametrize("host", ["192.0.2.77", "no.such.host.invalid"])
def test_a_channel_on_another_host_is_not_fixed_by_the_host_of_http(host: str) -> None:
    with pytest.raises(StartError) as caught:
        claim_port(host, 0, "--channel", channel=True)
    assert "--channel tcp://" in caught.value.fix and "--host" not in caught.value.fix


def test_a_port_that_needs_privileges_is_fixed_by_the_same_setting() -> None:
    refused = OSError(13, "Permission denied")
    assert ports._port_error("fd00::1", 80, refused, "", True).fix == "--channel tcp://[fd00::1]:5700"
    assert ports._port_error("10.0.0.1", 80, refused, "", False).fix == "--port 8000"


def test_an_ipv6_address_is_in_brackets() -> None:
    assert format_channel("fd00::1", 5700) == "tcp://[fd00::1]:5700"
    assert format_channel("gateway", 5700) == "tcp://gateway:5700"
