"""The channel in virtual time: sessions, order and silence as `diptych.channel` has them, and nothing of ZeroMQ.

    Line (a worker's end) ══ Network: delays, cuts ══ Exchange (the gateway's end)

A session is one unbroken run of frames. Either end may give it up; what belongs to an old one is dropped. A cut holds
frames back, as TCP does, until it heals. The worker's end has a thread of its own that beats, so it lives on while the
engine's thread is in a long step, and stands still with the process.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec

from diptych.frames import pack
from diptych.messages import Beat, Hello, Stats, ToGateway, ToWorker, Welcome
from tests.simulation.agenda import Agenda, Entry

BEAT_S, LINK_LOST_S, LEASE_S = 0.25, 1.5, 3.0
NOBODY = 0  # the session of those that have none

_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


@dataclass(slots=True)
class Wire:
    """One direction between a worker and the gateway: frames stay in order; a cut holds them back."""

    delay_s: float = 0.0005
    cut: bool = False
    last_s: float = 0.0
    sent: int = 0
    held: list[tuple[int, Callable[[], None]]] = field(default_factory=list)


class Network:
    """All wires. What is in flight is in the agenda."""

    def __init__(self, agenda: Agenda) -> None:
        self.agenda = agenda
        self.exchange: Exchange | None = None  # None: no gateway lives
        self.lines: dict[str, Line] = {}
        self._ups: dict[str, Wire] = {}
        self._downs: dict[str, Wire] = {}
        self._sessions = NOBODY
        self.frames: Callable[[str, bytes], None] = lambda name, payload: None  # sees every frame

    def session(self) -> int:
        self._sessions += 1
        return self._sessions

    def wires(self, name: str) -> tuple[Wire, Wire]:
        """Up and down."""
        return self._ups.setdefault(name, Wire()), self._downs.setdefault(name, Wire())

    def up(self, line: Line, session: int, payload: bytes, at_s: float) -> None:
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
                line.take(session, payload)

        self._carry(self.wires(name)[1], arrive, at_s, "to worker")

    def _carry(self, wire: Wire, arrive: Callable[[], None], at_s: float, kind: str) -> None:
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

        self.agenda.at(wire.last_s, deliver, kind)

    def cut(self, name: str) -> None:
        """Nothing passes between the gateway and a worker, and nobody is told."""
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


class Line:
    """A worker's end (`worker.shell.Line`). `wake` is called when the main thread has something to look at."""

    def __init__(
        self, network: Network, name: str, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        self._network, self.name, self._clock, self._stir = network, name, clock, wake
        self.ended_s = math.inf  # when its process was gone
        self.hello: Hello | None = None
        self.stats: Callable[[], Stats] = Stats
        self.gateway_lost = False
        self.breaks = 0
        self._inbox: deque[ToWorker] = deque()
        self._welcomed = self._closed = False
        self._session, self._heard_s = network.session(), clock()
        self._frozen: list[tuple[int, bytes]] | None = None  # what arrives at a stopped process
        self._due: Entry | None = None

    def open(self, hello: Hello) -> None:
        """Introduce this worker, from now on beat."""
        self.hello = hello
        self._network.lines[self.name] = self
        self._beat()

    # ---- the main thread

    def send(self, message: ToGateway) -> None:
        payload = pack(message)
        if self._welcomed and not self._closed:
            self._network.up(self, self._session, payload, self._clock())

    def poll(self, timeout_s: float) -> list[ToWorker]:
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def wake(self) -> None:
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
            self.take(session, payload)
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
        if self._welcomed:
            word: ToGateway = Beat(self.name, self.hello.incarnation, self.stats())
        else:
            word = msgspec.structs.replace(self.hello, link=str(self._session))
        self._network.up(self, self._session, pack(word), now_s)
        self._due = self._network.agenda.after(BEAT_S, self._beat, "beat")

    def _look(self) -> None:
        if self._welcomed and self._network.agenda.now_s - self._heard_s > LINK_LOST_S:
            self._break()

    def take(self, session: int, payload: bytes) -> None:
        """A frame from the gateway."""
        if self._closed:
            return
        if self._frozen is not None:
            self._frozen.append((session, payload))
            return
        self._heard_s = self._network.agenda.now_s
        if session != self._session:
            if session == NOBODY and self._welcomed:
                self.break_off()
            return
        message = _to_worker.decode(payload)
        pong = isinstance(message, Welcome) and self._welcomed
        if isinstance(message, Welcome):
            self._welcomed, self.gateway_lost = True, False
        if not pong:
            self._inbox.append(message)
            self._stir()

    def break_off(self) -> None:
        """This session is over, another begins at once."""
        if self._closed or self._frozen is not None:
            return
        self._break()
        self._beat()

    def _break(self) -> None:
        self.gateway_lost = self.gateway_lost or self._welcomed
        self._welcomed = False
        self._inbox.clear()
        self._session = self._network.session()
        self.breaks += 1
        self._stir()


class Exchange:
    """The gateway's end (`diptych.channel.Hub`). `hear` is called for every message that counts."""

    def __init__(self, network: Network, hear: Callable[[str, ToGateway], None]) -> None:
        self._network, self._hear = network, hear
        self._sessions: dict[str, int] = {}
        self._hung_up: set[str] = set()
        self.refused: Counter[str] = Counter()

    def take(self, name: str, session: int, payload: bytes) -> None:
        message = _to_gateway.decode(payload)
        if isinstance(message, Hello) and self._sessions.get(name) != session:
            self._sessions[name] = session
            self._hung_up.discard(name)
        if self._sessions.get(name) != session:
            self.refused["stale"] += 1
            if isinstance(message, Beat):
                self._say(name, NOBODY, Welcome("gateway", BEAT_S, LEASE_S))
            return
        if isinstance(message, Hello | Beat):
            self._say(name, session, Welcome("gateway", BEAT_S, LEASE_S))
        self._hear(name, message)

    def send(self, name: str, message: ToWorker) -> bool:
        """False if the worker is known not to be there."""
        session = self._sessions.get(name)
        if session is None or name in self._hung_up:
            self._sessions.pop(name, None)
            return False
        self._say(name, session, message)
        return True

    def _say(self, name: str, session: int, message: ToWorker) -> None:
        self._network.down(name, session, pack(message), self._network.agenda.now_s)

    def forget(self, name: str) -> None:
        self._sessions.pop(name, None)

    def hang_up(self, name: str) -> None:
        """The worker's end has closed its connection."""
        if name in self._sessions:
            self._hung_up.add(name)

    def gone(self) -> list[str]:
        """Who holds a session over a connection that is closed."""
        return sorted(self._hung_up & self._sessions.keys())
