"""What the next engine step works on: continuous batching under a token budget, with chunked prefill.

    add ──▶ waiting ──(slabs, a seat, budget)──▶ running ──remove──▶
               ▲──────────────preempt──────────────┤
    adopt ──▶ adopted ◀─(a seat)─pause─────────────┘

`schedule` only reads: it returns a `StepPlan` of keys and lengths, and the caller applies it. So the same state always
gives the same plan, and the simulator schedules as the engine does. No torch, clock, I/O or logging here.

Slabs are taken as a sequence grows. Who is admitted is reckoned to grow by a part of what it may
(`engine.scheduling.new_token_ratio`), so that those admitted together do not all run out together. When a step's growth
does not fit even so, the least deserving sequence gives up its memory and waits again; the most deserving
never does, so something always ends.

Slabs, growth and preemption are reckoned for each KV class by itself (`kvcache.arenas`), so a full arena takes nothing
from other classes. Seats, tokens and turns are shared by all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from engine.scheduling.deadlines import Deadlines
from engine.scheduling.fairness import VirtualTokenCounter
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.scheduling.prefill_adder import (
    ArenaRoom,
    KvAvailability,
    KvStock,
    PrefillAdder,
    PrefillChunk,
    find_prefix,
)
from engine.scheduling.prompt_queues import PromptQueues
from engine.scheduling.seats import choose_startable, choose_yielding, count_evicting_left, may_evict
from engine.scheduling.step_time import StepTimeModel
from engine.sequence import EngineLimits, Sequence, SequenceRefused

# After a prompt has started beside a longer one, more such prompts are expected for this many steps.
SHARED_STEPS = 64


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work: sequences that start, slabs to allocate, sequences that decode, and parts to prefill.

    If `preempted` or `paused` is set, the rest is empty: take that sequence's memory, or those seats, away, and plan
    again.
    """

    preempted: str | None = None
    paused: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    grow: tuple[tuple[str, int], ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


def check_limits(seq: Sequence, limits: EngineLimits, prompts: PromptQueues) -> None:
    """Check that a sequence can run within `limits`, and that there is a place for it among those that wait.

    Raises:
        SequenceRefused: the queue is full ("overloaded"), or the sequence can never run here ("out_of_memory",
            "internal_error").
    """
    if not 0 < seq.total <= limits.max_model_len:
        raise SequenceRefused(
            "internal_error", f"{seq.total} tokens are not within 1 to {limits.max_model_len}"
        )
    if (need := limits.max_slabs(seq)) > (most := limits.slabs_for(seq)):
        raise SequenceRefused("out_of_memory", f"it needs {need} KV slabs, and this worker has {most} in all")
    num_waiting, tokens = len(prompts.waiting), prompts.num_tokens
    if num_waiting >= limits.max_waiting or tokens + seq.total > limits.max_waiting_tokens:
        why = f"{num_waiting} sequences with {tokens} tokens are waiting"
        raise SequenceRefused("overloaded", "the worker's queue is full", why)


class Scheduler:
    """The queues of one engine: by priority, then fair among tenants, then first come first served."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.prompts = PromptQueues(limits)
        self.adopted: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.token_counter, self.ratio = VirtualTokenCounter(), NewTokenRatio()
        self.step_time = StepTimeModel()
        # Waiting sequences that have run before.
        self._preempted: set[str] = set()
        self._deadlines = Deadlines()
        self._arrivals = 0
        # Number of times that a running sequence gave its seat to another one.
        self.seat_pauses = 0
        # Number of steps for which a long prompt still leaves room for shorter prompts.
        self._shared_steps = 0

    @property
    def waiting(self) -> dict[str, Sequence]:
        """The sequences that hold no memory, by key."""
        return self.prompts.waiting

    @property
    def waiting_tokens(self) -> int:
        """The tokens that waiting sequences are to prefill."""
        return self.prompts.num_tokens

    def __len__(self) -> int:
        return len(self.waiting) + len(self.adopted) + len(self.running)

    def __contains__(self, key: str) -> bool:
        return key in self.running or key in self.adopted or key in self.waiting

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, running ones first."""
        return chain(self.running.values(), self.adopted.values(), self.waiting.values())

    def find(self, key: str) -> Sequence | None:
        """The sequence of this key, wherever it is."""
        return self.running.get(key) or self.adopted.get(key) or self.waiting.get(key)

    # ---- arrivals

    def add(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence that has no KV yet.

        Raises:
            SequenceRefused: the queue is full ("overloaded"), or the sequence can never run here ("out_of_memory",
                "internal_error").
            ValueError: it is already here, or half computed.
        """
        if seq.key in self or seq.computed or seq.slabs:
            raise ValueError(f"{seq.key} is already here or already has KV")
        check_limits(seq, self.limits, self.prompts)
        seq.update_keys()
        seq.target = seq.total
        self._register_arrival(seq, now_s)
        self.prompts.add(seq)

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Take over a sequence whose slabs hold its KV (`Sequence.is_adoptable`). It needs a seat.

        Raises:
            ValueError: it is already here, its KV is not complete, it has nothing left to write, or it can never run
                here to its end.
        """
        over = len(seq.output) >= seq.sampling.max_tokens or seq.total >= self.limits.max_model_len
        if seq.key in self or over or not seq.is_adoptable:
            raise ValueError(
                f"{seq.key} cannot be adopted: {seq.computed} of {seq.total} tokens have KV, in {len(seq.slabs)} slabs"
                f" (evicted: {bool(seq.kept_slabs)}), {seq.hold_kv=}; or it is finished, or already here"
            )
        if (need := self.limits.max_slabs(seq)) > (most := self.limits.slabs_for(seq)):
            raise ValueError(f"{seq.key} cannot be adopted: it needs {need} slabs, and there are {most}")
        # An evicted sequence may have to compute more than one token before it decodes.
        seq.target, seq.started_s = seq.computed if seq.pending == 1 else seq.total, None
        self._register_arrival(seq, now_s)
        self.adopted[seq.key] = seq

    def _register_arrival(self, seq: Sequence, now_s: float) -> None:
        self._arrivals += 1
        seq.number, seq.arrived_s = self._arrivals, now_s
        self.token_counter.enter_tenant(seq.tenancy.tenant)
        self._deadlines.add(seq)

    # ---- moves between the queues

    def start(self, key: str, now_s: float) -> Sequence:
        """Move a sequence that a plan admitted to the running ones."""
        seq = self.adopted.pop(key) if key in self.adopted else self._dequeue_sequence(key)
        seq.parked = False
        pending = seq.pending
        if any(other.pending > pending and not other.decoding for other in self.running.values()):
            self._shared_steps = SHARED_STEPS
        seq.started_s = now_s if seq.started_s is None else seq.started_s
        self.running[key] = seq
        return seq

    def preempt(self, key: str, parked: bool) -> Sequence:
        """Put a sequence back to its place in the queue. It keeps its output; the caller frees its slabs.

        `parked` says that its KV was copied, so that `computed` still counts. Raises KeyError if it holds no memory.
        """
        seq = (self.running if key in self.running else self.adopted).pop(key)
        seq.slabs, seq.parked, seq.shared = [], parked, 0
        if not parked:
            seq.computed, seq.target, seq.kept_slabs = 0, seq.total, 0
            seq.segments, seq.segment_keys = (), []
        seq.update_keys()
        self._preempted.add(key)
        self.prompts.add(seq)
        self.ratio.raise_for_preemption()
        return seq

    def pause(self, key: str) -> None:
        """Take a decoding sequence's seat, but not its slabs. It goes on when a seat is free. Raises KeyError."""
        self.adopted[key] = self.running.pop(key)
        self.seat_pauses += 1

    def remove(self, key: str) -> Sequence:
        """Forget a sequence, wherever it is; its slabs are the caller's to free. Raises KeyError."""
        if key in self.waiting:
            seq = self._dequeue_sequence(key)
        else:
            seq = (self.adopted if key in self.adopted else self.running).pop(key)
        self.token_counter.leave_tenant(seq.tenancy.tenant)
        self._deadlines.prune(self.find, len(self))
        return seq

    def _dequeue_sequence(self, key: str) -> Sequence:
        self._preempted.discard(key)
        return self.prompts.remove(key)

    def record_step(self, rows: int, tokens: int, seconds: float) -> None:
        """A step with `rows` decode rows and `tokens` prompt tokens took `seconds`."""
        self._shared_steps = max(0, self._shared_steps - 1)
        if rows:
            self.ratio.decay_once()
        if self.limits.tpot_s is not None:
            self.step_time.add_sample(rows, tokens, seconds)

    # ---- deadlines

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all sequences here."""
        return self._deadlines.find_earliest(self.find)

    def expired_keys(self, now_s: float) -> list[str]:
        """Keys of the sequences whose time is up."""
        if (first := self.deadline_s) is None or first > now_s:
            return []
        return [seq.key for seq in self.sequences() if seq.deadline_s <= now_s]

    # ---- decisions

    def ready(self, stock: KvStock) -> bool:
        """Whether a step would do anything now, deadlines aside; if not, only an event can change that."""
        return any(self.is_arena_ready(name, stock.arena_of(name)) for name in self.limits.kv_classes)

    def is_arena_ready(self, name: str, availability: KvAvailability) -> bool:
        """Whether a step would do anything for the sequences of one arena."""
        select = self.limits.select_arena
        running, adopted = select(self.running.values(), name), select(self.adopted.values(), name)
        if running or any(seq.ready for seq in adopted):
            if len(running) + len(adopted) > 1:
                # If no sequence can go on, the one with the worst precedence is preempted and makes room.
                return True
            return any(self._needed_slabs(seq) <= availability.free for seq in chain(running, adopted))
        if len(self.running) >= self.limits.max_num_seqs:
            # Sequences of other arenas have all seats.
            return False
        waiting = self.prompts.list_arena(name, self.token_counter)
        head = next((seq for seq in waiting if seq.ready and may_evict(seq, self)), None)
        free = availability.free
        return head is not None and find_prefix(head, availability).slab_cost(head, head.total) <= free

    def admits(self, seq: Sequence, stock: KvStock, moving_seqs: Iterable[Sequence] = ()) -> bool:
        """Whether a sequence whose KV is to come from elsewhere may take slabs now: `chunks(seq.total)` in all.

        There must be room for it and its expected growth beside all sequences that hold memory here; of these,
        `moving_seqs` are not in the scheduler, since their KV is on the way. Sequences preempted here come back first,
        unless their priority is worse. Whether the prefix of `seq` is attached already makes no difference.
        """
        name, arena = self.limits.arena_name(seq), stock.arena_of(seq.kv_class)
        returning = self.limits.select_arena([self.waiting[key] for key in self._preempted], name)
        if any(other.tenancy.priority <= seq.tenancy.priority for other in returning):
            return False
        seq.update_keys()
        found = find_prefix(seq, arena)
        coming = [other for other in moving_seqs if self.limits.arena_name(other) == name]
        if not (coming or any(True for _ in self._memory_holders(name))):
            return found.slab_cost(seq, seq.total) <= arena.free
        on_the_way = sum(
            other.expected_slabs(self._expected_tokens(other)) - other.slabs_for(other.total)
            for other in coming
        )
        left = arena.free - on_the_way - self._expected_growth(name)
        return found.slab_cost(seq, self._expected_tokens(seq)) <= left

    def next_plan(self, stock: KvStock) -> StepPlan:
        """The next step's plan, after sequences that must give up their seats were paused."""
        while (plan := self.schedule(stock)).paused:
            for key in plan.paused:
                self.pause(key)
        return plan

    def schedule(self, stock: KvStock) -> StepPlan:
        """The next step's plan. It changes nothing: apply it before the next call.

        Every decoding sequence gets its one token, then prompts are prefilled with the rest of the budget.
        """
        seats, running, adopted = self.limits.max_num_seqs, self.running.values(), self.adopted.values()
        if paused := choose_yielding(running, adopted, self.token_counter, seats):
            return StepPlan(paused=paused)
        new_seqs = choose_startable(running, adopted, self.token_counter, seats)
        decode = [seq for seq in self.running.values() if seq.decoding]
        decode += [seq for seq in new_seqs if seq.pending == 1]
        growing = [seq for seq in decode if seq.computed >= seq.capacity]
        rooms: dict[str, ArenaRoom] = {}
        for name in self.limits.kv_classes:
            arena, mine = stock.arena_of(name), self.limits.select_arena(growing, name)
            if self._is_short(name, len(mine), arena, decode, new_seqs):
                holders = list(self._memory_holders(name))
                if len(holders) > 1:
                    return StepPlan(preempted=max(holders, key=lambda seq: seq.precedence).key)
                decode = [seq for seq in decode if seq not in mine]
                growing, mine = [seq for seq in growing if seq not in mine], []
            rooms[name] = ArenaRoom(arena, arena.free - len(mine), 0, alone=False)
        grow = [(seq.key, 1) for seq in growing]
        if len(decode) == len(self.running) + len(new_seqs) and not self.waiting:
            return StepPlan(
                admitted=tuple([seq.key for seq in new_seqs]),
                grow=tuple(grow),
                decode=tuple([seq.key for seq in decode]),
            )
        adder = self._open_adder(rooms, len(decode), new_seqs)
        prefilling = [seq for seq in chain(self.running.values(), new_seqs) if not seq.decoding]
        adder.add_prompts(self.prompts.open_queues(prefilling))
        for room in rooms.values():
            if room.blocked is not None and (victim := self.victim_for(room.blocked, stock)) is not None:
                return StepPlan(preempted=victim)
        return StepPlan(
            admitted=tuple(seq.key for seq in new_seqs) + tuple(adder.admitted),
            grow=tuple(grow + adder.grow),
            decode=tuple(seq.key for seq in decode),
            prefill=tuple(adder.chunks),
        )

    def _is_short(
        self, name: str, growing: int, arena: KvAvailability, decode: list[Sequence], new_seqs: list[Sequence]
    ) -> bool:
        """Whether an arena lacks the slabs for its decoding sequences and for its most deserving prefill."""
        select = self.limits.select_arena
        seated = len(select(self.running.values(), name)) + len(select(new_seqs, name))
        prefills = len(select(decode, name)) < seated
        return bool(growing or prefills) and growing + self._prefill_need(name) > arena.free

    def victim_for(self, seq: Sequence, stock: KvStock) -> str | None:
        """Key of the sequence that is to be preempted first so that `seq`, for which there is no room, gets some.

        Only sequences of a worse priority make room, those with the worst precedence first, and only if that is enough.
        """
        holders, arena = self._memory_holders(self.limits.arena_name(seq)), stock.arena_of(seq.kv_class)
        worse = [other for other in holders if other.tenancy.priority > seq.tenancy.priority]
        if not worse:
            return None
        room = arena.free + arena.count_freed_by([other.key for other in worse])
        if find_prefix(seq, arena).slab_cost(seq, seq.total) > room:
            return None
        return max(worse, key=lambda other: other.precedence).key

    def worst_holder(self, seq: Sequence) -> Sequence:
        """The sequence with the worst precedence of those that hold slabs in the arena of `seq`."""
        return max(self._memory_holders(self.limits.arena_name(seq)), key=lambda other: other.precedence)

    def _memory_holders(self, name: str) -> Iterator[Sequence]:
        """The sequences that hold slabs of an arena."""
        select = self.limits.select_arena
        return chain(select(self.running.values(), name), select(self.adopted.values(), name))

    def _prefill_need(self, name: str) -> int:
        """Slabs that an arena's sequence with the best precedence needs to continue its prefill; 0 if it decodes."""
        head = min(self._memory_holders(name), key=lambda seq: seq.precedence)
        return 0 if head.decoding else self._needed_slabs(head)

    def _needed_slabs(self, seq: Sequence) -> int:
        """Slabs that a running sequence must take for its next step."""
        return seq.needed_slabs(1 if seq.decoding or self.limits.chunked_prefill else seq.pending)

    def _expected_tokens(self, seq: Sequence) -> int:
        return self.limits.expected_tokens(seq, self.ratio.value)

    def _expected_growth(self, name: str) -> int:
        """Slabs of an arena that sequences with memory there are expected to take in addition."""
        grown, ratio, holders = self.limits.expected_tokens, self.ratio.value, self._memory_holders(name)
        return sum([max(0, seq.expected_slabs(grown(seq, ratio)) - len(seq.slabs)) for seq in holders])

    def _open_adder(self, rooms: dict[str, ArenaRoom], rows: int, new_seqs: list[Sequence]) -> PrefillAdder:
        """A prefill of the step with `rows` decoding sequences, whose rooms lack what growth is expected to take.

        Its budget is L_m, the tokens that saturate the device, if the step decodes nothing (DistServe, section 4.3).
        """
        limits = self.limits
        seats = limits.max_num_seqs - len(self.running) - len(new_seqs)
        budget = limits.max_num_batched_tokens - rows
        if rows and limits.tpot_s is not None:
            decided = sum(seq.computed + 1 for seq in self.running.values() if seq.decides_next)
            budget = min(budget, self.step_time.prefill_budget(rows, limits.tpot_s, decided))
        if not rows and limits.saturation_tokens:
            budget = min(budget, limits.saturation_tokens)
        for name, room in rooms.items():
            if self.waiting and seats > 0:
                room.left = room.availability.free - self._expected_growth(name)
            room.alone = not any(True for _ in self._memory_holders(name))
        return PrefillAdder(
            limits=limits,
            rooms=rooms,
            token_counter=self.token_counter,
            running={**self.running, **{seq.key: seq for seq in new_seqs}} if new_seqs else self.running,
            ratio=self.ratio.value,
            seats=seats,
            budget=budget,
            shares_steps=self._shared_steps > 0,
            evicting_left=count_evicting_left(self),
        )
