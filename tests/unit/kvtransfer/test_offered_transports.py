"""Transports opened on demand: on the cores that were there at first, never in the way of closing; and why none is."""

from __future__ import annotations

import os
import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diptych.errors import TransferError
from diptych.messages import Opened
from kvtransfer.transports import links
from kvtransfer.transports.links import OfferedTransports, TransportLinks
from prefill_worker.late_transports import LateTransports

PATIENCE_S = 60


class FakeTransport:
    """A source that opens when `go` is set."""

    def __init__(self, go: threading.Event) -> None:
        self.begun, self.closed, self.go = threading.Event(), threading.Event(), go
        self.cores: set[int] = set()

    def begin(self, *_: Any) -> FakeTransport:
        self.cores = os.sched_getaffinity(0)
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return self

    def endpoint(self) -> bytes:
        return b"here"

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def go() -> threading.Event:
    return threading.Event()


@pytest.fixture
def late(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> FakeTransport:
    """What opens on demand; what does not is open at once."""
    late, at_once = FakeTransport(go), FakeTransport(threading.Event())
    at_once.go.set()
    monkeypatch.setitem(links.SOURCES, "shm", at_once.begin)
    monkeypatch.setitem(links.SOURCES, "nixl", late.begin)
    return late


def test_what_opens_later_does_not_run_on_the_core_that_computes(
    go: threading.Event, late: FakeTransport
) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core only")
    sources = OfferedTransports(["shm", "nixl"], [], "w-0")
    go.set()
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert sources.open_transport("nixl") == b"here"
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, cores)
    assert late.cores == cores
    assert sources.open_transport("nixl") == b"here" and sources.endpoints() == {
        "shm": b"here",
        "nixl": b"here",
    }


def test_closing_does_not_wait_for_a_transport_that_hangs(go: threading.Event, late: FakeTransport) -> None:
    sources, refused = OfferedTransports(["shm", "nixl"], [], "w-0"), threading.Event()

    def open_late() -> None:
        with pytest.raises(TransferError):
            sources.open_transport("nixl")
        refused.set()

    opener = threading.Thread(target=open_late, daemon=True)
    opener.start()
    assert late.begun.wait(PATIENCE_S)
    closer = threading.Thread(target=sources.close, daemon=True)
    closer.start()
    closer.join(10)
    closed = not closer.is_alive()
    go.set()
    opener.join(PATIENCE_S)
    assert closed and refused.is_set() and late.closed.is_set()


def test_whatever_a_library_raises_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def fail(transport: str) -> bytes:
        raise RuntimeError("no such device")

    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    LateTransports(fail, reports.put).start_opening("nixl")
    assert reports.get(timeout=PATIENCE_S) == Opened("nixl", b"", "RuntimeError('no such device')")
    assert "could not be opened" in caplog.text


@pytest.mark.parametrize(("devices", "named"), [("lo", True), ("eth0", False)])
def test_a_worker_on_loopback_learns_how_to_reach_other_hosts(
    monkeypatch: pytest.MonkeyPatch, devices: str, named: bool
) -> None:
    def link_task(*_: Any) -> Any:
        raise TransferError("no answer", "timed out")

    monkeypatch.setitem(links.PULLERS, "nixl", lambda *_: cast(Any, SimpleNamespace(link_task=link_task)))
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    own = TransportLinks(["nixl"], cast(Any, None))
    with pytest.raises(TransferError) as caught:
        own.link_worker("w-1", "1", {"nixl": b"there"})
    assert ("--advertise-host" in caught.value.why) is named
