"""The loop on every worker's main thread, whatever its role.

    take the gateway's messages ──▶ tend what the role holds ──▶ run one engine step ──▶ send outputs to the gateway

The role object adds the differences: a prefill worker leases and offers the KV that its engine hands over, a decode
worker pulls and adopts KV. The loop waits in `ChannelLink.poll_messages` while nothing can progress; it never spins. An
exception that leaves the loop is fatal: the process ends and its supervisor starts another. An error that concerns one
request only is handled with that request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import msgspec

from diptych.chunks import RAW_CLASS
from diptych.errors import WorkerRejected, raise_if_lost
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import ids_of_sequence
from diptych.messages import (
    Abort,
    Admit,
    Drain,
    Failed,
    Generate,
    Output,
    Prefill,
    Reject,
    Step,
    SwitchRole,
    ToGateway,
    ToWorker,
    Welcome,
    WorkerStats,
)
from engine.bulk.engine import BulkEngine
from engine.loop import Engine
from engine.protocols import EngineOutput, WorkerEngine
from engine.sequence import Sequence, SequenceRefused
from kvcache.prefix_tree import root_key
from worker.fencing import EpochFence
from worker.watchdog import EngineWatchdog

log = logging.getLogger(__name__)

# The full check of all slabs takes at most one part in this many of the worker's time.
MIN_CHECK_INTERVAL_RATIO = 100
# Longest wait for messages in seconds. A signal that arrives just before the wait begins is noticed after this time.
MAX_WAIT_S = 0.5

ROLES = ("prefill", "decode")
# The classes and codecs of a worker without codecs.
RAW_CODECS: Mapping[str, str] = {RAW_CLASS: ""}

WorkOrder = Prefill | Generate | Admit


class GatewayLink(Protocol):
    """The connection to the gateway (`diptych.channel.link.ChannelLink`)."""

    gateway_lost: bool

    @property
    def is_congested(self) -> bool:
        """Whether so many bytes wait for the gateway that computing should pause.

        `poll_messages` returns when it ends.
        """

    def send(self, message: ToGateway) -> None:
        """Queue `message` for the gateway. While no gateway listens it is dropped.

        Raises ChannelError if it is too long.
        """

    def poll_messages(self, timeout_s: float) -> list[ToWorker]:
        """The messages that have come. Waits up to `timeout_s` seconds for the first, or until `wake_poll`.

        Raises ChannelError if the connection's thread has failed.
        """

    def wake_poll(self) -> None:
        """End the current `poll_messages`, or the next one; for other threads."""


class WorkerRole(Protocol):
    """What a role adds to the loop. It holds slabs under the key "<request>#<epoch>"."""

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        """Start working on an attempt. Raises SequenceRefused, after which nothing is held for it."""

    def take_message(self, message: ToWorker, now_s: float) -> None:
        """Handle any message except orders, aborts, welcomes, drains and changes of role, which the loop handles."""

    def take_over(self, seq: Sequence, now_s: float) -> None:
        """Take the slabs of `seq`, which was added with `hold_kv` and which the engine has finished."""

    def tend_held(self, now_s: float) -> float | None:
        """Regular upkeep, such as expiring leases; returns when it is needed again (clock seconds), or None."""

    def abort_attempts(self, request: str, epoch: int) -> None:
        """Free the slabs held for the request, of this epoch and older ones."""

    def abandon_all(self) -> list[tuple[str, int]]:
        """Free everything; returns the attempts (request, epoch) that end with it."""

    @property
    def is_busy(self) -> bool:
        """Whether the role holds anything that a draining worker has to wait for."""

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the engine, with the role's own entries added."""


class SlabBooks(Protocol):
    """The read-only side of the slab accounting (`kvcache.allocator.KvAllocator`)."""

    @property
    def used(self) -> int:
        """How many slabs are held by a sequence; 0 at rest."""

    def owners(self) -> dict[str, int]:
        """How many slabs each owner has, by name. A shared slab counts for each of its owners."""

    def check_books(self) -> None:
        """Check that every slab is free or has exactly one owner. Raises AssertionError if not."""


