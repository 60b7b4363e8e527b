"""What is said of an address that cannot be listened on names the setting that it is from."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.errors import StartError
from services.host import ports
from services.host.ports import (
    LOWEST_PORT,
    MAX_TRIES,
    choose_ports,
    claim_port,
    format_channel,
    read_given_ports,
)


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


def test_a_chosen_port_is_none_that_the_kernel_gives_to_others() -> None:
    """Such a port would be taken by any connection that is made before its process binds it."""
    given = read_given_ports()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in given, "those who name none get theirs from here"
    chosen = {claim_port("127.0.0.1", 0) for _ in range(20)}
    assert len(chosen) > 1 and min(chosen) >= LOWEST_PORT
    if len(given) < 40_000:
        assert not chosen & set(given)


def test_ports_are_chosen_from_what_is_left() -> None:
    assert choose_ports(range(65536)) == []
    assert choose_ports(range(1, 65535)) == [65535]
    many = choose_ports(range(32768, 61000))
    assert len(set(many)) == MAX_TRIES and all(LOWEST_PORT <= port < 32768 or port > 60999 for port in many)


def test_where_all_ports_are_given_to_others_the_kernel_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for shown in ("1024 65535", "not a range"):
        (tmp_path / "range").write_text(shown)
        monkeypatch.setattr(ports, "_GIVEN_PORTS", tmp_path / "range")
        assert claim_port("127.0.0.1", 0) > 1023
    monkeypatch.setattr(ports, "_GIVEN_PORTS", tmp_path / "nothing")
    assert claim_port("127.0.0.1", 0) > 1023


def test_a_chosen_port_that_is_busy_is_passed_over(monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
    def choose(_: range) -> list[int]:
        return [busy, 61_234]

    monkeypatch.setattr(ports, "choose_ports", choose)
    assert claim_port("127.0.0.1", 0) != busy
