"""What every worker does, whatever its role: one loop on the main thread.

    take what the gateway said ──▶ tend what is held ──▶ one engine step ──▶ tell the gateway

A role adds what differs: a prefill worker leases and offers what its engine lets go, a decode worker pulls
and adopts what others offer. The loop waits in `Link.poll` whenever nothing can progress, never in a spin.
Every exception that gets out of here is fatal: the process ends and its supervisor starts another; whatever
concerns one request stays with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from diptych.messages import (
    Abort,
    Admit,
    Drain,
    Failed,
    Generate,
    Output,
    Prefill,
    Stats,
    Step,
    ToGateway,
    ToWorker,
    Turn,
    Welcome,
)
from engine.loop import Emission, Engine
from engine.scheduler import Refused, Sequence
from kvcache.prefix_tree import root
from worker.epochs import Epochs
from worker.pulse import Pulse

log = logging.getLogger(__name__)

PROOF_SHARE = 100
TICK_S = 0.5  # the longest wait: a signal that falls between a look and the wait is noticed by then

ROLES = ("prefill", "decode")

Order = Prefill | Generate | Admit


class Line(Protocol):
    """The way to the gateway (`diptych.channel.Link`)."""

    gateway_lost: bool

    def send(self, message: ToGateway) -> None: ...

    def poll(self, timeout_s: float) -> list[ToWorker]: ...

    def wake(self) -> None: ...


class Role(Protocol):
    """What a kind of worker adds. Whatever it holds, it holds under the key "<request>#<epoch>"."""

    def begin(self, order: Order, seq: Sequence, now_s: float) -> None:
        """Start working on an attempt. Raises Refused, holding nothing for it."""

    def take(self, message: ToWorker, now_s: float) -> None:
        """A message that is no order, abort, welcome, drain or turn."""

    def let_go(self, seq: Sequence, now_s: float) -> None:
        """The engine is done with a held sequence, whose slabs are now the role's."""

    def tend(self, now_s: float) -> float | None:
        """Look after what is held; returns when to look again, if nothing happens before."""

    def abort(self, request: str, epoch: int) -> None:
        """Free what is held for the request, of this epoch and older ones."""

    def abandon(self) -> list[tuple[str, int]]:
        """Free everything; returns the attempts (request, epoch) that this ends."""

    @property
    def holds(self) -> bool:
        """Is there anything that a drained worker has to wait for?"""

    def books(self, stats: Stats) -> Stats:
        """The engine's books, with the role's own entries."""


class Slabs(Protocol):
    """Who holds what (`kvcache.holdings.Holdings`), as far as its books are looked at."""

    @property
    def used(self) -> int: ...

    def owners(self) -> dict[str, int]: ...

    def check(self) -> None: ...


class Books:
    """The latest statistics, written by the main thread and read by the one that beats.

    With a `pulse` they tell when the main thread hangs.
    """

    def __init__(self, pulse: Pulse | None = None) -> None:
        self.stats = Stats()
        self.pulse = pulse

    def turn(self) -> None:
        """The main thread comes round."""
        if self.pulse is not None:
            self.pulse.turn()

    def read(self) -> Stats:
        """For a beat."""
        stuck_s = 0.0 if self.pulse is None else self.pulse.look()
        return msgspec.structs.replace(self.stats, stuck_s=stuck_s) if stuck_s else self.stats


def since(now: Stats, then: Stats) -> Stats:
    """`now`, with an engine's counters counted from `then` on: an engine outlives the roles that it serves in."""
    if not then.steps and not then.prefix_queries:
        return now
    return msgspec.structs.replace(
        now,
        steps=now.steps - then.steps,
        step_seconds=now.step_seconds - then.step_seconds,
        step_tokens=now.step_tokens - then.step_tokens,
        prefix_queries=now.prefix_queries - then.prefix_queries,
        prefix_hits=now.prefix_hits - then.prefix_hits,
        preemptions={way: count - then.preemptions.get(way, 0) for way, count in now.preemptions.items()},
        step_parts={part: spent - then.step_parts.get(part, 0.0) for part, spent in now.step_parts.items()},
    )


