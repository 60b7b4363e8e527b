"""What a decode worker adds to the common loop: offered KV is leased or pulled, verified, and adopted.

    begin ──▶ waiting ──room──▶ moving ──verified──▶ the engine's
                 ▲                │ └─ the courier's threads, beside decoding
                 └── recalled ────┘ one without a ticket, when another needs the room

A request that departs first takes hold of the chunks that are known here (so none of them is evicted any more), then
reserves slabs for the others, and only those are pulled. One that waits holds nothing, so waiting ones cannot block
each other. Pulls write straight into reserved slabs: an abort that comes meanwhile only asks the courier to stop, and
the slabs are free once nothing writes to them any more, never before. Within a priority the tenant with the least
service departs first, and within a tenant who came first: a request that needs much room is not overtaken for ever by
small ones.

One that comes without a ticket (its KV is still being computed) departs likewise, and pulls what hints tell of until
`Fetch` brings the ticket. Nobody waits for such a one: it may itself be waiting for memory at its prefill worker, which
somebody's offered KV takes up. So its room goes to whoever has a ticket and would have to wait, or writes and needs
slabs, and its chunks are waited for by none.
"""

from __future__ import annotations

import logging
import queue
from functools import partial

import msgspec

from decode_worker.courier import Arrival, Courier
from diptych.errors import DiptychError, StaleTicket, TransferError
from diptych.messages import (
    Admit,
    Failed,
    Fetch,
    Generate,
    Peer,
    Pulled,
    Staging,
    Stats,
    ToWorker,
    Unpeer,
)
from engine.desk import Aside
from engine.loop import Engine
from engine.scheduler import Refused, Sequence
from kvcache.holdings import Holdings
from kvcache.layout import CHUNK_TOKENS, KVLayout
from kvtransfer import ticket as tickets
from kvtransfer.digests import Seal
from kvtransfer.handoff import (
    Aborted,
    Ahead,
    Commit,
    Free,
    Outcome,
    Pull,
    Reserve,
    hand_off,
    perform,
)
from worker.shell import Line, Order

log = logging.getLogger(__name__)

TOO_LATE = "the request's time was up before its KV had arrived"
PASSED = 32  # that wait for chunks on their way are passed by in one turn; a long queue of them costs no more than that


