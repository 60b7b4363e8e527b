"""The engine's step: decide, run, account.

    add / adopt ──▶ Scheduler ──plan──▶ StepRunner ──logits──▶ Sampler ──tokens──▶ Emission

One thread calls everything here. What computes comes in through protocols the size of a sentence, so this file needs
no torch, and the simulator puts a cost model in place of the runner. A failure belongs to one sequence: it ends in an
emission with `Failed`, and the others never notice.

What a live sequence holds, it holds in `Holdings` under its key ("<request>#<epoch>"), and lets go of before the
emission that ends it leaves `step`. The one exception is a held sequence, which leaves with its slabs: they are then
the caller's to free (`Holdings.end`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from diptych.errors import OutOfBlocks
from diptych.messages import Failed, Logprob, Output, Stats
from engine.faults import code_of, isolate
from engine.growth import Rate, parks
from engine.scheduler import Plan, Scheduler, Sequence
from engine.seams import Follower, LayersDone, Logits, Picked, Row, StepRunner, StepSampler
from engine.work import Work
from kvcache.holdings import Holdings
from kvcache.layout import CHUNK_TOKENS
from kvcache.tiers.host import HostTier

__all__ = ["Emission", "Engine", "Follower", "Picked", "StepRunner", "StepSampler"]

TIME_UP = ("deadline_exceeded", "the request's time was up")


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step has to say about one sequence. `held` is set when it leaves with its slabs, for a hand-off."""

    message: Output | Failed
    held: Sequence | None = None


