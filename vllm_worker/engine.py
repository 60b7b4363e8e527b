"""The engine of a vLLM worker: our sequences over an `EnginePort`, as `worker.loop.WorkerLoop` drives an engine.

    add / adopt ──▶ EnginePort ──step──▶ tokens, ends, failures ─▶ messages
                        ├─ KV saved in the transfer buffer ──▶ take_saved ─▶ the prefill role offers it
                        └─ KV loaded from it ──▶ take_loaded ─▶ the decode role frees its slabs

vLLM schedules; this keeps what a worker promises beside: deadlines, aborts by request and epoch in every phase, a
bounded queue, statistics, and that an error of one request ends only that request. A step in which vLLM only waits, for
copies or for grammars that are being compiled, is followed by a rest: a waiting engine takes no core.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from diptych.messages import STEP_SIZE_BOUNDS, Output, WorkerStats
from engine.outputs import SequenceOutput, build_failure
from engine.protocols import StepObserver
from engine.sequence import Sequence, SequenceRefused
from engine.sequence_table import DEADLINE_FAILURE, StepCounters, first_output_seconds
from engine.step_work import StepWork
from vllm_worker.port import EnginePort, LoadPlan, PortOutput, PortRefused, PortRequest, SavedKv

# Steps in a row that may find nothing to compute before the engine rests: a copy takes one or two.
FREE_STEPS = 3
# The first rest in seconds, which doubles with each step in vain, and the longest one.
MIN_REST_S, MAX_REST_S = 0.001, 0.2


@dataclass(slots=True)
class _Live:
    """A sequence in the engine. `saving`: it has ended in vLLM, and its KV is on the way to the transfer buffer."""

    seq: Sequence
    load: LoadPlan | None = None
    saving: bool = False


class VllmEngine:
    """A `engine.protocols.WorkerEngine` over `port`. One thread calls everything.

    At most `max_waiting` sequences with `max_waiting_tokens` tokens wait for their first output. `clock` is that of the
    loop. `observer` is called for every sequence and step.
    """

    def __init__(
        self,
        port: EnginePort,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = 1024,
        max_waiting_tokens: int = 1 << 20,
        observer: StepObserver | None = None,
    ) -> None:
        self.port, self._observer = port, observer
        self.counters = StepCounters()
        self._clock, self._max_waiting, self._max_waiting_tokens = clock, max_waiting, max_waiting_tokens
        self._live: dict[str, _Live] = {}
        # (deadline, key) of all sequences, and of some that have ended.
        self._deadlines: list[tuple[float, str]] = []
        self._saved: list[tuple[Sequence | None, SavedKv]] = []
        self._loaded: list[tuple[str, bool]] = []
        # Steps in a row that found nothing to compute, and the clock time in seconds until which the engine rests.
        self._empty_steps, self._rests_until_s = 0, float("-inf")

    # ---- arrivals

    def notify(self, wake: Callable[[], None]) -> None:
        """See `engine.protocols.WorkerEngine`: nothing becomes ready in another thread."""

    def expect(self, seq: Sequence) -> None:
        """See `engine.protocols.WorkerEngine`: vLLM prepares a sequence when it gets it."""

    def add(self, seq: Sequence, now_s: float, defer_first: bool = False) -> None:
        """Queue a sequence to be prefilled. With `seq.hold_kv` its KV leaves after one token (`take_saved`), unless
        that token is its last; with `defer_first` as well, that token is not reported, since another worker draws it.

        Raises:
            SequenceRefused: the queue is full ("overloaded"), or it cannot be served here.
            ValueError: it is here already.
        """
        left = seq.sampling.max_tokens - len(seq.output)
        if left < 1 and (seq.output or seq.sampling.max_tokens):
            raise SequenceRefused("internal_error", "no token is left to generate")
        ends = left <= 1 or seq.total + 1 >= self.port.facts.max_model_len
        save = seq.hold_kv and seq.sampling.max_tokens > 0 and (defer_first or not ends)
        self._begin(seq, now_s, save, save and defer_first, None)

    def adopt(self, seq: Sequence, load: LoadPlan, now_s: float) -> None:
        """Continue a sequence whose verified KV is in slabs of the transfer buffer, which `take_loaded` gives back.

        The KV is that of all its tokens, or of all but the last; in the former case its last token is computed again.
        Otherwise the slabs stay the caller's. Raises as `add`.
        """
        if not seq.total - 1 <= load.num_tokens <= seq.total:
            raise SequenceRefused(
                "internal_error", f"KV of {load.num_tokens} tokens does not fit {seq.total} tokens"
            )
        if seq.sampling.max_tokens <= len(seq.output):
            raise SequenceRefused("internal_error", "no token is left to generate")
        self._begin(seq, now_s, False, False, load)

    def _begin(
        self, seq: Sequence, now_s: float, save: bool, defer_first: bool, load: LoadPlan | None
    ) -> None:
        """Give a sequence to vLLM. Raises as `add`."""
        if seq.key in self._live:
            raise ValueError(f"{seq.key} is here already")
        self._check_limits(seq)
        request = PortRequest(
            key=seq.key,
            prompt=list(seq.prompt),
            output=list(seq.output),
            sampling=seq.sampling,
            priority=seq.tenancy.priority,
            # Without an address its prefixes are its own.
            salt=seq.root.hex() or seq.key,
            arrived_s=now_s,
            save=save,
            defer_first=defer_first,
            load=load,
        )
        try:
            self.port.add(request)
        except PortRefused as refusal:
            raise SequenceRefused(refusal.code, refusal.what, refusal.why) from refusal
        seq.arrived_s, seq.fetched, seq.silent = now_s, load is not None, True
        self._live[seq.key] = _Live(seq, load)
        heapq.heappush(self._deadlines, (seq.deadline_s, seq.key))
        self._wake()
        if self._observer is not None:
            self._observer.on_sequence_arrived(seq, now_s)

    def _check_limits(self, seq: Sequence) -> None:
        """Raises SequenceRefused if `seq` can never run here, or not soon."""
        if seq.keep.evicts:
            raise SequenceRefused("internal_error", "a vLLM worker cannot drop KV")
        longest = self.port.facts.max_model_len
        if seq.total == longest:
            why = "vLLM computes one token more, also if only the prompt is scored"
            raise SequenceRefused("unsupported_parameter", f"a prompt of all {longest} tokens", why)
        if not 0 < seq.total < longest:
            raise SequenceRefused("internal_error", f"{seq.total} tokens are not within 1 to {longest - 1}")
        waiting = [live.seq.total for live in self._live.values() if live.seq.silent]
        tokens = sum(waiting)
        if len(waiting) >= self._max_waiting or tokens + seq.total > self._max_waiting_tokens:
            why = f"{len(waiting)} sequences with {tokens} tokens are waiting"
            raise SequenceRefused("overloaded", "the worker's queue is full", why)

    # ---- what the loop asks

    @property
    def has_work(self) -> bool:
        """Whether a step would progress now: vLLM holds something, and the engine does not rest."""
        if not self.port.has_work:
            return False
        return self._clock() >= self._rests_until_s or not self.port.is_waiting_only

    @property
    def deadline_s(self) -> float | None:
        """The clock time of the earliest deadline, or of the end of a rest; a step is due then."""
        while self._deadlines and not self._is_due(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        moments = [self._deadlines[0][0]] if self._deadlines else []
        if self.port.has_work and self._empty_steps > FREE_STEPS:
            moments.append(self._rests_until_s)
        return min(moments, default=None)

    def _is_due(self, deadline_s: float, key: str) -> bool:
        """Whether an entry of the deadlines is that of a sequence which is still here."""
        live = self._live.get(key)
        return live is not None and live.seq.deadline_s == deadline_s

    def sequences(self) -> Iterable[Sequence]:
        """All sequences, with those whose KV is on the way to the buffer or waits there for `take_saved`."""
        yield from (live.seq for live in self._live.values())
        yield from (seq for seq, _ in self._saved if seq is not None)

    def abort(self, request: str, epoch: int) -> list[Sequence]:
        """Drop the request's sequences of this epoch and older ones, in any phase. Nothing is emitted for them.

        What is being copied for them still ends in `take_saved`, without the sequence, and in `take_loaded`.
        """
        gone = [
            live.seq for live in self._live.values() if live.seq.id == request and live.seq.epoch <= epoch
        ]
        for seq in gone:
            del self._live[seq.key]
        self.port.abort([seq.key for seq in gone])
        for place, (done, saved) in enumerate(self._saved):
            if done is not None and done.id == request and done.epoch <= epoch:
                gone.append(done)
                self._saved[place] = (None, saved)
        if gone:
            self._wake()
        return gone

    def take_saved(self) -> list[tuple[Sequence | None, SavedKv]]:
        """The KV that has arrived in the transfer buffer since the last call; its slabs are the caller's.

        Without a sequence it was aborted meanwhile. The sequence's `slabs` and `computed` say what it offers; KV of no
        tokens could not be saved.
        """
        self._collect_saves()
        taken, self._saved = self._saved, []
        return taken

    def take_loaded(self) -> list[tuple[str, bool]]:
        """The keys of `adopt` whose slabs are not read any more, and whether the load has failed."""
        self._collect_loads()
        taken, self._loaded = self._loaded, []
        return taken

    # ---- a step

    def step(self, clock: Callable[[], float]) -> list[SequenceOutput]:
        """Run one step of vLLM, and return its messages, after those of sequences whose time was up."""
        begun_s = clock()
        outputs = self._fail_expired(begun_s)
        if not self.port.has_work:
            return outputs
        ran = self.port.step()
        ended_s = clock()
        works = [] if self._observer is None else self._list_works()
        # Errors of this step are those of loads, if one has failed.
        failed = self._collect_loads()
        outputs += [
            message for one in ran if (message := self._take_output(one, ended_s, failed)) is not None
        ]
        self._collect_saves()
        if self._observer is not None:
            self._observer.on_step_end(begun_s, ended_s, works, [one.message for one in outputs])
        self._account_step(ended_s - begun_s, clock() - ended_s)
        self._rest(ended_s)
        return outputs

    def _list_works(self) -> list[tuple[Sequence, StepWork]]:
        """What the step that has ended computed, before its tokens are appended."""
        return [
            (live.seq, StepWork(live.seq.tokens(part.start, part.count), part.start, [], "last"))
            for part in self.port.computed()
            if (live := self._live.get(part.key)) is not None
        ]

    def _fail_expired(self, now_s: float) -> list[SequenceOutput]:
        """End the sequences whose deadlines are over."""
        expired_seqs: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)
            if self._is_due(*entry):
                expired_seqs.append(self._live.pop(entry[1]).seq)
        if expired_seqs:
            self.port.abort([seq.key for seq in expired_seqs])
            self._wake()
        return [build_failure(seq, *DEADLINE_FAILURE) for seq in expired_seqs]

    def _take_output(self, output: PortOutput, now_s: float, loads_failed: bool) -> SequenceOutput | None:
        """Advance a sequence by what vLLM did for it. None: it is not here, or there is nothing to report."""
        live = self._live.get(output.key)
        if live is None:
            return None
        seq, first = live.seq, live.seq.silent
        if output.finish == "error":
            del self._live[output.key]
            if loads_failed:
                return build_failure(seq, "transfer_failed", "the KV could not be copied to vLLM")
            # A grammar that does not compile ends its request before it starts.
            compiles = seq.sampling.grammar is None or not first or output.started_s is not None
            return build_failure(seq, "internal_error" if compiles else "invalid_grammar", output.error)
        if first:
            started_s = now_s if output.started_s is None else output.started_s
            seq.started_s = min(max(started_s, seq.arrived_s), now_s)
        seq.output += output.tokens
        seconds = first_output_seconds(seq, now_s)
        seq.silent = False
        if output.finish == "saved":
            live.saving = True
        elif output.finish is not None:
            del self._live[output.key]
        return SequenceOutput(
            Output(
                request=seq.id,
                epoch=seq.epoch,
                tokens=list(output.tokens),
                logprobs=output.logprobs,
                prompt_logprobs=output.prompt_logprobs,
                finish=None if output.finish == "saved" else output.finish,
                seconds=seconds,
                cached_tokens=output.cached_tokens if first and not seq.fetched else 0,
            )
        )

    def _collect_saves(self) -> None:
        """Take the KV that the port has copied to the buffer."""
        for saved in self.port.saved():
            live = self._live.pop(saved.key, None)
            if live is not None:
                live.seq.slabs, live.seq.computed = list(saved.slabs), saved.num_tokens
            self._saved.append((None if live is None else live.seq, saved))

    def _collect_loads(self) -> bool:
        """Take the keys whose loads have ended; returns whether one has failed."""
        failed = set(self.port.failed_loads())
        self._loaded += [(key, key in failed) for key in self.port.loaded()]
        return bool(failed)

    # ---- rests

    def _wake(self) -> None:
        """There is something new to do."""
        self._empty_steps, self._rests_until_s = 0, float("-inf")

    def _rest(self, now_s: float) -> None:
        """Decide how long the next step can wait."""
        if not self.port.is_waiting_only:
            return self._wake()
        self._empty_steps += 1
        over = self._empty_steps - FREE_STEPS
        if over > 0:
            rest_s = MIN_REST_S * 2 ** min(over - 1, 10)
            self._rests_until_s = now_s + min(MAX_REST_S, rest_s)

    # ---- statistics

    def _account_step(self, run_s: float, rest_s: float) -> None:
        """Count a step that took `run_s` seconds in vLLM and `rest_s` here; one in vain is not counted."""
        tokens = self.port.counts.step_tokens
        if tokens == 0:
            return
        self.counters.steps += 1
        self.counters.tokens += tokens
        self.counters.sizes[bisect_left(STEP_SIZE_BOUNDS, tokens)] += 1
        self.counters.add_time("run", run_s)
        self.counters.add_time("sample", rest_s)

    def record_send_time(self, seconds: float) -> None:
        """Record that sending a step's messages to the gateway took `seconds`."""
        self.counters.add_time("send", seconds)

    @property
    def stats(self) -> WorkerStats:
        """The engine's part of a worker's statistics; a block of vLLM is a slab."""
        counts, counters = self.port.counts, self.counters
        silent = [live for live in self._live.values() if live.seq.silent]
        return WorkerStats(
            slabs_total=self.port.facts.num_blocks,
            slabs_used=counts.used_blocks,
            slabs_cached=counts.cached_blocks,
            running=counts.running,
            waiting=counts.waiting,
            waiting_tokens=sum(live.seq.total for live in silent),
            deferred=sum(live.load is not None for live in silent),
            steps=counters.steps,
            step_seconds=counters.seconds,
            step_tokens=counters.tokens,
            step_parts=dict(counters.parts),
            step_sizes=list(counters.sizes),
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            preemptions={"recompute": counts.preemptions} if counts.preemptions else {},
        )
