"""The frame that both ends of the channel exchange, its limits, and the window of unacknowledged frames.

A frame is `[header, payload]`. The header has the session (8 random bytes), the frame's number in the session, and how
many frames of the other side were taken so far by the thread that processes them. So each end knows which of its frames
are not taken yet, wherever they wait (here, in the kernel, in the other side's queue), and bounds them in frames and
bytes; ZeroMQ itself counts frames only. Heartbeats do not count for this window.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import zmq

from diptych.channel.keys import WorkerKeys
from diptych.errors import ChannelError
from diptych.eviction_spec import KEEP_ALL
from diptych.messages import Admit, Generate, Logprob, Output, Prefill, Step, ToGateway, ToWorker

# Limit of one payload: the sender refuses a larger one, and the receiver closes the connection.
MAX_FRAME_BYTES = 16 << 20
# Most frames that wait, per connection and direction: in ZeroMQ (its high-water mark), and in each side's own queue.
QUEUED_FRAMES = 4096
# Limit of each side's own queue for a session.
QUEUED_BYTES = 64 << 20
# Limits, per direction and session, of the frames that were sent and not taken yet by the other side's main thread.
# They are below ZeroMQ's own limit, so a socket that accepts no frame has no connection.
WINDOW_FRAMES, WINDOW_BYTES = QUEUED_FRAMES // 2, 16 << 20
# A longer `Step` is split, so that decoding one never takes long.
STEP_BYTES = 1 << 20
# The part of `STEP_BYTES` that scored prompts may fill.
STEP_FILL = 0.9
# Upper bounds of the encoded size of a scored token, and of each of its alternatives.
SCORE_BYTES, ALTERNATIVE_BYTES = 18, 15
# A connection that has not proven its key within this time is closed.
HANDSHAKE_MS = 5_000

HEADER = struct.Struct(">8sQQ")
# Session number in the Welcome to a worker that the gateway does not know.
NO_SESSION = bytes(8)

T = TypeVar("T")

_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def pack_message(message: ToWorker | ToGateway) -> bytes:
    """Encode a message as a payload.

    Raises:
        ChannelError: the payload is longer than MAX_FRAME_BYTES.
    """
    payload = msgspec.msgpack.encode(_omit_unused(message))
    if len(payload) > MAX_FRAME_BYTES:
        kind = type(message).__name__
        raise ChannelError(f"a {kind} of {len(payload)} bytes is longer than the limit of {MAX_FRAME_BYTES}")
    return payload


def _omit_unused(message: ToWorker | ToGateway) -> ToWorker | ToGateway:
    """The message without what a `KeepSpec` says of a request that keeps everything.

    Nothing there means the same to every worker, while one of before refuses a `KeepSpec` that is longer than its own.
    """
    if isinstance(message, Prefill | Generate | Admit) and message.keep == KEEP_ALL:
        return msgspec.structs.replace(message, keep=())
    return message


def pack_pieces(message: ToWorker | ToGateway) -> list[bytes]:
    """Encode a message as one payload, or a long `Step` as several smaller `Step` messages with the same content.

    Raises:
        ChannelError: a message that cannot be split is longer than MAX_FRAME_BYTES.
    """
    if not isinstance(message, Step):
        return [pack_message(message)]
    return [payload for outputs in _group_outputs(message.outputs) for payload in _pack_step(Step(outputs))]


def _group_outputs(outputs: Sequence[Output]) -> Iterator[list[Output]]:
    """Split the outputs, in order, into groups that are expected to be shorter than `STEP_BYTES`.

    Only scored prompts are counted, and split if need be, since everything else is small.
    """
    group, num_bytes = list[Output](), 0
    for output in outputs:
        size = _scored_bytes(output.prompt_logprobs)
        most = max(1, int(STEP_FILL * STEP_BYTES) // size) if size else 0
        for part in _slice_output(output, most):
            part_bytes = size * len(part.prompt_logprobs or ())
            if group and num_bytes + part_bytes > STEP_FILL * STEP_BYTES:
                yield group
                group, num_bytes = [], 0
            group.append(part)
            num_bytes += part_bytes
    yield group


def _slice_output(output: Output, most: int) -> Iterator[Output]:
    """Split an output into several with the same content, each with at most `most` scored prompt tokens."""
    logprobs = output.prompt_logprobs
    if not logprobs or len(logprobs) <= most:
        yield output
        return
    last = (len(logprobs) - 1) // most * most
    for begin in range(0, last, most):
        part = logprobs[begin : begin + most]
        yield Output(output.request, output.epoch, [], prompt_logprobs=part)
    yield msgspec.structs.replace(output, prompt_logprobs=logprobs[last:])


def _scored_bytes(logprobs: Sequence[Logprob | None] | None) -> int:
    """Upper bound of the encoded size of each scored token, if all have as many alternatives as the last; else 0."""
    if not logprobs:
        return 0
    return SCORE_BYTES + (ALTERNATIVE_BYTES * len(logprobs[-1].top) if logprobs[-1] is not None else 0)


def _pack_step(step: Step) -> list[bytes]:
    """The payload of a step; if it is longer than `STEP_BYTES`, the payloads of its halves."""
    payload = msgspec.msgpack.encode(step)
    if len(payload) <= STEP_BYTES:
        return [payload]
    halves = cut_step(step)
    return [piece for half in halves for piece in _pack_step(half)] if halves else [pack_message(step)]


def cut_step(step: Step) -> tuple[Step, Step] | tuple[()]:
    """Split a step into two steps with the same content; empty if that is not possible.

    If there is a single output, its scored prompt is split: tokens and the finish reason stay in the last piece.
    """
    if (count := len(step.outputs)) > 1:
        return Step(step.outputs[: count // 2]), Step(step.outputs[count // 2 :])
    logprobs = (step.outputs[0].prompt_logprobs if step.outputs else None) or []
    if len(logprobs) < 2:
        return ()
    (output,), middle = step.outputs, len(logprobs) // 2
    first = Output(output.request, output.epoch, [], prompt_logprobs=logprobs[:middle])
    return Step([first]), Step([msgspec.structs.replace(output, prompt_logprobs=logprobs[middle:])])


def decode_from_worker(payload: bytes) -> ToGateway:
    """Decode a payload from a worker. Raises msgspec.MsgspecError."""
    return _decode_payload(_to_gateway, payload)


def decode_from_gateway(payload: bytes) -> ToWorker:
    """Decode a payload from the gateway. Raises msgspec.MsgspecError."""
    return _decode_payload(_to_worker, payload)


def _decode_payload(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Decode a payload; a payload nested too deeply raises msgspec.DecodeError, like other malformed ones."""
    try:
        return decoder.decode(payload)
    except RecursionError as error:
        # Unknown fields are skipped, and a peer may nest them without limit.
        raise msgspec.DecodeError("nested too deeply") from error