@dataclass(slots=True)
class _Live:
    """A sequence that has started, and its sampling row. It stays so while it is preempted."""

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
class _Books:
    """What was done so far. `parts` are seconds, and sum to `seconds`."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    preempted: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("schedule", "prepare", "run", "sample", "send"), 0.0)
    )

    def spent(self, part: str, seconds: float) -> None:
        """One more stretch of a step."""
        self.parts[part] += seconds
        self.seconds += seconds


class Engine:
    """Sequences in, emissions out. `host` is where preempted sequences may be parked; None: nowhere.

    `follower` may be set at any time between steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        holdings: Holdings,
        sampler: StepSampler,
        host: HostTier | None = None,
    ) -> None:
        self.runner, self.scheduler, self.holdings, self.sampler = runner, scheduler, holdings, sampler
        self.host = host
        self.follower: Follower | None = None
        self.read_rate = Rate(2000.0)  # prompt tokens per second
        self.copy_rate = Rate(1e9)  # bytes per second, to and from the host tier
        self._live: dict[str, _Live] = {}
        self._books = _Books()

    def add(self, seq: Sequence, now_s: float) -> None:
        """Queue a sequence to be read from its first token; its slabs are taken as it goes.

        Raises:
            Refused: it cannot be taken; `code` says why, and nothing is held for it.
            ValueError: it is already here.
        """
        self.scheduler.add(seq, now_s)

    def admits(self, seq: Sequence, moving: Iterable[Sequence] = ()) -> bool:
        """Whether a sequence that is to be adopted may take its slabs now; `moving` are those that have, and wait.

        See `Scheduler.admits`.
        """
        return self.scheduler.admits(seq, self.holdings, moving)

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Continue a sequence read elsewhere: its slabs, held under its key, have KV of all its tokens but the last.

        From now on they are the engine's to let go. Raises ValueError, leaving them to the caller, if something is
        missing, or nothing is left to write.
        """
        self.scheduler.adopt(seq, now_s)

    def abort(self, request: str, epoch: int) -> list[Sequence]:
        """Drop the request's sequences of this epoch and older ones, and what they hold. Nothing is emitted."""
        keys = [seq.key for seq in self.scheduler.sequences() if seq.id == request and seq.epoch <= epoch]
        return [self._drop(key) for key in keys]

    @property
    def has_work(self) -> bool:
        """Whether a step would progress now. If not, wait for a message, for slabs, or until `deadline_s`."""
        return self.scheduler.ready(self.holdings)

    @property
    def deadline_s(self) -> float | None:
        """The earliest deadline of all sequences here; a step after it reports that sequence as failed."""
        return self.scheduler.deadline_s

    @property
    def stats(self) -> Stats:
        """The engine's part of a worker's books."""
        books, holdings = self._books, self.holdings
        return Stats(
            slabs_total=self.scheduler.limits.num_slabs,
            slabs_used=holdings.used,
            slabs_cached=holdings.cached,
            running=len(self.scheduler.running) + len(self.scheduler.adopted),
            waiting=len(self.scheduler.waiting),
            waiting_tokens=self.scheduler.waiting_tokens,
            steps=books.steps,
            step_seconds=books.seconds,
            step_tokens=books.tokens,
            step_parts=dict(books.parts),
            prefix_queries=holdings.queries,
            prefix_hits=holdings.hits,
            preemptions=dict(books.preempted),
        )

    def sent(self, seconds: float) -> None:
        """Telling the gateway what a step gave took `seconds`: a part of that step."""
        self._books.spent("send", seconds)

    def step(self, clock: Callable[[], float]) -> list[Emission]:
        """One turn. Emissions are in the plan's order: what ended without work, then decodes, then prefills."""
        begun_s = clock()
        told = [self._fail(key, *TIME_UP) for key in self.scheduler.expired(begun_s)]
        plan = self._decide(clock)
        told += self._begin(plan, clock)
        decided_s = clock()
        jobs = self._jobs(plan)
        if not jobs:
            return told
        ready_s = clock()
        logits = self._run(jobs)
        ran_s = clock()
        told += self._account(jobs, logits, ran_s)
        prepared_s = min(getattr(self.runner, "prepare_seconds", 0.0), ran_s - ready_s)
        books = self._books
        books.spent("schedule", decided_s - begun_s)
        books.spent("prepare", ready_s - decided_s + prepared_s)
        books.spent("run", ran_s - ready_s - prepared_s)
        books.spent("sample", clock() - ran_s)
        self._note(jobs, len(plan.decode), ran_s - ready_s)
        return told

    def _run(self, jobs: list[_Job]) -> list[Any]:
        """Each job's logits, or what went wrong with it. Who follows held sequences hears of it meanwhile."""
        works, done = [job.work for job in jobs], self._announce(jobs)
        if done is None:
            return isolate(self.runner.run, works)
        # What failed is run again one by one: that does not say how far the others are.
        return isolate(lambda batch: self.runner.run(batch, done if batch is works else None), works)

    def _announce(self, jobs: list[_Job]) -> LayersDone | None:
        held = [(job.live.seq, job.work.start + len(job.work.tokens)) for job in jobs if job.live.seq.hold]
        return self.follower.begin(held) if self.follower is not None and held else None

    def _note(self, jobs: list[_Job], rows: int, seconds: float) -> None:
        """What can be learnt from a step."""
        tokens = sum(len(job.work.tokens) for job in jobs)
        self._books.steps += 1
        self._books.tokens += tokens
        reading = max(0, tokens - rows)
        self.scheduler.account(rows, reading, seconds)
        if reading > rows:
            self.read_rate.note(tokens, seconds)

    def _decide(self, clock: Callable[[], float]) -> Plan:
        """A plan that the slabs suffice for."""
        while (plan := self.scheduler.schedule(self.holdings)).preempted:
            self._preempt(plan.preempted, clock)
        return plan

    def _preempt(self, key: str, clock: Callable[[], float]) -> None:
        """Take a sequence's memory away, in the cheaper way."""
        seq, live = self.scheduler.find(key), self._live.get(key)
        assert seq is not None, key
        parked = self._park(seq, clock)
        if not parked and live is not None and live.scores is not None:
            live.scores = [None]  # they are computed again with their tokens
        self.scheduler.preempt(key, parked)
        self._let_go(key)
        self._books.preempted["park" if parked else "recompute"] += 1

    def _park(self, seq: Sequence, clock: Callable[[], float]) -> bool:
        """Copy its KV to the host tier, if there is room and computing it again would take longer."""
        slabs, host = seq.slabs[: -(-seq.computed // CHUNK_TOKENS)], self.host
        if host is None or not slabs or not host.fits(len(slabs)):
            return False
        num_bytes, begun_s = len(slabs) * host.slab_bytes, clock()
        if not parks(seq.computed, num_bytes, self.read_rate.value, self.copy_rate.value):
            return False
        try:
            host.put(seq.key, slabs)
        except MemoryError:
            return False  # the machine has less than the tier was promised
        self.copy_rate.note(num_bytes, clock() - begun_s)
        return True

    def _begin(self, plan: Plan, clock: Callable[[], float]) -> list[Emission]:
        """Take the slabs, start the admitted."""
        if not plan.admitted and not plan.grow:
            return []
        need, failed = dict(plan.grow), []
        fresh = [seq for key in plan.admitted if (seq := self.scheduler.waiting.get(key)) is not None]
        found = {seq.key: self.holdings.attach(seq.key, seq.attachable()) for seq in fresh}
        for key, count in plan.grow:
            seq = self.scheduler.find(key)
            if key in found or seq is None:
                continue
            try:
                seq.slabs += self._take(key, count)
            except OutOfBlocks:
                continue  # somebody took them since the plan was made: it pauses for this step
        for key in plan.admitted:
            if key in found and not self._enter(key, found[key], need.get(key, 0), clock):
                continue
            if (failure := self._open(key, clock())) is not None:
                failed.append(failure)
        return failed

    def _take(self, key: str, count: int) -> list[int]:
        """Slabs that are written to from now on. Raises OutOfBlocks."""
        slabs = self.holdings.take(key, count)
        if self.follower is not None and slabs:
            self.follower.took(slabs)
        return slabs

    def _enter(self, key: str, found: list[int], need: int, clock: Callable[[], float]) -> bool:
        """Give a waiting sequence its slabs; False, with nothing held, if they are not to be had after all."""
        seq = self.scheduler.waiting[key]
        try:
            seq.slabs = found + self._take(key, need)
        except OutOfBlocks:
            self.holdings.end(key)
            return False
        seq.shared, reached = len(found), len(found) * CHUNK_TOKENS
        if seq.parked and self.host is not None:
            begun_s = clock()
            self.copy_rate.note(self.host.get(key, seq.slabs, len(found)), clock() - begun_s)
        else:
            seq.computed = reached
            seq.cached = reached if seq.started_s is None else seq.cached
        return True

    def _open(self, key: str, now_s: float) -> Emission | None:
        """Start a sequence that has its slabs, with a row of the sampler; the failure if it gets none."""
        fetched = key in self.scheduler.adopted
        seq = self.scheduler.start(key, now_s)
        if key in self._live:
            return None  # it was preempted, and goes on where it was
        try:
            row = self.sampler.open(seq)
        except Exception as error:
            return self._fail(key, code_of(error), str(error))
        stages = ("decode_queue", "decode_first") if fetched else ("queue", "prefill")
        self._live[key] = _Live(seq, row, [None] if seq.scored else None, stages)
        return None

    def _jobs(self, plan: Plan) -> list[_Job]:
        jobs = []
        running, live = self.scheduler.running, self._live
        for key in plan.decode:
            seq = running.get(key)
            if seq is not None and seq.computed < len(seq.slabs) * CHUNK_TOKENS:
                jobs.append(_Job(live[key], Work(seq.output[-1:], seq.computed, seq.slabs, "last")))
        for part in plan.prefill:
            seq = running.get(part.key)
            if seq is None:
                continue
            end = min(part.start + part.count, len(seq.slabs) * CHUNK_TOKENS)
            if (count := end - seq.computed) > 0:
                tokens, one = seq.tokens(seq.computed, count), live[part.key]
                jobs.append(_Job(one, Work(tokens, seq.computed, seq.slabs, _wanted(one, count))))
        return jobs

    def _account(self, jobs: list[_Job], results: list[Any], now_s: float) -> list[Emission]:
        """Advance every sequence by what ran, and sample for those that have nothing left to read."""
        verdicts: dict[str, Emission | None] = {}  # in the order of the plan
        chosen: list[tuple[_Live, Logits]] = []
        for job, result in zip(jobs, results, strict=True):
            live, seq, count = job.live, job.live.seq, len(job.work.tokens)
            verdicts[seq.key] = None
            self.scheduler.service.charge(seq.origin.tenant, count)
            try:
                if isinstance(result, Exception):
                    raise result
                self._score(live, job.work, result)
            except Exception as error:
                verdicts[seq.key] = self._fail(seq.key, code_of(error), str(error))
                continue
            seq.computed += count
            if seq.root and seq.computed // CHUNK_TOKENS > seq.shared:
                self._share(seq)
            if seq.pending == 0 and len(seq.output) < seq.sampling.max_tokens:
                chosen.append((live, result[-1:]))
            elif seq.pending == 0:
                verdicts[seq.key] = self._emit(live, [], None, "length", now_s)
        picks = isolate(self._sample, chosen) if chosen else []
        for (live, _), pick in zip(chosen, picks, strict=True):
            verdicts[live.seq.key] = self._write(live, pick, now_s)
        return [verdict for verdict in verdicts.values() if verdict]

    def _share(self, seq: Sequence) -> None:
        """Its full chunks are known from now on; slabs of those that were known already are replaced."""
        full = seq.computed // CHUNK_TOKENS
        self.holdings.share(seq.key, seq.address()[:full], seq.slabs)
        seq.shared = full

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
            return self._fail(seq.key, code_of(pick), str(pick))
        seq.output.append(pick.token)
        stopped = pick.token in seq.sampling.stop_token_ids
        if not stopped:
            try:
                live.row.push(pick.token)
            except Exception as error:
                return self._fail(seq.key, code_of(error), str(error))
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
        seq, first, scores = live.seq, live.silent, live.scores
        live.silent, live.scores = False, None  # the prompt's scores are told once
        output = Output(
            request=seq.id,
            epoch=seq.epoch,
            tokens=tokens,
            logprobs=[logprob] if logprob else None,
            prompt_logprobs=scores,
            finish=finish,
            seconds=_stages(live, now_s) if first else {},
            cached_tokens=seq.cached if first else 0,
        )
        if finish:
            self._drop(seq.key)
        elif seq.hold:
            del self._live[seq.key]
            return Emission(output, held=self.scheduler.remove(seq.key))
        return Emission(output)

    def _fail(self, key: str, code: str, message: str) -> Emission:
        # What made it fail may lie in its KV (logits that are not finite): nobody else is to find that.
        seq = self._drop(key, keep=code != "internal_error")
        return Emission(Failed(seq.id, seq.epoch, code, message))

    def _drop(self, key: str, keep: bool = True) -> Sequence:
        seq = self.scheduler.remove(key)
        self._live.pop(key, None)
        self._let_go(key, keep)
        if self.host is not None:
            self.host.drop(key)
        seq.slabs = []
        return seq

    def _let_go(self, key: str, keep: bool = True) -> None:
        """Give up all slabs of a sequence that may be followed."""
        self.holdings.end(key, keep)
        if self.follower is not None:
            self.follower.dropped(key)


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
