"""The prefill role of a vLLM worker: vLLM computes prompts, and their KV is offered from the transfer buffer.

    begin_attempt ──engine──▶ first token ─▶ KV is copied to the buffer, when there is room ─▶ hashed, signed, leased
                                             └─ by a thread, while vLLM computes the next prompts ──▶ Offer
    Release, Abort or the lease's end ─▶ the slabs are free

vLLM has its blocks back as soon as they are copied: the lease is on slabs of the buffer. While the buffer is full, the
blocks of finished prompts stay held, in the order in which they finished, and prompts wait in vLLM's queue.

The thread offers KV without waiting for the engine's step. It shares the leases and offers with the engine's thread
under one lock. A slab is given back when its lease has ended and the thread does not read it any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from diptych.errors import DiptychError, TransferError
from diptych.messages import (
    Failed,
    Offer,
    OpenTransport,
    Prefill,
    Release,
    Renew,
    ToWorker,
    WorkerStats,
)
from engine.sequence import Sequence, SequenceRefused
from kvtransfer.cooperative import CoopTask
from kvtransfer.leases import LeaseLedger
from kvtransfer.pipelined_pull import MAX_POLL_S, MIN_POLL_S
from kvtransfer.transfer_buffer import LEASED_OWNER, TransferBuffer
from prefill_worker.late_transports import LateTransports
from prefill_worker.worker import TicketIssuer
from vllm_worker.engine import VllmEngine
from vllm_worker.exchange import KvExchange, ignore_save
from vllm_worker.port import SavedKv
from vllm_worker.settling import settle_engine
from worker.loop import GatewayLink, WorkOrder
from worker.task_thread import TaskThread


class SaveFailed(TransferError):
    """A rank could not copy KV to the buffer. Another attempt may succeed."""


@dataclass(slots=True, eq=False)
class OfferedSave:
    """KV that leaves through the buffer. `seq` is None if it is not wanted any more."""

    key: str
    slabs: tuple[int, ...]
    seq: Sequence | None
    # Whether a rank could not even report its copies.
    is_lost: bool = False
    # Whether the thread does not wait for its copies or read it any more.
    is_hashed: bool = False
    # Why the thread could not offer it.
    error: Exception | None = None
    # Who owns its slabs in the buffer.
    owner: str = ""


@dataclass(slots=True)
class _Shared:
    """What both threads use, under `lock`."""

    ledger: LeaseLedger
    lock: threading.Lock = field(default_factory=threading.Lock)
    # By the key of the attempt: KV that is copied, hashed or under lease.
    outgoing: dict[str, OfferedSave] = field(default_factory=dict)


class VllmPrefillRole:
    """A `worker.loop.WorkerRole` over `engine`, whose KV leaves through `buffer`.

    `open_transport` opens a transport of this worker and returns its endpoint; any thread may call it. `tasks` runs the
    thread's part; `close` ends it.
    """

    def __init__(
        self,
        link: GatewayLink,
        engine: VllmEngine,
        exchange: KvExchange,
        buffer: TransferBuffer,
        ledger: LeaseLedger,
        issuer: TicketIssuer,
        open_transport: Callable[[str], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tasks: TaskThread | None = None,
    ) -> None:
        self.link, self.engine, self.exchange, self.buffer = link, engine, exchange, buffer
        self.issuer, self._clock = issuer, clock
        self._transports = LateTransports(open_transport, link.send)
        self._shared = _Shared(ledger)
        self._error: BaseException | None = None
        self._tasks = tasks or TaskThread("kv-offer", self._on_thread_died)
        exchange.on_save_begun = self._on_save_begun
        self._tasks.open()

    @property
    def is_busy(self) -> bool:
        """Whether any KV is being offered or is still leased, or vLLM holds blocks that nobody wants any more."""
        return bool(self._shared.outgoing) or self.engine.port.has_work

    # ---- orders and messages

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        """Queue a prompt. Raises SequenceRefused if it cannot be served here, or the order is not for this role."""
        if not isinstance(order, Prefill):
            raise SequenceRefused("internal_error", f"a prefill worker cannot serve {type(order).__name__}")
        if (need := self.buffer.layout.num_chunks(seq.total)) > self.buffer.num_slabs:
            why = f"the transfer buffer has {self.buffer.num_slabs}"
            raise SequenceRefused("out_of_memory", f"the request needs {need} KV slabs", why)
        seq.hold_kv = True
        self.engine.add(seq, now_s, order.defer_first)

    def take_message(self, message: ToWorker, now_s: float) -> None:
        """Renew or release leases, or open a transport."""
        match message:
            case Renew(leases):
                with self._shared.lock:
                    self._shared.ledger.renew_leases(leases, now_s)
            case Release(request, epoch):
                self.abort_attempts(request, epoch)
            case OpenTransport(transport):
                self._transports.start_opening(transport)

    def take_over(self, seq: Sequence, now_s: float) -> None:
        """Never called: a sequence stays in the engine until its KV is in the buffer."""
        raise AssertionError(f"{seq.key} was handed over with slabs")

    # ---- KV that leaves

    def _on_save_begun(self, saved: SavedKv, number: int) -> None:
        """vLLM is about to copy KV to slabs of the buffer; called on the engine's thread, within its step."""
        seq = next((one for one in self.engine.sequences() if one.key == saved.key), None)
        if seq is not None:
            seq.slabs, seq.computed = list(saved.slabs), saved.num_tokens
        outgoing = OfferedSave(saved.key, saved.slabs, seq, owner=saved.key)
        with self._shared.lock:
            self._shared.outgoing[saved.key] = outgoing
        self.buffer.count_copies(len(saved.slabs))
        self._tasks.add_task(self._offer_task(outgoing, number))

    def _offer_task(self, offered: OfferedSave, number: int) -> CoopTask[None]:
        """The thread's part: wait for the copies of all ranks, hash the slabs, then lease and offer them."""
        pause_s, made = MIN_POLL_S, self.exchange.is_saved(offered.slabs, number)
        while made is None and not offered.is_lost:
            yield pause_s
            pause_s, made = min(2 * pause_s, MAX_POLL_S), self.exchange.is_saved(offered.slabs, number)
        self.buffer.count_copies(-len(offered.slabs))
        payloads = []
        for slab in offered.slabs if made else ():
            payloads.append(self.buffer.pool.hash_slab(slab, self.issuer.algorithm))
            yield 0.0
        with self._shared.lock:
            offered.is_hashed = True
            try:
                if not made:
                    raise SaveFailed("vLLM could not copy the request's KV to the transfer buffer")
                self._lease_and_offer(offered, payloads)
            except (DiptychError, ValueError) as error:
                offered.error = error
                if offered.seq is not None:
                    self._shared.ledger.release_lease(offered.seq.id, offered.seq.epoch)
        # The engine's thread does the rest.
        self.link.wake_poll()

    def _lease_and_offer(self, offered: OfferedSave, payloads: list[bytes]) -> None:
        """Sign the ticket, lease the slabs and send the offer, unless it is not wanted any more.

        Raises DiptychError or ValueError. The lock is held.
        """
        seq = offered.seq
        if seq is None:
            return
        ticket = self.issuer.sign_ticket(seq, self.buffer.layout, offered.slabs, payloads)
        # The loop ends all older attempts before it begins a new one, so there is no older lease.
        self._shared.ledger.grant_lease(seq.id, seq.epoch, offered.slabs, self._clock())
        self.buffer.change_owner(offered.slabs, offered.owner, LEASED_OWNER)
        offered.owner = LEASED_OWNER
        num_bytes = len(offered.slabs) * self.buffer.layout.chunk_bytes
        self.link.send(Offer(seq.id, seq.epoch, ticket, seq.computed, num_bytes, len(offered.slabs)))

    def tend_held(self, now_s: float) -> float | None:
        """End expired leases, and free what nobody reads any more.

        Returns when the next lease is over (clock seconds), or None.
        """
        if self._error is not None:
            raise self._error
        for seq, saved in self.engine.take_saved():
            if saved.num_tokens == 0:
                self._on_save_failed(seq, saved.key)
        with self._shared.lock:
            for lease in self._shared.ledger.expire_leases(now_s):
                self._shared.outgoing[f"{lease.request}#{lease.epoch}"].seq = None
            failed = [one for one in self._shared.outgoing.values() if one.error is not None]
            self._free_unread()
            next_s = self._shared.ledger.next_expiry_s()
        for outgoing in failed:
            if outgoing.seq is not None:
                code = "transfer_failed" if isinstance(outgoing.error, SaveFailed) else "internal_error"
                self.link.send(Failed(outgoing.seq.id, outgoing.seq.epoch, code, str(outgoing.error)))
        return next_s

    def _on_save_failed(self, seq: Sequence | None, key: str) -> None:
        """A rank could not copy KV. If its copies had begun, the thread ends the offer; it may wait for the rank."""
        with self._shared.lock:
            outgoing = self._shared.outgoing.get(key)
            if outgoing is not None:
                outgoing.is_lost = True
        if outgoing is None and seq is not None:
            self.link.send(Failed(seq.id, seq.epoch, "transfer_failed", "vLLM has not all blocks of its KV"))

    def _free_unread(self) -> None:
        """Give back the slabs of what is not wanted, or has failed, and that the thread is done with. Locked."""
        for outgoing in list(self._shared.outgoing.values()):
            if outgoing.is_hashed and (outgoing.seq is None or outgoing.error is not None):
                del self._shared.outgoing[outgoing.key]
                self.buffer.give_back(outgoing.slabs, outgoing.owner)

    # ---- ends

    def abort_attempts(self, request: str, epoch: int) -> None:
        """End the request's lease and its offers, of this epoch and older ones."""
        with self._shared.lock:
            self._shared.ledger.release_lease(request, epoch)
            for outgoing in self._shared.outgoing.values():
                if (seq := outgoing.seq) is not None and seq.id == request and seq.epoch <= epoch:
                    outgoing.seq = None
            self._free_unread()

    def abandon_all(self) -> list[tuple[str, int]]:
        """End all leases and offers; returns their attempts (request, epoch)."""
        with self._shared.lock:
            ended = [(one.seq.id, one.seq.epoch) for one in self._shared.outgoing.values() if one.seq]
        for request, epoch in ended:
            self.abort_attempts(request, epoch)
        return ended

    def close(self) -> None:
        """Wait for the thread, and free what is left. Another role can use the engine then.

        No step runs any more: what the ranks have not copied by now, they never will.
        """
        settle_engine(self.engine)
        with self._shared.lock:
            for outgoing in self._shared.outgoing.values():
                outgoing.is_lost = True
        self._tasks.wake_tasks()
        self._tasks.close()
        self.abandon_all()
        self.exchange.on_save_begun = ignore_save

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the engine, with the counts of leases and of the transfer buffer added."""
        with self._shared.lock:
            ledger = self._shared.ledger
            return msgspec.structs.replace(
                self.buffer.complete_stats(stats),
                offers_waiting=len(self._shared.outgoing) - len(ledger) + self.exchange.num_waiting,
                leases=len(ledger),
                leases_expired=ledger.num_expired,
                late_messages=ledger.late_messages,
            )

    def _on_thread_died(self, error: BaseException) -> None:
        self._error = error
        self.link.wake_poll()
