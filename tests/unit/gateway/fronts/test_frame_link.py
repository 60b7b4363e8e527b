"""Sockets between processes of the gateway: order, bounds, and whose they are."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from diptych.errors import StartError
from services.gateway.fronts import frame_link
from services.gateway.fronts.frame_link import (
    HEAD,
    FrameLink,
    connect_unix,
    new_address,
    open_unix_listener,
)
from services.gateway.fronts.wire import AskCounts, FrontMessage


class End:
    """One end of a link, and what it has received."""

    def __init__(self) -> None:
        self.received: list[FrontMessage] = []
        self.lost = asyncio.Event()
        self.news = asyncio.Event()
        self.link: FrameLink[AskCounts] = FrameLink(AskCounts, self.hear, self.lost.set)

    def hear(self, messages: Sequence[FrontMessage]) -> None:
        self.received += messages
        self.news.set()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    """Two ends that are connected."""
    ours, theirs = End(), End()
    address = new_address("test")
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: theirs.link, sock=open_unix_listener(address))
    await loop.create_unix_connection(lambda: ours.link, sock=await connect_unix(address))
    await asyncio.sleep(0)
    yield ours, theirs
    ours.link.close()
    theirs.link.close()
    await asyncio.gather(ours.lost.wait(), theirs.lost.wait())
    server.close()


async def test_what_is_said_in_one_round_is_one_frame_in_order(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    for number in range(1000):
        ours.link.send(AskCounts(number))
    await theirs.news.wait()
    assert theirs.received == [AskCounts(number) for number in range(1000)]
    ours.link.close()
    await theirs.lost.wait()
    theirs.link.send(AskCounts(0))  # nobody is there: dropped


@pytest.mark.parametrize("frame", [HEAD.pack(3) + b"\x93\x01\x02", HEAD.pack(frame_link.MAX_FRAME_BYTES + 1)])
async def test_what_cannot_be_read_ends_the_link(ends: tuple[End, End], frame: bytes) -> None:
    ours, theirs = ends
    theirs.link.data_received(frame)
    await ours.lost.wait()
    assert theirs.received == []


async def test_an_end_that_does_not_read_is_given_up(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(frame_link, "MAX_WAITING_BYTES", 1 << 16)
    assert theirs.link._transport is not None
    theirs.link._transport.pause_reading()
    while not ours.lost.is_set():
        for _ in range(100_000):
            ours.link.send(AskCounts(1 << 40))
        await asyncio.sleep(0)


async def test_who_connects_waits_while_too_many_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_link, "BACKLOG", 1)
    address, waiting = new_address("test"), list[asyncio.Task[socket.socket]]()
    with open_unix_listener(address) as listener:
        for _ in range(4):
            waiting.append(asyncio.create_task(connect_unix(address)))
            await asyncio.sleep(0)
        assert not all(one.done() for one in waiting), "the kernel takes more than it was told"
        accepted = [(await asyncio.get_running_loop().sock_accept(listener))[0] for _ in waiting]
        for one in (*accepted, *await asyncio.gather(*waiting)):
            one.close()
        monkeypatch.setattr(frame_link, "CONNECT_S", 0.0)
        full = [await connect_unix(address) for _ in range(2)]
        with pytest.raises(BlockingIOError):
            await connect_unix(address)
        monkeypatch.setattr(frame_link, "CONNECT_S", 10.0)
        given_up = asyncio.create_task(connect_unix(address))
        await asyncio.sleep(0)
        given_up.cancel()
        # A socket that stays open would be a warning, and so an error.
        with pytest.raises(asyncio.CancelledError):
            await given_up
        for one in full:
            one.close()


async def test_what_was_sent_is_there_when_the_link_ends_after_a_flush(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    ours.link.send(AskCounts(7))
    await ours.link.flush(30.0)
    ours.link.close()
    await theirs.lost.wait()
    assert theirs.received == [AskCounts(7)]


async def test_a_process_of_another_user_is_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    address, end = new_address("test"), End()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: end.link, sock=open_unix_listener(address))
    connection = await connect_unix(address)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConnectionRefusedError, match="another user"):
        await connect_unix(address)
    await end.lost.wait()
    assert end.received == []
    with connection:
        assert await asyncio.to_thread(reads_an_end, connection)
    server.close()


def reads_an_end(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_without_unix_sockets_the_error_has_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(StartError) as caught:
        open_unix_listener(new_address("test"))
    lines = caught.value.lines()
    assert len(lines) <= 6 and "--gateways 1" in lines[-1]
