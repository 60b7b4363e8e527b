"""One engine in virtual time: the real scheduler and KV accounting, with a cost in place of the model.

What a step changes is done by `engine.sequence_table.SequenceTable`, as in `engine.loop.Engine`. To be fast, the
simulator also merges steps into a run: while the same sequences decode, none ends, none waits and memory suffices, one
plan stands for many steps. They take exactly as long as they would one by one. Any new event cuts the run at the end of
the current step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from math import inf
from typing import cast

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_report import KeptReport
from diptych.eviction_spec import decision_tokens
from engine.prefix_restores import NoRestores, PrefixRestores
from engine.scheduling.new_token_ratio import FIRST_PREFILL_RATE, MeasuredRate
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.sequence import EngineLimits, Sequence, num_chunks
from engine.sequence_table import SequenceTable, first_output_seconds
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from planner.costs.step import StepVariation
from planner.sim.exact.cores import SimCores
from planner.sim.exact.segments import plan_kept
from planner.types import CostModel, KvClassWork, KvKeep, StepBatch

# Number of a run's steps that are computed at once at first. It doubles each time the run goes on.
FIRST_RUN_STEPS = 8
SAME_WORK = KvClassWork()


@dataclass(slots=True)
class SimSequence(Sequence):
    """A sequence that will generate `max_output` tokens. `prompt` and `output` are ranges: only their lengths count.

    Beyond `quiet` tokens each chunk that begins is news to the relay: it has booked no room for that.
    """

    max_output: int = 0
    quiet: int = 0
    # Number of tokens of its prompt.
    size: int = 0
    # Number of chunks that were announced to a decode worker before there was a ticket.
    announced: int = 0
    # What it kept by its latest decision, until an output has told.
    kept: KeptReport | None = None


SimPrefills = list[tuple[SimSequence, int]]


@dataclass(slots=True)
class SimOutput:
    """The output of a step for one sequence. `output` is how many tokens its answer has by now."""

    seq: SimSequence
    output: int
    finish: str | None = None
    held: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    kept: KeptReport | None = None


def make_output(seq: SimSequence, count: int, now_s: float) -> SimOutput:
    """The output of a sequence whose answer has `count` tokens; the first output also has its latency by stage."""
    return SimOutput(seq, count, seconds=first_output_seconds(seq, now_s))


@dataclass(slots=True)
class StepRun:
    """One step, or several equal ones: decoding sequences, with `context` tokens in all, and (task, tokens) of prompts.

    The context grows by `growth` with each step. Tokens of a class count as often as its KV makes them cost.
    `ends` are the times at which steps end, as far as they have been computed; the run has at most `most` steps.
    If it is not cut, sequences decide after `decides_at` steps what they keep, which takes `decide_s` seconds.
    """

    begun_s: float
    rows: list[SimSequence] = field(default_factory=list)
    parts: SimPrefills = field(default_factory=list)
    context: float = 0
    growth: float = 0
    most: int = 1
    ends: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    cut: bool = False
    decides_at: int = 0
    decide_s: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the end of its last step has been computed."""
        return len(self.ends) >= self.most


class PipelineStages:
    """The stages of a pipeline. A batch enters a stage when it has left the stage before and this stage is free.

    With a `variation`, steps on `cores` vary as a measured worker's steps did. At the end of a tape it starts again.
    """

    def __init__(
        self,
        cost: CostModel,
        count: int,
        extra_s: float,
        variation: StepVariation | None = None,
        cores: SimCores | None = None,
    ) -> None:
        # `extra_s` are the seconds of a step outside the model.
        self.cost, self.extra_s = cost, extra_s
        self._free_s = [-inf] * count
        self._variation, self._cores = variation, cores or SimCores()
        self._tapes = [cycle(tape) for tape in variation.tapes] if variation is not None else []
        self.busy_s = 0.0

    def end_s(self, now_s: float, batch: StepBatch) -> float:
        """When a step that begins now ends."""
        variation = self._variation
        at_s = now_s + (self.extra_s if variation is None else variation.gap_s(batch, self.extra_s))
        ratio = self._ratio(batch, at_s)
        if len(self._free_s) == 1:
            took_s = self.cost.step_s(batch) * ratio
            self.busy_s += took_s
            if self._variation is not None:
                self._cores.spans[self] = at_s, at_s + took_s
            return at_s + took_s
        stage_s, whole_s = self.cost.stage_s(batch) * ratio, self.cost.step_s(batch) * ratio
        self.busy_s += stage_s
        for place, free_s in enumerate(self._free_s):
            at_s = self._free_s[place] = max(at_s, free_s) + stage_s
        return at_s + max(0.0, whole_s - stage_s * len(self._free_s))

    def _ratio(self, batch: StepBatch, at_s: float) -> float:
        """The factor by which a step that begins at `at_s` takes longer than its cost."""
        if self._variation is None:
            return 1.0
        return self._variation.factor(batch, self._cores.busy(at_s, self)) * next(
            self._tapes[batch.tokens > 0]
        )


