"""Who and what is not heard."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq

from diptych import frames
from diptych.channel import Hub
from diptych.frames import HEADER, NOBODY
from diptych.keys import WorkerKeys, load_worker_keys
from diptych.messages import Abort, Beat, Failed, Hello, Stats, ToWorker, Welcome
from tests.unit.channel.ends import (
    QUIET_S,
    Dial,
    Raw,
    hear,
    hello,
    met,
    refused,
)


async def test_only_the_worker_key_enters(hub: Hub, dial: Dial, folder: Path) -> None:
    right = load_worker_keys(folder)
    public, secret = zmq.curve_keypair()
    dial(hub, "intruder", WorkerKeys(secret, public, right.server_public))
    await refused(hub, "denied")
    dial(hub, "decode-0", right)  # the control: with the right key the same hub hears
    assert await hear(hub, Hello)


async def test_a_worker_talks_only_to_its_gateway(hub: Hub, dial: Dial, folder: Path) -> None:
    right = load_worker_keys(folder)
    public, _ = zmq.curve_keypair()
    dial(hub, "decode-0", WorkerKeys(right.secret, right.public, public))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await hub.recv()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"only one"],
        [HEADER.pack(b"session1", 0, 0), b"noise"],
        [b"short", frames.pack(hello("raw"))],
        [HEADER.pack(b"session1", 0, 0), frames.pack(Abort("r", 0))],
        [HEADER.pack(b"session1", 0, 0), frames.pack(hello("raw")), b"third"],
    ],
    ids=["empty", "one", "noise", "header", "not for the gateway", "three"],
)
async def test_malformed_frames_are_counted_and_dropped(
    hub: Hub, raw: Raw, dial: Dial, frames: list[bytes]
) -> None:
    raw.socket.send_multipart(frames)
    await refused(hub, "malformed")
    await met(hub, dial(hub))  # and others are served


async def test_nobody_speaks_as_another(hub: Hub, raw: Raw) -> None:
    raw.greet("decode-0")
    await refused(hub, "stranger")
    raw.greet()
    await hear(hub, Hello)
    raw.say(1, Beat("decode-0", "decode-0/1", Stats()))
    hub.refused.clear()
    await refused(hub, "stranger")


async def test_who_was_not_met_is_not_heard_and_asked_to_say_hello(hub: Hub, raw: Raw) -> None:
    raw.say(0, Failed("r", 0, "a", "b"))
    await refused(hub, "stale")
    raw.say(1, Beat("raw", "raw/1", Stats()))
    hub.refused.clear()
    await refused(hub, "stale")
    header, payload = await asyncio.to_thread(raw.socket.recv_multipart)
    assert HEADER.unpack(header)[0] == NOBODY
    assert isinstance(msgspec.msgpack.decode(payload, type=ToWorker), Welcome)


@pytest.mark.parametrize("number", [0, 2])
async def test_a_frame_that_is_missing_or_doubled_ends_the_session(hub: Hub, raw: Raw, number: int) -> None:
    raw.greet()
    await hear(hub, Hello)
    raw.say(number, Failed("r", 0, "a", "b"))
    await refused(hub, "gap")
    assert not hub.send("raw", Abort("r", 0))
    raw.say(1, Failed("r", 0, "a", "b"))
    await refused(hub, "stale")


async def test_a_session_of_before_is_not_heard_any_more(hub: Hub, raw: Raw) -> None:
    raw.greet(session=b"session1")
    await hear(hub, Hello)
    raw.greet(session=b"session2")
    await hear(hub, Hello)
    raw.say(1, Failed("r", 0, "a", "b"), session=b"session1")
    await refused(hub, "stale")
    raw.say(1, Failed("r", 7, "a", "b"), session=b"session2")
    assert await hear(hub) == Failed("r", 7, "a", "b")
