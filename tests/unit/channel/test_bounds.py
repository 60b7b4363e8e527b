"""What is under way on the channel is bounded in messages and bytes, on both sides."""

from __future__ import annotations

import asyncio

import pytest

from diptych.channel import frames, hub_thread
from diptych.channel import link as link_module
from diptych.channel.frames import HEADER, SendWindow
from diptych.channel.hub import ChannelHub
from diptych.errors import ChannelError
from diptych.messages import Abort, Failed, Hello
from tests.unit.channel.endpoints import (
    Dial,
    RawSocket,
    meet_each_other,
    receive_from,
    wait_for_refusal,
)


async def test_what_is_too_long_is_refused_by_its_sender(
    hub: ChannelHub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ChannelError, match="longer than the limit"):
        link.send(Failed("r", 0, "a", "b" * 1000))
    with pytest.raises(ChannelError, match="longer than the limit"):
        hub.send("decode-0", Abort("r" * 1000, 0))


async def test_what_is_too_long_cuts_the_connection(hub: ChannelHub, raw: RawSocket, dial: Dial) -> None:
    raw.greet()
    await receive_from(hub, Hello)
    raw.socket.send_multipart([HEADER.pack(b"session1", 1, 0), bytes(frames.MAX_FRAME_BYTES + 1)])
    raw.say(2, Failed("r", 0, "a", "b"))
    await wait_for_refusal(hub, "gap", "stale")  # it connects again before, or after, its end was noticed
    await meet_each_other(hub, dial(hub))


async def test_a_worker_that_does_not_read_is_given_up_not_buffered_for_ever(
    hub: ChannelHub, raw: RawSocket
) -> None:
    raw.greet()
    await receive_from(hub, Hello)
    big = Abort("r" * 16_000, 0)
    sent = 0
    while hub.send("raw", big):
        sent += 1
        assert sent <= 4 * frames.QUEUED_FRAMES
    assert not hub.send("raw", Abort("r", 0))


async def test_an_inbox_that_overflows_ends_the_session(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub, max_messages=10)
    await meet_each_other(hub, link)
    for number in range(50):
        hub.send("decode-0", Abort("r", number))
    assert isinstance(await receive_from(hub, Hello), Hello)
    assert link.num_broken_sessions == 1


async def test_a_flood_of_messages_does_not_starve_other_tasks(hub: ChannelHub, dial: Dial) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    for number in range(1000):
        link.send(Failed("r", number, "a", "b"))
    await asyncio.sleep(0.3)
    num_calls = 0

    async def other() -> None:
        nonlocal num_calls
        while True:
            num_calls += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(1000):
        await receive_from(hub, Failed)
    task.cancel()
    assert num_calls >= 10


def test_what_is_under_way_is_counted_until_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "WINDOW_BYTES", 100)
    way = SendWindow()
    assert way.fits(1000)  # alone: `MAX_BYTES` is its bound
    for size in (60, 40):
        assert way.fits(size)
        way.record_sent(size)
    assert not way.fits(1) and (len(way), way.num_bytes, way.next_number) == (2, 100, 2)
    way.record_taken(1)
    way.record_taken(0)  # an older word
    assert way.fits(60) and not way.fits(61) and (len(way), way.num_bytes) == (1, 40)
    way.record_taken(99)  # more than was sent: whoever says so harms nobody
    assert (len(way), way.num_bytes, way.next_number) == (0, 0, 2)
    monkeypatch.setattr(frames, "WINDOW_FRAMES", 3)
    for _ in range(3):
        assert way.fits(1)
        way.record_sent(1)
    assert not way.fits(1)


async def test_a_worker_that_takes_no_bytes_is_given_up(
    hub: ChannelHub, raw: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "WINDOW_BYTES", 100_000)
    monkeypatch.setattr(hub_thread, "QUEUED_BYTES", 100_000)
    raw.greet()
    await receive_from(hub, Hello)
    sent = 0
    while hub.send("raw", Abort("r" * 10_000, 0)):
        sent += 1
    assert 9 <= sent <= 20  # what is under way, the Welcome with it, and as much again that waits
    raw.greet(session=b"session2")
    await receive_from(hub, Hello)
    for number in range(1, 50):  # one that says what it takes is sent as much as there is
        assert hub.send("raw", Abort("r" * 10_000, 0))
        header = HEADER.pack(b"session2", number, number + 1)
        raw.socket.send_multipart([header, frames.pack_message(Failed("r", number, "a", "b"))])
        await receive_from(hub, Failed)


async def test_a_worker_waits_until_the_gateway_has_taken_what_it_said(
    hub: ChannelHub, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "WINDOW_BYTES", 50_000)
    link = dial(hub)
    await meet_each_other(hub, link)
    for number in range(100):
        link.send(Failed("r", number, "a", "b" * 10_000))
    received = [await receive_from(hub, Failed) for _ in range(100)]
    assert [message.epoch for message in received if isinstance(message, Failed)] == list(range(100))
    assert link.num_broken_sessions == 0


@pytest.mark.parametrize("side", ["outbox", "inbox"])
async def test_queues_of_a_worker_that_overflow_in_bytes_end_the_session(
    hub: ChannelHub, dial: Dial, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    link = dial(hub)
    await meet_each_other(hub, link)
    monkeypatch.setattr(link_module, "QUEUED_BYTES", 50_000)
    if side == "outbox":
        with link._lock:  # the I/O thread cannot empty it meanwhile
            link._outbox.append(b"x" * 50_000)
            link._out_bytes = 50_000
        link.send(Failed("r", 0, "a", "b"))
    else:
        hub.send("decode-0", Abort("r" * 60_000, 0))
    assert isinstance(await receive_from(hub, Hello), Hello)
    assert link.num_broken_sessions == 1
