"""Decides which requests of a decode worker may fetch their KV now, as memory allows. No threads, no I/O, no torch.

    enqueue ──▶ waiting ──StartFetch──▶ moving ──finish──▶ adopted by the engine
                   ▲                      │
                   └───────Recall─────────┘ a request without a ticket, when another request needs its slabs

A waiting request holds nothing, so waiting requests cannot block each other. To depart (start its fetch), a request
attaches its chunks that are cached here, so that they are not evicted, and fetches only the others. Within a priority
the tenant with the least service departs first, and within a tenant the oldest request, so that small requests do not
overtake a large one for ever.

A request without a ticket (its KV is still being computed) departs in the same way, but no other request waits for it:
it may itself be waiting for memory at its prefill worker, which the offered KV of another request occupies. So its
slabs go to a request with a ticket that would have to wait, or to a decoding one that needs slabs, and no request waits
for chunks that it fetches.

`KvAdmission` decides, and a driver acts: the decode worker with real pulls (`decode_worker.worker.DecodeWorker`), the
simulator in virtual time (`planner.sim.exact.handoff.SimFetcher`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Generic, Protocol, TypeVar

from engine.scheduling.prefill_adder import RemainingArenas
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.seats import may_evict
from engine.scheduling.shared_slabs import publish_shared
from engine.sequence import Sequence, SequenceRefused
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas

# At most this many requests that wait for chunks of other fetches are skipped in one pass, which bounds its cost.
MAX_PASSED_BY = 32
# The failure code of a fetch that was stopped (`kvtransfer.handoff.HandoffAborted`).
ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class RemoteKv:
    """The KV of one request that has to come from another worker. Drivers subclass it with their transfer's state."""

    seq: Sequence
    # Number of tokens whose KV the request needs here, fetched or attached from the cache.
    num_tokens: int
    arrived_s: float
    # None while its KV is still being computed by the prefill worker.
    ticket: object | None = None
    # Whether its fetch was stopped only so that another request gets its slabs. It is still wanted: it waits for its
    # ticket and is then fetched again.
    recalled: bool = False
    # Whether its fetch was asked to end.
    stopped: bool = False
    # (code, message) to report when the fetch has ended; None reports nothing.
    failure: tuple[str, str] | None = None
    # Addresses of the full chunks that its fetch brings.
    coming: frozenset[bytes] = frozenset()
    # Time at which its fetch started, in seconds on the worker's clock.
    reserved_s: float = 0.0

    @property
    def used_tokens(self) -> int:
        """Of `num_tokens`, those that its sequence begins with: its last token is computed here, even if it came."""
        return self.num_tokens if self.ticket is None else min(self.num_tokens, self.seq.total - 1)

    @property
    def full_keys(self) -> list[bytes]:
        """Addresses of all its full chunks: even the last one can be attached, unless a token of it is computed here,
        since others read it.
        """
        return self.seq.first_keys(self.seq.full_chunks(self.used_tokens))

    @property
    def num_slabs(self) -> int:
        """Slabs for its KV and for one more token."""
        return self.seq.slabs_for(self.num_tokens + 1)

    @property
    def is_wanted(self) -> bool:
        """Whether it was not stopped, or was stopped only to wait again."""
        return self.recalled or not self.stopped


A = TypeVar("A", bound=RemoteKv)


class PullRestores(Protocol):
    """Reads chunks back from the tiers below the pool, where that is sooner than pulling them
    (`engine.prefix_restores`).
    """

    has_tiers: bool

    def begin_pull(self, seq: Sequence, keys: list[bytes], now_s: float) -> None:
        """Look for those of the chunks `keys` that the pool lacks; `seq` is not ready until that has ended."""


@dataclass(frozen=True, slots=True)
class StartFetch(Generic[A]):
    """Start the fetch of `arrival`. It holds the slabs `held` of its first chunks: reserve and fetch the others."""

    arrival: A
    held: list[int]


@dataclass(frozen=True, slots=True)
class Recall(Generic[A]):
    """Stop the fetch of `arrival`; once it has stopped, `finish` lets it wait again."""

    arrival: A


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """Preempt one sequence of a worse priority than `seq`; answer whether there was one."""

    seq: Sequence


DepartureEffect = StartFetch[A] | Recall[A] | MakeRoom


