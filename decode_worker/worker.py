"""What a decode worker adds to the common loop: offered KV is reserved for, pulled, verified, and adopted.

    begin ──▶ waiting ──room for its whole growth──▶ moving ──verified──▶ the engine's
                                                       └─ the courier's threads, beside decoding

Pulls write straight into reserved slabs, so an abort that comes meanwhile only asks the courier to stop: the
slabs are free once nothing writes to them any more, never before. First come, first served: a request that
needs much room is not overtaken for ever by small ones.
"""

from __future__ import annotations

import queue
from functools import partial

import msgspec

from decode_worker.courier import Arrival, Courier
from diptych.errors import DiptychError, StaleTicket
from diptych.messages import Admit, Failed, Generate, Peer, Pulled, Stats, ToWorker, Unpeer
from engine.loop import Engine
from engine.scheduler import Refused, Sequence
from kvcache.pool import Pool
from kvtransfer import ticket as tickets
from kvtransfer.digests import Seal
from kvtransfer.handoff import Aborted, Commit, Free, Outcome, Reserve, hand_off, perform
from worker.shell import Line, Order

TOO_LATE = "the request's time was up before its KV had arrived"


class Decoder:
    """The role of a worker that writes answers. `key` is the deployment's transfer key."""

    def __init__(
        self, link: Line, engine: Engine, pool: Pool, courier: Courier, key: bytes, fingerprint: str
    ) -> None:
        self.link, self.engine, self.pool, self.courier = link, engine, pool, courier
        self._key, self._fingerprint = key, fingerprint
        self._limits = engine.scheduler.limits
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
            layout = self.pool.layout
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
        steps = hand_off(ticket, room, Seal(self._key, ticket.terms).matches)
        self._waiting[seq.key] = Arrival(seq, ticket, room, steps, now_s)

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
            del self._waiting[arrival.seq.key]
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
        """Reserve for and fetch, in order of arrival, as long as there is room."""
        for arrival in list(self._waiting.values()):
            if arrival.room > self.pool.free:
                return
            key = arrival.seq.key
            del self._waiting[key]
            arrival.turn = perform(arrival.steps, {Reserve: partial(self._reserve, key)})
            arrival.reserved_s = now_s
            self._moving[key] = arrival
            self.courier.fetch(arrival)

    def _reserve(self, key: str, effect: Reserve) -> list[int]:
        return self.pool.take(effect.num_slabs, key)

    def _finish(self, arrival: Arrival, now_s: float) -> None:
        """The last turns of a hand-off, back on the thread that owns the pool: commit, or free."""
        seq = arrival.seq
        del self._moving[seq.key]

        def commit(effect: Commit) -> None:
            seq.slabs, seq.computed = list(effect.slabs), arrival.ticket.terms.num_tokens
            self.engine.adopt(seq, now_s)

        table = {Commit: commit, Free: lambda effect: self.pool.give(effect.slabs, seq.key)}
        error = Aborted("stopped while its KV was on the way") if arrival.stop.is_set() else None
        outcome = perform(arrival.steps, table, arrival.turn, error)
        assert isinstance(outcome, Outcome)
        if outcome.error is None:
            self._tell(arrival)
        elif arrival.stop.is_set():
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
        seq, ticket = arrival.seq, arrival.ticket
        self.link.send(Pulled(seq.id, seq.epoch, arrival.transport, ticket.num_bytes, seconds))

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
        self._waiting.pop(arrival.seq.key, None)

    def books(self, stats: Stats) -> Stats:
        """The engine's books, with what waits for room and what is on its way."""
        on_the_way = sum(arrival.ticket.num_bytes for arrival in self._moving.values())
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + len(self._waiting) + len(self._moving),
            staging_bytes=on_the_way,
            integrity_failures=self._corrupt,
        )


def _told(error: DiptychError | Exception) -> str:
    why = error.why if isinstance(error, DiptychError) else ""
    return " ".join(f"{error}{': ' if why else ''}{why}".split())
