"""Messages between the gateway and its workers: ZeroMQ, CURVE on both sides, msgpack without pickle.

    gateway  Hub   ROUTER, binds     allow-list of one worker key (ZAP), counts and drops whatever does not fit
    worker   Link  DEALER, connects  own I/O thread: beats go out while the engine is in a long step

Frames are those of `diptych.frames`. ZeroMQ loses messages silently when a connection breaks, and a lost `Step` would
be a hole in somebody's answer. So a session is one unbroken run of frames: a gap, an overflow or a silence ends it on
either side, and the worker introduces itself again with a new one. The first `Welcome` of a session reaches the worker
through `poll`: whatever it still holds belonged to requests that were given up, and is to be aborted.

Not covered: who may speak to the HTTP side, and the KV bytes (`kvtransfer`).
"""

from __future__ import annotations

import asyncio
import collections
import errno
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from diptych import frames as wire
from diptych.door import admit
from diptych.errors import ChannelError
from diptych.frames import HEADER, NOBODY, QUEUED_BYTES, QUEUED_FRAMES, UnderWay, pack
from diptych.keys import ServerKeys, WorkerKeys
from diptych.messages import Beat, Hello, Stats, ToGateway, ToWorker, Welcome

RETRY_S = 0.02  # between attempts to speak to a gateway that is not connected
DOWN_S = 0.4  # after so long without a connection the gateway is gone; a moment is none
REDIAL_S = 5.0  # after a frame that was altered on its way libzmq closes a connection and never makes another
FRAMES_PER_TURN = 64  # taken before the event loop (or the beat) gets its turn again


@dataclass(slots=True)
class _Session:
    """One unbroken run of frames from (`heard`) and to (`sent`) a worker."""

    name: bytes
    heard: int  # sequence number that comes next
    sent: UnderWay = field(default_factory=UnderWay)
    looked: int = 0  # how many were sent when `Hub.gone` last looked

    def header(self) -> bytes:
        return HEADER.pack(self.name, self.sent.said, self.heard)


