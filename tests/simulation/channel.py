"""The channel in virtual time: sessions, order and silence as `diptych.channel.hub` has them, and nothing of ZeroMQ.

    Line (a worker's end) ══ Network: delays, cuts ══ Exchange (the gateway's end)

A session is one unbroken run of frames. Either end may give it up; what belongs to an old one is dropped. A cut holds
frames back, as TCP does, until it heals. Both ends have a thread of their own that beats, so they live on while the
engine's thread is in a long step or the gateway's event loop is blocked, and stand still with the process.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec

from diptych.channel.frames import pack_message
from diptych.messages import (
    SILENCE_S,
    Alive,
    Heartbeat,
    Hello,
    Reject,
    ToGateway,
    ToWorker,
    Welcome,
    WorkerStats,
)
from tests.simulation.event_queue import ScheduledEvent, VirtualEventQueue

BEAT_S, LEASE_S = 0.25, 30.0
NO_SESSION = 0  # the session of those that have none

_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


@dataclass(slots=True)
class VirtualWire:
    """One direction between a worker and the gateway: frames stay in order; a cut holds them back."""

    delay_s: float = 0.0005
    cut: bool = False
    last_s: float = 0.0
    sent: int = 0
    held: list[tuple[int, Callable[[], None]]] = field(default_factory=list)


class VirtualNetwork:
    """All wires. What is in flight is in the agenda."""

    def __init__(self, agenda: VirtualEventQueue) -> None:
        self.agenda = agenda
        self.exchange: VirtualHub | None = None  # None: no gateway lives
        self.lines: dict[str, VirtualLink] = {}
        self._ups: dict[str, VirtualWire] = {}
        self._downs: dict[str, VirtualWire] = {}
        self._sessions = NO_SESSION
        self.frames: Callable[[str, bytes], None] = lambda name, payload: None  # sees every frame

    def session(self) -> int:
        self._sessions += 1
        return self._sessions

    def wires(self, name: str) -> tuple[VirtualWire, VirtualWire]:
        """Up and down."""
        return self._ups.setdefault(name, VirtualWire()), self._downs.setdefault(name, VirtualWire())

    def up(self, line: VirtualLink, session: int, payload: bytes, at_s: float) -> None:
        """A frame leaves a worker at `at_s`, if that lives until then."""
        name = line.name

        def arrive() -> None:
            if self.exchange is not None and line.ended_s >= at_s:
                self.exchange.take(name, session, payload)

        self._carry(self.wires(name)[0], arrive, at_s, "to gateway")

    def down(self, name: str, session: int, payload: bytes, at_s: float) -> None:
        def arrive() -> None:
            if (line := self.lines.get(name)) is not None:
                self.frames(name, payload)
                line.take_frame(session, payload)

        self._carry(self.wires(name)[1], arrive, at_s, "to worker")

    def _carry(self, wire: VirtualWire, arrive: Callable[[], None], at_s: float, kind: str) -> None:
        wire.sent += 1
        number = wire.sent
        if wire.cut:
            wire.held.append((number, arrive))
            return
        wire.last_s = max(at_s + wire.delay_s, wire.last_s)

        def deliver() -> None:
            if wire.cut:
                wire.held.append((number, arrive))
            else:
                arrive()

        self.agenda.schedule_at(wire.last_s, deliver, kind)

    def cut(self, name: str) -> None:
        """Nothing passes between the gateway and a worker, and nobody is informed."""
        for wire in self.wires(name):
            wire.cut = True

    def heal(self, name: str) -> None:
        """What was held back arrives, in order."""
        for wire in self.wires(name):
            wire.cut = False
            held, wire.held = wire.held, []
            for _, arrive in sorted(held, key=itemgetter(0)):
                self._carry(wire, arrive, self.agenda.now_s, "after a cut")

    def slow(self, name: str, delay_s: float) -> None:
        for wire in self.wires(name):
            wire.delay_s = delay_s


class VirtualLink:
    """A worker's end (`worker.loop.GatewayLink`). `wake` is called when the main thread has something to look at."""

    def __init__(
        self, network: VirtualNetwork, name: str, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        self._network, self.name, self._clock, self._stir = network, name, clock, wake
        self.ended_s = math.inf  # when its process was gone
        self.hello: Hello | None = None
        self.stats: Callable[[], WorkerStats] = WorkerStats
        self.gateway_lost = False
        self.breaks = 0
        self._inbox: deque[ToWorker] = deque()
        self.is_congested = False  # of no time, here: queues have no end
        self._greeted = self._welcomed = self._closed = False
        self._session, self._received_s = network.session(), clock()
        self._frozen: list[tuple[int, bytes]] | None = None  # what arrives at a stopped process
        self._due: ScheduledEvent | None = None

    def open(self, hello: Hello) -> None:
        """Introduce this worker, from now on beat."""
        self.hello = hello
        self._network.lines[self.name] = self
        self._beat()

    # ---- the main thread

    def send(self, message: ToGateway) -> None:
        payload = pack_message(message)
        if self._welcomed and not self._closed:
            self._network.up(self, self._session, payload, self._clock())

    def poll_messages(self, timeout_s: float) -> list[ToWorker]:
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def wake_poll(self) -> None:
        self._stir()

    @property
    def waiting(self) -> bool:
        """Has something arrived?"""
        return bool(self._inbox)

    def close(self) -> None:
        """The process ends."""
        self._closed, self.ended_s = True, self._network.agenda.now_s
        if self._due is not None:
            self._due.cancel()
        if self._network.lines.get(self.name) is self:
            del self._network.lines[self.name]

    def freeze(self) -> None:
        """The process is stopped: the kernel keeps what arrives."""
        self._frozen = []
        if self._due is not None:
            self._due.cancel()

    def thaw(self, silence_first: bool) -> None:
        """It goes on; its thread looks either at the clock first, or at what has arrived."""
        frozen, self._frozen = self._frozen or [], None
        if silence_first:
            self._look()
        for session, payload in frozen:
            self.take_frame(session, payload)
        self._beat()

    # ---- its I/O thread

    def _beat(self) -> None:
        if self._closed or self._frozen is not None:
            return
        if self._due is not None:
            self._due.cancel()
        self._look()
        assert self.hello is not None
        now_s = self._network.agenda.now_s
        if self._greeted:
            word: ToGateway = Heartbeat(self.name, self.hello.incarnation, self.stats())
        else:
            word = msgspec.structs.replace(self.hello, link=str(self._session))
        self._network.up(self, self._session, pack_message(word), now_s)
        self._due = self._network.agenda.schedule_after(BEAT_S, self._beat, "beat")

    def _look(self) -> None:
        if self._greeted and self._network.agenda.now_s - self._received_s > SILENCE_S:
            self._end_session()

    def take_frame(self, session: int, payload: bytes) -> None:
        """A frame from the gateway."""
        if self._closed:
            return
        if self._frozen is not None:
            self._frozen.append((session, payload))
            return
        self._received_s = self._network.agenda.now_s
        if session != self._session:
            if session == NO_SESSION and self._greeted:
                self.end_session()
            return
        message = _to_worker.decode(payload)
        self._greeted = True
        if isinstance(message, Welcome):
            self._welcomed, self.gateway_lost = True, False
        if not isinstance(message, Alive):
            self._inbox.append(message)
            self._stir()

    def end_session(self) -> None:
        """This session is over, another begins at once."""
        if self._closed or self._frozen is not None:
            return
        self._end_session()
        self._beat()

    def _end_session(self) -> None:
        self.gateway_lost = self.gateway_lost or self._welcomed
        self._greeted = self._welcomed = False
        self._inbox.clear()
        self._session = self._network.session()
        self.breaks += 1
        self._stir()


class VirtualHub:
    """The gateway's end (`diptych.channel.hub.ChannelHub`). `hear` is called for every message that counts,
    when the loop runs.
    """

    def __init__(self, network: VirtualNetwork, hear: Callable[[str, ToGateway], None]) -> None:
        self._network, self._hear = network, hear
        self._sessions: dict[str, int] = {}  # by name, the latest
        self._accepted: dict[str, int] = {}
        self._hung_up: set[int] = set()
        self._inbox: deque[tuple[str, int, ToGateway]] = deque()
        self._frozen: list[tuple[str, int, bytes]] | None = None  # what arrives at a stopped process
        self._blocked = False  # the event loop stands still, the I/O thread does not
        self.refused: Counter[str] = Counter()

    # ---- the I/O thread

    def take(self, name: str, session: int, payload: bytes) -> None:
        if self._frozen is not None:
            self._frozen.append((name, session, payload))
            return
        message = _to_gateway.decode(payload)
        if isinstance(message, Hello) and self._sessions.get(name) != session:
            self._sessions[name] = session
        elif self._sessions.get(name) != session:
            self.refused["stale"] += 1
            if isinstance(message, Heartbeat):
                self._say(name, NO_SESSION, Alive())
            return
        if isinstance(message, Hello | Heartbeat):
            self._say(name, session, Alive())
        self._inbox.append((name, session, message))
        self._hear_all()

    def freeze(self) -> None:
        """The process is stopped: the kernel keeps what arrives."""
        self._frozen = []

    def thaw(self) -> None:
        """It goes on."""
        frozen, self._frozen = self._frozen or [], None
        for frame in frozen:
            self.take(*frame)

    def _say(self, name: str, session: int, message: ToWorker) -> None:
        self._network.down(name, session, pack_message(message), self._network.agenda.now_s)

    # ---- the event loop

    def block(self, blocked: bool) -> None:
        """The event loop stands still, or goes on."""
        self._blocked = blocked
        self._hear_all()

    def _hear_all(self) -> None:
        while self._inbox and not self._blocked:
            name, session, message = self._inbox.popleft()
            if isinstance(message, Hello | Heartbeat) or self._accepted.get(name) == session:
                self._hear(name, message)
            else:
                self.refused["stale"] += 1

    def accept_session(self, name: str, link: str) -> bool:
        """Take in the session that a `Hello` with this `link` began; False if it is over already."""
        session = int(link)
        if self._sessions.get(name) != session or session in self._hung_up:
            return False
        self._accepted[name] = session
        self._say(name, session, Welcome("gateway", BEAT_S, LEASE_S))
        return True

    def reject_session(self, name: str, link: str, why: str) -> None:
        """Tell the worker that began this session that it has to end."""
        self._say(name, int(link), Reject(why))

    def send(self, name: str, message: ToWorker) -> bool:
        """False if the worker is known not to be there."""
        session = self._accepted.get(name)
        if session is None or session in self._hung_up or self._sessions.get(name) != session:
            self.end_session(name)
            return False
        self._say(name, session, message)
        return True

    def end_session(self, name: str) -> None:
        session = self._accepted.pop(name, None)
        if session is not None and self._sessions.get(name) == session:
            del self._sessions[name]

    def hang_up(self, name: str) -> None:
        """The worker's end has closed its connection."""
        if name in self._sessions:
            self._hung_up.add(self._sessions[name])

    def take_ended(self) -> list[str]:
        """Accepted workers whose session has ended."""
        return sorted(
            name
            for name, session in self._accepted.items()
            if session in self._hung_up or self._sessions.get(name) != session
        )
