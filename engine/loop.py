"""The engine's step: decide, run, account.

    add / adopt ──▶ Scheduler ──plan──▶ StepRunner ──logits──▶ Sampler ──tokens──▶ Emission

One thread calls everything here. What computes comes in through protocols the size of a sentence, so this file needs
no torch, and the simulator puts a cost model in place of the runner. A failure belongs to one sequence: it ends in an
emission with `Failed`, and the others never notice.

What a live sequence holds, it holds in `KvAllocator` under its key ("<request>#<epoch>"), and lets go of before the
emission that ends it leaves `step`. The one exception is a held sequence, which leaves with its slabs: they are then
the caller's to free (`KvAllocator.release`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diptych.messages import WorkerStats
from engine.eviction.decision_points import DecisionPoints
from engine.isolation import failure_code, isolate_failures
from engine.outputs import (
    LiveSequence,
    SequenceOutput,
    append_token,
    build_failure,
    build_output,
    forget_prompt_rows,
    open_live,
    take_prompt_rows,
)
from engine.parking import park_sequence, restore_sequence
from engine.prefix_restores import NoRestores, PrefixRestores
from engine.protocols import (
    KvObserver,
    Logits,
    OnLayersDone,
    SampledToken,
    StepObserver,
    StepRunner,
    StepSampler,
)
from engine.sampling.mask_budget import MaskBudget
from engine.scheduling.new_token_ratio import FIRST_PREFILL_RATE, MeasuredRate
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from engine.sequence_table import DEADLINE_FAILURE, AdmittedSequence, SequenceTable, StepWorkload
from engine.step_work import StepWork, choose_logits, kept_work
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.tiers.host import HostArenas, HostTier


@dataclass(slots=True)
class _StepJob:
    live: LiveSequence
    work: StepWork
    # Whether this is one decoding token of a sequence whose prefill is complete.
    decodes: bool = False


def build_jobs(workload: StepWorkload, live: Mapping[str, LiveSequence], masks: MaskBudget) -> list[_StepJob]:
    """The jobs of a step: those that decode, then prefills. Sequences whose masks take too long are left out."""
    jobs = []
    asked = [*workload.decodes, *[seq for seq, _ in workload.prefills]]
    left_out = masks.choose_left_out([(seq.key, live[seq.key].sampling) for seq in asked])
    for seq in workload.decodes:
        if seq.key not in left_out:
            # Without any output, an adopted sequence draws its first token from the last one of its prompt.
            last = seq.output[-1:] or seq.prompt[-1:]
            work = StepWork(last, seq.computed, seq.slabs, "last", seq.prompt[0], kept_work(seq))
            jobs.append(_StepJob(live[seq.key], work, decodes=True))
    for seq, count in workload.prefills:
        if not (seq.key in left_out and seq.pending == count):
            entry = live[seq.key]
            wanted = choose_logits(seq, count, entry.logprobs is not None)
            tokens = seq.tokens(seq.computed, count)
            work = StepWork(tokens, seq.computed, seq.slabs, wanted, seq.prompt[0], kept_work(seq))
            jobs.append(_StepJob(entry, work))
    return jobs


class Engine:
    """Runs sequences step by step. `host` is the tier in which preempted sequences may be parked; None: there is none.

    `restores` may be set before the first sequence: it reads prefixes back from the tiers below the pool.

    `observer` is called for every sequence and step. `kv_observer` may be set at any time between steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        kv: KvAllocator | KvArenas,
        sampler: StepSampler,
        host: HostTier | HostArenas | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self.runner, self.scheduler, self.kv, self.sampler = runner, scheduler, kv, sampler
        self.host, self._observer = host, observer
        self.kv_observer: KvObserver | None = None
        # Estimates: prompt tokens computed per second, and bytes copied per second to and from the host tier.
        self.prefill_rate, self.copy_rate = MeasuredRate(FIRST_PREFILL_RATE), MeasuredRate(1e9)
        self.table = SequenceTable(scheduler, kv)
        self._live: dict[str, LiveSequence] = {}
        self._masks = MaskBudget()
        self.decisions = DecisionPoints(runner, self.table)
        self.restores: PrefixRestores | NoRestores = NoRestores()

    def expect(self, seq: Sequence) -> None:
        """Announce a sequence that will be added or adopted soon, so that slow preparation can begin. Idempotent."""
        self.sampler.expect(seq)
        self.decisions.expect(seq)

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, whenever a sequence has become ready (`Sequence.ready`)."""
        self.sampler.notify(wake)
        self.decisions.notify(wake)
        self.restores.notify(wake)

    def add(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence to be prefilled from its first token. Its slabs are allocated step by step.

        Raises SequenceRefused if it cannot be taken (`code` says why), and ValueError if it is already here.
        """
        self.decisions.check_runner(seq)
        self.expect(seq)
        self.scheduler.add(seq, now_s)
        self.restores.begin(seq, now_s)
        if self._observer is not None:
            self._observer.on_sequence_arrived(seq, now_s)

    def admits(self, seq: Sequence, moving_seqs: Iterable[Sequence] = ()) -> bool:
        """Whether `seq`, to be adopted, may take its slabs now (`Scheduler.admits`). `moving_seqs` are on their way."""
        return self.scheduler.admits(seq, self.kv, moving_seqs)

    def make_room(self, seq: Sequence, now_s: float) -> bool:
        """Preempt one sequence of a worse priority than `seq`, which is to be adopted; False if none may be."""
        return self.table.make_room(seq, lambda key: self._preempt_sequence(key, lambda: now_s))

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Continue a sequence prefilled elsewhere: its slabs, held under its key, have KV of all tokens but the last,
        which is that of its prompt if nothing was drawn from it yet.

        An evicted sequence has the KV up to its last decision point (`Sequence.is_adoptable`). The engine frees the
        slabs from now on.

        Otherwise they stay the caller's. Raises:
            ValueError, SequenceRefused: something is missing, or no token is left to generate.
            CorruptChunk: its maps are not valid, or those of other segments or of another decision.
            Exception: the runner could not read the map for want of memory, for example.
        """
        self.decisions.check_runner(seq)
        self.expect(seq)
        self.scheduler.adopt(seq, now_s)
        if seq.kept_slabs:
            try:
                self.decisions.load_adopted(seq)
            except Exception:
                self.table.withdraw(seq.key)
                raise
        if self._observer is not None:
            self._observer.on_sequence_arrived(seq, now_s)

    def abort(self, request: str, epoch: int) -> list[Sequence]:
        """Drop the request's sequences of this epoch and older ones, and what they hold. Nothing is emitted."""
        return [self._drop_sequence(key) for key in self.table.keys_of(request, epoch)]

    def sequences(self) -> Iterable[Sequence]:
        """All sequences, running ones first."""
        return self.scheduler.sequences()

    @property
    def has_work(self) -> bool:
        """Whether a step would progress now. If not, wait for a message, for slabs, or until `deadline_s`."""
        return self.scheduler.ready(self.kv)

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all sequences here; a step after it reports that sequence as failed."""
        return self.scheduler.deadline_s

    @property
    def stats(self) -> WorkerStats:
        """The engine's part of a worker's statistics."""
        return self.restores.complete_stats(self.table.stats)

    def record_send_time(self, seconds: float) -> None:
        """Record that sending a step's messages to the gateway took `seconds`. They count as part of the step."""
        self.table.counters.add_time("send", seconds)

    def step(self, clock: Callable[[], float]) -> list[SequenceOutput]:
        """Run one step, and return its messages: of sequences that ended without work, of decodes, then of prefills."""
        begun_s = clock()
        outputs, jobs = self._run_step(begun_s, clock)
        if self._observer is not None:
            works = [(job.live.seq, job.work) for job in jobs]
            self._observer.on_step_end(begun_s, clock(), works, [one.message for one in outputs])
        return outputs

    def _run_step(
        self, begun_s: float, clock: Callable[[], float]
    ) -> tuple[list[SequenceOutput], list[_StepJob]]:
        """The messages of a step, and the jobs that ran in it."""
        expired = self.scheduler.expired_keys(begun_s)
        outputs = [self._fail_sequence(key, *DEADLINE_FAILURE) for key in expired]
        plan = self.table.plan_step(lambda key: self._preempt_sequence(key, clock))
        outputs += self._apply_plan(plan, clock)
        decided_s = clock()
        jobs = build_jobs(self.table.select_work(plan), self._live, self._masks)
        for job in jobs:
            self.decisions.note_run(job.live.seq)
        if not jobs:
            return outputs, jobs
        ready_s = clock()
        logits = self._run_jobs(jobs)
        ran_s, counters = clock(), self.table.counters
        evicted_s = counters.parts["evict"]
        outputs += self._account_results(jobs, logits, ran_s, clock)
        evicted_s = counters.parts["evict"] - evicted_s
        prepared_s = min(getattr(self.runner, "prepare_seconds", 0.0), ran_s - ready_s)
        counters.add_time("schedule", decided_s - begun_s)
        counters.add_time("prepare", ready_s - decided_s + prepared_s)
        counters.add_time("run", ran_s - ready_s - prepared_s)
        counters.add_time("sample", clock() - ran_s - evicted_s)
        self._learn_from_step(jobs, ran_s - ready_s)
        return outputs, jobs

    def _run_jobs(self, jobs: list[_StepJob]) -> list[Any]:
        """Each job's logits, or its exception. `kv_observer` is called meanwhile with how many layers are done."""
        works, done = [job.work for job in jobs], self._announce_step(jobs)
        if done is None:
            return isolate_failures(self.runner.run, works)
        # Progress is reported only for the first run of the whole batch. After a failure the jobs are run again one
        # by one, and a job's progress then says nothing about the others.
        return isolate_failures(lambda batch: self.runner.run(batch, done if batch is works else None), works)

    def _announce_step(self, jobs: list[_StepJob]) -> OnLayersDone | None:
        held = [(job.live.seq, job.work.start + len(job.work.tokens)) for job in jobs if job.live.seq.hold_kv]
        return self.kv_observer.on_step_begin(held) if self.kv_observer is not None and held else None

    def _learn_from_step(self, jobs: list[_StepJob], seconds: float) -> None:
        """Update the estimates of step time and prefill rate from a step that took `seconds`."""
        rows = sum(job.decodes for job in jobs)
        reading = sum(len(job.work.tokens) for job in jobs) - rows
        self.table.record_steps(rows, reading, [seconds])
        if reading > rows:
            self.prefill_rate.add_sample(reading, seconds)

    def _preempt_sequence(self, key: str, clock: Callable[[], float]) -> None:
        """Take a sequence's memory away: park its KV if that is cheaper than computing it again, else drop the KV."""
        seq, live = self.scheduler.find(key), self._live.get(key)
        assert seq is not None, key
        rates, arena = (self.prefill_rate, self.copy_rate), self.table.arena_of(seq)
        host = None if self.host is None else self.host.arena_of(seq.kv_class)
        parked = host is not None and park_sequence(seq, host, arena, *rates, clock)
        if not parked and live is not None:
            forget_prompt_rows(live)
        if self.kv_observer is not None:
            self.kv_observer.on_sequence_dropped(key)
        self.table.preempt(key, parked)
        if not parked:
            self.decisions.forget(key)

    def _apply_plan(self, plan: StepPlan, clock: Callable[[], float]) -> list[SequenceOutput]:
        """Take the plan's slabs and start the admitted sequences. Returns the failures of those that cannot start."""
        admissions, taken = self.table.take_slabs(plan)
        self.note_taken(taken)
        return [failure for one in admissions if (failure := self._start_sequence(one, clock)) is not None]

    def _start_sequence(
        self, admitted_seq: AdmittedSequence, clock: Callable[[], float]
    ) -> SequenceOutput | None:
        """Start a sequence that has its slabs, with a row of the sampler. Returns its failure if it gets no row."""
        seq, cached = admitted_seq.seq, admitted_seq.cached
        restored = (
            cached is not None
            and self.host is not None
            and restore_sequence(seq, self.host.arena_of(seq.kv_class), cached, self.copy_rate, clock)
        )
        self.table.start(admitted_seq, clock(), restored)
        try:
            if cached is not None and not restored:
                self.decisions.forget(seq.key)
            elif cached is not None and seq.kept_slabs:
                self.decisions.load_restored(seq)
            if seq.key in self._live:
                # The sequence was preempted earlier and keeps its row of the sampler.
                return None
            self._live[seq.key] = open_live(seq, self.sampler)
        except Exception as error:
            return self._fail_sequence(seq.key, failure_code(error), str(error))
        return None

    def _account_results(
        self, jobs: list[_StepJob], results: list[Any], now_s: float, clock: Callable[[], float]
    ) -> list[SequenceOutput]:
        """Advance every sequence by the tokens that ran, let some drop KV, and sample for those without prefill."""
        # The output of each sequence, in the order of the step's jobs. None: the sequence has nothing to report.
        outputs: dict[str, SequenceOutput | None] = {}
        chosen: list[tuple[LiveSequence, Logits]] = []
        for job, result in zip(jobs, results, strict=True):
            live, seq, count = job.live, job.live.seq, len(job.work.tokens)
            outputs[seq.key] = None
            try:
                if isinstance(result, Exception):
                    raise result
                take_prompt_rows(live, job.work, result, self.sampler)
            except Exception as error:
                self.table.charge(seq, count)
                outputs[seq.key] = self._fail_sequence(seq.key, failure_code(error), str(error))
                continue
            self.table.advance((seq,), count)
            if seq.wants_token:
                chosen.append((live, result[-1:]))
            elif seq.pending == 0:
                finish = None if seq.defer_first else "stop" if live.pooled else "length"
                outputs[seq.key] = self._emit_output(live, None, finish, now_s)
        if deciding := [job.live.seq for job in jobs if job.live.seq.must_decide]:
            begun_s, unused = clock(), {live.seq.key for live, _ in chosen}.union(seq.key for seq in deciding)
            # Counted now: a sequence that is preempted for room has fewer tokens afterwards.
            counts = self.table.count_decided(deciding)
            outputs.update(self._decide_kept(deciding, unused, clock))
            self.table.record_decisions(*counts, decided_s := clock() - begun_s)
            if self._observer is not None:
                self._observer.on_decisions(*counts, decided_s)
            chosen = [pair for pair in chosen if pair[0].seq.key in self.scheduler.running]
        picks = isolate_failures(self._sample_rows, chosen) if chosen else []
        for (live, _), pick in zip(chosen, picks, strict=True):
            outputs[live.seq.key] = self._append_token(live, pick, now_s)
        return [output for output in outputs.values() if output]

    def _decide_kept(
        self, deciding: list[Sequence], unused: set[str], clock: Callable[[], float]
    ) -> dict[str, SequenceOutput | None]:
        """Let sequences at decision points drop KV, those with the best precedence first; returns the failures.

        Those in `unused` were not sampled from or decided upon yet. If one is preempted for room, its last token is
        computed again, which gives the same.
        """
        failures: dict[str, SequenceOutput | None] = {}

        def preempt(victim: Sequence) -> None:
            victim.computed -= victim.key in unused
            self._preempt_sequence(victim.key, clock)

        for seq in sorted(deciding, key=lambda seq: seq.precedence):
            if seq.key not in self.scheduler.running:
                # It has failed, or was preempted for one before it.
                continue
            try:
                self.decisions.evict(seq, preempt, self.note_taken)
            except Exception as error:
                failures[seq.key] = self._fail_sequence(seq.key, failure_code(error), str(error))
        return failures

    def note_taken(self, slabs: list[int]) -> None:
        """Tell the KV observer about slabs that are about to be written."""
        if self.kv_observer is not None and slabs:
            self.kv_observer.on_slabs_taken(slabs)

    def _sample_rows(self, pairs: list[tuple[LiveSequence, Logits]]) -> list[SampledToken | Exception]:
        return self.sampler.sample([logits for _, logits in pairs], [live.sampling for live, _ in pairs])

    def _append_token(
        self, live: LiveSequence, token: SampledToken | Exception, now_s: float
    ) -> SequenceOutput:
        """Append one sampled token, and finish the sequence if it is the last one."""
        try:
            if isinstance(token, Exception):
                raise token
            ends = append_token(live, token)
        except Exception as error:
            return self._fail_sequence(live.seq.key, failure_code(error), str(error))
        return self._emit_output(live, token, self.table.finish_reason(live.seq, ends), now_s)

    def _emit_output(
        self, live: LiveSequence, token: SampledToken | None, finish: str | None, now_s: float
    ) -> SequenceOutput:
        """The message with a step's token; the sequence leaves if it has finished, or is held."""
        seq = live.seq
        cached_tokens, kept = seq.cached if seq.silent else 0, self.decisions.take_report(seq)
        output = build_output(live, token, finish, now_s, cached_tokens, kept)
        if finish:
            self._forget_sequence(seq.key)
        held = self.table.settle_output(seq, finish)
        if held:
            del self._live[seq.key]
            # The map is in the bag.
            self.decisions.forget(seq.key)
        return SequenceOutput(output, seq if held else None)

    def _fail_sequence(self, key: str, code: str, message: str) -> SequenceOutput:
        # After an internal error (for example logits that are not finite) its KV may be bad, so no other request may
        # reuse it.
        return build_failure(self._drop_sequence(key, code != "internal_error"), code, message)

    def _drop_sequence(self, key: str, keep: bool = True) -> Sequence:
        self._forget_sequence(key)
        return self.table.drop(key, keep)

    def _forget_sequence(self, key: str) -> None:
        """Forget all that the engine and its host tier hold for a sequence whose slabs are about to be freed."""
        self._live.pop(key, None)
        self.decisions.forget(key)
        if self.kv_observer is not None:
            self.kv_observer.on_sequence_dropped(key)
        if self.host is not None:
            self.host.drop_slabs(key)