class Hub:
    """The gateway's end: hears all workers, speaks to those that have introduced themselves.

    `refused` counts what was dropped: "denied" (wrong key), "malformed", "stranger" (speaks in another's name),
    "stale" (no session, or an old one), "gap" (frames were lost: the session is over).
    """

    def __init__(
        self, address: str, keys: ServerKeys, gateway: str, *, beat_s: float = 0.25, lease_s: float = 10.0
    ):
        self.address, self.refused = address, collections.Counter[str]()
        self._keys = keys
        self._welcome = pack(Welcome(gateway, beat_s, lease_s))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._guard: threading.Thread | None = None
        self._sessions: dict[bytes, _Session] = {}
        self._gone: set[bytes] = set()
        self._wake: asyncio.Future[None] | None = None
        self._turn = 0

    def open(self) -> None:
        """Bind. `address` then names the real port. Raises ChannelError if the address cannot be bound."""
        self._guard = admit(self._context, self._keys.worker_raw, self.refused)
        socket = self._context.socket(zmq.ROUTER)
        wire.limit(socket, linger_ms=0)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to nobody fails here, not silently
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a restarted worker takes over its name at once
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.set(zmq.ZAP_DOMAIN, b"diptych")
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            socket.close()
            self.close()
            what = f"cannot listen for workers on {self.address}"
            raise ChannelError(what, str(error), "choose another port or stop its holder") from error
        self._socket, self.address = socket, socket.get_string(zmq.LAST_ENDPOINT)

    async def recv(self) -> tuple[str, ToGateway]:
        """The next message and the worker that sent it. Safe to cancel. Hello and Beat have been answered already."""
        while True:
            self._turn += 1
            if self._turn % FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)  # under a flood of messages the clients must be served as well
            try:
                frames = self._open_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await self._readable()
                continue
            if (message := self._accept(frames)) is not None:
                return frames[0].decode(), message

    @property
    def _open_socket(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            raise ChannelError("the hub is not open")
        return self._socket

    async def _readable(self) -> None:
        # libzmq's descriptor signals changes, not states: look at EVENTS before every wait and after every send
        loop, socket = asyncio.get_running_loop(), self._open_socket
        wake = self._wake = loop.create_future()
        descriptor = int(socket.get(zmq.FD))
        loop.add_reader(descriptor, self._stir)
        try:
            if not self._waiting(socket):
                await wake
        finally:
            if self._wake is wake:  # else another has begun to wait since this one was cancelled
                loop.remove_reader(descriptor)
                self._wake = None

    @staticmethod
    def _waiting(socket: zmq.Socket[bytes]) -> bool:
        return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _stir(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _accept(self, frames: list[bytes]) -> ToGateway | None:
        """The message in these frames, if its sender may say it now; answers Hello and Beat."""
        try:
            worker, header, payload = frames
            session, number, taken = HEADER.unpack(header)
            message = wire.for_gateway(payload)
        except (ValueError, struct.error, msgspec.MsgspecError):
            return self._refuse("malformed", frames[0])  # the run of a worker that sends garbage is broken
        if isinstance(message, Hello | Beat) and message.worker.encode() != worker:
            return self._refuse("stranger", worker)
        known = self._sessions.get(worker)
        if isinstance(message, Hello) and (known is None or known.name != session):
            if message.link != session.hex():
                return self._refuse("stranger", worker)
            known = self._sessions[worker] = _Session(session, number)
            self._gone.discard(worker)
        if known is None or known.name != session:
            self.refused["stale"] += 1
            if isinstance(message, Beat):
                self._speak(worker, HEADER.pack(NOBODY, 0, 0), self._welcome)
            return None
        if number != known.heard:
            return self._refuse("gap", worker)
        known.heard += 1
        known.sent.taken(taken)
        if isinstance(message, Hello | Beat):
            self._say(worker, known, self._welcome)
        return message

    def _refuse(self, reason: str, worker: bytes) -> ToGateway | None:
        self.refused[reason] += 1
        self._sessions.pop(worker, None)
        return None

    def send(self, worker: str, message: ToWorker) -> bool:
        """Queue a message for a worker; False if it is not there or takes nothing: its session is then over."""
        name = worker.encode()
        known = self._sessions.get(name)
        if known is not None and self._say(name, known, pack(message)):
            return True
        self._gone.discard(name)  # the caller knows it now
        return False

    def gone(self) -> list[str]:
        """Workers whose connection was closed since they introduced themselves, each told once; their session is over.

        A process that dies closes its connection, so it is known within one look, long before its silence tells. Those
        to whom nothing was sent since the last look get a word that they ignore: only sending tells.
        """
        for worker, session in list(self._sessions.items()):
            if session.sent.said == session.looked:
                self._say(worker, session, self._welcome)
            session.looked = session.sent.said
        gone, self._gone = sorted(self._gone), set()
        return [worker.decode() for worker in gone]

    def _say(self, worker: bytes, session: _Session, payload: bytes) -> bool:
        if session.sent.fits(len(payload)) and self._speak(worker, session.header(), payload):
            session.sent.sent(len(payload))
            return True
        if self._sessions.pop(worker, None) is not None:
            self._gone.add(worker)
        return False

    def _speak(self, worker: bytes, header: bytes, payload: bytes) -> bool:
        socket = self._open_socket
        try:
            socket.send_multipart([worker, header, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        if self._wake is not None and self._waiting(socket):
            self._stir()  # sending may have consumed the signal of an arrival
        return True

    def forget(self, worker: str) -> None:
        """End this worker's session (it was declared lost): on its next beat it is asked to introduce itself anew."""
        self._sessions.pop(worker.encode(), None)
        self._gone.discard(worker.encode())

    def close(self) -> None:
        """Unbind; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._context.term()  # ends the guard
        if self._guard is not None:
            self._guard.join()


class Link:
    """A worker's end. `send` may be called from any thread, `poll` from one.

    `stats` is called in the I/O thread for every beat. After `lost_s` without a word from the gateway, or `down_s`
    without a connection to it, the session is over, and `gateway_lost` is true until the next `Welcome`; orphans have
    to be aborted within 2 s.
    """

    def __init__(
        self,
        address: str,
        keys: WorkerKeys,
        hello: Hello,
        stats: Callable[[], Stats],
        *,
        beat_s: float = 0.25,
        lost_s: float = 1.5,
        down_s: float = DOWN_S,
        max_messages: int = QUEUED_FRAMES,
    ) -> None:
        self._address, self._keys, self._hello, self._stats = address, keys, hello, stats
        self._beat_s, self._lost_s, self._down_s = beat_s, lost_s, down_s
        self._max_messages = max_messages
        self._lock = threading.Condition()  # guards everything below that both sides touch
        self._inbox: collections.deque[ToWorker] = collections.deque()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._in_bytes = self._out_bytes = 0
        self._welcomed = self._closing = self._overflow = self._news = False
        self._error: BaseException | None = None
        self.gateway_lost = False
        self.breaks = 0  # sessions that ended before the worker did
        self._session, self._sent, self._heard = os.urandom(8), UnderWay(), 0
        self._due_s = self._heard_s = 0.0
        self._down_since_s: float | None = None
        self._redial = False  # begin again with a new socket: a new session, or no connection comes
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._guarded, name="channel-link", daemon=True)

    def open(self) -> None:
        """Start the I/O thread: connect, introduce this worker, beat."""
        self._thread.start()

    def send(self, message: ToGateway) -> None:
        """Queue a message; raises ChannelError if it is too long.

        While no gateway listens it is dropped: nobody is left whose request it could concern.
        """
        payload = pack(message)
        with self._lock:
            if not self._welcomed or self._closing:
                return
            if len(self._outbox) >= self._max_messages or self._out_bytes + len(payload) > QUEUED_BYTES:
                self._overflow = True
            first = not self._outbox
            self._outbox.append(payload)
            self._out_bytes += len(payload)
            if first or self._overflow:
                os.eventfd_write(self._wake, 1)

    def poll(self, timeout_s: float) -> list[ToWorker]:
        """All messages that have arrived; waits up to `timeout_s` for the first, less if the gateway is lost.

        Raises ChannelError if the I/O thread has failed: the worker cannot go on.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._inbox or self._news or self._closing or self._error, timeout_s)
            if self._error is not None:
                raise ChannelError("the worker's channel has failed", repr(self._error)) from self._error
            messages = list(self._inbox)
            self._inbox.clear()
            self._in_bytes, self._news = 0, False
        return messages

    def wake(self) -> None:
        """Let `poll` return now with whatever is there; from any thread."""
        with self._lock:
            self._news = True
            self._lock.notify_all()

    def close(self) -> None:
        """Send what is queued and stop the I/O thread; idempotent."""
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

    def _guarded(self) -> None:
        try:
            with zmq.Context() as context:
                while not self._closing:
                    with context.socket(zmq.DEALER) as socket:
                        wire.dial(socket, self._hello.worker, self._keys)
                        socket.connect(self._address)
                        self._serve(socket)
        except BaseException as error:  # told by the next poll: without its channel a worker is of no use
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        self._redial = False
        while not (self._closing or self._redial):
            now_s = time.monotonic()
            self._keep_up(socket, now_s)
            stuck = not self._flush(socket)
            poller.register(socket, zmq.POLLIN | zmq.POLLOUT if stuck else zmq.POLLIN)
            wait_ms = max(0, round(1000 * (self._due_s - now_s)) + 1)
            ready = dict(poller.poll(wait_ms))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if ready.get(socket, 0) & zmq.POLLIN:
                self._drain(socket)
        self._flush(socket)

    def _keep_up(self, socket: zmq.Socket[bytes], now_s: float) -> None:
        """Notice silence and a closed connection; say Hello until welcomed, then beat."""
        down_s = 0.0 if self._down_since_s is None else now_s - self._down_since_s
        if self._overflow or (
            self._welcomed and (now_s - self._heard_s > self._lost_s or down_s > self._down_s)
        ):
            self._break_off()
        elif down_s > REDIAL_S:
            self._redial, self._down_since_s = True, None
        if now_s < self._due_s or self._redial:
            return
        if self._welcomed:
            payload = pack(Beat(self._hello.worker, self._hello.incarnation, self._stats()))
        else:
            payload = pack(msgspec.structs.replace(self._hello, link=self._session.hex()))
        if self._say(socket, payload):
            self._due_s, self._down_since_s = now_s + self._beat_s, None
            return
        self._due_s = now_s + min(self._beat_s, RETRY_S)
        # The socket takes nothing: either it is full, or (IMMEDIATE) there is no connection.
        if self._down_since_s is None and len(self._sent) < QUEUED_FRAMES // 2:
            self._down_since_s = now_s

    def _say(self, socket: zmq.Socket[bytes], payload: bytes) -> bool:
        header = HEADER.pack(self._session, self._sent.said, self._heard)
        try:
            socket.send_multipart([header, payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent.sent(len(payload))
        return True

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what is queued, oldest first; False if the socket takes no more."""
        while True:
            with self._lock:
                if not self._outbox:
                    return True
                payload = self._outbox[0]
            if not self._sent.fits(len(payload)):
                return True  # the gateway's next word tells what it has taken, and wakes us
            if not self._say(socket, payload):
                return False
            with self._lock:
                self._outbox.popleft()
                self._out_bytes -= len(payload)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        self._heard_s = time.monotonic()
        try:
            header, payload = frames
            session, number, taken = HEADER.unpack(header)
            message = wire.for_worker(payload)
        except (ValueError, struct.error, msgspec.MsgspecError):
            return self._break_off()
        if session != self._session:
            # A gateway that knows no session of ours: it restarted, or it has given us up.
            return self._break_off() if session == NOBODY and self._welcomed else None
        if number != self._heard:
            return self._break_off()
        self._heard += 1
        self._sent.taken(taken)
        pong = isinstance(message, Welcome) and self._welcomed
        with self._lock:
            if isinstance(message, Welcome):
                self._welcomed, self.gateway_lost, self._beat_s = True, False, message.beat_s
            if not pong:
                self._inbox.append(message)
                self._in_bytes += len(payload)
                self._lock.notify_all()
            full = len(self._inbox) > self._max_messages or self._in_bytes > QUEUED_BYTES
        if full:
            self._break_off()

    def _break_off(self) -> None:
        """This session is over; another begins with a Hello, at once."""
        with self._lock:
            self.gateway_lost = self.gateway_lost or self._welcomed
            self._news = self._news or self._welcomed
            self._welcomed = self._overflow = False
            self._inbox.clear()
            self._outbox.clear()
            self._in_bytes = self._out_bytes = 0
            self._lock.notify_all()
        self.breaks += 1
        self._redial = True
        self._session, self._sent, self._heard = os.urandom(8), UnderWay(), 0
        self._due_s, self._down_since_s = 0.0, None
