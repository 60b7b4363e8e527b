"""What a prefill worker adds to the common loop: KV that was read is leased, offered, and let go.

    begin ──engine──▶ let_go: digests ─▶ lease ─▶ Offer ──Release, Abort or the lease's end──▶ let go of
               └─ step by step: Staged, if that is asked for; hashes of what is complete

The first token is already on its way to the client when the last digests are computed. Memory in which KV waits to
be fetched is the buffer between the two pools: while it is full, prompts wait in the engine's bounded queue.
A lease is the sequence's hold on its slabs, kept: chunks that others share stay known when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import msgspec

from diptych.errors import DiptychError
from diptych.messages import Failed, Offer, Prefill, Release, Renew, Staged, Stats, ToWorker
from engine.loop import Engine
from engine.scheduler import Refused, Sequence
from kvcache.holdings import Holdings
from kvcache.layout import KVLayout
from kvtransfer import ticket as tickets
from kvtransfer.board import Board
from kvtransfer.digests import Terms
from kvtransfer.leases import Lease, LeaseLedger
from kvtransfer.parts import Parts
from prefill_worker.payloads import Payloads
from prefill_worker.stager import Stager
from worker.shell import Line, Order


@dataclass(frozen=True, slots=True)
class Issuer:
    """Who offers KV: this life of this worker, running this model, with the deployment's transfer key."""

    key: bytes
    worker: str
    incarnation: str
    fingerprint: str
    algorithm: str  # of the payload digests

    def hint(self, seq: Sequence, start: int, slabs: Many[int], mark: int) -> bytes:
        """Sign that chunks of a sequence, from `start` on, are being computed into `slabs` under `mark`."""
        hint = tickets.Hint(seq.id, seq.epoch, self.worker, self.incarnation, start, tuple(slabs), mark)
        return tickets.encode_hint(hint, self.key)

    def issue(self, seq: Sequence, layout: KVLayout, payloads: Many[bytes]) -> bytes:
        """Sign the ticket for the slabs of a sequence that was read, whose `payloads` are their hashes, in order.

        Raises:
            ValueError: there are more or fewer of them than chunks.
        """
        terms = Terms(
            request=seq.id,
            epoch=seq.epoch,
            num_tokens=seq.computed,
            layers=(0, layout.layers),
            dtype=layout.dtype,
            shape=layout.chunk_shape,
            fingerprint=self.fingerprint,
            algorithm=self.algorithm,
        )
        known = dict(zip(seq.slabs, payloads, strict=True))
        ticket = tickets.write(
            self.key, terms, self.worker, self.incarnation, seq.slabs, lambda slab, algorithm: known[slab]
        )
        return tickets.encode(ticket, self.key)


class Prefiller:
    """The role of a worker that reads prompts. What is leased is held under the sequence's key.

    From now on it follows what `engine` does. Without a `board` no KV is announced, whoever asks for it.
    """

    def __init__(
        self,
        link: Line,
        engine: Engine,
        holdings: Holdings,
        pool: Parts,
        ledger: LeaseLedger,
        issuer: Issuer,
        board: Board | None = None,
    ) -> None:
        self.link, self.engine, self.holdings, self.layout = link, engine, holdings, pool.layout
        self.ledger, self.issuer = ledger, issuer
        payloads = Payloads(holdings, lambda slab: pool.payload(slab, issuer.algorithm))
        self.stager = engine.follower = Stager(holdings, payloads, self.layout.layers, board, self._hint)

    @property
    def holds(self) -> bool:
        """Are there offers that nobody has fetched yet?"""
        return len(self.ledger) > 0

    def begin(self, order: Order, seq: Sequence, now_s: float) -> None:
        """Queue a prompt. Raises Refused if the queue is full, or the order is not for this role."""
        if not isinstance(order, Prefill):
            raise Refused("internal_error", f"a prefill worker cannot serve {type(order).__name__}")
        seq.hold, seq.stage = True, order.stage
        self.engine.add(seq, now_s)

    def _hint(self, seq: Sequence, start: int, slabs: list[int], mark: int) -> None:
        self.link.send(Staged(seq.id, seq.epoch, self.issuer.hint(seq, start, slabs, mark)))

    def take(self, message: ToWorker, now_s: float) -> None:
        """Renew or release leases."""
        match message:
            case Renew(leases):
                self.ledger.renew(leases, now_s)
            case Release(request, epoch):
                self._free(self.ledger.release(request, epoch))

    def let_go(self, seq: Sequence, now_s: float) -> None:
        """Offer what the engine has read."""
        try:
            ticket = self.issuer.issue(seq, self.layout, self.stager.finish(seq))
            older = self.ledger.offer(seq.id, seq.epoch, seq.slabs, now_s)
        except (DiptychError, ValueError) as error:
            self.holdings.end(seq.key)
            self.link.send(Failed(seq.id, seq.epoch, "internal_error", str(error)))
            return
        self._free(older)
        num_bytes = len(seq.slabs) * self.layout.chunk_bytes
        self.link.send(Offer(seq.id, seq.epoch, ticket, seq.computed, num_bytes))

    def tend(self, now_s: float) -> float | None:
        """Free what nobody has renewed in time, and hash ahead."""
        self.stager.hash_full()
        for lease in self.ledger.expire(now_s):
            self._free(lease)
        return self.ledger.next_s()

    def abort(self, request: str, epoch: int) -> None:
        """Free what is leased to the request."""
        self._free(self.ledger.release(request, epoch))

    def abandon(self) -> list[tuple[str, int]]:
        """Free everything that is leased."""
        ended = [(lease.request, lease.epoch) for lease in self.ledger]
        for request, epoch in ended:
            self.abort(request, epoch)
        return ended

    def close(self) -> None:
        """Follow the engine no more; another role may take it over."""
        if self.engine.follower is self.stager:
            self.engine.follower = None

    def books(self, stats: Stats) -> Stats:
        """The engine's books, with the leases."""
        return msgspec.structs.replace(
            stats,
            leases=len(self.ledger),
            leases_expired=self.ledger.expired,
            late_messages=self.ledger.late,
        )

    def _free(self, lease: Lease | None) -> None:
        if lease is not None:
            self.holdings.end(f"{lease.request}#{lease.epoch}")