def _decides_at(seq: SimSequence, end: int) -> bool:
    """Whether the sequence will decide what it keeps when `end` of its tokens have KV (`Sequence.must_decide`)."""
    if not seq.keep.evicts or end != decision_tokens(seq.size, end):
        return False
    return end < seq.total or end - seq.size + 1 < seq.sampling.max_tokens


def build_allocator(limits: EngineLimits, caching: bool) -> KvAllocator | KvArenas:
    """The slabs of an engine, in an arena for each KV class if it has several."""
    if not limits.arena_slabs:
        return KvAllocator(SlabLedger(limits.num_slabs), PrefixTree() if caching else None)
    arenas, first = dict[str, KvAllocator](), 0
    for name, count in limits.arena_slabs.items():
        arenas[name] = KvAllocator(SlabLedger(count, first), PrefixTree() if caching else None)
        first += count
    return KvArenas(arenas)


class SimEngine:
    """A scheduler, its memory, and the current run of steps. With `skips`, one plan may stand for many steps.

    `work` says by KV class what work on it costs; it is empty if all KV costs the same. `keep` says what sequences that
    evict keep. `scheduler` and `kv` take the place of a plain scheduler and a pool of its own. `preempted` counts
    preemptions by class, `most_used` the slabs of each class that were held at one time at most.
    """

    def __init__(
        self,
        limits: EngineLimits,
        stages: PipelineStages,
        caching: bool,
        skips: bool,
        work: Mapping[str, KvClassWork] | None = None,
        keep: KvKeep | None = None,
        scheduler: Scheduler | None = None,
        kv: KvAllocator | KvArenas | None = None,
    ) -> None:
        # An empty scheduler is false.
        self.scheduler = Scheduler(limits) if scheduler is None else scheduler
        self.limits, self._keep = limits, keep
        self._usual_work = SAME_WORK if keep is None else keep.work
        self.kv = build_allocator(limits, caching) if kv is None else kv
        self.table = SequenceTable(self.scheduler, self.kv)
        self.stages, self.skips, self.work = stages, skips, work or {}
        self.run: StepRun | None = None
        # As those of `engine.loop.Engine`.
        self.prefill_rate = MeasuredRate(FIRST_PREFILL_RATE)
        self.restores: PrefixRestores | NoRestores = NoRestores()
        self.preempted: Counter[str] = Counter()
        self.most_used: dict[str, int] = dict.fromkeys(limits.kv_classes, 0)

    # ---- a step begins

    @property
    def ready(self) -> bool:
        """Whether a step may begin and would do anything."""
        return self.run is None and self.scheduler.ready(self.kv)

    def begin_step(self, now_s: float, waited_for: bool, spare: bool = False) -> StepRun | None:
        """Begins a step, or a run of equal steps. Returns None if there is nothing to do.

        `waited_for`: others wait for slabs that a step's end may free, so the run has one step. `spare`: some KV is
        being fetched ahead of its ticket, so the run ends before fewer free slabs than rows are left.
        """
        plan = self.table.plan_step(self._preempt_sequence)
        for admission in self.table.take_slabs(plan)[0]:
            self.table.start(admission, now_s)
        run = StepRun(now_s)
        self._fill_run(run, plan)
        if not run.rows and not run.parts:
            return None
        for name, most in self.most_used.items():
            self.most_used[name] = max(most, self.kv.arena_of(name).used)
        if self.skips and not waited_for and run.rows:
            run.most = self._steps_unchanged(run, spare)
        if self._keep is not None:
            self._plan_decisions(run, self._keep)
        self.run = run
        self.extend_run()
        return run

    def add(self, seq: SimSequence, now_s: float) -> None:
        """Queue a sequence to be prefilled. Raises SequenceRefused if it cannot be taken."""
        self.scheduler.add(seq, now_s)
        self.restores.begin(seq, now_s)

    def make_room(self, seq: Sequence) -> bool:
        """Preempt one sequence of a worse priority than `seq`, which is to be adopted; False if none may be."""
        return self.table.make_room(seq, self._preempt_sequence)

    def _preempt_sequence(self, key: str) -> None:
        seq = cast(SimSequence, self.table.preempt(key, parked=False))
        seq.announced = 0
        self.preempted[self.limits.arena_name(seq)] += 1

    def _fill_run(self, run: StepRun, plan: StepPlan) -> None:
        """Fills in the run's decode rows and prompt parts from the plan."""
        work = self.table.select_work(plan)
        run.rows, run.parts = cast(list[SimSequence], work.decodes), cast(SimPrefills, work.prefills)
        if self.work or self._keep is not None:
            ratios = [self.work.get(seq.kv_class, self._usual_work).context for seq in run.rows]
            run.context = sum(task.computed * ratio for task, ratio in zip(run.rows, ratios, strict=True))
            run.growth = sum(ratios)
        else:
            run.context, run.growth = sum([task.computed for task in run.rows]), len(run.rows)

    def _steps_unchanged(self, run: StepRun, spare: bool) -> int:
        """For how many steps the plan stays the same if no message arrives.

        With `spare`, each row must leave one more slab of its class free.
        """
        scheduler, rows = self.scheduler, run.rows
        if run.parts or scheduler.waiting or scheduler.adopted or len(rows) < len(scheduler.running):
            return 1
        most = min([seq.max_output - len(seq.output) for seq in rows])
        if self._keep is not None:
            # A run ends where sequences decide.
            most = min(most, min(task.capacity - task.computed for task in rows))
        for name in self.limits.kv_classes:
            mine = self.limits.select_arena(rows, name)
            free = self.kv.arena_of(name).free - (len(mine) if spare else 0)
            if (most // CHUNK_TOKENS + 1) * len(mine) <= free:
                continue
            grown = sum(max(0, task.slabs_for(task.computed + most) - len(task.slabs)) for task in mine)
            if grown > free:
                return 1
        return most

    # ---- a run goes on

    def extend_run(self) -> tuple[int, int]:
        """Computes when the next steps of the run end. Returns the index of the first, and after the last, of them."""
        run = self.run
        assert run is not None, "no run is under way"
        first = len(run.ends)
        end = min(run.most, 2 * first or FIRST_RUN_STEPS)
        deadline_s = self.scheduler.deadline_s or inf
        at_s = run.ends[-1] if run.ends else run.begun_s
        for step in range(first, end):
            before_s, at_s = at_s, self.stages.end_s(at_s, self._step_batch(run, step))
            run.costs.append(at_s - before_s)
            if step + 1 == run.decides_at:
                at_s += run.decide_s
                self.stages.busy_s += run.decide_s
            run.ends.append(at_s)
            if at_s >= deadline_s:
                run.most = len(run.ends)
                break
        return first, len(run.ends)

    def _step_batch(self, run: StepRun, step: int) -> StepBatch:
        rows = len(run.rows)
        if not run.parts:
            return StepBatch(0, 0.0, rows, run.context + step * run.growth)
        tokens, squares = 0.0, 0.0
        for seq, count in run.parts:
            work = self.work.get(seq.kv_class, self._usual_work)
            tokens += work.token * count
            squares += work.square * ((seq.computed + count) ** 2 - seq.computed**2)
        return StepBatch(tokens, squares, rows, run.context)

    def cut(self, now_s: float) -> float | None:
        """Ends the run with its current step, since a message has come. Returns the end if it is now earlier."""
        run = self.run
        if run is None or run.cut:
            return None
        run.cut = True
        last = bisect_left(run.ends, now_s)
        if last + 1 >= run.most:
            return None
        run.most = last + 1
        del run.ends[run.most :], run.costs[run.most :]
        return run.ends[-1]

    def done(self, now_s: float) -> tuple[int, float, int]:
        """Number of steps that have ended by now, with their seconds and tokens."""
        run, counters = self.run, self.table.counters
        if run is None or not run.ends:
            return counters.steps, counters.seconds, counters.tokens
        ended = bisect_left(run.ends, now_s)
        seconds = counters.seconds
        for cost_s in run.costs[:ended]:
            seconds += cost_s
        return counters.steps + ended, seconds, counters.tokens + ended * len(run.rows)

    def announce(self, run: StepRun) -> list[tuple[SimSequence, int, int]]:
        """Announces the chunks of held prompts that this run completes.

        Returns for each: (sequence, chunks that are complete but not yet announced, chunks that this run completes).
        """
        announced = []
        for seq, count in run.parts:
            if not seq.stage:
                continue
            end = seq.computed + count
            last = num_chunks(end) if end == seq.total else end // CHUNK_TOKENS
            if last > seq.announced:
                there = max(seq.announced, seq.computed // CHUNK_TOKENS)
                announced.append((seq, there - seq.announced, last - there))
                seq.announced = last
        return announced

    # ---- a run ends

    def finish(self, now_s: float) -> list[SimOutput]:
        """Ends the current run: advances every sequence by what ran, and returns the outputs."""
        run = self.run
        assert run is not None and run.over, "the run goes on"
        self.run = None
        self._account_run(run)
        steps, outputs, all_ = run.most, list[SimOutput](), not self.skips
        self.table.advance(run.rows, steps)
        if self._keep is not None:
            self._decide_kept(run, self._keep)
        for seq in run.rows:
            if self._keep is not None and seq.key not in self.scheduler.running:
                # It was preempted for one that decided.
                continue
            computed = seq.computed
            # Allocates the slabs that the plans of the skipped steps would have taken.
            if (missing := seq.slabs_for(computed) - len(seq.slabs)) > 0:
                seq.slabs += self.table.arena_of(seq).allocate(seq.key, missing)
            if steps > 1:
                # Its first output was scheduled when the run began.
                seq.silent = False
            # Every token of a decoding sequence but the last has KV.
            count = computed + 1 - seq.size
            begins = computed >= seq.quiet and not computed % CHUNK_TOKENS
            if begins or all_ or count >= seq.max_output or seq.silent or seq.kept is not None:
                outputs.append(self._emit_tokens(seq, count, now_s))
            else:
                seq.output = cast(list[int], range(count))
        for seq, read in run.parts:
            if self._keep is None:
                self.table.advance([seq], read)
            elif seq.key not in self.scheduler.running:
                continue
            if seq.pending == 0:
                outputs.append(self._emit_tokens(seq, len(seq.output) + seq.wants_token, now_s))
        return outputs

    # ---- decision points

    def _plan_decisions(self, run: StepRun, keep: KvKeep) -> None:
        """Notes how long the decisions take that come at the end of the run, unless it is cut."""
        ahead = [(seq, seq.computed + run.most) for seq in run.rows]
        ahead += [(task, task.computed + count) for task, count in run.parts]
        due = [(task, end) for task, end in ahead if _decides_at(task, end)]
        if due:
            run.decides_at = run.most
            run.decide_s = sum(
                end * (keep.prompt_s if end == task.size else keep.answer_s) for task, end in due
            )

    def _decide_kept(self, run: StepRun, keep: KvKeep) -> None:
        """Lets sequences at decision points drop KV as the engine does: when all of the step have their KV, and before
        any of them gets its next token.
        """
        for seq, read in run.parts:
            self.table.advance([seq], read)
        for seq in run.rows:
            seq.output = cast(list[int], range(seq.computed - seq.size))
        tasks = [*run.rows, *(task for task, _ in run.parts)]
        deciding = sorted((task for task in tasks if task.must_decide), key=lambda task: task.precedence)
        if deciding:
            self.table.record_decisions(*self.table.count_decided(deciding), run.decide_s)
        for seq in deciding:
            if seq.key in self.scheduler.running:
                self._evict(seq, keep)

    def _evict(self, seq: SimSequence, keep: KvKeep) -> None:
        """Lets the heads of one sequence drop KV; if there are too few slabs for the rest, others are preempted."""
        segments, bag_slabs = plan_kept(seq, keep)
        while not self.table.has_room_for_bag(seq, bag_slabs, segments):
            victim = self.scheduler.worst_holder(seq)
            self._preempt_sequence(victim.key)
            if victim is seq:
                return
        self.table.release_undecided(seq)
        self.table.take_bag(seq, bag_slabs, segments)
        freed = max(0, num_chunks(seq.computed) - len(seq.slabs))
        seq.kept = KeptReport(round(keep.share * seq.computed), seq.computed, {"": 1}, freed)

    def _account_run(self, run: StepRun) -> None:
        rows, prefilled = len(run.rows), sum(count for _, count in run.parts)
        self.table.record_steps(rows, prefilled, run.costs)
        for cost_s in run.costs:
            self.table.counters.seconds += cost_s
        if prefilled > rows:
            self.prefill_rate.add_sample(prefilled, run.costs[0])

    def _emit_tokens(self, seq: SimSequence, count: int, now_s: float) -> SimOutput:
        """The output of a sequence that has generated `count` tokens by now; drops the sequence if it has finished."""
        seq.output = cast(list[int], range(count))
        output = make_output(seq, count, now_s)
        output.kept, seq.kept = seq.kept, None
        output.finish = self.table.finish_reason(seq, count >= seq.max_output)
        output.held = self.table.settle_output(seq, output.finish)
        return output
