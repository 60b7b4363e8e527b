"""The engine's step: decide, run, account.

    add / adopt ──▶ Scheduler ──plan──▶ StepRunner ──logits──▶ Sampler ──tokens──▶ Emission

One thread calls everything here. What computes comes in through protocols the size of a sentence, so this file needs
no torch, and the simulator puts a cost model in place of the runner. A failure belongs to one sequence: it ends in an
emission with `Failed`, and the others never notice.

Slabs of a live sequence belong to its key ("<request>#<epoch>") in the pool, and are given back before the emission
that ends it leaves `step`. The one exception is a held sequence, which leaves with its slabs: they are then the
caller's to free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from diptych.errors import GrammarError, OutOfBlocks
from diptych.messages import Failed, Logprob, Output, Stats
from engine.scheduler import Plan, Scheduler, Sequence
from engine.work import Work

Logits = (
    Any  # whatever the runner returns and the sampler takes; torch tensors [rows, vocab] in the real ones
)


class StepRunner(Protocol):
    """Runs a batch of `Work` through the model, and returns each one's logits. Running a batch again does no harm."""

    def run(self, batch: list[Any]) -> list[Any]: ...


class Slabs(Protocol):
    """The pool, as far as an engine uses it."""

    @property
    def free(self) -> int: ...

    @property
    def used(self) -> int: ...

    def take(self, n: int, owner: str) -> list[int]: ...

    def give(self, slabs: list[int], owner: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Picked:
    """One sampled token, with its log-probability when the request asked for that."""

    token: int
    logprob: Logprob | None = None


class Row(Protocol):
    """What sampling has to remember of one sequence; it is told of every token."""

    @property
    def done(self) -> bool:
        """The grammar is complete: nothing can follow."""

    def push(self, token: int) -> None: ...


class StepSampler(Protocol):
    """Chooses one token for each row of logits [1, vocab]. `open` and `push` raise GrammarError."""

    def open(self, seq: Sequence) -> Any: ...

    def sample(self, logits: list[Any], rows: list[Any]) -> list[Picked | Exception]: ...

    def score(self, logits: Any, tokens: list[int], top: int) -> list[Logprob]: ...


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step has to say about one sequence. `held` is set when it leaves with its slabs, for a hand-off."""

    message: Output | Failed
    held: Sequence | None = None


@dataclass(slots=True)
class _Live:
    """A running sequence and its sampling row."""

    seq: Sequence
    row: Row
    scores: list[Logprob | None] | None  # of the prompt's tokens so far, if they are asked for
    stages: tuple[str, str]  # what to call the time until it started, and from then to its first token here
    silent: bool = True  # nothing has been emitted for it yet


@dataclass(frozen=True, slots=True)
class _Job:
    live: _Live
    work: Work


@dataclass(slots=True)
class _Count:
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


class Engine:
    """Sequences in, emissions out."""

    def __init__(self, runner: StepRunner, scheduler: Scheduler, pool: Slabs, sampler: StepSampler) -> None:
        self.runner, self.scheduler, self.pool, self.sampler = runner, scheduler, pool, sampler
        self._live: dict[str, _Live] = {}
        self._count = _Count()

    def add(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence to be read from its first token; its slabs are taken when it starts.

        Raises:
            Refused: it cannot be taken; `code` says why, and nothing is held for it.
            ValueError: it is already here.
        """
        self.scheduler.add(seq, now_s)

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Continue a sequence read elsewhere: its slabs, owned by its key, have the KV of all its tokens but the last.

        From now on its slabs are the engine's to free. Raises ValueError, leaving them to the caller, if they do not
        cover all that it may still write, or nothing is left to write.
        """
        self.scheduler.adopt(seq, now_s)

    def abort(self, request: str, epoch: int) -> list[Sequence]:
        """Drop the request's sequences of this epoch and older ones, and free their slabs. Nothing is emitted."""
        keys = [seq.key for seq in self.scheduler.sequences() if seq.id == request and seq.epoch <= epoch]
        return [self._drop(key) for key in keys]

    @property
    def has_work(self) -> bool:
        """Whether a step would progress now. If not, wait for a message, for slabs, or until `deadline_s`."""
        return self.scheduler.ready(self.pool.free)

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all sequences here; a step after it reports that sequence as failed."""
        return min((seq.deadline_s for seq in self.scheduler.sequences()), default=None)

    @property
    def stats(self) -> Stats:
        """The engine's part of a worker's books."""
        return Stats(
            slabs_total=self.scheduler.limits.num_slabs,
            slabs_used=self.pool.used,
            running=len(self.scheduler.running) + len(self.scheduler.adopted),
            waiting=len(self.scheduler.waiting),
            waiting_tokens=self.scheduler.waiting_tokens,
            steps=self._count.steps,
            step_seconds=self._count.seconds,
            step_tokens=self._count.tokens,
        )

    def step(self, clock: Callable[[], float]) -> list[Emission]:
        """One turn. Emissions are in the plan's order: what ended without work, then decodes, then prefills."""
        now_s = clock()
        plan = self.scheduler.schedule(self.pool.free, now_s)
        told = self._begin(plan, now_s)
        jobs = self._jobs(plan)
        logits = _isolate(self.runner.run, [job.work for job in jobs]) if jobs else []
        done_s = clock()
        told += self._account(jobs, logits, done_s)
        if jobs:
            self._count.steps += 1
            self._count.seconds += done_s - now_s
            self._count.tokens += sum(len(job.work.tokens) for job in jobs)
        return told

    def _begin(self, plan: Plan, now_s: float) -> list[Emission]:
        """Drop the expired, start the admitted."""
        told = []
        for key in plan.expired:
            told.append(self._fail(key, "deadline_exceeded", "the request's time was up"))
        for key, need in plan.admitted:
            try:
                slabs = self.pool.take(need, key) if need else []
            except OutOfBlocks:
                continue  # somebody took them since the plan was made: it stays in the queue
            seq = self.scheduler.start(key, slabs, now_s)
            try:
                row = self.sampler.open(seq)
            except Exception as error:
                told.append(self._fail(key, _code(error), str(error)))
                continue
            scored = seq.sampling.prompt_logprobs is not None and not seq.output
            stages = ("queue", "prefill") if need else ("decode_queue", "decode_first")
            self._live[key] = _Live(seq, row, [None] if scored else None, stages)
        return told

    def _jobs(self, plan: Plan) -> list[_Job]:
        jobs = []
        for key in plan.decode:
            if live := self._live.get(key):
                seq = live.seq
                jobs.append(_Job(live, Work(seq.output[-1:], seq.computed, seq.slabs, "last")))
        for part in plan.prefill:
            if live := self._live.get(part.key):
                tokens = live.seq.tokens(part.start, part.count)
                jobs.append(_Job(live, Work(tokens, part.start, live.seq.slabs, _wanted(live, part.count))))
        return jobs

    def _account(self, jobs: list[_Job], results: list[Any], now_s: float) -> list[Emission]:
        """Advance every sequence by what ran, and sample for those that have nothing left to read."""
        verdicts: dict[str, Emission | None] = {}  # in the order of the plan
        chosen: list[tuple[_Live, Logits]] = []
        for job, result in zip(jobs, results, strict=True):
            live, key = job.live, job.live.seq.key
            verdicts[key] = None
            if isinstance(result, Exception):
                verdicts[key] = self._fail(key, _code(result), str(result))
                continue
            try:
                self._score(live, job.work, result)
            except Exception as error:
                verdicts[key] = self._fail(key, _code(error), str(error))
                continue
            live.seq.computed += len(job.work.tokens)
            if live.seq.pending == 0 and len(live.seq.output) < live.seq.sampling.max_tokens:
                chosen.append((live, result[-1:]))
            elif live.seq.pending == 0:
                verdicts[key] = self._emit(live, [], None, "length", now_s)
        picks = _isolate(self._sample, chosen) if chosen else []
        for (live, _), pick in zip(chosen, picks, strict=True):
            verdicts[live.seq.key] = self._write(live, pick, now_s)
        return [verdict for verdict in verdicts.values() if verdict]

    def _sample(self, pairs: list[tuple[_Live, Logits]]) -> list[Picked | Exception]:
        return self.sampler.sample([logits for _, logits in pairs], [live.row for live, _ in pairs])

    def _score(self, live: _Live, work: Work, logits: Logits) -> None:
        """Logits row i of a chunk speaks about the token after it; the first prompt token has no score."""
        if live.scores is None or work.logits != "all":
            return
        following = live.seq.prompt[work.start + 1 : work.start + 1 + len(work.tokens)]
        live.scores += self.sampler.score(
            logits[: len(following)], following, live.seq.sampling.prompt_logprobs or 0
        )

    def _write(self, live: _Live, pick: Picked | Exception, now_s: float) -> Emission:
        """Append one sampled token, and see whether it is the last."""
        seq = live.seq
        if isinstance(pick, Exception):
            return self._fail(seq.key, _code(pick), str(pick))
        seq.output.append(pick.token)
        stopped = pick.token in seq.sampling.stop_token_ids
        if not stopped:
            try:
                live.row.push(pick.token)
            except Exception as error:
                return self._fail(seq.key, _code(error), str(error))
        finish = None
        if stopped or live.row.done:
            finish = "stop"
        elif len(seq.output) >= seq.sampling.max_tokens or seq.total >= self.scheduler.limits.max_model_len:
            finish = "length"
        return self._emit(live, [pick.token], pick.logprob, finish, now_s)

    def _emit(
        self, live: _Live, tokens: list[int], logprob: Logprob | None, finish: str | None, now_s: float
    ) -> Emission:
        """What one step gave. A finishing stop token is among `tokens`; the gateway leaves it out of the text."""
        seq, first, live.silent = live.seq, live.silent, False
        output = Output(
            request=seq.id,
            epoch=seq.epoch,
            tokens=tokens,
            logprobs=[logprob] if logprob else None,
            prompt_logprobs=live.scores if first else None,
            finish=finish,
            seconds=_stages(live, now_s) if first else {},
        )
        if finish:
            self._drop(seq.key)
        elif seq.hold:
            del self._live[seq.key]
            return Emission(output, held=self.scheduler.remove(seq.key))
        return Emission(output)

    def _fail(self, key: str, code: str, message: str) -> Emission:
        seq = self._drop(key)
        return Emission(Failed(seq.id, seq.epoch, code, message))

    def _drop(self, key: str) -> Sequence:
        seq = self.scheduler.remove(key)
        self._live.pop(key, None)
        if seq.slabs:
            self.pool.give(seq.slabs, key)
            seq.slabs = []
        return seq


def _wanted(live: _Live, count: int) -> str:
    """Which logits a chunk of `count` tokens is run for."""
    seq = live.seq
    if live.scores is not None and seq.computed + 1 < len(seq.prompt):
        return "all"
    return "last" if seq.pending == count and len(seq.output) < seq.sampling.max_tokens else "none"


def _stages(live: _Live, now_s: float) -> dict[str, float]:
    """Two durations in seconds that meet at the same moment, so they sum to the whole since `arrived_s`."""
    seq, (wait, work) = live.seq, live.stages
    started_s = now_s if seq.started_s is None else seq.started_s
    return {wait: started_s - seq.arrived_s, work: now_s - started_s}


def _isolate(call: Callable[[list[Any]], list[Any]], batch: list[Any]) -> list[Any]:
    """`call(batch)`; if that raises, each item alone, so that only those at fault get an exception for a result."""
    try:
        return call(batch)
    except Exception as error:
        if len(batch) == 1:
            return [error]
        return [result for item in batch for result in _isolate(call, [item])]


def _code(error: Exception) -> str:
    """The `Failed` code of what went wrong. torch is not imported here, so its out-of-memory is known by its words."""
    if isinstance(error, GrammarError):
        return "invalid_grammar"
    words = f"{type(error).__name__} {error}".lower()
    exhausted = isinstance(error, MemoryError) or "outofmemory" in words or "t allocate memory" in words
    return "out_of_memory" if exhausted else "internal_error"
