"""The decode worker's side of hand-offs in virtual time: wait for room, reserve, pull, commit.

It mirrors `decode_worker.worker.Decoder` and its courier; the conversation itself is `kvtransfer.handoff.hand_off`. KV
that is announced while it is computed is sent at once, and is there when it is complete at the earliest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import msgspec

from diptych.messages import Admit, Failed, Fetch, Pulled
from engine.desk import Aside
from engine.scheduler import Refused
from engine.sequence import chunks
from kvcache.layout import CHUNK_TOKENS
from kvtransfer.digests import Terms
from kvtransfer.handoff import (
    Aborted,
    Ahead,
    Arrived,
    Commit,
    Effect,
    Free,
    Outcome,
    Pull,
    Reserve,
    Steps,
    hand_off,
    perform,
)
from kvtransfer.ticket import Chunk, Ticket
from planner.sim_agenda import Agenda
from planner.sim_engine import Engine, Task
from planner.sim_wires import Transfer, Wires

PASSED = 32  # that wait for chunks on their way are passed by in one turn (`decode_worker.worker`)
SHAPE = (1, 1, 2, CHUNK_TOKENS, 1)  # of chunks without content


class Hint(msgspec.Struct, frozen=True, array_like=True):
    """Chunks from `start` on: `there` are complete at `source`, `coming` more will be at `ready_s`."""

    source: str
    start: int
    there: int
    coming: int
    ready_s: float


@dataclass(slots=True, eq=False)
class Arrival:
    """One request whose KV is to come: its task, how much of it, and the conversation once it has begun.

    `early` are the chunks that came ahead of the ticket, `sent` what is on its way. One that is `recalled` had to give
    its room back, and waits for its ticket.
    """

    task: Task
    num_tokens: int
    ticket: Ticket | None
    arrived_s: float
    ticket_s: float = 0.0
    reserved_s: float = 0.0
    recalled: bool = False
    hints: deque[Hint] = field(default_factory=deque)
    steps: Steps | None = None
    turn: Effect | Outcome | None = None
    coming: frozenset[bytes] = frozenset()
    early: set[int] = field(default_factory=set)
    sent: dict[int, Transfer] = field(default_factory=dict)
    parts: int = 0  # sent so far
    stopped: bool = False


@cache
def _chunks(count: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(slab, bytes(16)) for slab in range(count))


def ticket_of(order: Admit | Fetch, num_tokens: int) -> Ticket:
    """What an order to fetch stands for; its ticket is nothing but the name of the worker that has the KV."""
    terms = Terms(order.request, order.epoch, num_tokens, (0, 1), "float16", SHAPE, "simulated")
    return Ticket(terms, order.ticket.decode(), "1", _chunks(chunks(num_tokens)))


class Fetcher:
    """Offers that wait for room at one engine, and those that are on their way to it."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        wires: Wires,
        chunk_bytes: int,
        send: Callable[[Any], None],
        landed: Callable[[Arrival], None],
    ) -> None:
        self.name, self.engine, self.wires, self.chunk_bytes = name, engine, wires, chunk_bytes
        self._send, self._landed = send, landed
        self._agenda: Agenda = wires.agenda
        self.waiting: dict[str, Arrival] = {}
        self.moving: dict[str, Arrival] = {}

    @property
    def ahead(self) -> bool:
        """Whether anything moves ahead of its ticket."""
        return any(arrival.ticket is None for arrival in self.moving.values())

    # ---- what comes

    def admit(self, order: Admit, task: Task, now_s: float) -> None:
        """Queue an offer, or one that is still read. Raises Refused."""
        limits = self.engine.limits
        # The last token is the first decode input and has no KV yet; without a ticket it is still to come.
        num_tokens = task.total - bool(order.ticket)
        if (room := limits.room(task)) > limits.num_slabs:
            raise Refused("out_of_memory", f"the request needs {room} KV slabs")
        if len(self.waiting) >= limits.max_waiting:
            raise Refused("overloaded", f"{len(self.waiting)} requests wait for room already")
        self.engine.scheduler.service.enter(task.origin.tenant)
        ticket = ticket_of(order, num_tokens) if order.ticket else None
        self.waiting[task.key] = Arrival(task, num_tokens, ticket, now_s, now_s)

    def hint(self, key: str, raw: bytes) -> None:
        """Chunks are being computed."""
        arrival = self.waiting.get(key) or self.moving.get(key)
        if arrival is not None and arrival.ticket is None:
            arrival.hints.append(msgspec.msgpack.decode(raw, type=Hint))
            if key in self.moving:
                self._send_ahead(arrival)

    def fetch(self, order: Fetch, now_s: float) -> None:
        """The ticket of one that came without."""
        key = f"{order.request}#{order.epoch}"
        arrival = self.waiting.get(key) or self.moving.get(key)
        if arrival is None or arrival.ticket is not None:
            return
        arrival.task.output = list(order.output)
        arrival.ticket, arrival.ticket_s = ticket_of(order, arrival.num_tokens), now_s
        if key in self.moving:
            self._arrive(arrival)

    # ---- who departs

    def depart(self, now_s: float) -> None:
        """Reserve for and fetch, one after the other, as long as there is room."""
        engine, holdings = self.engine, self.engine.holdings
        if self.ahead:
            starved = len(engine.scheduler) > 0 and not engine.scheduler.ready(holdings)
            if holdings.free < len(engine.scheduler.running) or starved:
                self._recall(now_s)
        if not self.waiting:
            return
        coming = {key for arrival in self.moving.values() if arrival.ticket for key in arrival.coming}
        ahead = [arrival.task for arrival in self.moving.values()]
        stock = Aside(holdings)
        for arrival in self._order():
            if stock.passed > PASSED:
                return
            task, keys = arrival.task, self._full(arrival)
            known = holdings.look(keys)
            need = chunks(arrival.num_tokens + 1) - known + holdings.look_free(keys)
            if need > stock.free or not engine.scheduler.admits(task, stock, ahead):
                if any(waiting.ticket for waiting in self.waiting.values()):
                    self._recall(now_s)
                return
            ahead.append(task)
            if known < len(keys) and keys[known] in coming:
                stock.pass_by(need)
                continue
            self._set_out(arrival, now_s)
            if arrival.ticket:
                coming |= arrival.coming

    def _order(self) -> list[Arrival]:
        service = self.engine.scheduler.service

        def place(arrival: Arrival) -> tuple[int, float]:
            origin = arrival.task.origin
            return origin.priority, service.of(origin.tenant)

        return sorted((one for one in self.waiting.values() if one.ticket or not one.recalled), key=place)

    def _recall(self, now_s: float) -> None:
        """Those that move without a ticket give their room back."""
        for arrival in [one for one in self.moving.values() if one.ticket is None]:
            arrival.recalled = True
            self._stop(arrival, now_s)

    def _full(self, arrival: Arrival) -> list[bytes]:
        return arrival.task.keys[: arrival.num_tokens // CHUNK_TOKENS]

    def _set_out(self, arrival: Arrival, now_s: float) -> None:
        """Take hold of what is here, reserve the rest, and pull that."""
        task, keys, holdings = arrival.task, self._full(arrival), self.engine.holdings
        del self.waiting[task.key]
        held = holdings.attach(task.key, keys)
        num_slabs = chunks(arrival.num_tokens + 1)
        arrival.steps = hand_off(arrival.ticket, num_slabs, _matches, dict(enumerate(held)))
        reserve = {Reserve: lambda effect: holdings.take(task.key, effect.num_slabs)}
        arrival.turn = perform(arrival.steps, reserve)
        arrival.reserved_s, arrival.recalled = now_s, False
        arrival.coming = frozenset(keys[len(held) :])
        self.moving[task.key] = arrival
        if isinstance(arrival.turn, Ahead):
            self._send_ahead(arrival)
        elif isinstance(arrival.turn, Pull):
            self._pull(arrival, arrival.turn)
        else:
            self.finish(arrival, now_s)  # everything is here already

    # ---- on the way

    def _send_ahead(self, arrival: Arrival) -> None:
        """Chunks that are complete, and those that will be."""
        turn = arrival.turn
        assert isinstance(turn, Ahead), "it does not wait for its ticket"
        while arrival.hints:
            hint = arrival.hints.popleft()
            middle = hint.start + hint.there
            for first, end, ready_s in (
                (hint.start, middle, 0.0),
                (middle, middle + hint.coming, hint.ready_s),
            ):
                wanted = [
                    index for index in range(first, end) if index in turn.slabs and index not in arrival.early
                ]
                if wanted:
                    arrival.early.update(wanted)
                    self._part(arrival, hint.source, len(wanted), ready_s)

    def _part(self, arrival: Arrival, source: str, count: int, ready_s: float) -> None:
        """So many chunks are sent, of which the last bytes are not there before `ready_s`."""
        arrival.parts += 1
        there = partial(self._copied, arrival, arrival.parts, ready_s)
        arrival.sent[arrival.parts] = self.wires.start(source, self.name, count * self.chunk_bytes, there)

    def _copied(self, arrival: Arrival, part: int, ready_s: float) -> None:
        if arrival.stopped:
            return
        if self._agenda.now_s < ready_s:
            self._agenda.at(ready_s, self._copied, arrival, part, ready_s)
            return
        del arrival.sent[part]
        if isinstance(arrival.turn, Ahead):
            self._arrive(arrival)
        else:
            self._landed(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        """When the ticket is there, and what was announced: pull what is missing yet."""
        ticket, steps = arrival.ticket, arrival.steps
        if ticket is None or steps is None or arrival.sent:
            return
        came = Arrived(ticket, dict.fromkeys(arrival.early, b""))
        arrival.turn = perform(steps, {Ahead: lambda effect: came}, arrival.turn)
        if isinstance(arrival.turn, Pull):
            self._pull(arrival, arrival.turn)
        else:
            self._landed(arrival)

    def _pull(self, arrival: Arrival, pull: Pull) -> None:
        self._part(arrival, pull.ticket.worker, len(pull.pairs), 0.0)

    # ---- how it ends

    def finish(self, arrival: Arrival, now_s: float) -> None:
        """What was pulled is here, or was stopped: commit, or free."""
        task, holdings, steps = arrival.task, self.engine.holdings, arrival.steps
        assert steps is not None, "it has not departed"
        del self.moving[task.key]
        if not arrival.stopped:
            pull = {Pull: lambda effect: [b""] * len(effect.pairs)}
            arrival.turn = perform(steps, pull, arrival.turn)

        def commit(effect: Commit) -> None:
            task.slabs, task.computed = list(effect.slabs), arrival.num_tokens
            keys = self._full(arrival)
            holdings.share(task.key, keys, task.slabs)
            task.shared = len(keys)
            self.engine.scheduler.adopt(task, now_s)

        table = {Commit: commit, Free: lambda effect: holdings.end(task.key)}
        error = Aborted("stopped while its KV was on the way") if arrival.stopped else None
        outcome = perform(steps, table, arrival.turn, error)
        assert isinstance(outcome, Outcome)
        if outcome.error is not None:
            holdings.end(task.key)  # also what was held without being reserved
            if arrival.recalled:
                again = Arrival(task, arrival.num_tokens, None, arrival.arrived_s, recalled=True)
                self.waiting[task.key] = again
                return
        self.engine.scheduler.service.leave(task.origin.tenant)
        if outcome.error is None:
            self._tell(arrival, outcome, now_s)
        elif not arrival.stopped:
            self._send(Failed(task.id, task.epoch, outcome.code, str(outcome.error)))

    def _tell(self, arrival: Arrival, outcome: Outcome, now_s: float) -> None:
        began_s = max(arrival.reserved_s, arrival.ticket_s)
        seconds = {
            "reserve": max(0.0, arrival.reserved_s - arrival.ticket_s),
            "transfer": now_s - began_s,
            "verify": 0.0,
            "hidden": max(0.0, began_s - arrival.reserved_s),
            "exposed": now_s - began_s,
        }
        num_bytes = outcome.pulled * self.chunk_bytes
        self._send(Pulled(arrival.task.id, arrival.task.epoch, "simulated", num_bytes, seconds))

    def _stop(self, arrival: Arrival, now_s: float) -> None:
        arrival.stopped = True
        for transfer in arrival.sent.values():
            self.wires.stop(transfer)
        arrival.sent.clear()
        self.finish(arrival, now_s)

    def abort(self, request: str, epoch: int, now_s: float) -> None:
        """Forget what waits, stop what moves."""
        for arrival in [*self.waiting.values(), *self.moving.values()]:
            task = arrival.task
            if task.id != request or task.epoch > epoch:
                continue
            if task.key in self.waiting:
                del self.waiting[task.key]
                self.engine.scheduler.service.leave(task.origin.tenant)
            else:
                self._stop(arrival, now_s)


def _matches(_index: int, _payload: bytes, _promised: bytes) -> bool:
    return True