class Shell:
    """The loop, for the time of one role. `drain_s` bounds how long a worker that is to end waits for what it holds.

    `turned` is the role that the gateway wants next, if any; it is to be looked at when `run` has returned.
    `fingerprint` is that of the model, if prefixes are kept and shared; without it they are not.
    """

    def __init__(
        self,
        link: Line,
        engine: Engine,
        role: Role,
        holdings: Slabs,
        books: Books,
        *,
        fingerprint: str = "",
        drain_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link, self.engine, self.role, self.holdings, self.books = link, engine, role, holdings, books
        self.epochs = Epochs()
        self.turned = ""
        self._fingerprint, self._before = fingerprint, engine.stats
        self.welcomed: Callable[[], None] | None = None  # called once, when the gateway first answers
        self._drain_s, self._clock = drain_s, clock
        self._ending_s: float | None = None  # the moment at which a drained worker waits no longer
        self._next_s: float | None = None
        self._proof_s = float("-inf")  # when all books are gone through again, at the earliest
        self._idle = False

    def drain(self) -> None:
        """Take no new work, end when nothing is held any more. Idempotent; a signal handler may call it."""
        self.turned = ""
        if self._ending_s is None:
            self._ending_s = self._clock() + self._drain_s

    def become(self, role: str) -> None:
        """Drain, for a life in `role`. A worker that is drained for its end is not asked any more."""
        if self._ending_s is None and role in ROLES:
            self.drain()
            self.turned = role

    def run(self) -> None:
        """Serve until drained. What is left by then fails as "draining", and can go on elsewhere."""
        while not self.over:
            self.turn()
        for request, epoch in self._abandon():
            self.link.send(Failed(request, epoch, "draining", "the worker had to end"))

    def settle(self) -> None:
        """After `run`, when nothing writes to the pool any more: what was on its way is let go of, and all is free.

        Raises:
            RuntimeError: something is still held. It would be missing for ever, so a new process is better.
            AssertionError: the books do not add up.
        """
        self.role.tend(self._clock())
        if self.holds:
            raise RuntimeError("a role that has ended still holds something")
        self._idle, self._proof_s = False, float("-inf")
        self._prove()

    def turn(self) -> None:
        """Take, tend, step, tell, and note it in the books."""
        self.books.turn()
        for message in self.link.poll(self.patience):
            self._take(message)
        if self.link.gateway_lost:
            self._orphan()
        now_s = self._clock()
        self._next_s = self.role.tend(now_s)
        if self.engine.has_work or (self.engine.deadline_s or now_s + 1) <= now_s:
            self._tell(self.engine.step(self._clock))
            self._next_s = self.role.tend(self._clock())  # what has ended made room for what waits
        self._prove()
        self._write_books()

    @property
    def holds(self) -> bool:
        """Is any attempt alive here, in whatever phase?"""
        return len(self.engine.scheduler) > 0 or self.role.holds

    def _prove(self) -> None:
        """Whenever the last attempt has ended, nobody may hold a slab; chunks kept for later are held by none.

        Going through all books takes longer the larger the pool is, so it takes one part in `PROOF_SHARE` of the time
        at most: requests that come one by one do not wait for it each time.

        Raises:
            RuntimeError: some are not. They would be missing for ever, so a new process is better.
            AssertionError: the books do not add up.
        """
        idle = not self.holds
        if idle and not self._idle:
            if (begun_s := self._clock()) >= self._proof_s:
                self.holdings.check()
                ended_s = self._clock()
                self._proof_s = ended_s + PROOF_SHARE * (ended_s - begun_s)
            if self.holdings.used:
                owners = self.holdings.owners()
                raise RuntimeError(f"{self.holdings.used} slabs are used although nothing is held: {owners}")
        self._idle = idle

    @property
    def over(self) -> bool:
        """Is the worker drained, or was it so for long enough?"""
        if self._ending_s is None:
            return False
        return not self.holds or self._clock() >= self._ending_s

    @property
    def patience(self) -> float:
        """How long to wait for a message, in seconds; 0 while the engine can progress."""
        if self.engine.has_work:
            return 0.0
        now_s, moments = self._clock(), (self._next_s, self.engine.deadline_s, self._ending_s)
        return max(0.0, min([TICK_S, *(moment - now_s for moment in moments if moment is not None)]))

    def _take(self, message: ToWorker) -> None:
        now_s = self._clock()
        match message:
            case Prefill() | Generate() | Admit():
                self._begin(message, now_s)
            case Abort(request, epoch):
                if self.epochs.holds(request, epoch):
                    self._abort(request, epoch)
            case Welcome():
                self._orphan()  # a session begins: what is held belongs to requests that were given up
                self._announce()
            case Drain():
                self.drain()
            case Turn(role):
                self.become(role)
            case _:
                self.role.take(message, now_s)

    def _announce(self) -> None:
        if self.welcomed is not None:
            self.welcomed()
            self.welcomed = None

    def _begin(self, order: Order, now_s: float) -> None:
        if not self.epochs.begin(order.request, order.epoch):
            return
        self._abort(order.request, order.epoch - 1)
        if self._ending_s is not None:
            self._fail(order, "draining", "the worker is about to end")
            return
        seq = Sequence(
            order.request,
            order.epoch,
            order.prompt,
            order.sampling,
            now_s + order.remaining_s,
            output=list(order.output),
            origin=order.origin,
            root=root(self._fingerprint, order.origin.scope) if self._fingerprint else b"",
        )
        try:
            self.role.begin(order, seq, now_s)
        except Refused as refusal:
            self._fail(order, refusal.code, "; ".join(part for part in (refusal.what, refusal.why) if part))
        except Exception as error:
            log.exception("request %s cannot begin", order.request)
            self._abort(order.request, order.epoch)
            self._fail(order, "internal_error", f"{type(error).__name__}: {error}")

    def _fail(self, order: Order, code: str, message: str) -> None:
        self.link.send(Failed(order.request, order.epoch, code, message))

    def _tell(self, emissions: list[Emission]) -> None:
        """One `Step` for all that progressed, before anything else is done with what they hold."""
        if not emissions:
            return
        begun_s = self._clock()
        if outputs := [told.message for told in emissions if isinstance(told.message, Output)]:
            self.link.send(Step(outputs))
        for told in emissions:
            if isinstance(told.message, Failed):
                self.link.send(told.message)
        self.engine.sent(self._clock() - begun_s)
        for told in emissions:
            if told.held is not None:
                self.role.let_go(told.held, self._clock())

    def _abort(self, request: str, epoch: int) -> None:
        self.engine.abort(request, epoch)
        self.role.abort(request, epoch)

    def _orphan(self) -> None:
        if ended := self._abandon():
            log.warning("the gateway is gone: %d attempts ended", len(ended))

    def _abandon(self) -> list[tuple[str, int]]:
        """Free everything that the engine and the role hold."""
        ended = [(seq.id, seq.epoch) for seq in self.engine.scheduler.sequences()]
        for request, epoch in ended:
            self.engine.abort(request, epoch)
        return ended + self.role.abandon()

    def _write_books(self) -> None:
        stats = self.role.books(since(self.engine.stats, self._before))
        late = stats.late_messages + self.epochs.late
        draining = self._ending_s is not None
        self.books.stats = msgspec.structs.replace(stats, late_messages=late, draining=draining)
