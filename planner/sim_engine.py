"""One engine in virtual time: the real scheduler and books of memory, with a cost in place of the model.

It mirrors `engine.loop.Engine`: decide, take the slabs, start the admitted, run, account. What it adds is the run of
steps: while the same sequences write, none of them ends, nobody waits and memory suffices, one plan stands for many
steps. They take exactly as long as one by one, and whatever comes cuts the run at the end of the step that it is in.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import cycle
from math import inf
from typing import cast

from diptych.errors import OutOfBlocks
from engine.scheduler import Limits, Plan, Scheduler, Sequence
from engine.sequence import chunks
from kvcache.holdings import Holdings
from kvcache.layout import CHUNK_TOKENS
from kvcache.prefix_tree import PrefixTree
from kvcache.slabs import Slabs
from planner.cost import Rhythm
from planner.sim_cores import Cores
from planner.terms import Batch, Cost

FIRST_BLOCK = 8  # steps of a run that are reckoned at once; twice as many each time it goes on


@dataclass(slots=True)
class Task(Sequence):
    """A sequence that will write `writes` tokens. `prompt` and `output` are ranges: nothing but their length counts.

    Beyond `quiet` tokens each chunk that begins is news to the relay: it has booked no room for that.
    """

    writes: int = 0
    quiet: int = 0
    size: int = 0  # of its prompt
    announced: int = 0  # chunks that a decode worker was told of before there was a ticket
    silent: bool = True  # nothing of it has been told by this worker


@dataclass(slots=True)
class Told:
    """What a step says of one sequence, `output` tokens of whose answer are there."""

    task: Task
    output: int
    finish: str | None = None
    held: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


def word(task: Task, count: int, now_s: float) -> Told:
    """What is said when `count` tokens of an answer are there; the first time, also where the time went."""
    if not task.silent:
        return Told(task, count)
    started_s = now_s if task.started_s is None else task.started_s
    return Told(task, count, seconds={"queue": started_s - task.arrived_s, "prefill": now_s - started_s})


@dataclass(slots=True)
class Run:
    """One step, or several equal ones: those that write, with `context` tokens in all, and (task, tokens) of readers.

    `ends` are the moments at which steps end, as far as they are reckoned; there may be `most`.
    """

    begun_s: float
    rows: list[Task] = field(default_factory=list)
    parts: list[tuple[Task, int]] = field(default_factory=list)
    context: int = 0
    most: int = 1
    ends: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    cut: bool = False

    @property
    def over(self) -> bool:
        """Whether its last step is reckoned."""
        return len(self.ends) >= self.most


class Stages:
    """The stages of a pipeline: a batch enters one when it has left the one before and the batch ahead is out.

    With a rhythm, steps on `cores` take as long as that worker's did, and its tapes begin again at their ends.
    """

    def __init__(
        self, cost: Cost, count: int, extra_s: float, rhythm: Rhythm | None = None, cores: Cores | None = None
    ) -> None:
        self.cost, self.extra_s = cost, extra_s  # seconds of a step beside the model
        self._free_s = [-inf] * count
        self._rhythm, self._cores = rhythm, cores or Cores()
        self._tapes = [cycle(tape) for tape in rhythm.tapes] if rhythm is not None else []
        self.busy_s = 0.0

    def end_s(self, now_s: float, batch: Batch) -> float:
        """When a step that begins now ends."""
        rhythm = self._rhythm
        at_s = now_s + (self.extra_s if rhythm is None else rhythm.gap_s(batch, self.extra_s))
        ratio = self._ratio(batch, at_s)
        if len(self._free_s) == 1:
            took_s = self.cost.step_s(batch) * ratio
            self.busy_s += took_s
            if self._rhythm is not None:
                self._cores.spans[self] = at_s, at_s + took_s
            return at_s + took_s
        stage_s, whole_s = self.cost.stage_s(batch) * ratio, self.cost.step_s(batch) * ratio
        self.busy_s += stage_s
        for place, free_s in enumerate(self._free_s):
            at_s = self._free_s[place] = max(at_s, free_s) + stage_s
        return at_s + max(0.0, whole_s - stage_s * len(self._free_s))

    def _ratio(self, batch: Batch, at_s: float) -> float:
        """How much longer than its cost the step takes that begins then."""
        if self._rhythm is None:
            return 1.0
        return self._rhythm.factor(batch, self._cores.busy(at_s, self)) * next(self._tapes[batch.tokens > 0])


class Engine:
    """A scheduler, its memory, and the run that is under way. `skips` lets one plan stand for many steps."""

    def __init__(self, limits: Limits, stages: Stages, caching: bool, skips: bool) -> None:
        self.scheduler, self.limits = Scheduler(limits), limits
        self.holdings = Holdings(Slabs(limits.num_slabs), PrefixTree() if caching else None)
        self.stages, self.skips = stages, skips
        self.run: Run | None = None
        self.steps = self.tokens = self.preempted = self.plans = 0
        self.seconds = 0.0
        self.most_used = 0

    # ---- a step begins

    @property
    def ready(self) -> bool:
        """Whether a step may begin and would do anything."""
        return self.run is None and self.scheduler.ready(self.holdings)

    def begin(self, now_s: float, waited_for: bool, spare: bool = False) -> Run | None:
        """Decide on a step; None if there is nothing to do in it.

        `waited_for`: others need what it gives back; `spare`: others give theirs when a slab for each row is not left.
        """
        while (plan := self._plan()).preempted:
            cast(Task, self.scheduler.preempt(plan.preempted, False)).announced = 0
            self.holdings.end(plan.preempted)
            self.preempted += 1
        self._enter(plan, now_s)
        run = Run(now_s)
        self._write(run, plan)
        self._read(run, plan)
        if not run.rows and not run.parts:
            return None
        self.most_used = max(self.most_used, self.holdings.used)
        if self.skips and not waited_for and run.rows:
            run.most = self._most(run, len(run.rows) if spare else 0)
        self.run = run
        self.reckon()
        return run

    def _plan(self) -> Plan:
        self.plans += 1
        return self.scheduler.schedule(self.holdings)

    def _enter(self, plan: Plan, now_s: float) -> None:
        """Take the slabs, start the admitted."""
        scheduler, holdings = self.scheduler, self.holdings
        need = dict(plan.grow)
        found: dict[str, list[int]] = {}
        for key in plan.admitted:
            if (seq := scheduler.waiting.get(key)) is not None:
                found[key] = holdings.attach(key, seq.attachable())
        for key, count in plan.grow:
            if key not in found and (seq := scheduler.find(key)) is not None:
                self._take(seq, count)
        for key in plan.admitted:
            if key in found and not self._attach(key, found[key], need.get(key, 0)):
                continue
            scheduler.start(key, now_s)

    def _attach(self, key: str, found: list[int], need: int) -> bool:
        """Give a waiting sequence its slabs; False, with nothing held, if they are not to be had after all."""
        seq = self.scheduler.waiting[key]
        seq.slabs = list(found)
        if not self._take(seq, need):
            self.holdings.end(key)
            seq.slabs = []
            return False
        seq.shared, seq.computed = len(found), len(found) * CHUNK_TOKENS
        seq.cached = seq.computed if seq.started_s is None else seq.cached
        return True

    def _take(self, seq: Sequence, count: int) -> bool:
        try:
            seq.slabs += self.holdings.take(seq.key, count)
        except OutOfBlocks:
            return False  # somebody took them since the plan was made: it pauses for this step
        return True

    def _write(self, run: Run, plan: Plan) -> None:
        """Those that write in this step."""
        running, rows, context = self.scheduler.running, run.rows, 0
        for key in plan.decode:
            task = cast(Task | None, running.get(key))
            if task is not None and (computed := task.computed) < len(task.slabs) * CHUNK_TOKENS:
                rows.append(task)
                context += computed
        run.context = context

    def _read(self, run: Run, plan: Plan) -> None:
        """Those that read in this step, and how much."""
        for part in plan.prefill:
            task = self.scheduler.running.get(part.key)
            if task is None:
                continue
            end = min(part.start + part.count, len(task.slabs) * CHUNK_TOKENS)
            if (count := end - task.computed) > 0:
                run.parts.append((cast(Task, task), count))

    def _most(self, run: Run, spare: int) -> int:
        """For how many steps the plan would be the same, if nothing came, and more than `spare` slabs were left."""
        scheduler, rows = self.scheduler, run.rows
        if run.parts or scheduler.waiting or scheduler.adopted or len(rows) < len(scheduler.running):
            return 1
        most = min([task.writes - len(task.output) for task in rows])
        free = self.holdings.free - spare
        if (most // CHUNK_TOKENS + 1) * len(rows) <= free:
            return most
        grown = sum(max(0, chunks(task.computed + most) - len(task.slabs)) for task in rows)
        return most if grown <= free else 1

    # ---- a run goes on

    def reckon(self) -> tuple[int, int]:
        """Reckon the next steps of the run, some of them or all that there may be; the first, and the one after."""
        run = self.run
        assert run is not None, "no run is under way"
        first = len(run.ends)
        end = min(run.most, 2 * first or FIRST_BLOCK)
        deadline_s = self.scheduler.deadline_s or inf
        at_s = run.ends[-1] if run.ends else run.begun_s
        for step in range(first, end):
            before_s, at_s = at_s, self.stages.end_s(at_s, self._batch(run, step))
            run.ends.append(at_s)
            run.costs.append(at_s - before_s)
            if at_s >= deadline_s:
                run.most = len(run.ends)
                break
        return first, len(run.ends)

    def _batch(self, run: Run, step: int) -> Batch:
        rows = len(run.rows)
        if not run.parts:
            return Batch(0, 0.0, rows, run.context + step * rows)
        squares = sum((task.computed + count) ** 2 - task.computed**2 for task, count in run.parts)
        return Batch(sum(count for _, count in run.parts), float(squares), rows, run.context)

    def cut(self, now_s: float) -> float | None:
        """Somebody has something to say: the run ends with the step that it is in. When, if that is sooner."""
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
        """Steps, their seconds and tokens, of all that have ended by now."""
        run = self.run
        if run is None or not run.ends:
            return self.steps, self.seconds, self.tokens
        ended = bisect_left(run.ends, now_s)
        seconds = self.seconds
        for cost_s in run.costs[:ended]:
            seconds += cost_s
        return self.steps + ended, seconds, self.tokens + ended * len(run.rows)

    def announce(self, run: Run) -> list[tuple[Task, int, int]]:
        """Of those that are to be fetched while they are read: task, and chunks that are complete, and will be then."""
        told = []
        for task, count in run.parts:
            if not task.stage:
                continue
            end = task.computed + count
            last = chunks(end) if end == task.total else end // CHUNK_TOKENS
            if last > task.announced:
                there = max(task.announced, task.computed // CHUNK_TOKENS)
                told.append((task, there - task.announced, last - there))
                task.announced = last
        return told

    # ---- a run ends

    def finish(self, now_s: float) -> list[Told]:
        """Advance every sequence by what ran."""
        run = self.run
        assert run is not None and run.over, "the run goes on"
        self.run = None
        self._account(run)
        steps, told, all_ = run.most, list[Told](), not self.skips
        for task in run.rows:
            computed = task.computed = task.computed + steps
            if computed > CHUNK_TOKENS * len(task.slabs):
                task.slabs += self.holdings.take(task.key, chunks(computed) - len(task.slabs))
            if steps > 1:
                task.silent = False  # its first word was foretold
            count = computed + 1 - task.size  # of who writes, the last token alone has no KV
            begins = computed >= task.quiet and not computed % CHUNK_TOKENS
            if begins or all_ or count >= task.writes or task.silent:
                told.append(self._wrote(task, count, now_s))
            else:
                task.output = cast(list[int], range(count))
        for task, read in run.parts:
            task.computed += read
            self._share(task)
            if task.pending == 0:
                count = len(task.output) + (task.sampling.max_tokens > 0)
                told.append(self._wrote(task, count, now_s))
        return told

    def _account(self, run: Run) -> None:
        scheduler, rows, steps = self.scheduler, len(run.rows), run.most
        reading = sum(count for _, count in run.parts)
        some = run.rows[0] if rows else run.parts[0][0]
        scheduler.service.charge(some.origin.tenant, rows * steps + reading)  # a trace is of one tenant
        for cost_s in run.costs:
            scheduler.account(rows, reading, cost_s)
            self.seconds += cost_s
        self.steps += steps
        self.tokens += rows * steps + reading

    def _share(self, task: Task) -> None:
        full = min(task.computed // CHUNK_TOKENS, len(task.keys))
        if full > task.shared:
            self.holdings.share(task.key, task.keys[:full], task.slabs)
            task.shared = full

    def _wrote(self, task: Task, count: int, now_s: float) -> Told:
        """There is something to say of one that has written `count` tokens of its answer by now."""
        task.output = cast(list[int], range(count))
        told = word(task, count, now_s)
        if count >= task.writes:
            told.finish = "length" if count >= task.sampling.max_tokens else "stop"
        task.silent = False
        if told.finish:
            self.drop(task.key)
        elif task.hold:
            self.scheduler.remove(task.key)
            told.held = True
        return told

    def drop(self, key: str) -> Sequence:
        """Forget a sequence, and free what it holds."""
        seq = self.scheduler.remove(key)
        self.holdings.end(key)
        seq.slabs = []
        return seq
