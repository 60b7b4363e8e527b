"""The sequences of one engine, and how a step changes their slabs, KV and tokens. No torch, no clock.

    plan_step ─▶ take_slabs ─▶ start ─▶ select_work ─▶ (run) ─▶ advance ─▶ finish_reason, settle_output

`Scheduler` decides who works in a step; this does what follows from it. Two drive it, and add what is theirs: the
engine (`engine.loop.Engine`) runs a model, samples, and copies parked KV; the simulator
(`planner.sim.exact.engine.SimEngine`) has a cost in place of the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Durations
from dataclasses import dataclass, field

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import OutOfSlabs
from diptych.messages import STEP_SIZE_BOUNDS, WorkerStats
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.shared_slabs import publish_shared
from engine.sequence import Sequence
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.eviction.kept_segments import KeptSegment, count_segment_slabs

DEADLINE_FAILURE = ("deadline_exceeded", "the request's time was up")
STEP_PARTS = ("schedule", "prepare", "run", "evict", "sample", "send")
# The name of the time until a sequence started, and the name of the time from then to its first token.
LOCAL_STAGES = ("queue", "prefill")
# Of the time until it started, the part in which its prefix was read back from a tier, if it was.
RESTORE_STAGE = "restore"
FETCHED_STAGES = ("decode_queue", "decode_first")


@dataclass(slots=True)
class StepCounters:
    """Counts since the start. `parts` are seconds, and sum to `seconds`."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    plans: int = 0
    preempted: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    # Number of steps by their tokens, as in `WorkerStats.step_sizes`.
    sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZE_BOUNDS) + 1))

    def add_time(self, part: str, seconds: float) -> None:
        """One more stretch of a step."""
        self.parts[part] += seconds
        self.seconds += seconds


@dataclass(slots=True)
class AdmittedSequence:
    """A sequence that a plan admitted and that has its slabs; the first `cached` of them were in the prefix tree.

    None: it has all its KV already, since it was adopted.
    """

    seq: Sequence
    cached: int | None = None


@dataclass(slots=True)
class StepWorkload:
    """The work of a step: sequences that decode one token each, and the prompts with the tokens to prefill of each."""

    decodes: list[Sequence]
    prefills: list[tuple[Sequence, int]]


