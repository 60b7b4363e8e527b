"""The I/O thread of the gateway's end of the channel: owns the ROUTER socket, answers heartbeats, bounds the queues.

    worker ══ ROUTER ── HubThread ──inbox──▶ the event loop (`diptych.channel.hub.ChannelHub`)
                                  ◀─outbox── one for each session

Heartbeats are answered here, so a worker gets answers however long the event loop is busy. All workers' messages go
into one inbox, in order. A frame is acknowledged to its worker only when the loop has taken it out. So the inbox is
bounded by each worker's window (`diptych.channel.frames.WINDOW_FRAMES`, `WINDOW_BYTES`), and a worker whose window is
full keeps its messages until the loop catches up.

There are no locks: deques have atomic ends, and each attribute is written by one thread only, except two attributes of
`ChannelSession`. `over` may be set by either thread and is never unset. `beat_entry` is set by this thread when it puts
a heartbeat into the inbox, and unset by the loop when it takes the heartbeat out; a heartbeat that arrives at this
moment may be lost, which does no harm, since another follows.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
)
from diptych.messages import Alive, Heartbeat, Hello, ToGateway

# Seconds between two checks of all connections.
CONNECTION_CHECK_S = 0.1
# At most this many frames are received before frames for workers are sent again.
MAX_FRAMES_PER_ROUND = 256
ALIVE_PAYLOAD = pack_message(Alive())


@dataclass(eq=False, slots=True)
class ChannelSession:
    """One unbroken sequence of frames from a worker (`received`) and to it (`send_window`).

    The event loop writes `taken`, `taken_bytes` and `posted_bytes`, and appends to the outbox; both threads write
    `over` and `beat_entry`; the I/O thread writes everything else.
    """

    # ROUTER's id of the connection.
    route: bytes
    name: bytes
    worker: str
    # Number of the next frame that the worker will send.
    received: int
    send_window: SendWindow = field(default_factory=SendWindow)
    outbox: collections.deque[bytes] = field(default_factory=collections.deque)
    # Total bytes that were ever put into the outbox.
    posted_bytes: int = 0
    # Total bytes that were ever taken out of the outbox.
    flushed_bytes: int = 0
    # One more than the number of the last frame that was put into the inbox. Heartbeats are not put there.
    put: int = 0
    put_bytes: int = 0
    # One more than the number of the last frame that the event loop has taken out of the inbox.
    taken: int = 0
    taken_bytes: int = 0
    # The heartbeat in the inbox, if any. Only the latest one matters.
    beat_entry: InboxEntry | None = None
    # Number of frames that had been sent at the last check of the connection.
    frames_at_check: int = 0
    over: bool = False

    def frame_header(self) -> bytes:
        """The header of the next frame to the worker; it also acknowledges the worker's frames that were taken."""
        taken = self.received if self.taken == self.put else self.taken
        return HEADER.pack(self.name, self.send_window.next_number, taken)

    @property
    def has_unread(self) -> bool:
        """Whether the session is over while the loop has not taken all its messages from the inbox."""
        return self.over and self.taken != self.put

    def is_overrun(self) -> bool:
        """Whether the worker has sent more than its window allows."""
        frames, num_bytes = self.put - self.taken, self.put_bytes - self.taken_bytes
        return frames > QUEUED_FRAMES or num_bytes > QUEUED_BYTES

    def has_room(self, size: int) -> bool:
        """Whether the outbox has room for a payload of `size` bytes."""
        waiting = self.posted_bytes - self.flushed_bytes
        return len(self.outbox) < QUEUED_FRAMES and waiting + size <= max(QUEUED_BYTES, size)


@dataclass(eq=False, slots=True)
class InboxEntry:
    """A message in the inbox; `number` and `size` belong to its frame, and are 0 for a heartbeat."""

    session: ChannelSession
    message: ToGateway
    number: int
    size: int

    def take_message(self) -> ToGateway:
        """Return the message and record that the loop has taken it out of the inbox."""
        session = self.session
        if session.beat_entry is self:
            session.beat_entry = None
        if self.number:
            session.taken, session.taken_bytes = self.number, session.taken_bytes + self.size
        return self.message


