"""The prefill role of a worker: prefills prompts, leases the KV, offers it to decode workers, frees it after the pull.

    begin_attempt ──engine──▶ take_over: digests ─▶ lease ─▶ Offer ──Release, Abort or the lease's end──▶ free the slabs
               └─ step by step: Staged hints, if the request asks for them; hashes of complete chunks

On a device, KV leaves the pool for a transfer buffer first, and the lease is on the buffer's slabs:

    begin_attempt ──engine──▶ take_over: queue ─▶ copies, digests ─▶ tend_held: lease ─▶ Offer ── ... ──▶ free the slabs

The first token is already on its way to the client when the last digests are computed. KV that waits to be fetched is
the buffer between the prefill and the decode pool: while it fills the memory, prompts wait in the engine's bounded
queue. A lease keeps the sequence's slabs allocated; when it ends, chunks in the prefix tree stay cached.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from diptych.errors import DiptychError
from diptych.eviction_spec import KEEP_ALL, decision_tokens
from diptych.messages import (
    Failed,
    Generate,
    Offer,
    OpenTransport,
    Prefill,
    Release,
    Renew,
    Staged,
    ToWorker,
    WorkerStats,
)
from engine.loop import Engine
from engine.sequence import Sequence, SequenceRefused
from engine.sequence_table import DEADLINE_FAILURE
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.layout import KvLayout
from kvtransfer import ticket as tickets
from kvtransfer.digests import ONE_RANK, BagSplit, DigestContext
from kvtransfer.layer_progress import LayerProgress
from kvtransfer.leases import Lease, LeaseLedger
from kvtransfer.resharding import ShardedPool
from prefill_worker.announcer import KvAnnouncer
from prefill_worker.chunk_hashes import ChunkHashes
from prefill_worker.late_transports import LateTransports
from worker.loop import GatewayLink, WorkOrder

if TYPE_CHECKING:
    # Only workers with a device load it.
    from prefill_worker.buffered_offers import BufferedOffers


@dataclass(frozen=True, slots=True)
class TicketIssuer:
    """Signs tickets and hints for this worker's current life (`incarnation`) with the deployment's transfer key."""

    key: bytes
    worker: str
    incarnation: str
    fingerprint: str
    # The hash algorithm of the payload digests.
    algorithm: str
    # The worker's tensor-parallel lanes and its stages.
    tp: int = 1
    pp: int = 1

    def sign_hint(self, seq: Sequence, start: int, slabs: Many[int], mark: int) -> bytes:
        """Sign that the chunks of `seq` from index `start` on are being computed into `slabs`, which carry `mark`."""
        hint = tickets.StagingHint(
            seq.id, seq.epoch, self.worker, self.incarnation, start, tuple(slabs), mark
        )
        return tickets.encode_hint(hint, self.key)

    def sign_ticket(self, seq: Sequence, layout: KvLayout, slabs: Many[int], payloads: Many[bytes]) -> bytes:
        """Sign the ticket for the `slabs` that a prefilled sequence offers. `hashes` are the hashes of their content.

        Raises:
            ValueError: the number of hashes or of slabs is not what the sequence has to offer.
        """
        evicts = seq.keep.evicts
        terms = DigestContext(
            request=seq.id,
            epoch=seq.epoch,
            num_tokens=offered_tokens(seq),
            layers=(0, layout.layers),
            dtype=layout.dtype,
            shape=layout.chunk_shape,
            fingerprint=self.fingerprint,
            chunk_bytes=layout.chunk_bytes,
            codec=layout.codec,
            algorithm=self.algorithm,
            keep=seq.keep if evicts else KEEP_ALL,
            num_bag_slabs=len(slabs) - seq.lead_slabs if evicts else 0,
            bag=self._split_of(seq) if evicts else ONE_RANK,
            segments=seq.segments if evicts else (),
        )
        known = dict(zip(slabs, payloads, strict=True))
        ticket = tickets.issue_ticket(
            self.key, terms, self.worker, self.incarnation, slabs, lambda slab, algorithm: known[slab]
        )
        return tickets.encode_ticket(ticket, self.key)

    def _split_of(self, seq: Sequence) -> BagSplit:
        """How the bag of an evicted sequence is split over the ranks of this worker."""
        return BagSplit(self.tp, self.pp, *(seq.eviction.sizes if seq.eviction is not None else ()))


def offered_tokens(seq: Sequence) -> int:
    """Number of tokens whose KV a prefilled sequence offers.

    If it may drop tokens, these are the ones at its last decision: those after it are computed again elsewhere.
    """
    return decision_tokens(len(seq.prompt), seq.computed) if seq.keep.evicts else seq.computed


class PrefillWorker:
    """The role of a worker that prefills prompts. Leased slabs stay allocated under the sequence's key.

    It registers itself as the observer of `engine`. Without `progress` no KV is announced, even if a request asks for
    it. With `offers`, `pool` is that of their transfer buffer, and `progress` is not used: chunks are announced when
    they are complete there.
    """

    def __init__(
        self,
        link: GatewayLink,
        engine: Engine,
        kv: KvAllocator | KvArenas,
        pool: ShardedPool,
        ledger: LeaseLedger,
        issuer: TicketIssuer,
        progress: LayerProgress | None = None,
        open_transport: Callable[[str], bytes] | None = None,
        offers: BufferedOffers | None = None,
    ) -> None:
        """`open_transport` opens a transport of this worker and returns its endpoint. It must be safe in any thread."""
        self._transports = LateTransports(open_transport, link.send)
        self.link, self.engine, self.kv, self.pool = link, engine, kv, pool
        self.ledger, self.issuer = ledger, issuer
        self.offers = offers
        hashes = ChunkHashes(kv, lambda slab: pool.hash_slab(slab, issuer.algorithm))
        self.announcer = KvAnnouncer(kv, hashes, pool.layout.layers, progress, self._send_hint)
        self._observer = engine.kv_observer = self.announcer if offers is None else offers
        if offers is not None:
            offers.open(self._send_hint)

    @property
    def is_busy(self) -> bool:
        """Whether any KV waits to be offered, is still leased, or holds slabs that a tier is read into."""
        if len(self.ledger) > 0 or self.engine.restores.is_busy:
            return True
        return self.offers is not None and self.offers.is_busy

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        """Queue a prompt. Raises SequenceRefused if the queue is full or the order is not for this role."""
        if isinstance(order, Generate) and order.sampling.pooling is not None:
            # It ends here, and its KV with it: nothing is offered.
            return self.engine.add(seq, now_s)
        if not isinstance(order, Prefill):
            raise SequenceRefused("internal_error", f"a prefill worker cannot serve {type(order).__name__}")
        seq.hold_kv, seq.stage, seq.defer_first = True, order.stage, order.defer_first
        seq.cuts_kept = order.cuts_kept
        self.engine.add(seq, now_s)

    def _send_hint(self, seq: Sequence, start: int, slabs: list[int], mark: int) -> None:
        """Announce chunks that are being computed to the gateway."""
        self.link.send(Staged(seq.id, seq.epoch, self.issuer.sign_hint(seq, start, slabs, mark)))

    def take_message(self, message: ToWorker, now_s: float) -> None:
        """Renew or release leases, or open a transport."""
        match message:
            case Renew(leases):
                self.ledger.renew_leases(leases, now_s)
            case Release(request, epoch):
                self._end_attempts(request, epoch, fetched=True)
            case OpenTransport(transport):
                self._transports.start_opening(transport)

    def take_over(self, seq: Sequence, now_s: float) -> None:
        """Lease and offer the KV of `seq`, which the engine has prefilled. On an error the attempt fails.

        With a transfer buffer it is queued, and offered by `tend_held` when it is there.
        """
        try:
            if self.offers is not None:
                self.offers.begin_offer(seq)
            else:
                slabs = self._keep_offered(seq)
                self._lease_and_offer(seq, slabs, self.announcer.finish_sequence(seq, slabs), now_s)
        except (DiptychError, ValueError) as error:
            self.kv.release(seq.key)
            self._report_failed(seq, error)

    def _lease_and_offer(self, seq: Sequence, slabs: list[int], payloads: Many[bytes], now_s: float) -> None:
        """Sign the ticket for `slabs`, lease them, and send the offer. Raises DiptychError or ValueError."""
        layout = self.pool.layout_of(seq.kv_class)
        ticket = self.issuer.sign_ticket(seq, layout, slabs, payloads)
        older = self.ledger.grant_lease(seq.id, seq.epoch, slabs, now_s)
        self._free_lease(older)
        num_bytes = len(slabs) * layout.chunk_bytes
        self.link.send(Offer(seq.id, seq.epoch, ticket, offered_tokens(seq), num_bytes, len(slabs)))

    def _report_failed(self, seq: Sequence, error: Exception) -> None:
        self.link.send(Failed(seq.id, seq.epoch, "internal_error", str(error)))

    def _tend_offers(self, offers: BufferedOffers, now_s: float) -> None:
        """Let KV leave for the transfer buffer, offer what is there, and fail offers that have waited too long."""
        for seq in offers.drop_expired(now_s):
            self.link.send(Failed(seq.id, seq.epoch, *DEADLINE_FAILURE))
        offers.copy_full_chunks()
        for ready in offers.poll():
            try:
                self._lease_and_offer(ready.seq, ready.slabs, ready.payloads, now_s)
            except (DiptychError, ValueError) as error:
                offers.free_offer(ready.seq.key, keep=True)
                self._report_failed(ready.seq, error)

    def _keep_offered(self, seq: Sequence) -> list[int]:
        """The slabs that `seq` offers. The slab of its tokens since the last decision is not among them: it is freed.

        Raises:
            ValueError: it has no such slab, so it has not been decided what it keeps.
        """
        if not seq.keep.evicts:
            return seq.slabs
        place = seq.lead_slabs
        if len(seq.slabs) <= place + 1:
            raise ValueError(f"{len(seq.slabs)} slabs do not hold a bag behind {place} others")
        self.kv.arena_of(seq.kv_class).free_slabs(seq.key, seq.slabs[place : place + 1])
        return seq.slabs[:place] + seq.slabs[place + 1 :]

    def tend_held(self, now_s: float) -> float | None:
        """Free expired leases, go on with prefixes that are read back, and hash full chunks or copy them to the
        transfer buffer.

        Returns when the next lease, the time of a waiting offer or of a prefix is over (clock seconds), or None.
        """
        restores_end_s = self.engine.restores.tend(now_s)
        if self.offers is None:
            self.announcer.hash_full()
        for lease in self.ledger.expire_leases(now_s):
            self._free_lease(lease)
        ends = [self.ledger.next_expiry_s(), restores_end_s]
        if self.offers is not None:
            self._tend_offers(self.offers, now_s)
            ends.append(self.offers.deadline_s)
        return min((end_s for end_s in ends if end_s is not None), default=None)

    def abort_attempts(self, request: str, epoch: int) -> None:
        """Free the slabs that are leased to this request, or that wait to be offered."""
        self._end_attempts(request, epoch)

    def _end_attempts(self, request: str, epoch: int, fetched: bool = False) -> None:
        """End the request's lease and its waiting offers; `fetched`: its KV has arrived elsewhere."""
        self._free_lease(self.ledger.release_lease(request, epoch), fetched)
        if self.offers is not None:
            self.offers.end_attempts(request, epoch)

    def abandon_all(self) -> list[tuple[str, int]]:
        """Free all leased slabs, and those that wait to be offered; returns their attempts (request, epoch)."""
        ended = [(lease.request, lease.epoch) for lease in self.ledger]
        for request, epoch in ended:
            self.abort_attempts(request, epoch)
        self.engine.restores.stop()
        return ended if self.offers is None else ended + self.offers.abandon_all()

    def close(self) -> None:
        """Stop observing the engine, so that another role can use it. Waits for copies to the transfer buffer."""
        if self.engine.kv_observer is self._observer:
            self.engine.kv_observer = None
        if self.offers is not None:
            self.offers.close()

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the engine, with the counts of leases and of the transfer buffer added."""
        if self.offers is not None:
            stats = self.offers.complete_stats(stats)
        return msgspec.structs.replace(
            stats,
            leases=len(self.ledger),
            leases_expired=self.ledger.num_expired,
            late_messages=self.ledger.late_messages,
        )

    def _free_lease(self, lease: Lease | None, fetched: bool = False) -> None:
        """Free the slabs of a lease that has ended; `fetched`: its KV has arrived elsewhere."""
        if lease is None:
            return
        key = f"{lease.request}#{lease.epoch}"
        if self.offers is not None:
            self.offers.free_offer(key, keep=fetched)
        else:
            self.kv.release(key)