def set_socket_limits(socket: zmq.Socket[bytes], address: str, linger_ms: int) -> None:
    """Set what both ends of a channel at `address` use: no queue is unbounded; IPv6 if the address is in brackets.

    Closing waits `linger_ms` for frames to be sent.
    """
    # With it libzmq would prefer the IPv6 addresses of names, where a gateway may not listen.
    socket.set(zmq.IPV6, int("[" in address))
    socket.set(zmq.LINGER, linger_ms)
    socket.set(zmq.SNDHWM, QUEUED_FRAMES)
    socket.set(zmq.RCVHWM, QUEUED_FRAMES)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def make_route(worker: str, session: bytes) -> bytes:
    """The routing id of a session's connection; two workers of the same name have two different ones."""
    return f"{worker}/{session.hex()}".encode()


def is_route_of(route: bytes, worker: str) -> bool:
    """Whether `route` belongs to a session of `worker`."""
    return route.rpartition(b"/")[0] == worker.encode()


def configure_dealer(socket: zmq.Socket[bytes], address: str, route: bytes, keys: WorkerKeys) -> None:
    """Set up a worker's new socket. It connects only to a gateway that proves to have the deployment's server key."""
    # The 500 ms let a worker that ends send its last tokens.
    set_socket_limits(socket, address, linger_ms=500)
    socket.set(zmq.ROUTING_ID, route)
    # Frames are queued only for an open connection, so nothing piles up for an absent gateway.
    socket.set(zmq.IMMEDIATE, 1)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 500)
    socket.set(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)


class SendWindow:
    """The frames of one session that were sent but not yet taken by the other side; `next_number` is the next
    frame's.
    """

    def __init__(self) -> None:
        self.next_number, self.num_bytes = 0, 0
        self._sizes: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        return len(self._sizes)

    def fits(self, size: int) -> bool:
        """Whether a payload of `size` bytes may be sent now."""
        room = len(self._sizes) < WINDOW_FRAMES and self.num_bytes + size <= WINDOW_BYTES
        return room or not self._sizes

    def record_sent(self, size: int) -> None:
        """A frame with a payload of `size` bytes was sent."""
        self.next_number += 1
        self.num_bytes += size
        self._sizes.append(size)

    def record_taken(self, count: int) -> None:
        """The other side reports that it has taken `count` frames of this session in total."""
        while self._sizes and self.next_number - len(self._sizes) < count:
            self.num_bytes -= self._sizes.popleft()
