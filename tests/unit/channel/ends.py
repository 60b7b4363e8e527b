"""Both ends of a channel over loopback, and one that says whatever it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from diptych import frames
from diptych.channel import Hub, Link
from diptych.frames import HEADER
from diptych.keys import load_server_keys, load_worker_keys
from diptych.messages import Hello, ToGateway, ToWorker, Welcome

ROOT = Path(__file__).parents[3]
WAIT_S = 90.0  # until something that must happen; never waited for in full unless the test fails
QUIET_S = 0.4  # for something that must not happen

Dial = Callable[..., Link]


def hub_at(folder: Path, address: str = "tcp://127.0.0.1:0", name: str = "g1") -> Hub:
    hub = Hub(address, load_server_keys(folder), name, beat_s=0.05)
    hub.open()
    return hub


def hello(worker: str = "decode-0") -> Hello:
    return Hello(worker, "decode", f"{worker}/1", "f", {}, "host", 1, 10, 100, 2048, {})


async def hear(hub: Hub, kind: type[ToGateway] | None = None) -> ToGateway:
    """The next message, of this kind if one is named."""
    async with asyncio.timeout(WAIT_S):
        while True:
            _, message = await hub.recv()
            if kind is None or isinstance(message, kind):
                return message


async def listen(link: Link, kind: type[ToWorker]) -> ToWorker:
    """The next message of a kind at a worker."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for message in await asyncio.to_thread(link.poll, 0.5):
                if isinstance(message, kind):
                    return message


async def met(hub: Hub, link: Link) -> Hello:
    """Both know each other."""
    message = await hear(hub, Hello)
    assert isinstance(message, Hello)
    await listen(link, Welcome)
    return message


async def refused(hub: Hub, reason: str) -> None:
    """Wait until something was dropped for this reason; nothing may get through."""
    hearing = asyncio.create_task(hub.recv())
    async with asyncio.timeout(WAIT_S):
        while not hub.refused[reason]:
            assert not hearing.done()
            await asyncio.sleep(0.01)
    hearing.cancel()


class Raw:
    """A socket with the right key that says whatever it likes, under a name of its own."""

    def __init__(self, hub: Hub, folder: Path, name: str = "raw") -> None:
        keys = load_worker_keys(folder)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self.socket.set(zmq.ROUTING_ID, name.encode())
        self.socket.set(zmq.CURVE_SERVERKEY, keys.server_public)
        self.socket.set(zmq.CURVE_PUBLICKEY, keys.public)
        self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(hub.address)

    def say(self, number: int, message: ToGateway, session: bytes = b"session1") -> None:
        self.socket.send_multipart([HEADER.pack(session, number, 0), frames.pack(message)])

    def greet(self, name: str = "raw", session: bytes = b"session1") -> None:
        self.say(0, msgspec.structs.replace(hello(name), link=session.hex()), session)

    def close(self) -> None:
        self.socket.close()
        self.context.term()