class LatestStats:
    """The latest statistics: written by the main thread, read by the thread that sends heartbeats.

    With a watchdog the heartbeats also report that the main thread hangs.
    """

    def __init__(self, watchdog: EngineWatchdog | None = None) -> None:
        self.stats = WorkerStats()
        self.watchdog = watchdog

    def begin_round(self) -> None:
        """The main thread begins another round of its loop."""
        if self.watchdog is not None:
            self.watchdog.begin_round()

    def read_stats(self) -> WorkerStats:
        """The statistics for a heartbeat, with the seconds for which the main thread has been stuck, if any."""
        stuck_s = 0.0 if self.watchdog is None else self.watchdog.check_stuck()
        return msgspec.structs.replace(self.stats, stuck_s=stuck_s) if stuck_s else self.stats


class WorkerLoop:
    """Runs an engine in one role until the worker is drained, which takes `drain_s` seconds at most.

    `next_role` is the role that the gateway wants this worker to take next, if any; read it when `run_until_drained`
    has returned. `fingerprint` identifies the model for prefix caching; if it is empty, prefixes are not shared.
    `codecs` are those of the pool's layouts (`kvcache.layout.KvLayout.codec`) by KV class, the first one for attempts
    that name no class. The codec is part of every prefix's address. `bulk` does bulk work in the time that `engine`
    leaves; without it bulk work is done by `engine`, which may be that of models larger than memory.
    """

    def __init__(
        self,
        link: GatewayLink,
        engine: WorkerEngine,
        role: WorkerRole,
        books: SlabBooks,
        latest_stats: LatestStats,
        *,
        fingerprint: str = "",
        codecs: Mapping[str, str] = RAW_CODECS,
        drain_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        bulk: BulkEngine | None = None,
    ) -> None:
        self.bulk = bulk
        self.link, self.engine, self.role = link, engine, role
        self.books, self.latest_stats = books, latest_stats
        engine.notify(link.wake_poll)
        self.epoch_fence = EpochFence()
        self.next_role = ""
        self._fingerprint, self._codecs, self._before = fingerprint, dict(codecs), self._read_stats()
        # Called once, when the gateway's first Welcome arrives.
        self.welcomed: Callable[[], None] | None = None
        self._drain_s, self._clock = drain_s, clock
        # Clock time in seconds at which a draining worker stops waiting.
        self._ending_s: float | None = None
        # Clock time in seconds at which `role.tend_held` must be called again; None if it need not be.
        self._next_s: float | None = None
        # The earliest clock time, in seconds, of the next full check of the slabs.
        self._proof_s = float("-inf")
        self._idle = False

    def start_drain(self) -> None:
        """Take no new work, and end when nothing is held any more. Idempotent; a signal handler may call it."""
        self.next_role = ""
        if self._ending_s is None:
            self._ending_s = self._clock() + self._drain_s

    def switch_role(self, role: str) -> None:
        """Drain, then let the process serve in `role`. Ignored while the worker is draining already."""
        if self._ending_s is None and role in ROLES:
            self.start_drain()
            self.next_role = role

    def run_until_drained(self) -> None:
        """Serve until drained. Attempts left after `drain_s` fail with "draining"; the gateway may start them
        elsewhere.
        """
        while not self.is_over:
            self.run_once()
        for request, epoch in self._abandon_all():
            self.link.send(Failed(request, epoch, "draining", "the worker had to end"))

    def check_settled(self) -> None:
        """Check, after `run_until_drained`, that every slab is free, so that the pool can serve another role.

        The role first frees what it can. The full check then runs, even if the last one was a short time ago.

        Raises:
            RuntimeError: something is still held. The slabs would be lost for ever, so a new process is better.
            AssertionError: the slab counts do not add up.
        """
        self.role.tend_held(self._clock())
        if self.is_busy:
            raise RuntimeError("a role that has ended still holds something")
        self._idle, self._proof_s = False, float("-inf")
        self._check_books()

    def run_once(self) -> None:
        """One round: take messages, tend what the role holds, run a step, send outputs, update the statistics."""
        self.latest_stats.begin_round()
        for message in self.link.poll_messages(self.max_wait_s):
            self._on_message(message)
        if self.link.gateway_lost:
            self._on_gateway_lost()
        now_s = self._clock()
        self._next_s = self.role.tend_held(now_s)
        if self.bulk is not None and isinstance(self.engine, Engine):
            self.bulk.make_way(self.engine)
        can_step = self.engine.has_work and not self.link.is_congested
        if can_step or (self.engine.deadline_s or now_s + 1) <= now_s:
            self._send_outputs(self.engine.step(self._clock), self.engine)
            if self.bulk is not None:
                self.bulk.record_online(now_s, self._clock())
            # Sequences that ended made room for requests that wait.
            self._next_s = self.role.tend_held(self._clock())
        if self.bulk and not self.link.is_congested:
            self._do_bulk_work(self.bulk)
        self._check_books()
        self._update_stats()

    def _do_bulk_work(self, bulk: BulkEngine) -> None:
        """Run a unit of bulk work if there is time for it. A worker that is about to end gives bulk work back."""
        if self._ending_s is None:
            assert isinstance(self.engine, Engine)
            return self._send_outputs(bulk.run_unit(self.engine, self._clock), bulk)
        for seq in list(bulk.sequences()):
            bulk.abort(seq.id, seq.epoch)
            self.link.send(Failed(seq.id, seq.epoch, "draining", "the worker is about to end"))

    @property
    def _can_step(self) -> bool:
        """Can an engine progress, and does the gateway keep up with what it is sent?"""
        bulk, now_s = self.bulk, self._clock()
        unit = bulk and bulk.rests_until_s <= now_s and bulk.has_work
        return bool(unit or self.engine.has_work) and not self.link.is_congested

    @property
    def _engines(self) -> tuple[WorkerEngine, ...]:
        """The engine, and that of bulk work if there is one."""
        return (self.engine,) if self.bulk is None else (self.engine, self.bulk)

    @property
    def is_busy(self) -> bool:
        """Whether any attempt is alive in the engines or the role."""
        return any(True for engine in self._engines for _ in engine.sequences()) or self.role.is_busy

    def _check_books(self) -> None:
        """When the last attempt has ended, check that no slab is held (cached chunks have no holder).

        The full check takes longer the larger the pool is, so it takes at most one part in `MIN_CHECK_INTERVAL_RATIO`
        of the time: requests that come one by one do not wait for it each time.

        Raises:
            RuntimeError: some slabs are held. They would be lost for ever, so a new process is better.
            AssertionError: the slab counts do not add up.
        """
        idle = not self.is_busy
        if idle and not self._idle:
            if (begun_s := self._clock()) >= self._proof_s:
                self.books.check_books()
                ended_s = self._clock()
                self._proof_s = ended_s + MIN_CHECK_INTERVAL_RATIO * (ended_s - begun_s)
            if self.books.used:
                owners = self.books.owners()
                raise RuntimeError(f"{self.books.used} slabs are used although nothing is held: {owners}")
        self._idle = idle

    @property
    def is_over(self) -> bool:
        """Whether the worker is drained, or has drained for `drain_s` seconds."""
        if self._ending_s is None:
            return False
        return not self.is_busy or self._clock() >= self._ending_s

    @property
    def max_wait_s(self) -> float:
        """The longest wait for a message, in seconds; 0 while the engine can progress."""
        if self._can_step:
            return 0.0
        now_s, deadlines = self._clock(), [engine.deadline_s for engine in self._engines]
        moments = [self._next_s, *deadlines, self._ending_s]
        if self.bulk is not None and self.bulk.rests_until_s > now_s and self.bulk.has_work:
            moments.append(self.bulk.rests_until_s)
        return max(0.0, min([MAX_WAIT_S, *(moment - now_s for moment in moments if moment is not None)]))

    def _on_message(self, message: ToWorker) -> None:
        """Handle a message that concerns every role; pass others to the role."""
        now_s = self._clock()
        match message:
            case Prefill() | Generate() | Admit():
                self._begin_attempt(message, now_s)
            case Abort(request, epoch):
                if self.epoch_fence.is_current(request, epoch):
                    self._abort_attempts(request, epoch)
            case Welcome():
                # A Welcome begins a new session: the gateway has given up all requests of the previous one.
                self._on_gateway_lost()
                self._report_welcomed()
            case Drain():
                self.start_drain()
            case SwitchRole(role):
                self.switch_role(role)
            case Reject(why):
                fix = "give it a name of its own with --name, or stop the other one"
                raise WorkerRejected("the gateway rejects this worker", why, fix)
            case _:
                self.role.take_message(message, now_s)

    def _report_welcomed(self) -> None:
        """Call `welcomed` at the first Welcome."""
        if self.welcomed is not None:
            self.welcomed()
            self.welcomed = None

    def _begin_attempt(self, order: WorkOrder, now_s: float) -> None:
        """Turn an order into a sequence and give it to the role, or report why it cannot begin."""
        if not self.epoch_fence.begin_attempt(order.request, order.epoch):
            return
        self._abort_attempts(order.request, order.epoch - 1)
        if self._ending_s is not None:
            self._fail_order(order, "draining", "the worker is about to end")
            return
        kv_class = order.kv_class or next(iter(self._codecs))
        if kv_class not in self._codecs:
            has = " and ".join(self._codecs)
            self._fail_order(order, "internal_error", f"the worker has KV of {has}, not of {kv_class}")
            return
        seq = Sequence(
            order.request,
            order.epoch,
            order.prompt,
            order.sampling,
            now_s + order.remaining_s,
            output=list(order.output),
            tenancy=order.tenancy,
            root=self._prefix_root(order.tenancy.scope, self._codecs[kv_class]),
            kv_class=kv_class,
            keep=order.keep,
        )
        # The sequence's KV may be on the way for a while before the engine gets the sequence.
        self.engine.expect(seq)
        try:
            if self.bulk is not None and order.tenancy.bulk and isinstance(order, Generate):
                self.bulk.add(seq, now_s)
            else:
                if self.bulk is not None and not order.tenancy.canary:
                    self.bulk.note_request(now_s)
                self.role.begin_attempt(order, seq, now_s)
        except SequenceRefused as refusal:
            self._fail_order(
                order, refusal.code, "; ".join(part for part in (refusal.what, refusal.why) if part)
            )
        except Exception as error:
            raise_if_lost(error)
            ids = ids_of_sequence(order.request, order.tenancy.client_id)
            log.exception("the request cannot begin", extra=about_request(ids))
            self._abort_attempts(order.request, order.epoch)
            self._fail_order(order, "internal_error", f"{type(error).__name__}: {error}")

    def _prefix_root(self, scope: str, codec: str) -> bytes:
        """The root of the addresses of prefixes that requests of `scope` share; empty: they share none."""
        return root_key(self._fingerprint, scope, codec) if self._fingerprint else b""

    def _fail_order(self, order: WorkOrder, code: str, message: str) -> None:
        self.link.send(Failed(order.request, order.epoch, code, message))

    def _send_outputs(self, outputs: Many[EngineOutput], engine: WorkerEngine) -> None:
        """Send one `Step` with all new tokens of `engine`, before any other work, then hand finished sequences to the
        role.
        """
        if not outputs:
            return
        begun_s = self._clock()
        if tokens := [output.message for output in outputs if isinstance(output.message, Output)]:
            self.link.send(Step(tokens))
        for output in outputs:
            if isinstance(output.message, Failed):
                self.link.send(output.message)
        engine.record_send_time(self._clock() - begun_s)
        for output in outputs:
            if output.held is not None:
                self.role.take_over(output.held, self._clock())

    def _abort_attempts(self, request: str, epoch: int) -> None:
        for engine in self._engines:
            engine.abort(request, epoch)
        self.role.abort_attempts(request, epoch)

    def _on_gateway_lost(self) -> None:
        """End all attempts, which the gateway has given up or starts elsewhere."""
        if ended := self._abandon_all():
            log.warning("the gateway is gone: %d attempts ended", len(ended))

    def _abandon_all(self) -> list[tuple[str, int]]:
        """Free everything that the engines and the role hold."""
        ended = [(seq.id, seq.epoch) for engine in self._engines for seq in engine.sequences()]
        for request, epoch in ended:
            for engine in self._engines:
                engine.abort(request, epoch)
        return ended + self.role.abandon_all()

    def _read_stats(self) -> WorkerStats:
        """The statistics of the engines."""
        stats = self.engine.stats
        return stats if self.bulk is None else self.bulk.complete_stats(stats)

    def _update_stats(self) -> None:
        """Publish the statistics of the engine, the role and the loop for the next heartbeat."""
        stats = self.role.complete_stats(self._read_stats().since(self._before))
        late = stats.late_messages + self.epoch_fence.late_messages
        draining = self._ending_s is not None
        self.latest_stats.stats = msgspec.structs.replace(stats, late_messages=late, draining=draining)
