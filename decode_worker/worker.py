"""What a decode worker adds to the common loop: offered KV is leased or pulled, verified, and adopted.

    begin ──▶ waiting ──room──▶ moving ──verified──▶ the engine's
                                  └─ the courier's threads, beside decoding

A request that departs first takes hold of the chunks that are known here (so none of them is evicted any more), then
reserves slabs for the others, and only those are pulled. One that waits holds nothing, so waiting ones cannot block
each other. Pulls write straight into reserved slabs: an abort that comes meanwhile only asks the courier to stop, and
the slabs are free once nothing writes to them any more, never before. Within a priority the tenant with the least
service departs first, and within a tenant who came first: a request that needs much room is not overtaken for ever by
small ones.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence as Keys
from functools import partial

import msgspec

from decode_worker.courier import Arrival, Courier
from diptych.errors import DiptychError, StaleTicket
from diptych.messages import Admit, Failed, Generate, Peer, Pulled, Stats, ToWorker, Unpeer
from engine.loop import Engine
from engine.scheduler import Refused, Sequence
from kvcache.holdings import Holdings
from kvcache.layout import KVLayout
from kvtransfer import ticket as tickets
from kvtransfer.digests import Seal
from kvtransfer.handoff import Aborted, Commit, Free, Outcome, Pull, Reserve, hand_off, perform
from worker.shell import Line, Order

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
        try:
            ticket = tickets.decode(order.ticket, self._key)
            layout = self._layout
            tickets.expect(
                ticket,
                request=order.request,
                epoch=order.epoch,
                num_tokens=seq.total - 1,  # the last token is the first decode input, and has no KV yet
                dtype=layout.dtype,
                shape=layout.chunk_shape,
                fingerprint=self._fingerprint,
            )
        except DiptychError as error:
            code = "stale_ticket" if isinstance(error, StaleTicket) else "transfer_failed"
            raise Refused(code, error.what, error.why) from error
        room = self._limits.room(seq)
        if room > self._limits.num_slabs:
            why = f"this worker has {self._limits.num_slabs}"
            raise Refused("out_of_memory", f"the request needs {room} KV slabs", why)
        if len(self._waiting) >= self._limits.max_waiting:
            raise Refused("overloaded", f"{len(self._waiting)} requests wait for room already")
        seq.address()
        self._service.enter(seq.origin.tenant)  # it is here from now on, though the engine has not got it yet
        self._waiting[seq.key] = Arrival(seq, ticket, now_s)

    def take(self, message: ToWorker, now_s: float) -> None:
        """Prefill workers come and go."""
        match message:
            case Peer():
                self.courier.link(message)
            case Unpeer(worker, incarnation):
                self.courier.unlink(worker, incarnation)

    def let_go(self, seq: Sequence, now_s: float) -> None:
        """Nothing is held here after its first token: this worker hands nothing over."""
        raise AssertionError(f"{seq.key} was held by a decode worker")

    def tend(self, now_s: float) -> float | None:
        """Adopt what has landed, drop what is too late, begin to fetch what there is room for."""
        if self.courier.error is not None:
            raise self.courier.error
        while (arrival := self._landed()) is not None:
            self._finish(arrival, now_s)
        for arrival in [late for late in self._waiting.values() if late.seq.deadline_s <= now_s]:
            self._forget(arrival)
            self._fail(arrival.seq, "deadline_exceeded", TOO_LATE)
        for arrival in self._moving.values():
            if arrival.seq.deadline_s <= now_s and not arrival.stop.is_set():
                arrival.blame = "deadline_exceeded"
                arrival.stop.set()
        self._depart(now_s)
        return min((arrival.seq.deadline_s for arrival in self._live()), default=None)

    def _live(self) -> list[Arrival]:
        """Whatever waits or moves and was not stopped."""
        moving = [arrival for arrival in self._moving.values() if not arrival.stop.is_set()]
        return [*self._waiting.values(), *moving]

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
        moving = [arrival for arrival in self._moving.values() if not arrival.stop.is_set()]
        coming = {key for arrival in moving for key in arrival.coming}
        ahead = [arrival.seq for arrival in moving]
        stock = _Stock(self.holdings)
        for arrival in self._order():
            seq, keys = arrival.seq, arrival.seq.attachable()
            if stock.passed > PASSED or not self.engine.scheduler.admits(seq, stock, ahead):
                return
            ahead.append(seq)
            known = self.holdings.look(keys)
            if known < len(keys) and keys[known] in coming:
                need = self._layout.num_chunks(seq.total) - known + self.holdings.look_free(keys)
                stock.pass_by(need)
                continue
            self._fetch(arrival, now_s)
            coming |= arrival.coming

    def _order(self) -> list[Arrival]:
        """Those that wait: by priority, then by what their tenants have received here, then by arrival."""

        def place(arrival: Arrival) -> tuple[int, float]:
            origin = arrival.seq.origin
            return origin.priority, self._service.of(origin.tenant)

        return sorted(self._waiting.values(), key=place)

    def _fetch(self, arrival: Arrival, now_s: float) -> None:
        """Take hold of what is here, reserve the rest, and let the courier pull that."""
        seq, ticket = arrival.seq, arrival.ticket
        del self._waiting[seq.key]
        keys = seq.attachable()
        held = self.holdings.attach(seq.key, keys)
        arrival.steps = hand_off(
            ticket,
            self._layout.num_chunks(seq.total),
            Seal(self._key, ticket.terms).matches,
            dict(enumerate(held)),
        )
        arrival.turn = perform(arrival.steps, {Reserve: partial(self._reserve, seq.key)})
        arrival.reserved_s = now_s
        route = self.courier.links.route(ticket.worker)
        arrival.transport = route.transport if route else ""
        self._moving[seq.key] = arrival
        if isinstance(arrival.turn, Pull):
            arrival.coming = frozenset(keys[len(held) :])
            arrival.num_bytes = len(arrival.turn.pairs) * ticket.chunk_bytes
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
            seq.slabs, seq.computed = list(effect.slabs), arrival.ticket.terms.num_tokens
            keys = seq.attachable()
            self.holdings.share(seq.key, keys, seq.slabs)
            seq.shared = len(keys)
            self.engine.adopt(seq, now_s)

        table = {Commit: commit, Free: lambda effect: self.holdings.end(seq.key)}
        error = Aborted("stopped while its KV was on the way") if arrival.stop.is_set() else None
        outcome = perform(arrival.steps, table, arrival.turn, error)
        self._service.leave(seq.origin.tenant)  # as an arrival; the engine counts those that it has got
        assert isinstance(outcome, Outcome)
        if outcome.error is None:
            self._tell(arrival)
            return
        self.holdings.end(seq.key)  # also what was held without being reserved
        if arrival.stop.is_set():
            if arrival.blame:
                self._fail(seq, arrival.blame, TOO_LATE)
        else:
            self._corrupt += outcome.code == "kv_corrupt"
            self._fail(seq, outcome.code, _told(outcome.error))

    def _tell(self, arrival: Arrival) -> None:
        seconds = {
            "reserve": arrival.reserved_s - arrival.arrived_s,
            "transfer": arrival.pull_s,
            "verify": arrival.verify_s,
        }
        seq = arrival.seq
        self.link.send(Pulled(seq.id, seq.epoch, arrival.transport, arrival.num_bytes, seconds))

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
        arrival.blame = ""
        arrival.stop.set()
        if arrival.seq.key in self._waiting:
            self._forget(arrival)

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
            integrity_failures=self._corrupt,
        )


class _Stock:
    """The slabs to be had (`engine.desk.Stock`), less those that are set `aside` for requests ahead."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings, self.aside, self.passed = holdings, 0, 0

    @property
    def free(self) -> int:
        return self.holdings.free - self.aside

    def pass_by(self, need: int) -> None:
        """Set `need` slabs aside for one that does not take them yet."""
        self.aside += need
        self.passed += 1

    def look(self, keys: Keys[bytes]) -> int:
        return self.holdings.look(keys)

    def look_free(self, keys: Keys[bytes]) -> int:
        return self.holdings.look_free(keys)


def _told(error: DiptychError | Exception) -> str:
    why = error.why if isinstance(error, DiptychError) else ""
    return " ".join(f"{error}{': ' if why else ''}{why}".split())