class Decoder:
    """The role of a worker that writes answers. `key` is the deployment's transfer key."""

    def __init__(
        self,
        link: Line,
        engine: Engine,
        holdings: Holdings,
        layout: KVLayout,
        courier: Courier,
        key: bytes,
        fingerprint: str,
    ) -> None:
        self.link, self.engine, self.holdings, self.courier = link, engine, holdings, courier
        self._layout = layout
        self._key, self._fingerprint = key, fingerprint
        self._limits, self._service = engine.scheduler.limits, engine.scheduler.service
        self._waiting: dict[str, Arrival] = {}  # in order of arrival
        self._moving: dict[str, Arrival] = {}
        self._corrupt = 0
        self._late = 0  # hints and tickets for what is over
        self.wasted_bytes = 0  # copied ahead, and changed by its source afterwards

    @property
    def holds(self) -> bool:
        """Is KV awaited or on its way?"""
        return bool(self._waiting or self._moving)

    def begin(self, order: Order, seq: Sequence, now_s: float) -> None:
        """Queue a request, to be read here (`Generate`) or fetched (`Admit`). Raises Refused."""
        match order:
            case Generate():
                self.engine.add(seq, now_s)
            case Admit():
                self._await(order, seq, now_s)
            case _:
                raise Refused("internal_error", f"a decode worker cannot serve {type(order).__name__}")

    def _await(self, order: Admit, seq: Sequence, now_s: float) -> None:
        # The last token is the first decode input and has no KV yet; without a ticket it is still to come.
        arrival = Arrival(seq, seq.total - bool(order.ticket), now_s)
        if order.ticket:
            self._present(arrival, order.ticket, now_s)
        room = self._limits.room(seq)
        if room > self._limits.num_slabs:
            why = f"this worker has {self._limits.num_slabs}"
            raise Refused("out_of_memory", f"the request needs {room} KV slabs", why)
        if len(self._waiting) >= self._limits.max_waiting:
            raise Refused("overloaded", f"{len(self._waiting)} requests wait for room already")
        seq.address()
        self._service.enter(seq.origin.tenant)  # it is here from now on, though the engine has not got it yet
        self._waiting[seq.key] = arrival

    def _present(self, arrival: Arrival, raw: bytes, now_s: float) -> None:
        """Its ticket. Raises Refused if that is not what it should be; the arrival is then as before."""
        seq, layout = arrival.seq, self._layout
        try:
            ticket = tickets.decode(raw, self._key)
            tickets.expect(
                ticket,
                request=seq.id,
                epoch=seq.epoch,
                num_tokens=arrival.num_tokens,
                dtype=layout.dtype,
                shape=layout.chunk_shape,
                fingerprint=self._fingerprint,
            )
        except DiptychError as error:
            code = "stale_ticket" if isinstance(error, StaleTicket) else "transfer_failed"
            raise Refused(code, error.what, error.why) from error
        route = self.courier.links.route(ticket.worker)
        arrival.transport = route.transport if route else ""
        arrival.seal, arrival.ticket_s = Seal(self._key, ticket.terms), now_s
        arrival.ticket = ticket  # last: the courier looks for it

    def take(self, message: ToWorker, now_s: float) -> None:
        """Prefill workers come and go; hints and tickets arrive."""
        match message:
            case Peer():
                self.courier.link(message)
            case Unpeer(worker, incarnation):
                self.courier.unlink(worker, incarnation)
            case Staging():
                self._hint(message)
            case Fetch():
                self._fetch(message, now_s)

    def _expecting(self, request: str, epoch: int) -> Arrival | None:
        """The arrival that a hint or a ticket is for, if it is still wanted; if not, that is counted."""
        key = f"{request}#{epoch}"
        arrival = self._waiting.get(key) or self._moving.get(key)
        if arrival is None or arrival.ticket is not None or not arrival.live:
            self._late += 1
            return None
        return arrival

    def _hint(self, message: Staging) -> None:
        if (arrival := self._expecting(message.request, message.epoch)) is None:
            return
        try:
            hint = tickets.decode_hint(message.hint, self._key)
        except TransferError as error:  # it was only a hint
            self._corrupt += 1
            log.warning("request %s: %s (%s)", message.request, error.what, error.why)
            return
        if (hint.request, hint.epoch) == (message.request, message.epoch):
            arrival.hints.append(hint)
            self.courier.stir()
        else:
            self._late += 1

    def _fetch(self, message: Fetch, now_s: float) -> None:
        """The ticket of one that came without."""
        if (arrival := self._expecting(message.request, message.epoch)) is None:
            return
        seq = arrival.seq
        try:
            if message.output[:-1] != seq.output or not message.output:
                raise Refused("internal_error", "the tokens of the ticket do not follow those of the request")
            self._present(arrival, message.ticket, now_s)
        except Refused as refusal:
            self._refuse(arrival, refusal.code, _told(refusal))
            return
        seq.output, seq.deadline_s = list(message.output), now_s + message.remaining_s
        seq.address()
        self.courier.stir()

    def _refuse(self, arrival: Arrival, code: str, message: str) -> None:
        """End one that waits or moves, and tell of it when nothing is held for it."""
        if arrival.seq.key in self._waiting:
            self._forget(arrival)
            self._fail(arrival.seq, code, message)
        else:
            self._stop(arrival, (code, message))

    def _stop(self, arrival: Arrival, blame: tuple[str, str] | None, *, recalled: bool = False) -> None:
        """Let one that moves move no more; when it has landed `blame` is told, or it waits again."""
        arrival.blame, arrival.recalled = blame, recalled
        arrival.stop.set()
        self.courier.stir()

    def let_go(self, seq: Sequence, now_s: float) -> None:
        """Nothing is held here after its first token: this worker hands nothing over."""
        raise AssertionError(f"{seq.key} was held by a decode worker")

    def tend(self, now_s: float) -> float | None:
        """Adopt what has landed, drop what is too late, begin to fetch what there is room for."""
        if self.courier.error is not None:
            raise self.courier.error
        while (arrival := self._landed()) is not None:
            self._finish(arrival, now_s)
        for arrival in [late for late in self._live() if late.seq.deadline_s <= now_s]:
            self._refuse(arrival, "deadline_exceeded", TOO_LATE)
        self._depart(now_s)
        return min((arrival.seq.deadline_s for arrival in self._live()), default=None)

    def _live(self) -> list[Arrival]:
        """Whatever waits or moves, or will wait again."""
        return [*self._waiting.values(), *(one for one in self._moving.values() if one.live)]

    def _landed(self) -> Arrival | None:
        try:
            return self.courier.landed.get_nowait()
        except queue.Empty:
            return None

    def _depart(self, now_s: float) -> None:
        """Reserve for and fetch, one after the other, as long as there is room.

        One whose next chunk is on its way already, for another request, waits until it can share that, and keeps its
        place: what it needs stays set aside.
        """
        writing = len(self.engine.scheduler.running)
        if self.holdings.free < writing or (len(self.engine.scheduler) and not self.engine.has_work):
            self._recall()  # what is here already needs slabs itself, or may with its next tokens
        moving = [arrival for arrival in self._moving.values() if not arrival.stop.is_set()]
        coming = {key for arrival in moving if arrival.ticket is not None for key in arrival.coming}
        ahead = [arrival.seq for arrival in moving]
        stock = Aside(self.holdings)
        for arrival in self._order():
            seq, keys = arrival.seq, self._full(arrival)
            if stock.passed > PASSED:
                return
            known = self.holdings.look(keys)
            need = self._layout.num_chunks(arrival.num_tokens + 1) - known + self.holdings.look_free(keys)
            if need > stock.free or not self.engine.scheduler.admits(seq, stock, ahead):
                if any(waiting.ticket is not None for waiting in self._waiting.values()):
                    self._recall()
                return
            ahead.append(seq)
            if known < len(keys) and keys[known] in coming:
                stock.pass_by(need)
                continue
            self._set_out(arrival, now_s)
            if arrival.ticket is not None:
                coming |= arrival.coming

    def _order(self) -> list[Arrival]:
        """Those that may depart: by priority, then by what their tenants have received here, then by arrival.

        One that was recalled waits for its ticket, so that it and the one it made room for do not take turns.
        """

        def place(arrival: Arrival) -> tuple[int, float]:
            origin = arrival.seq.origin
            return origin.priority, self._service.of(origin.tenant)

        ready = [a for a in self._waiting.values() if a.ticket is not None or not a.recalled]
        return sorted(ready, key=place)

    def _recall(self) -> None:
        """Those that move without a ticket give their room back."""
        for arrival in self._moving.values():
            if arrival.ticket is None and not arrival.stop.is_set():
                self._stop(arrival, None, recalled=True)

    def _full(self, arrival: Arrival) -> list[bytes]:
        """The addresses of the full chunks that it will have: nothing has to be computed here for logits."""
        return arrival.seq.keys[: arrival.num_tokens // CHUNK_TOKENS]

    def _set_out(self, arrival: Arrival, now_s: float) -> None:
        """Take hold of what is here, reserve the rest, and let the courier pull that."""
        seq, keys = arrival.seq, self._full(arrival)
        del self._waiting[seq.key]
        held = self.holdings.attach(seq.key, keys)
        num_slabs = self._layout.num_chunks(arrival.num_tokens + 1)
        arrival.steps = hand_off(arrival.ticket, num_slabs, arrival.matches, dict(enumerate(held)))
        arrival.turn = perform(arrival.steps, {Reserve: partial(self._reserve, seq.key)})
        arrival.reserved_s, arrival.recalled = now_s, False
        self._moving[seq.key] = arrival
        if isinstance(arrival.turn, Ahead | Pull):
            arrival.coming = frozenset(keys[len(held) :])
            missing = self._layout.num_chunks(arrival.num_tokens) - len(held)
            arrival.num_bytes = missing * self._layout.chunk_bytes
            self.courier.fetch(arrival)
        else:
            self._finish(arrival, now_s)  # everything is here already

    def _reserve(self, key: str, effect: Reserve) -> list[int]:
        return self.holdings.take(key, effect.num_slabs)

    def _finish(self, arrival: Arrival, now_s: float) -> None:
        """The last turns of a hand-off, back on the thread that owns the pool: commit, or free."""
        seq = arrival.seq
        assert arrival.steps is not None, "it has not departed"
        del self._moving[seq.key]

        def commit(effect: Commit) -> None:
            seq.slabs, seq.computed = list(effect.slabs), arrival.num_tokens
            keys = self._full(arrival)
            self.holdings.share(seq.key, keys, seq.slabs)
            seq.shared = len(keys)
            self.engine.adopt(seq, now_s)

        table = {Commit: commit, Free: lambda effect: self.holdings.end(seq.key)}
        complete = arrival.recalled and isinstance(arrival.turn, Commit)  # its ticket came just in time
        stopped = arrival.stop.is_set() and not complete
        error = Aborted("stopped while its KV was on the way") if stopped else None
        outcome = perform(arrival.steps, table, arrival.turn, error)
        assert isinstance(outcome, Outcome)
        self.wasted_bytes += outcome.wasted * self._layout.chunk_bytes
        if outcome.error is not None:
            self.holdings.end(seq.key)  # also what was held without being reserved
            if arrival.recalled and isinstance(outcome.error, Aborted):
                self._waiting[seq.key] = self._again(arrival)
                return
        self._service.leave(seq.origin.tenant)  # as an arrival; the engine counts those that it has got
        if outcome.error is None:
            self._tell(arrival, outcome)
        elif not stopped or arrival.recalled:  # one that was recalled is still wanted
            self._corrupt += outcome.code == "kv_corrupt"
            self._fail(seq, outcome.code, _told(outcome.error))
        elif arrival.blame is not None:
            self._fail(seq, *arrival.blame)

    def _again(self, arrival: Arrival) -> Arrival:
        """The same request as it was before it departed; what was announced so far is announced no more."""
        return Arrival(
            arrival.seq,
            arrival.num_tokens,
            arrival.arrived_s,
            arrival.ticket,
            arrival.seal,
            arrival.ticket_s,
            transport=arrival.transport,
            recalled=True,
        )

    def _tell(self, arrival: Arrival, outcome: Outcome) -> None:
        seconds = {
            "reserve": arrival.reserved_s - arrival.arrived_s,
            "transfer": arrival.pull_s,
            "verify": arrival.verify_s,
            "hidden": arrival.hidden_s,
            "exposed": arrival.exposed_s,
        }
        seq, num_bytes = arrival.seq, (outcome.pulled + outcome.wasted) * self._layout.chunk_bytes
        self.link.send(Pulled(seq.id, seq.epoch, arrival.transport, num_bytes, seconds))

    def _fail(self, seq: Sequence, code: str, message: str) -> None:
        self.link.send(Failed(seq.id, seq.epoch, code, message))

    def abort(self, request: str, epoch: int) -> None:
        """Forget what waits, stop what moves."""
        for arrival in [*self._waiting.values(), *self._moving.values()]:
            if arrival.seq.id == request and arrival.seq.epoch <= epoch:
                self._drop(arrival)

    def abandon(self) -> list[tuple[str, int]]:
        """Forget everything that waits, stop everything that moves."""
        ended = self._live()
        for arrival in ended:
            self._drop(arrival)
        return [(arrival.seq.id, arrival.seq.epoch) for arrival in ended]

    def _drop(self, arrival: Arrival) -> None:
        if arrival.seq.key in self._waiting:
            self._forget(arrival)
        else:
            self._stop(arrival, None)

    def _forget(self, arrival: Arrival) -> None:
        """It waits no longer, and holds nothing."""
        del self._waiting[arrival.seq.key]
        self._service.leave(arrival.seq.origin.tenant)

    def books(self, stats: Stats) -> Stats:
        """The engine's books, with what waits for room and what is on its way."""
        on_the_way = sum(arrival.num_bytes for arrival in self._moving.values())
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + len(self._waiting) + len(self._moving),
            staging_bytes=on_the_way,
            late_messages=stats.late_messages + self._late,
            integrity_failures=self._corrupt,
            wasted_bytes=self.wasted_bytes,
        )


def _told(error: DiptychError | Exception) -> str:
    why = error.why if isinstance(error, DiptychError) else ""
    return " ".join(f"{error}{': ' if why else ''}{why}".split())