class SequenceTable:
    """The sequences of `scheduler`, with the slabs that they hold in `allocator` under their keys."""

    def __init__(self, scheduler: Scheduler, allocator: KvAllocator | KvArenas) -> None:
        self.scheduler, self.allocator = scheduler, allocator
        self.counters = StepCounters()

    # ---- a step begins

    def plan_step(self, preempt: Callable[[str], None]) -> StepPlan:
        """A plan that the slabs suffice for; `preempt` takes the memory of one sequence away (see `preempt`)."""
        while True:
            self.counters.plans += 1
            plan = self.scheduler.next_plan(self.allocator)
            if plan.preempted is None:
                return plan
            preempt(plan.preempted)

    def make_room(self, seq: Sequence, preempt: Callable[[str], None]) -> bool:
        """Preempt one sequence of a worse priority than `seq`, which is to be adopted; False if none may be."""
        victim = self.scheduler.victim_for(seq, self.allocator)
        if victim is not None:
            preempt(victim)
        return victim is not None

    def preempt(self, key: str, parked: bool) -> Sequence:
        """Take a sequence's memory away; `parked` says that its KV was copied. It waits at its place in the queue."""
        seq = self.scheduler.preempt(key, parked)
        self.allocator.release(key)
        self.counters.preempted["park" if parked else "recompute"] += 1
        return seq

    def take_slabs(self, plan: StepPlan) -> tuple[list[AdmittedSequence], list[int]]:
        """Take the slabs of a plan. Returns the sequences to `start`, in order, and all slabs written from now on.

        If others took the slabs since the plan was made, a running sequence pauses for this step, and a new one
        waits on, with nothing held.
        """
        if not plan.admitted and not plan.grow:
            return [], []
        admissions, taken, need = list[AdmittedSequence](), list[int](), dict(plan.grow)
        waiting, find = self.scheduler.waiting, self.scheduler.find
        fresh = [seq for key in plan.admitted if (seq := waiting.get(key)) is not None]
        cached = {seq.key: self.arena_of(seq).attach_prefix(seq.key, seq.attachable_keys()) for seq in fresh}
        left_out = set[str]()
        for key, count in plan.grow:
            if key in cached or (seq := find(key)) is None:
                continue
            slabs = self._allocate(seq, count)
            if slabs is None and (attached := cached.keys() - left_out):
                # Beside a second sequence, bulk work may hold less: no new one comes before those that run.
                for other in attached:
                    self.allocator.release(other)
                left_out |= attached
                slabs = self._allocate(seq, count)
            taken += slabs or ()
            seq.slabs += slabs or ()
        for key in plan.admitted:
            if key in left_out or (seq := find(key)) is None:
                continue
            if (known := cached.get(key)) is None:
                admissions.append(AdmittedSequence(seq))
            elif (slabs := self._allocate(seq, need.get(key, 0))) is None:
                self.allocator.release(key)
            else:
                taken += slabs
                seq.slabs, seq.shared = known + slabs, len(known)
                admissions.append(AdmittedSequence(seq, len(known)))
        return admissions, taken

    def arena_of(self, seq: Sequence) -> KvAllocator:
        """The allocator of the slabs of `seq`."""
        return self.allocator.arena_of(seq.kv_class)

    def _allocate(self, seq: Sequence, count: int) -> list[int] | None:
        try:
            return self.arena_of(seq).allocate(seq.key, count)
        except OutOfSlabs:
            return None

    def start(self, admitted_seq: AdmittedSequence, now_s: float, restored: bool = False) -> None:
        """Let an admitted sequence run; `restored` says that its parked KV is back in its slabs."""
        seq, cached, first = admitted_seq.seq, admitted_seq.cached, admitted_seq.seq.started_s is None
        if cached is not None and not restored:
            seq.computed, seq.target, seq.kept_slabs = cached * CHUNK_TOKENS, seq.total, 0
            # If it was parked in vain, nothing of its segments is left either.
            seq.segments, seq.segment_keys = (), []
            seq.cached = seq.computed if first else seq.cached
        if first:
            seq.silent, seq.fetched = True, seq.key in self.scheduler.adopted
        self.scheduler.start(seq.key, now_s)

    def share_restored(self, seq: Sequence) -> bool:
        """A sequence's segments are back in its slabs: others may attach them. Returns whether it got other slabs."""
        slabs = list(seq.slabs)
        if seq.segment_keys:
            publish_shared(seq, self.arena_of(seq))
        return seq.slabs != slabs

    def select_work(self, plan: StepPlan) -> StepWorkload:
        """The work of a plan, as far as the slabs of each sequence suffice for it."""
        running = self.scheduler.running
        decodes = [
            seq
            for key in plan.decode
            if (seq := running.get(key)) is not None and seq.computed < seq.capacity
        ]
        prefills = list[tuple[Sequence, int]]()
        for part in plan.prefill:
            if (seq := running.get(part.key)) is not None:
                count = min(part.start + part.count, seq.capacity) - seq.computed
                if count > 0:
                    prefills.append((seq, count))
        return StepWorkload(decodes, prefills)

    # ---- a step ends

    def record_steps(self, rows: int, prefill_tokens: int, durations: Durations[float]) -> None:
        """Steps in each of which `rows` sequences decoded and `prefill_tokens` were prefilled took so many seconds."""
        counters, record = self.counters, self.scheduler.record_step
        counters.steps += len(durations)
        counters.tokens += (rows + prefill_tokens) * len(durations)
        counters.sizes[bisect_left(STEP_SIZE_BOUNDS, rows + prefill_tokens)] += len(durations)
        for seconds in durations:
            record(rows, prefill_tokens, seconds)

    @staticmethod
    def count_decided(seqs: Iterable[Sequence]) -> tuple[int, int]:
        """Tokens of sequences that come to decision points: of those at the end of their prompts, and of answers."""
        lengths = [(seq.computed, seq.computed == len(seq.prompt)) for seq in seqs]
        return sum(count for count, ends in lengths if ends), sum(
            count for count, ends in lengths if not ends
        )

    def record_decisions(self, prompts: int, answers: int, seconds: float) -> None:
        """In a step, what sequences of so many tokens keep (`count_decided`) was decided in so many seconds."""
        self.counters.add_time("evict", seconds)
        if not prompts:
            # Only decisions in answers are predicted. Those at the end of a prompt profile heads, which takes longer.
            self.scheduler.step_time.add_decisions(answers, seconds)

    def charge(self, seq: Sequence, count: int) -> None:
        """Count `count` tokens for the sequence's tenant that were computed but failed."""
        self.scheduler.token_counter.charge_tokens(seq.tenancy.tenant, count)

    def advance(self, seqs: Iterable[Sequence], count: int) -> None:
        """`count` tokens more of each sequence were run and have KV; full chunks are known to all from now on."""
        charge = self.scheduler.token_counter.charge_tokens
        for seq in seqs:
            charge(seq.tenancy.tenant, count)
            seq.computed += count
            full, shared = seq.full_chunks(seq.computed), seq.shared
            if full > shared and (seq.root or len(seq.keys) > shared):
                seq.update_keys()
                publish_shared(seq, self.arena_of(seq))

    # ---- decision points

    def has_room_for_bag(self, seq: Sequence, bag_slabs: int, segments: tuple[KeptSegment, ...] = ()) -> bool:
        """Whether `take_bag` would succeed after `release_undecided`."""
        more = 0 if seq.kept_slabs else 1 + count_segment_slabs(segments)
        arena, need = self.arena_of(seq), bag_slabs + more
        return need <= arena.free + arena.count_freed_tail(seq.key, seq.slabs[self._num_decided(seq) :])

    def _num_decided(self, seq: Sequence) -> int:
        """How many leading slabs of a sequence at a decision point stay: whole chunks, segments and, if it has one, its
        ring.
        """
        return seq.lead_slabs + bool(seq.kept_slabs)

    def release_undecided(self, seq: Sequence) -> None:
        """Free the slabs with the rows that `seq` chooses from: all behind the boundary, but not an evicted one's ring.

        Its prompt's chunks that were published stay cached. The rows to keep must have been copied aside.
        """
        stay = self._num_decided(seq)
        self.arena_of(seq).release_tail(seq.key, seq.slabs[stay:])
        seq.kept_slabs = min(seq.kept_slabs, 1)
        seq.slabs, seq.shared = seq.slabs[:stay], min(seq.shared, seq.lead_slabs)

    def take_bag(
        self, seq: Sequence, bag_slabs: int, segments: tuple[KeptSegment, ...] = ()
    ) -> list[int] | None:
        """Take a bag of so many slabs, and `segments` and the ring if `seq` has none yet, after `release_undecided`.

        Returns the slabs taken; None if too few are free.
        """
        more = 0 if seq.kept_slabs else 1 + count_segment_slabs(segments)
        slabs = self._allocate(seq, bag_slabs + more)
        if slabs is not None:
            seq.slabs += slabs
            seq.segments = seq.segments if seq.kept_slabs else segments
            seq.kept_slabs = bag_slabs + 1
        return slabs

    def finish_reason(self, seq: Sequence, stopped: bool) -> str | None:
        """Why the output of a sequence is complete, if it is; `stopped` says that its last token ends it."""
        if stopped:
            return "stop"
        written, limits = len(seq.output), self.scheduler.limits
        if written >= seq.sampling.max_tokens or len(seq.prompt) + written >= limits.max_model_len:
            return "length"
        return None

    def settle_output(self, seq: Sequence, finish: str | None) -> bool:
        """Output of a sequence is emitted: one that has finished is dropped, one that is held leaves with its slabs.

        Returns whether it left with its slabs; they are then the caller's to free.
        """
        seq.silent = False
        if finish:
            self.drop(seq.key)
        elif seq.hold_kv:
            self.scheduler.remove(seq.key)
            return True
        return False

    def drop(self, key: str, keep: bool = True) -> Sequence:
        """Forget a sequence wherever it is, and free what it holds; without `keep` its chunks are forgotten, too."""
        seq = self.scheduler.remove(key)
        self.allocator.release(key, keep)
        seq.slabs = []
        return seq

    def withdraw(self, key: str) -> None:
        """Forget a sequence that was adopted just now. Its slabs are the caller's again."""
        self.scheduler.remove(key)

    def keys_of(self, request: str, epoch: int) -> list[str]:
        """The keys of a request's sequences of this epoch and older ones."""
        return [seq.key for seq in self.scheduler.sequences() if seq.id == request and seq.epoch <= epoch]

    # ---- statistics

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return len(self.scheduler.running) + len(self.scheduler.adopted)

    @property
    def stats(self) -> WorkerStats:
        """The engine's part of a worker's statistics."""
        counters, allocator = self.counters, self.allocator
        arenas = allocator if isinstance(allocator, KvArenas) else None
        return WorkerStats(
            slabs_total=self.scheduler.limits.num_slabs,
            slabs_used=allocator.used - allocator.lent,
            slabs_lent=allocator.lent,
            slabs_cached=allocator.cached,
            running=self.num_running,
            waiting=len(self.scheduler.waiting),
            waiting_tokens=self.scheduler.waiting_tokens,
            steps=counters.steps,
            step_seconds=counters.seconds,
            step_tokens=counters.tokens,
            step_parts=dict(counters.parts),
            step_sizes=list(counters.sizes),
            prefix_queries=allocator.prefix_queries,
            prefix_hits=allocator.prefix_hits,
            preemptions=dict(counters.preempted),
            seat_pauses=self.scheduler.seat_pauses,
            class_slabs_used=arenas.used_by_class if arenas else {},
            class_slabs_cached=arenas.cached_by_class if arenas else {},
        )


def first_output_seconds(seq: Sequence, now_s: float) -> dict[str, float]:
    """Where the time of a sequence went until its first output, in seconds by stage; empty after that.

    They follow one another, so they sum to the whole since `arrived_s`.
    """
    if not seq.silent:
        return {}
    wait, work = FETCHED_STAGES if seq.fetched else LOCAL_STAGES
    started_s = now_s if seq.started_s is None else seq.started_s
    stages = {wait: started_s - seq.arrived_s, work: now_s - started_s}
    if seq.restore is not None and not seq.fetched:
        stages[RESTORE_STAGE] = max(0.0, min(started_s, seq.restore.ended_s) - seq.arrived_s)
        stages[wait] -= stages[RESTORE_STAGE]
    return stages