def perform_departures(
    departures: Generator[DepartureEffect[A], bool | None, None],
    perform: Callable[[DepartureEffect[A]], bool | None],
) -> None:
    """Drive `KvAdmission.departures` to its end. `perform` answers `MakeRoom`, and returns None for other effects."""
    effect = next(departures, None)
    while effect is not None:
        answer = perform(effect)
        try:
            effect = departures.send(answer)
        except StopIteration:
            return


@dataclass(frozen=True, slots=True)
class FetchEnd:
    """How a fetch ended: "adopted", "waiting" again, "dropped" without a report, or "failed" with a code to report."""

    status: str
    code: str = ""
    message: str = ""


class KvAdmission(Generic[A]):
    """The requests of one decode worker whose KV is not here yet.

    `renew` restores a recalled request to its state before it departed.
    """

    def __init__(
        self, scheduler: Scheduler, allocator: KvAllocator | KvArenas, renew: Callable[[A], A]
    ) -> None:
        self._scheduler, self._allocator, self._renew = scheduler, allocator, renew
        # Requests that wait for room, in order of arrival. A recalled request is added at the end.
        self.waiting: dict[str, A] = {}
        self.moving: dict[str, A] = {}
        # No arrival has a deadline before this time.
        self._earliest_s = inf

    def __len__(self) -> int:
        return len(self.waiting) + len(self.moving)

    # ---- arrivals

    def enqueue(self, arrival: A) -> None:
        """Add a request that waits for room.

        Raises:
            SequenceRefused: it can never run here ("out_of_memory"), or too many wait already ("overloaded").
        """
        seq, limits = arrival.seq, self._scheduler.limits
        if (need := limits.max_slabs(seq)) > (most := limits.slabs_for(seq)):
            why = f"this worker has {most}"
            raise SequenceRefused("out_of_memory", f"the request needs {need} KV slabs", why)
        if len(self.waiting) >= limits.max_waiting:
            raise SequenceRefused("overloaded", f"{len(self.waiting)} requests wait for room already")
        seq.update_keys()
        # Its tenant counts as present from now on, although the engine does not have the sequence yet.
        self._scheduler.token_counter.enter_tenant(seq.tenancy.tenant)
        self._earliest_s = min(self._earliest_s, seq.deadline_s)
        self.waiting[seq.key] = arrival

    def update_sequence(self, arrival: A, output: list[int], deadline_s: float) -> None:
        """Set the output so far and the deadline of an arrival; both come with its ticket."""
        seq = arrival.seq
        seq.output, seq.deadline_s = output, deadline_s
        seq.update_keys()
        self._earliest_s = min(self._earliest_s, deadline_s)

    def find_expecting(self, request: str, epoch: int) -> A | None:
        """The arrival that a hint or a ticket is for, if it is still wanted and has no ticket yet."""
        key = f"{request}#{epoch}"
        arrival = self.waiting.get(key) or self.moving.get(key)
        return None if arrival is None or arrival.ticket is not None or not arrival.is_wanted else arrival

    def find_request(self, request: str, epoch: int) -> list[A]:
        """All arrivals of a request, of this epoch and older ones."""
        return [one for one in self._all() if one.seq.id == request and one.seq.epoch <= epoch]

    def wanted(self) -> list[A]:
        """All arrivals that wait or move, except those that were stopped for good."""
        return [one for one in self._all() if one.is_wanted]

    def expired(self, now_s: float) -> list[A]:
        """All wanted arrivals whose deadline has passed."""
        if now_s < self._earliest_s:
            return []
        wanted = self.wanted()
        self._earliest_s = min([d for one in wanted if (d := one.seq.deadline_s) > now_s], default=inf)
        return [one for one in wanted if one.seq.deadline_s <= now_s]

    @property
    def has_ticketless(self) -> bool:
        """Whether any request is being fetched ahead of its ticket."""
        return any(one.ticket is None and not one.stopped for one in self.moving.values())

    def _all(self) -> Iterator[A]:
        """All arrivals, waiting or moving."""
        return chain(self.waiting.values(), self.moving.values())

    def begin_restore(self, arrival: A, restores: PullRestores, now_s: float) -> None:
        """Let a request that waits look for its whole chunks in the tiers below the pool first (`Sequence.restore`).

        What another fetch brings comes by itself.
        """
        if not restores.has_tiers:
            return
        seq = arrival.seq
        keys = seq.keys[: seq.keep.boundary_chunks] if seq.keep.evicts else arrival.full_keys
        known = self._allocator.arena_of(seq.kv_class).count_cached(keys)
        if known < len(keys) and not any(keys[known] in one.coming for one in self.moving.values()):
            restores.begin_pull(seq, keys, now_s)

    # ---- departures

    def departures(self, now_s: float) -> Generator[DepartureEffect[A], bool | None, None]:
        """Start fetches, one after the other, as long as there is room. The driver must run the generator to its end.

        It yields effects; the answer to `MakeRoom` is whether there is more room now. If another fetch brings the next
        chunk of a request, the request waits to share this chunk, and its slabs stay set aside for it.
        """
        for name in self._short_arenas():
            yield from self._recall_ticketless(name)
        if not self.waiting:
            return
        moving = [one for one in self.moving.values() if not one.stopped]
        coming = {key for one in moving if one.ticket is not None for key in one.coming}
        ahead = [one.seq for one in moving]
        arenas, full = RemainingArenas(self._allocator), set[str]()
        for arrival in self._departure_order():
            if (name := self._arena_name(arrival)) in full:
                continue
            arena = arenas.arena_of(arrival.seq.kv_class)
            if arena.passed > MAX_PASSED_BY:
                full.add(name)
                continue
            if not may_evict(arrival.seq, self._scheduler, ahead):
                # It waits until another one that evicts has left. Those that keep everything may pass.
                continue
            room = yield from self._find_room(arrival, arenas, ahead)
            if room is None:
                # Nobody overtakes it in its arena. Requests of other classes need none of the slabs it waits for.
                full.add(name)
                if any(
                    one.ticket is not None for one in self.waiting.values() if self._arena_name(one) == name
                ):
                    yield from self._recall_ticketless(name)
                continue
            ahead.append(arrival.seq)
            known, need = room
            keys = arrival.full_keys
            if known < len(keys) and keys[known] in coming:
                arena.set_aside(need)
                continue
            yield self._start(arrival, now_s)
            if arrival.ticket is not None and arrival.seq.key in self.moving:
                coming |= arrival.coming

    def _short_arenas(self) -> list[str]:
        """Arenas in which the engine's sequences need slabs now or for their next tokens, and a recall frees some."""
        if not self.has_ticketless:
            return []
        scheduler, allocator = self._scheduler, self._allocator
        names = {
            self._arena_name(one) for one in self.moving.values() if one.ticket is None and not one.stopped
        }
        running = Counter(scheduler.limits.arena_name(seq) for seq in scheduler.running.values())
        stuck = self._stuck_arenas()
        return sorted(
            name for name in names if name in stuck or allocator.arena_of(name).free < running[name]
        )

    def _stuck_arenas(self) -> set[str]:
        """Arenas whose sequences wait for slabs of theirs: there are some, and a step would do nothing for them.

        An arena whose sequences only wait for a seat, since those of other arenas have all of them, is not stuck.
        """
        scheduler, limits = self._scheduler, self._scheduler.limits
        full = len(scheduler.running) >= limits.max_num_seqs
        seated = chain(scheduler.running.values(), scheduler.adopted.values())
        here = {limits.arena_name(seq) for seq in (seated if full else scheduler.sequences())}
        return {name for name in here if not scheduler.is_arena_ready(name, self._allocator.arena_of(name))}

    def _arena_name(self, arrival: A) -> str:
        return self._scheduler.limits.arena_name(arrival.seq)

    def _recall_ticketless(self, arena: str) -> Iterator[Recall[A]]:
        """Recall all requests that are fetched into an arena without a ticket, to free their slabs."""
        for arrival in [
            one
            for one in self.moving.values()
            if one.ticket is None and not one.stopped and self._arena_name(one) == arena
        ]:
            arrival.failure, arrival.recalled, arrival.stopped = None, True, True
            yield Recall(arrival)

    def _departure_order(self) -> list[A]:
        """The requests that may depart: by priority, then by the service of their tenant, then by arrival.

        A request whose grammar is still compiled does not depart, to take no memory yet. A recalled request waits for
        its ticket, so that it does not alternate for ever with the request that it made room for.
        """
        token_counter = self._scheduler.token_counter

        def place(arrival: A) -> tuple[int, float]:
            tenancy = arrival.seq.tenancy
            return tenancy.priority, token_counter.served_tokens(tenancy.tenant)

        ready = [
            one
            for one in self.waiting.values()
            if (one.ticket is not None or not one.recalled) and one.seq.ready
        ]
        return sorted(ready, key=place)

    def _find_room(
        self, arrival: A, arenas: RemainingArenas, ahead: list[Sequence]
    ) -> Generator[MakeRoom, bool | None, tuple[int, int] | None]:
        """(cached chunks, free slabs needed) of a departure; the slabs include cached chunks without a holder.

        None: there is no room. For a request with a ticket, decoding sequences of a worse priority are preempted.
        """
        keys, arena = arrival.full_keys, arenas.arena_of(arrival.seq.kv_class)
        while True:
            known = arena.count_cached(keys)
            need = arrival.num_slabs - known + arena.count_unheld(keys)
            if need <= arena.free and self._scheduler.admits(arrival.seq, arenas, ahead):
                return known, need
            if arrival.ticket is None or not (yield MakeRoom(arrival.seq)):
                return None

    def _start(self, arrival: A, now_s: float) -> StartFetch[A]:
        """Attach the cached chunks of an arrival, and move it from `waiting` to `moving`."""
        seq, keys = arrival.seq, arrival.full_keys
        del self.waiting[seq.key]
        held = self._allocator.arena_of(seq.kv_class).attach_prefix(seq.key, keys)
        arrival.reserved_s, arrival.recalled = now_s, False
        arrival.coming = frozenset(keys[len(held) :])
        self.moving[seq.key] = arrival
        return StartFetch(arrival, held)

    # ---- the end of a fetch

    def withdraw(self, arrival: A, failure: tuple[str, str] | None = None) -> bool:
        """Give up an arrival. `failure` is the (code, message) to report for it, if any.

        Returns True if it only waited: report `failure` now. If False, stop its fetch; `finish` returns what to report
        when nothing writes to its slabs any more.
        """
        if arrival.seq.key in self.waiting:
            del self.waiting[arrival.seq.key]
            self._scheduler.token_counter.leave_tenant(arrival.seq.tenancy.tenant)
            return True
        arrival.failure, arrival.recalled, arrival.stopped = failure, False, True
        return False

    def must_abort(self, arrival: A, complete: bool) -> bool:
        """Whether the KV of a fetch that has ended must be discarded. `complete`: every chunk is here and verified.

        The KV of a stopped fetch is discarded. A recalled request is the exception: its fetch was stopped only so that
        another request gets its slabs. The request is still wanted, and is adopted if all its KV had come before.
        """
        return arrival.stopped and not (arrival.recalled and complete)

    def commit(self, arrival: A, slabs: list[int]) -> None:
        """All KV is in `slabs`: give them to the sequence, and publish its full chunks.

        They are in token order, whole chunks and segments before a bag; the last one is for the next tokens. If there
        is a bag, that one is the ring.
        """
        seq = arrival.seq
        if seq.kept_slabs:
            slabs.insert(seq.lead_slabs, slabs.pop())
        seq.slabs, seq.computed = slabs, arrival.used_tokens
        publish_shared(seq, self._allocator.arena_of(seq.kv_class))

    def finish(self, arrival: A, code: str = "", message: str = "") -> FetchEnd:
        """A fetch has ended, and nothing writes to its slabs; `code` and `message` describe its failure, if it failed.

        After a failure nothing is held for the request, including the attached chunks.
        """
        seq = arrival.seq
        del self.moving[seq.key]
        if code:
            self._allocator.release(seq.key)
            if arrival.recalled and code == ABORTED:
                self.waiting[seq.key] = self._renew(arrival)
                return FetchEnd("waiting")
        # From here on the engine counts the sequence for its tenant.
        self._scheduler.token_counter.leave_tenant(seq.tenancy.tenant)
        if not code:
            return FetchEnd("adopted")
        # A recalled request is still wanted, so a failure of its fetch is reported.
        if not arrival.stopped or arrival.recalled:
            return FetchEnd("failed", code, message)
        return FetchEnd("failed", *arrival.failure) if arrival.failure is not None else FetchEnd("dropped")