@dataclass(eq=False, slots=True)
class _LoopWaiter:
    """A waiting task; `woken` makes sure that it is woken only once."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    woken: bool = False

    def end(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class LoopWakeup:
    """Lets one task of an event loop wait for an event of another thread."""

    def __init__(self) -> None:
        self._waiter: _LoopWaiter | None = None

    async def wait(self, ready: Callable[[], object]) -> None:
        """Wait until `wake` is called; returns at once if `ready()` is true already. Safe to cancel."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = _LoopWaiter(loop, loop.create_future())
        if not ready():  # checked after the other thread can see the waiter, so that no event is missed
            await waiter.future

    def wake(self) -> None:
        """Wake the waiting task. The other thread calls it after `ready()` has become true."""
        waiter = self._waiter
        if waiter is not None and not waiter.woken:
            waiter.woken = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                waiter.loop.call_soon_threadsafe(waiter.end)


class HubThread:
    """Runs the I/O of `socket`, which belongs to this thread from `start` on.

    `arrived` is called in this thread after messages were put into the inbox. `error` is the exception that ended the
    thread, if any.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        refused: collections.Counter[str],
        arrived: Callable[[], None],
    ) -> None:
        self.inbox: collections.deque[InboxEntry] = collections.deque()
        # The session of each `Hello.link`. Only the I/O thread writes this.
        self.links: dict[str, ChannelSession] = {}
        self.error: BaseException | None = None
        self._socket, self._refused, self._arrived = socket, refused, arrived
        self._sessions: dict[bytes, ChannelSession] = {}  # by route
        # Sessions with new payloads to send, or that were ended.
        self._touched_sessions: collections.deque[ChannelSession] = collections.deque()
        # Sessions that cannot send now: their window is full, or their connection accepts nothing.
        self._full_sessions: set[ChannelSession] = set()
        self._closing = self._signalled = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run_guarded, name="channel-hub", daemon=True)

    def start(self) -> None:
        """Start the thread; from now on the socket belongs to it."""
        self._thread.start()

    # ---- called by the event loop's thread

    def post_payload(self, session: ChannelSession, payload: bytes) -> bool:
        """Queue a payload. False if the session is over, or its outbox is full."""
        if session.over or not session.has_room(len(payload)):
            return False
        session.posted_bytes += len(payload)
        session.outbox.append(payload)
        self._wake_for(session)
        return True

    def end_session(self, session: ChannelSession) -> None:
        """End a session; later frames of it are dropped."""
        session.over = True
        self._wake_for(session)

    def stop(self) -> None:
        """Send what can be sent at once, close the socket and end the thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _wake_for(self, session: ChannelSession) -> None:
        """Let the I/O thread look at `session` soon; called by the event loop's thread."""
        self._touched_sessions.append(session)
        if not self._signalled:
            self._signalled = True
            os.eventfd_write(self._wake, 1)

    # ---- everything below runs in the I/O thread

    def _run_guarded(self) -> None:
        """Run the I/O until `stop`; an exception is kept in `error` for the event loop."""
        try:
            self._serve_socket()
        # `receive_message` raises this error: a gateway cannot go on without its channel.
        except BaseException as error:
            self.error = error
            self._arrived()
        finally:
            self._socket.close()

    def _serve_socket(self) -> None:
        """The I/O loop: receive frames, send queued payloads, and check connections from time to time."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        look_s = time.monotonic()
        while not self._closing:
            wait_s = look_s - time.monotonic()
            if wait_s <= 0:
                self._check_connections()
                look_s = time.monotonic() + CONNECTION_CHECK_S
                continue
            ready = dict(poller.poll(1 + int(1000 * wait_s)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._signalled = False
            self._flush_touched()
            if self._socket in ready and self._drain_socket():
                self._arrived()
        self._flush_touched()

    def _check_connections(self) -> None:
        """Find closed connections (only sending reveals them), and retry the sessions that could not send."""
        for session in list(self._sessions.values()):
            if session.send_window.next_number == session.frames_at_check:
                self._send_payload(session, ALIVE_PAYLOAD)
            session.frames_at_check = session.send_window.next_number
        for session in list(self._full_sessions):
            self._flush_outbox(session)

    def _flush_touched(self) -> None:
        """Send the queued payloads of sessions that got some, and drop sessions that were ended."""
        while self._touched_sessions:
            session = self._touched_sessions.popleft()
            if session.over:
                self._drop_session(session)
            else:
                self._flush_outbox(session)

    def _flush_outbox(self, session: ChannelSession) -> None:
        """Send a session's queued payloads, as far as its window and its connection allow."""
        outbox = session.outbox
        while outbox and not session.over:
            if not session.send_window.fits(len(outbox[0])) or not self._send_payload(session, outbox[0]):
                self._full_sessions.add(session)
                return
            session.flushed_bytes += len(outbox.popleft())
        self._full_sessions.discard(session)

    def _drain_socket(self) -> bool:
        """Receive the frames that have arrived; True if a message for the event loop was among them."""
        news = False
        for _ in range(MAX_FRAMES_PER_ROUND):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            news = self._accept_frame(frames) or news
        return news

    def _accept_frame(self, frames: list[bytes]) -> bool:
        """Process one frame; True if it put a message into the inbox. Answers Hello and Heartbeat."""
        route = frames[0]
        try:
            route, header, payload = frames
            name, number, taken = HEADER.unpack(header)
            message = wire.decode_from_worker(payload)
        except (ValueError, struct.error, msgspec.MsgspecError):
            # Also ends the session, since a frame of it is missing.
            return self._refuse_frame("malformed", route)
        if isinstance(message, Hello | Heartbeat) and not wire.is_route_of(route, message.worker):
            return self._refuse_frame("stranger", route)
        session = self._sessions.get(route)
        if isinstance(message, Hello) and (session is None or session.name != name):
            if message.link != name.hex():
                return self._refuse_frame("stranger", route)
            session = self._begin_session(ChannelSession(route, name, message.worker, number))
        if session is None or session.over or session.name != name:
            self._refused["stale"] += 1
            if isinstance(message, Heartbeat):
                self._send_frame(route, HEADER.pack(NO_SESSION, 0, 0), ALIVE_PAYLOAD)
            return False
        if number != session.received:
            return self._refuse_frame("gap", route)
        session.received += 1
        session.send_window.record_taken(taken)
        return self._put_message(session, message, len(payload))

    def _begin_session(self, session: ChannelSession) -> ChannelSession:
        """Register a new session; the session that this connection had before is ended."""
        if (before := self._sessions.get(session.route)) is not None:
            self._drop_session(before)
        self._sessions[session.route] = self.links[session.name.hex()] = session
        return session

    def _put_message(self, session: ChannelSession, message: ToGateway, size: int) -> bool:
        """Put a message into the inbox; True if the loop has to be woken for it."""
        if session in self._full_sessions:
            self._flush_outbox(session)
        if not isinstance(message, Heartbeat):
            if isinstance(message, Hello):
                if session.put:
                    # The Hello is a repetition; the session's first one is in the inbox already.
                    return False
                self._send_payload(session, ALIVE_PAYLOAD)
            session.put, session.put_bytes = session.received, session.put_bytes + size
            self.inbox.append(InboxEntry(session, message, session.received, size))
            return not session.is_overrun() or self._refuse_frame("overrun", session.route)
        self._send_payload(session, ALIVE_PAYLOAD)
        if (waiting := session.beat_entry) is not None:
            waiting.message = message
            return False
        session.beat_entry = beat_entry = InboxEntry(session, message, 0, 0)
        self.inbox.append(beat_entry)
        return True

    def _refuse_frame(self, reason: str, route: bytes) -> bool:
        """Count a refused frame and end its session, which now lacks a frame; returns False for the caller."""
        self._refused[reason] += 1
        if (session := self._sessions.get(route)) is not None:
            self._drop_session(session)
        return False

    def _send_payload(self, session: ChannelSession, payload: bytes) -> bool:
        """Send one frame. False if the connection accepts nothing now, or is closed, which ends the session."""
        if not self._send_frame(session.route, session.frame_header(), payload, session):
            return False
        session.send_window.record_sent(len(payload))
        return True

    def _send_frame(
        self, route: bytes, header: bytes, payload: bytes, session: ChannelSession | None = None
    ) -> bool:
        """Send without blocking; False if the connection accepts nothing now, or is closed."""
        try:
            self._socket.send_multipart([route, header, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            if session is not None and error.errno == errno.EHOSTUNREACH:
                self._drop_session(session)
            return False
        return True

    def _drop_session(self, session: ChannelSession) -> None:
        """Forget a session and its queued payloads; later frames of it are "stale"."""
        session.over = True
        self._full_sessions.discard(session)
        session.outbox.clear()
        if self._sessions.get(session.route) is session:
            del self._sessions[session.route]
        self.links.pop(session.name.hex(), None)
