"""A Unix socket between two processes of the gateway: its address, who may connect, and frames of messages.

The addresses are abstract: they are in no folder, and vanish with their process. Anybody may connect to them, so each
end asks the kernel whose the other one is (SO_PEERCRED), and talks to this user alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from diptych.errors import StartError
from services.gateway.fronts.wire import FrontMessage

M = TypeVar("M", bound=FrontMessage)

# A frame holds what was said in one round of the event loop: all prompts of a body at most, or the tokens of a step,
# with the log-probabilities of a prompt: 36 MiB for 131,072 tokens with 20 each.
MAX_FRAME_BYTES = 1 << 30
# What may wait for an end that does not read. Beyond, the link is given up, like that of a worker.
MAX_WAITING_BYTES = 64 << 20
HEAD = struct.Struct("!I")
CREDENTIALS = struct.Struct("3i")
BACKLOG = 256
# How long, and how often, a connection is asked for again while as many as BACKLOG are not accepted yet.
CONNECT_S, CONNECT_RETRY_S = 10.0, 0.02
FLUSH_RETRY_S = 0.005

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


def new_address(what: str) -> str:
    """An abstract address that nobody can guess; `what` is for people who list sockets."""
    return f"\0diptych-{what}-{secrets.token_hex(16)}"


def open_unix_listener(address: str) -> socket.socket:
    """A socket that listens at an abstract address.

    Raises:
        StartError: this system has no such sockets.
    """
    try:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.setblocking(False)
        bound.bind(address)
        bound.listen(BACKLOG)
    except (OSError, AttributeError) as error:
        raise StartError(
            "the processes of the gateway cannot reach each other",
            f"no Unix socket can be opened: {error}",
            "--gateways 1",
        ) from None
    return bound


async def connect_unix(address: str) -> socket.socket:
    """A connection to a listener of the same user. Raises OSError if there is none, or it accepts none for long."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await _connect(connection, address)
        if not is_same_user(connection):
            raise ConnectionRefusedError("the socket is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


async def _connect(connection: socket.socket, address: str) -> None:
    """Connect a socket, and wait while the listener has too many that it has not accepted."""
    loop = asyncio.get_running_loop()
    latest_s = loop.time() + CONNECT_S
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            if loop.time() > latest_s:
                raise
        await asyncio.sleep(CONNECT_RETRY_S)


def refuse_other_user(transport: asyncio.BaseTransport) -> bool:
    """Whether the process at the other end of a Unix socket runs as another user, which is logged."""
    refused = not is_same_user(transport.get_extra_info("socket"))
    if refused:
        log.warning("a process of another user is refused at a socket of the gateway")
    return refused


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())


class FrameLink(asyncio.Protocol, Generic[M]):
    """One end of a link. `on_messages` gets what the other end says, `on_lost` is called once, at the end.

    What is sent in one round of the event loop is one frame.
    """

    def __init__(
        self,
        messages: type[M],
        on_messages: Callable[[Sequence[M]], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`messages` is the union of all messages of the other end."""
        self._decoder = msgspec.msgpack.Decoder(list[messages])  # type: ignore[valid-type]
        self._on_messages, self._on_lost = on_messages, on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[FrontMessage] = []
        self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless the other end is another user's."""
        self._transport = transport
        if refuse_other_user(transport):
            transport.abort()

    @property
    def waiting_bytes(self) -> int:
        """What was sent and the other end has not read, but for what one buffer of the kernel holds."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: FrontMessage) -> None:
        """Send a message behind those before; dropped if the link is lost."""
        if self._transport is None or self._is_lost:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    async def flush(self, timeout_s: float) -> None:
        """Wait until the kernel has what was sent, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_lost and (self._unsent or self.waiting_bytes):
                    await asyncio.sleep(FLUSH_RETRY_S)

    def close(self) -> None:
        """End the link. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle all frames that are complete. One that cannot be read ends the link."""
        received = self._received
        received += data
        while len(received) >= HEAD.size:
            [size] = HEAD.unpack_from(received)
            if size > MAX_FRAME_BYTES:
                return self._give_up(f"a frame of {size} bytes")
            if len(received) < HEAD.size + size:
                return
            try:
                messages = self._decoder.decode(bytes(memoryview(received)[HEAD.size : HEAD.size + size]))
            except (msgspec.MsgspecError, ValueError) as error:
                return self._give_up(str(error))
            del received[: HEAD.size + size]
            self._on_messages(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self._is_lost = True
        self._on_lost()

    def _give_up(self, why: str) -> None:
        log.error("a link between processes of the gateway is given up: %s", why)
        self.close()

    def _flush(self) -> None:
        """Send all that waits as one frame, unless the other end has stopped to read."""
        unsent, self._unsent = self._unsent, []
        if self._transport is None or self._is_lost or not unsent:
            return
        body = _encoder.encode(unsent)
        self._transport.write(HEAD.pack(len(body)) + body)
        if self.waiting_bytes > MAX_WAITING_BYTES + len(body):
            self._give_up("the other end does not read")
