"""The gateway's end of the channel to its workers: ZeroMQ with CURVE authentication, messages in msgpack.

    gateway  `ChannelHub`, here       ROUTER, binds: accepts one worker key (ZAP), counts and drops invalid frames
    worker   `channel.link`           DEALER, connects

Both ends have an I/O thread that owns the socket. It keeps heartbeats going while the gateway's event loop is busy, or
a worker's engine computes a long step. A side counts as lost when its connection is closed, which is noticed within a
fraction of a second, or when it was silent for `SILENCE_S`. A main thread that pauses for less loses nothing: messages
wait in bounded queues.

ZeroMQ drops messages silently when a connection breaks, and a lost `Step` would be a hole in an answer. So a session is
one unbroken sequence of frames (`diptych.channel.frames`): a gap or an overflow ends it on either side, and
the worker begins a new one with `Hello`. `Welcome` is the first message of a session that the worker gets from
`ChannelLink.poll_messages`: everything that the worker still holds belongs to requests that the gateway has given up,
and must be aborted.

Elsewhere: authentication of HTTP clients (services/gateway), and the KV bytes (`kvtransfer`).
"""

from __future__ import annotations

import asyncio
import collections
import threading

import zmq

from diptych.channel import frames as wire
from diptych.channel.auth import start_zap_guard
from diptych.channel.frames import (
    pack_message,
)
from diptych.channel.hub_thread import ChannelSession, HubThread, LoopWakeup
from diptych.channel.keys import ServerKeys
from diptych.errors import ChannelError
from diptych.messages import (
    SILENCE_S,
    Heartbeat,
    Hello,
    Reject,
    ToGateway,
    ToWorker,
    Welcome,
)

# Frames that are processed before the event loop's other tasks may run.
MAX_FRAMES_PER_ROUND = 64


class ChannelHub:
    """The gateway's end: receives from all workers, sends to accepted ones. Use it from the event loop's thread.

    `refused` counts dropped messages: "denied" (wrong key), "malformed", "stranger" (uses another worker's name),
    "stale" (no session, or an old one), "gap" (frames were lost; the session is ended), "overrun" (the worker sent more
    than the window allows; the session is ended).
    """

    def __init__(
        self,
        address: str,
        keys: ServerKeys,
        gateway: str,
        *,
        beat_s: float = 0.25,
        lease_s: float = 30.0,
        silence_s: float = SILENCE_S,
    ):
        self.address, self.refused = address, collections.Counter[str]()
        self._keys = keys
        self._welcome = pack_message(Welcome(gateway, beat_s, lease_s, silence_s))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread: HubThread | None = None
        self._guard: threading.Thread | None = None
        self._accepted: dict[str, ChannelSession] = {}  # by worker
        self._wakeup = LoopWakeup()
        self._num_received = 0

    def open(self) -> None:
        """Bind, and start the I/O thread. Afterwards `address` has the actual port.

        Raises:
            ChannelError: the address cannot be bound.
        """
        self._guard = start_zap_guard(self._context, self._keys.worker_raw, self.refused)
        socket = self._context.socket(zmq.ROUTER)
        wire.set_socket_limits(socket, self.address, linger_ms=0)
        # Sending to an unknown worker raises an error instead of being dropped.
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a worker that connects again takes over its routing id at once
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
        self.address = socket.get_string(zmq.LAST_ENDPOINT)
        self._thread = HubThread(socket, self.refused, self._wakeup.wake)
        self._thread.start()

    async def receive_message(self) -> tuple[str, ToGateway]:
        """The next message, and the worker that sent it. Safe to cancel.

        Until a worker's session is accepted, only its `Hello` and `Heartbeat` messages are returned.

        Raises:
            ChannelError: the I/O thread has failed, so the gateway cannot go on.
        """
        thread = self._require_thread
        while True:
            self._num_received += 1
            if self._num_received % MAX_FRAMES_PER_ROUND == 0:
                await asyncio.sleep(0)  # let other tasks serve clients, even under a flood of messages
            try:
                entry = thread.inbox.popleft()
            except IndexError:
                if thread.error is not None:
                    error = thread.error
                    raise ChannelError("the gateway's channel has failed", repr(error)) from error
                await self._wakeup.wait(lambda: thread.inbox or thread.error)
                continue
            session, message = entry.session, entry.take_message()
            known = isinstance(message, Hello | Heartbeat) or self._accepted.get(session.worker) is session
            if known:
                return session.worker, message
            self.refused["stale"] += 1

    @property
    def _require_thread(self) -> HubThread:
        """The I/O thread. Raises ChannelError before `open`."""
        if self._thread is None:
            raise ChannelError("the hub is not open")
        return self._thread

    def accept_session(self, worker: str, link: str) -> bool:
        """Accept the session that began with the `Hello` with this `link`, and welcome the worker.

        From now on `send` to `worker` uses this session; an earlier session of the same name is ended. Returns False if
        this session has ended already.
        """
        thread = self._require_thread
        session = thread.links.get(link)
        if self._accepted.get(worker) is not session:
            self.end_session(worker)
        if session is None or not thread.post_payload(session, self._welcome):
            return False
        self._accepted[worker] = session
        return True

    def reject_session(self, link: str, why: str) -> None:
        """Tell the worker that began the session `link` that it must end, and why."""
        thread = self._require_thread
        if (session := thread.links.get(link)) is not None:
            thread.post_payload(session, pack_message(Reject(why)))

    def send(self, worker: str, message: ToWorker) -> bool:
        """Queue a message for a worker. Returns False, and ends the session, if the worker is gone or its queue is
        full.

        Raises:
            ChannelError: the message is too long.
        """
        payload = pack_message(message)
        session = self._accepted.get(worker)
        if session is not None and (
            session.has_unread or self._require_thread.post_payload(session, payload)
        ):
            # If the session has ended with unread messages, these are received first, and then `take_ended` reports
            # it.
            return True
        self.end_session(worker)
        return False

    def take_ended(self) -> list[str]:
        """Accepted workers whose session has ended (connection closed or frames lost); each is returned once.

        A process that dies closes its connection, so its death is noticed by the next check of the I/O thread, long
        before its silence is. A worker with unread messages is returned after they were received.
        """
        ended = [(worker, session) for worker, session in self._accepted.items() if session.over]
        gone = sorted(worker for worker, session in ended if not session.has_unread)
        for worker in gone:
            del self._accepted[worker]
        return gone

    def end_session(self, worker: str) -> None:
        """End the session of a worker that was declared lost.

        Its next heartbeat is answered so that it begins a new one.
        """
        if (session := self._accepted.pop(worker, None)) is not None:
            self._require_thread.end_session(session)

    def close(self) -> None:
        """Close the socket and end the threads. Idempotent."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        self._accepted.clear()
        # This also ends the guard.
        self._context.term()
        if self._guard is not None:
            self._guard.join()
