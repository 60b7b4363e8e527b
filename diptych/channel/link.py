"""A worker's end of the channel: a DEALER socket with an I/O thread of its own, which also sends the heartbeats.

`diptych.channel.hub` is the gateway's end, and explains sessions.
"""

from __future__ import annotations

import collections
import os
import struct
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from diptych.channel import frames as wire
from diptych.channel.frames import (
    HEADER,
    NO_SESSION,
    QUEUED_BYTES,
    QUEUED_FRAMES,
    SendWindow,
    pack_message,
    pack_pieces,
)
from diptych.channel.keys import WorkerKeys
from diptych.errors import ChannelError
from diptych.messages import (
    SILENCE_S,
    Alive,
    Heartbeat,
    Hello,
    ToGateway,
    ToWorker,
    Welcome,
    WorkerStats,
)

# Seconds between attempts to send while there is no connection.
RETRY_S = 0.02
# After this many seconds without a connection the worker regards the gateway as lost.
MAX_DOWN_S = 0.4
# A new socket is opened after this many seconds without a connection: libzmq closes a connection after a corrupted
# frame and never opens another.
RECONNECT_S = 5.0
# A round of the thread that took longer than this many heartbeats was a pause, not a wait.
MIN_PAUSE_BEATS = 4
# Frames that are received before the thread sends again.
MAX_FRAMES_PER_ROUND = 64


