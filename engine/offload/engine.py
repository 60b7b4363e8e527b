"""The engine of bulk work whose weights or KV do not fit into memory: one block, computed step by step, unit by unit.

    add ──▶ BlockAdmission ──works──▶ OffloadRunner ──unit, unit, ...──▶ Sampler ──tokens──▶ SequenceOutput

`step` computes units for a bounded time and returns what they gave, so that the caller can look at messages in between;
the step of the block goes on with the next call. It has the parts of `engine.loop.Engine` that a worker's loop uses.

If a disk fails, or a unit fails otherwise, the block's sequences are computed again from their first token, keeping
their answers so far. A sequence that was in `MAX_FAILURES` failed steps fails with the reason. A sequence whose numbers
are not finite fails alone, at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from diptych.messages import WorkerStats
from engine.isolation import failure_code, isolate_failures
from engine.offload.block_admission import BlockAdmission, SequenceStep
from engine.offload.units import OffloadRunner, UnitResult, WorkFailure, WorkLogits
from engine.outputs import (
    LiveSequence,
    SequenceOutput,
    append_token,
    build_failure,
    build_output,
    open_live,
    score_prompt,
)
from engine.protocols import SampledToken, StepSampler
from engine.sequence import Sequence, SequenceRefused
from engine.sequence_table import DEADLINE_FAILURE
from engine.step_work import StepWork, choose_logits

# Failed steps after which a sequence is not tried again.
MAX_FAILURES = 3


@dataclass(slots=True)
class _OpenStep:
    """A step of the block that is being computed."""

    units: Generator[Iterable[UnitResult]]
    # By batch, in the order of its works. A sequence that has ended meanwhile is not in `live` any more.
    parts: dict[int, list[tuple[SequenceStep, StepWork]]]
    # Chosen tokens, and failures, by sequence.
    picks: dict[str, SampledToken | Exception] = field(default_factory=dict)
    # Sequences that were dropped while the step runs: their rooms are free when it has ended.
    dropped: set[str] = field(default_factory=set)


class OffloadEngine:
    """Runs sequences in one block. A call of `step` takes about `slice_s` seconds, and one unit at least."""

    def __init__(
        self,
        runner: OffloadRunner,
        schedule: BlockAdmission,
        sampler: StepSampler,
        vocab_size: int,
        slice_s: float,
    ) -> None:
        self.runner, self.scheduler, self.sampler, self.slice_s = runner, schedule, sampler, slice_s
        self._vocab_size = vocab_size
        self._live: dict[str, LiveSequence] = {}
        self._open: _OpenStep | None = None
        self.steps = self.units = self.tokens = self.failed_steps = 0
        self.seconds = 0.0

    def expect(self, seq: Sequence) -> None:
        """Announce a sequence that will be added soon, so that slow preparation can begin. Idempotent."""
        self.sampler.expect(seq)

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, whenever a sequence has become ready (`Sequence.ready`)."""
        self.sampler.notify(wake)

    def add(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence. Raises SequenceRefused and ValueError as `BlockAdmission.add`."""
        if not 0 <= min(seq.prompt, default=0) <= max(seq.prompt, default=0) < self._vocab_size:
            raise SequenceRefused("internal_error", f"token ids are not all within 0..{self._vocab_size - 1}")
        self.expect(seq)
        self.scheduler.add(seq, now_s)

    def abort(self, request: str, epoch: int) -> list[Sequence]:
        """Drop the request's sequences of this epoch and older ones. Nothing is emitted."""
        seqs = [seq for seq in self.scheduler.sequences() if seq.id == request and seq.epoch <= epoch]
        for seq in seqs:
            self._drop(seq.key)
        return seqs

    def sequences(self) -> Iterable[Sequence]:
        """All sequences, those in the block first."""
        return self.scheduler.sequences()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything now."""
        return self._open is not None or self.scheduler.has_work

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all sequences here; a step after it reports that sequence as failed."""
        live = [seq for seq in self.scheduler.sequences() if not self._is_dropped(seq.key)]
        return min((seq.deadline_s for seq in live), default=None)

    def _is_dropped(self, key: str) -> bool:
        return self._open is not None and key in self._open.dropped

    def record_send_time(self, seconds: float) -> None:
        """Record that sending messages to the gateway took `seconds`."""
        self.seconds += seconds

    def step(self, clock: Callable[[], float]) -> list[SequenceOutput]:
        """Compute units for about `slice_s` seconds; returns the messages of what ended or went on with them."""
        begun_s = clock()
        outputs = [
            self._fail(key, *DEADLINE_FAILURE)
            for key in self.scheduler.expired_keys(begun_s)
            if not self._is_dropped(key)
        ]
        while self.has_work:
            if self._open is None:
                failures, self._open = self._begin_step(clock())
                outputs += failures
                if self._open is None:
                    break
            outputs += self._run_unit(self._open, clock)
            if clock() - begun_s >= self.slice_s:
                break
        self.seconds += clock() - begun_s
        return outputs

    # ---- a step of the block

    def _begin_step(self, now_s: float) -> tuple[list[SequenceOutput], _OpenStep | None]:
        """Admit sequences, and begin a step of all that have a place; None if there is none."""
        failures = []
        self.scheduler.grow_rooms()
        for seq in self.scheduler.admit(now_s):
            if (live := self._live.get(seq.key)) is not None:
                # It is computed again, and so is its prompt's score if that was not sent yet.
                live.logprobs = None if live.logprobs is None else [None]
                continue
            try:
                self._live[seq.key] = open_live(seq, self.sampler)
            except Exception as error:
                failures.append(self._fail(seq.key, failure_code(error), str(error)))
        parts: dict[int, list[tuple[SequenceStep, StepWork]]] = {}
        for one in self.scheduler.plan_step():
            parts.setdefault(one.batch, []).append((one, self._build_work(one)))
        if not parts:
            return failures, None
        self.steps += 1
        works = {batch: [work for _, work in mine] for batch, mine in parts.items()}
        return failures, _OpenStep(self.runner.run_step(works, self._is_last_step(parts)), parts)

    def _build_work(self, one: SequenceStep) -> StepWork:
        seq = one.seq
        live = self._live[seq.key]
        wanted = choose_logits(seq, one.count, live.logprobs is not None)
        return StepWork(seq.tokens(seq.computed, one.count), seq.computed, seq.slabs, wanted, seq.prompt[0])

    def _is_last_step(self, parts: dict[int, list[tuple[SequenceStep, StepWork]]]) -> bool:
        """Whether surely no step follows: all sequences end with this one, and none waits."""
        ends = [
            one.count == one.seq.pending and len(one.seq.output) + 1 >= one.seq.sampling.max_tokens
            for mine in parts.values()
            for one, _ in mine
        ]
        return all(ends) and len(ends) == len(self.scheduler)

    def _run_unit(self, step: _OpenStep, clock: Callable[[], float]) -> list[SequenceOutput]:
        """Compute the next unit; returns the messages of a step that has ended with it."""
        try:
            found = next(step.units, None)
            if found is not None:
                self.units += 1
                self._take_results(step, found)
                return []
        except Exception as error:
            return self._fail_step(step, error)
        self._open = None
        return self._end_step(step, clock())

    def _take_results(self, step: _OpenStep, found: Iterable[UnitResult]) -> None:
        """Choose a token for each sequence whose last logits came, and score the prompts that ask for it.

        A sequence that has failed in this step gets no token any more.
        """
        chosen: list[tuple[LiveSequence, WorkLogits]] = []
        for one in found:
            part, work = step.parts[one.batch][one.index]
            key = part.seq.key
            live = self._live.get(key)
            if live is None or key in step.picks:
                continue
            if isinstance(one, WorkFailure):
                step.picks[key] = one.error
                continue
            if work.logits == "all":
                try:
                    score_prompt(live, work.start + one.row, 1, one.logits, self.sampler)
                except Exception as error:
                    step.picks[key] = error
                    continue
            is_last = one.row == work.wanted - 1 and part.count == part.seq.pending
            # A prompt that is only scored asks for 0 tokens.
            if is_last and len(part.seq.output) < part.seq.sampling.max_tokens:
                chosen.append((live, one))
        if not chosen:
            return
        picks = isolate_failures(
            lambda pairs: self.sampler.sample(
                [one.logits for _, one in pairs], [live.sampling for live, _ in pairs]
            ),
            chosen,
        )
        for (live, _), pick in zip(chosen, picks, strict=True):
            step.picks[live.seq.key] = pick

    def _end_step(self, step: _OpenStep, now_s: float) -> list[SequenceOutput]:
        """Advance all sequences of a step by what it computed; returns their messages."""
        outputs = []
        for one in [one for mine in step.parts.values() for one, _ in mine]:
            seq = one.seq
            self.tokens += one.count
            if seq.key in step.dropped:
                self.scheduler.release(seq.key)
                continue
            seq.computed += one.count
            token = step.picks.get(seq.key)
            if isinstance(token, SampledToken):
                outputs.append(self._append_token(self._live[seq.key], token, now_s))
            elif token is not None:
                outputs.append(self._fail(seq.key, failure_code(token), str(token)))
            elif seq.pending == 0:
                outputs.append(self._emit(self._live[seq.key], None, "length", now_s))
        return outputs

    def _fail_step(self, step: _OpenStep, error: Exception) -> list[SequenceOutput]:
        """A step failed: its sequences begin again, or fail if they have done so too often."""
        self._open = None
        self.failed_steps += 1
        outputs = []
        for one in [one for mine in step.parts.values() for one, _ in mine]:
            seq = one.seq
            if seq.key in step.dropped:
                self.scheduler.release(seq.key)
                continue
            live = self._live[seq.key]
            live.failures += 1
            if live.failures >= MAX_FAILURES:
                outputs.append(self._fail(seq.key, failure_code(error), f"the block failed: {error}"))
            else:
                self.scheduler.put_back(seq.key)
        return outputs

    # ---- messages

    def _append_token(self, live: LiveSequence, token: SampledToken, now_s: float) -> SequenceOutput:
        """Append one sampled token, and finish the sequence if it is the last one."""
        seq = live.seq
        try:
            ends = append_token(live, token)
        except Exception as error:
            return self._fail(seq.key, failure_code(error), str(error))
        full = len(seq.output) >= seq.sampling.max_tokens or seq.total >= self.scheduler.max_model_len
        return self._emit(live, token, "stop" if ends else "length" if full else None, now_s)

    def _emit(
        self, live: LiveSequence, token: SampledToken | None, finish: str | None, now_s: float
    ) -> SequenceOutput:
        output = build_output(live, token, finish, now_s)
        live.seq.silent = False
        if finish:
            self._drop(live.seq.key)
        return SequenceOutput(output)

    def _fail(self, key: str, code: str, message: str) -> SequenceOutput:
        seq = self.scheduler.find(key)
        assert seq is not None, key
        self._drop(key)
        return build_failure(seq, code, message)

    def _drop(self, key: str) -> None:
        """Forget a sequence; the room of one that is being computed is free when the step has ended."""
        self._live.pop(key, None)
        step = self._open
        keys = set() if step is None else {one.seq.key for mine in step.parts.values() for one, _ in mine}
        if step is None or key not in keys:
            self.scheduler.release(key)
            return
        step.dropped.add(key)
        if step.dropped == keys:
            # Nobody waits for this step any more.
            self._open = None
            step.units.close()
            for one in keys:
                self.scheduler.release(one)

    # ---- statistics

    @property
    def stats(self) -> WorkerStats:
        """The engine's part of a worker's statistics: all of it is bulk work."""
        running = self.scheduler.num_running
        return WorkerStats(
            steps=self.steps,
            step_seconds=self.seconds,
            step_tokens=self.tokens,
            step_parts=dict(Counter({"run": self.seconds})),
            bulk_running=running,
            bulk_waiting=len(self.scheduler.waiting),
            bulk_units=self.units,
            bulk_seconds=self.seconds,
            bulk_tokens=self.tokens,
            bulk_preemptions=self.failed_steps + self.scheduler.preemptions,
        )
