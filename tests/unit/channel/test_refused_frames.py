"""Whose messages are refused, and which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq

from diptych.channel import frames
from diptych.channel.frames import HEADER, NO_SESSION
from diptych.channel.hub import ChannelHub
from diptych.channel.keys import WorkerKeys, load_worker_keys
from diptych.messages import Abort, Alive, Failed, Heartbeat, Hello, ToWorker, WorkerStats
from tests.unit.channel.endpoints import (
    QUIET_S,
    Dial,
    RawSocket,
    make_hello,
    meet_each_other,
    receive_from,
    wait_for_refusal,
)


async def test_only_the_worker_key_enters(hub: ChannelHub, dial: Dial, folder: Path) -> None:
    right = load_worker_keys(folder)
    public, secret = zmq.curve_keypair()
    dial(hub, "intruder", WorkerKeys(secret, public, right.server_public))
    await wait_for_refusal(hub, "denied")
    dial(hub, "decode-0", right)  # the control: with the right key the same hub hears
    assert await receive_from(hub, Hello)


async def test_a_worker_talks_only_to_its_gateway(hub: ChannelHub, dial: Dial, folder: Path) -> None:
    right = load_worker_keys(folder)
    public, _ = zmq.curve_keypair()
    dial(hub, "decode-0", WorkerKeys(right.secret, right.public, public))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await hub.receive_message()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"only one"],
        [HEADER.pack(b"session1", 0, 0), b"noise"],
        [b"short", frames.pack_message(make_hello("raw"))],
        [HEADER.pack(b"session1", 0, 0), frames.pack_message(Abort("r", 0))],
        [HEADER.pack(b"session1", 0, 0), frames.pack_message(make_hello("raw")), b"third"],
    ],
    ids=["empty", "one", "noise", "header", "not for the gateway", "three"],
)
async def test_malformed_frames_are_counted_and_dropped(
    hub: ChannelHub, raw: RawSocket, dial: Dial, frames: list[bytes]
) -> None:
    raw.socket.send_multipart(frames)
    await wait_for_refusal(hub, "malformed")
    await meet_each_other(hub, dial(hub))  # and others are served


async def test_nobody_speaks_as_another(hub: ChannelHub, raw: RawSocket) -> None:
    raw.greet("decode-0")
    await wait_for_refusal(hub, "stranger")
    raw.greet()
    await receive_from(hub, Hello)
    hub.refused.clear()
    raw.say(1, Heartbeat("decode-0", "decode-0/1", WorkerStats()))
    await wait_for_refusal(hub, "stranger")


async def test_messages_of_an_unknown_worker_are_refused_and_it_must_say_hello(
    hub: ChannelHub, raw: RawSocket
) -> None:
    raw.say(0, Failed("r", 0, "a", "b"))
    await wait_for_refusal(hub, "stale")
    hub.refused.clear()
    raw.say(1, Heartbeat("raw", "raw/1", WorkerStats()))
    await wait_for_refusal(hub, "stale")
    header, payload = await asyncio.to_thread(raw.socket.recv_multipart)
    assert HEADER.unpack(header)[0] == NO_SESSION
    assert isinstance(msgspec.msgpack.decode(payload, type=ToWorker), Alive)


@pytest.mark.parametrize("number", [0, 2])
async def test_a_frame_that_is_missing_or_doubled_ends_the_session(
    hub: ChannelHub, raw: RawSocket, number: int
) -> None:
    raw.greet()
    await receive_from(hub, Hello)
    raw.say(number, Failed("r", 0, "a", "b"))
    await wait_for_refusal(hub, "gap")
    assert not hub.send("raw", Abort("r", 0))
    raw.say(1, Failed("r", 0, "a", "b"))
    await wait_for_refusal(hub, "stale")


async def test_an_earlier_session_is_refused(hub: ChannelHub, raw: RawSocket) -> None:
    raw.greet(session=b"session1")
    await receive_from(hub, Hello)
    raw.greet(session=b"session2")
    await receive_from(hub, Hello)
    raw.say(1, Failed("r", 0, "a", "b"), session=b"session1")
    await wait_for_refusal(hub, "stale")
    raw.say(1, Failed("r", 7, "a", "b"), session=b"session2")
    assert await receive_from(hub) == Failed("r", 7, "a", "b")