class ChannelLink:
    """A worker's end. Any thread may call `send`, one thread `poll_messages`.

    `stats` is called in the I/O thread for every heartbeat. The session ends after `silence_s` without a message from
    the gateway (the gateway sets it in `Welcome`), or after `down_s` without a connection. Then `gateway_lost` is true
    until the next `Welcome`; the worker must abort what it holds within 2 s. Time for which this process was stopped
    (SIGSTOP, a machine that slept) is no silence.
    """

    def __init__(
        self,
        address: str,
        keys: WorkerKeys,
        hello: Hello,
        stats: Callable[[], WorkerStats],
        *,
        beat_s: float = 0.25,
        silence_s: float = SILENCE_S,
        down_s: float = MAX_DOWN_S,
        max_messages: int = QUEUED_FRAMES,
    ) -> None:
        self._address, self._keys, self._hello, self._stats = address, keys, hello, stats
        self._beat_s, self._silence_s, self._down_s = beat_s, silence_s, down_s
        self._max_messages = max_messages
        self._lock = threading.Condition()  # guards all attributes below that both threads use
        self._inbox: collections.deque[ToWorker] = collections.deque()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._in_bytes = self._out_bytes = 0
        self._welcomed = self._closing = self._overflow = self._news = False
        self._error: BaseException | None = None
        self.gateway_lost = False
        # Number of sessions that ended while the worker went on.
        self.num_broken_sessions = 0
        # Whether the gateway has answered in this session. Only the I/O thread uses this.
        self._greeted = False
        self._session, self._sent, self._received = os.urandom(8), SendWindow(), 0
        # The numbers that follow those of the last frame put into the inbox, and of the last frame taken out of it.
        self._put = self._taken = 0
        self._due_s = self._received_s = self._round_s = 0.0
        self._down_since_s: float | None = None
        # Whether to open a new socket: for a new session, or because no connection comes about.
        self._redial = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run_guarded, name="channel-link", daemon=True)

    def open(self) -> None:
        """Start the I/O thread, which connects, says Hello, and sends heartbeats."""
        self._thread.start()

    def send(self, message: ToGateway) -> None:
        """Queue a message. Raises ChannelError if it is too long.

        While no gateway is connected the message is dropped: the gateway has given up the request that it concerns.
        """
        pieces = pack_pieces(message)
        size = sum(map(len, pieces))
        with self._lock:
            if not self._welcomed or self._closing:
                return
            if len(self._outbox) >= self._max_messages or self._out_bytes + size > QUEUED_BYTES:
                self._overflow = True
            first = not self._outbox
            self._outbox.extend(pieces)
            self._out_bytes += size
            if first or self._overflow:
                os.eventfd_write(self._wake, 1)

    @property
    def is_congested(self) -> bool:
        """Whether half of the outgoing queue is full, because the gateway is too slow.

        The worker should then pause computing; `poll_messages` returns when the queue has shrunk.
        """
        return 2 * len(self._outbox) >= self._max_messages or 2 * self._out_bytes >= QUEUED_BYTES

    def poll_messages(self, timeout_s: float) -> list[ToWorker]:
        """All messages that have arrived; waits up to `timeout_s` for the first, less if the gateway is lost.

        Raises ChannelError if the I/O thread has failed, so that the worker cannot go on.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._inbox or self._news or self._closing or self._error, timeout_s)
            if self._error is not None:
                raise ChannelError("the worker's channel has failed", repr(self._error)) from self._error
            messages = list(self._inbox)
            self._inbox.clear()
            self._in_bytes, self._news, self._taken = 0, False, self._put
        return messages

    def wake_poll(self) -> None:
        """Let `poll_messages` return now with the messages that are there. Any thread may call it."""
        with self._lock:
            self._news = True
            self._lock.notify_all()

    def close(self) -> None:
        """Send the queued messages and stop the I/O thread. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake)

    # everything below runs in the I/O thread

    def _run_guarded(self) -> None:
        """Run the I/O until `close`, with a new socket per session; an exception is kept for `poll_messages`."""
        try:
            with zmq.Context() as context:
                while not self._closing:
                    with context.socket(zmq.DEALER) as socket:
                        route = wire.make_route(self._hello.worker, self._session)
                        wire.configure_dealer(socket, self._address, route, self._keys)
                        socket.connect(self._address)
                        self._serve_socket(socket)
        except BaseException as error:  # `poll_messages` raises it: a worker cannot go on without its channel
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _serve_socket(self, socket: zmq.Socket[bytes]) -> None:
        """The I/O loop of one socket, until `close` or a redial."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        self._redial, self._round_s = False, time.monotonic()
        while not (self._closing or self._redial):
            now_s = time.monotonic()
            self._discount_pause(now_s)
            self._keep_alive(socket, now_s)
            stuck = not self._flush_outbox(socket)
            poller.register(socket, zmq.POLLIN | zmq.POLLOUT if stuck else zmq.POLLIN)
            wait_ms = max(0, round(1000 * (self._due_s - now_s)) + 1)
            ready = dict(poller.poll(wait_ms))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if ready.get(socket, 0) & zmq.POLLIN:
                self._drain_socket(socket)
        self._flush_outbox(socket)

    def _discount_pause(self, now_s: float) -> None:
        """Do not count a long pause of this thread as silence of the gateway, which may have been stopped as well."""
        pause_s, self._round_s = now_s - self._round_s, now_s
        if pause_s > max(self._silence_s / 2, MIN_PAUSE_BEATS * self._beat_s):
            self._received_s = min(now_s, self._received_s + pause_s)

    def _keep_alive(self, socket: zmq.Socket[bytes], now_s: float) -> None:
        """Detect silence and a closed connection; send Hello until the gateway answers, then heartbeats."""
        down_s = 0.0 if self._down_since_s is None else now_s - self._down_since_s
        silent = now_s - self._received_s > self._silence_s
        if self._overflow or (self._greeted and (silent or down_s > self._down_s)):
            self._end_session()
        elif down_s > RECONNECT_S:
            self._redial, self._down_since_s = True, None
        if now_s < self._due_s or self._redial:
            return
        if self._greeted:
            payload = pack_message(Heartbeat(self._hello.worker, self._hello.incarnation, self._stats()))
        else:
            payload = pack_message(msgspec.structs.replace(self._hello, link=self._session.hex()))
        if self._send_frame(socket, payload):
            self._due_s, self._down_since_s = now_s + self._beat_s, None
            return
        self._due_s = now_s + min(self._beat_s, RETRY_S)
        # The socket accepts nothing. It is not full, since the window is smaller, so there is no connection
        # (IMMEDIATE).
        if self._down_since_s is None:
            self._down_since_s = now_s

    def _send_frame(self, socket: zmq.Socket[bytes], payload: bytes) -> bool:
        """Send one frame without blocking; False if there is no connection."""
        with self._lock:
            taken = self._received if self._taken == self._put else self._taken
        header = HEADER.pack(self._session, self._sent.next_number, taken)
        try:
            socket.send_multipart([header, payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent.record_sent(len(payload))
        return True

    def _flush_outbox(self, socket: zmq.Socket[bytes]) -> bool:
        """Send queued payloads, oldest first; False if the socket accepts no more."""
        while True:
            with self._lock:
                if not self._outbox:
                    return True
                payload = self._outbox[0]
            if not self._sent.fits(len(payload)):
                # The window is full. The gateway's next frame acknowledges some frames, and wakes this thread.
                return True
            if not self._send_frame(socket, payload):
                return False
            with self._lock:
                congested = self.is_congested
                self._outbox.popleft()
                self._out_bytes -= len(payload)
                if congested and not self.is_congested:
                    self._news = True
                    self._lock.notify_all()

    def _drain_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Process the frames that have arrived, up to MAX_FRAMES_PER_ROUND."""
        for _ in range(MAX_FRAMES_PER_ROUND):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._accept_frame(frames)

    def _accept_frame(self, frames: list[bytes]) -> None:
        """Process one frame of the gateway; a malformed, unexpected or lost frame ends the session."""
        self._received_s = time.monotonic()
        try:
            header, payload = frames
            session, number, taken = HEADER.unpack(header)
            message = wire.decode_from_gateway(payload)
        except (ValueError, struct.error, msgspec.MsgspecError):
            return self._end_session()
        if session != self._session:
            # The gateway knows no session of this worker: the gateway restarted, or has given the worker up.
            return self._end_session() if session == NO_SESSION and self._greeted else None
        if number != self._received:
            return self._end_session()
        self._received += 1
        self._sent.record_taken(taken)
        self._greeted = True
        if isinstance(message, Alive):
            return None
        with self._lock:
            if isinstance(message, Welcome):
                self._welcomed, self.gateway_lost = True, False
                self._beat_s, self._silence_s = message.beat_s, message.silence_s
            self._inbox.append(message)
            self._in_bytes, self._put = self._in_bytes + len(payload), self._received
            self._lock.notify_all()
            full = len(self._inbox) > self._max_messages or self._in_bytes > QUEUED_BYTES
        if full:
            self._end_session()
        return None

    def _end_session(self) -> None:
        """End this session; a new one begins with a Hello at once."""
        with self._lock:
            self.gateway_lost = self.gateway_lost or self._welcomed
            self._news = self._news or self._welcomed
            self._welcomed = self._overflow = self._greeted = False
            self._put = self._taken = 0
            self._inbox.clear()
            self._outbox.clear()
            self._in_bytes = self._out_bytes = 0
            self._lock.notify_all()
        self.num_broken_sessions += 1
        self._redial = True
        self._session, self._sent, self._received = os.urandom(8), SendWindow(), 0
        self._due_s, self._down_since_s = 0.0, None
