"""Both ends of a channel over loopback, and one that says whatever it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from diptych.channel import frames
from diptych.channel.frames import HEADER
from diptych.channel.hub import ChannelHub
from diptych.channel.keys import load_server_keys, load_worker_keys
from diptych.channel.link import ChannelLink
from diptych.messages import Hello, ToGateway, ToWorker, Welcome

ROOT = Path(__file__).parents[3]
WAIT_S = 90.0  # until something that must happen; never waited for in full unless the test fails
QUIET_S = 0.4  # for something that must not happen

Dial = Callable[..., ChannelLink]


def open_hub(
    folder: Path, address: str = "tcp://127.0.0.1:0", name: str = "g1", silence_s: float = WAIT_S
) -> ChannelHub:
    hub = ChannelHub(address, load_server_keys(folder), name, beat_s=0.05, lease_s=10.0, silence_s=silence_s)
    hub.open()
    return hub


def make_hello(worker: str = "decode-0") -> Hello:
    return Hello(worker, "decode", f"{worker}/1", "f", {}, "host", 1, 10, 100, 2048, {})


async def receive_from(hub: ChannelHub, kind: type[ToGateway] | None = None) -> ToGateway:
    """The next message, of this kind if one is named. Whoever introduces itself is taken in."""
    async with asyncio.timeout(WAIT_S):
        while True:
            worker, message = await hub.receive_message()
            if isinstance(message, Hello):
                hub.accept_session(worker, message.link)
            if kind is None or isinstance(message, kind):
                return message


async def receive_at(link: ChannelLink, kind: type[ToWorker]) -> ToWorker:
    """The next message of a kind at a worker."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for message in await asyncio.to_thread(link.poll_messages, 0.5):
                if isinstance(message, kind):
                    return message


async def meet_each_other(hub: ChannelHub, link: ChannelLink) -> Hello:
    """Both know each other."""
    message = await receive_from(hub, Hello)
    assert isinstance(message, Hello)
    await receive_at(link, Welcome)
    return message


async def wait_for_refusal(hub: ChannelHub, *reasons: str) -> None:
    """Wait until something was dropped for one of these reasons; nothing may get through."""
    hearing = asyncio.create_task(hub.receive_message())
    async with asyncio.timeout(WAIT_S):
        while not any(hub.refused[reason] for reason in reasons):
            assert not hearing.done()
            await asyncio.sleep(0.01)
    hearing.cancel()


class RawSocket:
    """A socket with the right key that says whatever it likes, over a route of its own."""

    def __init__(self, hub: ChannelHub, folder: Path, route: str = "raw/1") -> None:
        keys = load_worker_keys(folder)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self.socket.set(zmq.ROUTING_ID, route.encode())
        self.socket.set(zmq.CURVE_SERVERKEY, keys.server_public)
        self.socket.set(zmq.CURVE_PUBLICKEY, keys.public)
        self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(hub.address)

    def say(self, number: int, message: ToGateway, session: bytes = b"session1") -> None:
        self.socket.send_multipart([HEADER.pack(session, number, 0), frames.pack_message(message)])

    def greet(self, name: str = "raw", session: bytes = b"session1") -> None:
        self.say(0, msgspec.structs.replace(make_hello(name), link=session.hex()), session)

    def close(self) -> None:
        self.socket.close()
        self.context.term()
