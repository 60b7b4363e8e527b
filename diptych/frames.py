"""What both ends of the channel share: the frame, its limits, and the count of what is under way.

A frame is `[header, payload]`; the header is the session (8 random bytes), the frame's number in it, and how many of
the other side's frames were taken so far. So each end knows what it has sent that nobody has taken yet, wherever it
waits (here, in the kernel, there), and bounds that in bytes: ZeroMQ itself counts frames only.
"""

from __future__ import annotations

import collections
import struct
from typing import TypeVar

import msgspec
import zmq

from diptych.errors import ChannelError
from diptych.keys import WorkerKeys
from diptych.messages import ToGateway, ToWorker

MAX_BYTES = 16 << 20  # of one payload: the sender refuses more, the receiver cuts the connection
QUEUED_FRAMES = 4096  # high-water mark of each direction of each connection
QUEUED_BYTES = (
    64 << 20
)  # under way in each direction of each session; the same again in a worker's own queues
HANDSHAKE_MS = 5_000  # a connection that has not proven its key by then is cut

HEADER = struct.Struct(">8sQQ")
NOBODY = bytes(8)  # session of a Welcome to a worker that the gateway does not know

T = TypeVar("T")

_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def pack(message: ToWorker | ToGateway) -> bytes:
    """The payload of a message; raises ChannelError if it is longer than MAX_BYTES."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_BYTES:
        kind = type(message).__name__
        raise ChannelError(f"a {kind} of {len(payload)} bytes is longer than the limit of {MAX_BYTES}")
    return payload


def for_gateway(payload: bytes) -> ToGateway:
    """The message in a payload from a worker. Raises msgspec.MsgspecError."""
    return _read(_to_gateway, payload)


def for_worker(payload: bytes) -> ToWorker:
    """The message in a payload from the gateway. Raises msgspec.MsgspecError."""
    return _read(_to_worker, payload)


def _read(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except RecursionError as error:  # fields that nobody knows are passed over, whatever is in them
        raise msgspec.DecodeError("nested too deeply") from error


def limit(socket: zmq.Socket[bytes], linger_ms: int) -> None:
    """What both ends set: nothing is unbounded. Closing waits up to `linger_ms` for what was sent to leave."""
    socket.set(zmq.LINGER, linger_ms)
    socket.set(zmq.SNDHWM, QUEUED_FRAMES)
    socket.set(zmq.RCVHWM, QUEUED_FRAMES)
    socket.set(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def dial(socket: zmq.Socket[bytes], name: str, keys: WorkerKeys) -> None:
    """Make a new socket that of the worker `name`; it connects to whoever proves to be the gateway of these keys."""
    limit(socket, linger_ms=500)  # a worker that ends says its last tokens
    socket.set(zmq.ROUTING_ID, name.encode())
    socket.set(zmq.IMMEDIATE, 1)  # queue only to a completed connection: nothing piles up for a gateway
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 500)
    socket.set(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)


class UnderWay:
    """Frames of one session that were sent, and not taken by the other side yet. `said` is the next one's number."""

    def __init__(self) -> None:
        self.said, self.num_bytes = 0, 0
        self._sizes: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        return len(self._sizes)

    def fits(self, size: int) -> bool:
        """May a payload of `size` bytes go now?"""
        return not self._sizes or self.num_bytes + size <= QUEUED_BYTES

    def sent(self, size: int) -> None:
        """A frame has left."""
        self.said += 1
        self.num_bytes += size
        self._sizes.append(size)

    def taken(self, count: int) -> None:
        """The other side says that it has taken `count` frames in all."""
        while self._sizes and self.said - len(self._sizes) < count:
            self.num_bytes -= self._sizes.popleft()
