"""What instances of the fast simulator share: the clock, a request under way, and the queue that every instance has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

from planner.terms import BOTH, Batch, Cost, Job

Call = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an instance takes at once, besides its memory; everything is unlimited unless set.

    `prefill_tokens` closes a batch of prompts (a longer prompt goes alone). `decode_rows` are the seats of an instance:
    who is to decode and finds none waits, with its KV, until another one ends, first come first served; where prompts
    are read beside that, one is begun only if it has a seat. `chunk_tokens` cuts prompts of a colocated instance into
    slices that share a step with the rows that decode, at most so many tokens a step together (and an instance that
    only reads then fills its steps with slices, up to `prefill_tokens`); 0: prompts go before decoding, whole. With
    `chunk_tokens`, `step_s` keeps such a step below so many seconds while something decodes, but for `slice_tokens`
    that always go on.

    What the paper's simulator does: `turn_rows` and `turn_tokens` (of context) close a batch that decodes, and what
    does not fit waits its turn, step by step; `first_again` decodes the first token a second time.

    Raises ValueError: turns, and prompts that are cut.
    """

    prefill_tokens: float = inf
    decode_rows: float = inf
    chunk_tokens: int = 0
    step_s: float = inf
    slice_tokens: int = 64
    turn_rows: float = inf
    turn_tokens: float = inf
    first_again: bool = False

    def __post_init__(self) -> None:
        if self.chunk_tokens and self.turns:
            raise ValueError("rows that take turns share no step with slices of prompts")

    @property
    def turns(self) -> bool:
        """Whether rows may have to wait their turn for a step."""
        return min(self.turn_rows, self.turn_tokens) < inf


class Run:
    """A request on its way. `hold` is the KV that it may come to, in tokens; `steps` those of decoding in all."""

    __slots__ = (
        "began_s", "done", "ends", "first_s", "hold", "index", "job", "moved_s", "prompt", "ready_s", "source", "steps"
    )  # fmt: skip

    def __init__(self, index: int, job: Job, steps: int) -> None:
        self.index, self.job, self.prompt, self.steps = index, job, job.prompt, steps
        self.hold = job.prompt + job.output
        self.ends = 0  # the turn of its group after which it is finished
        self.done = 0  # tokens of its prompt that are computed, where prompts are cut
        self.began_s = self.first_s = self.ready_s = self.moved_s = 0.0
        self.source: Instance | None = None  # who holds its KV until it is moved


class Clock:
    """Virtual time. Of things at one time: arrivals, then what ends, in order of its begin, then what wakes up."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Call, Any]] = []
        self._count = 0

    def at(self, when_s: float, call: Call, what: Any) -> None:
        self._count += 1
        heappush(self._heap, (when_s, 0, self._count, call, what))

    def soon(self, call: Call, what: Any) -> None:
        """At this time still, after all else that happens at it."""
        self._count += 1
        heappush(self._heap, (self.now_s, 1, self._count, call, what))

    def run(self, runs: Sequence[Run], arrive: Call) -> None:
        """`runs` arrive, by time; ends when nothing is left to happen."""
        heap = self._heap
        for run in runs:
            at_s = run.job.at_s
            while heap and heap[0][0] < at_s:
                self.now_s, _, _, call, what = heappop(heap)
                call(what)
            self.now_s = at_s
            arrive(run)
        while heap:
            self.now_s, _, _, call, what = heappop(heap)
            call(what)


class Fleet(Protocol):
    """Whom an instance tells."""

    clock: Clock
    limits: Limits

    def prefilled(self, run: Run, at: Instance) -> None: ...

    def finished(self, run: Run, at: Instance) -> None: ...


class Instance:
    """One copy of the model: a queue of prompts, memory for `free` more tokens of KV, and rows that decode."""

    def __init__(self, fleet: Fleet, role: str, cost: Cost, kv_tokens: float) -> None:
        self.fleet, self.clock, self.role, self.cost = fleet, fleet.clock, role, cost
        self.capacity = self.free = kv_tokens
        self.queue: deque[Run] = deque()  # prompts that wait
        self.pulls: deque[Run] = deque()  # prompts read elsewhere, whose KV has no room here yet
        self.queued_tokens = 0  # of prompts that wait or are being read
        self.reading = 0  # prompts that are being read
        self.seats = 0  # requests that decode here or are about to
        self.port_s = 0.0  # when its side of the link is free again
        self.token_s = cost.step_s(Batch(512, 512.0 * 512.0)) / 512
        self.row_s = cost.step_s(Batch(0, 0.0, 32, 32 * 512)) / 32

    def wake(self) -> None:
        """Something came that it may not know about."""
        raise NotImplementedError

    def join(self, run: Run) -> None:
        """`run` decodes here from the next step on."""
        raise NotImplementedError

    def wait_s(self, run: Run) -> tuple[float, float]:
        """What goes by until `run`, too, is read here, as far as prompts tell; and what rows add to a step."""
        return (self.queued_tokens + run.prompt) * self.token_s, self.seats * self.row_s

    def offer(self, run: Run) -> None:
        """A prompt to be read."""
        self.queue.append(run)
        self.queued_tokens += run.prompt
        self.wake()

    def release(self, tokens: int) -> None:
        """Memory comes back; if prompts wait, it may be for that."""
        self.free += tokens
        if self.queue:
            self.wake()

    def room(self, run: Run) -> int:
        """The tokens of KV that `run`'s prompt takes here: what it grows to, if it stays."""
        return run.hold if self.role == BOTH else run.prompt

    def takes(self, run: Run) -> bool:
        """Whether `run`'s prompt may be begun: there is room, and a seat, if its answer is written here too."""
        if self.role == BOTH and self.seats + self.reading >= self.fleet.limits.decode_rows:
            return False
        return self.room(run) <= self.free

    def admit(self, run: Run) -> None:
        """`run`'s prompt is begun."""
        self.free -= self.room(run)
        self.reading += 1
        run.began_s = self.clock.now_s

    def take(self) -> list[Run]:
        """The prompts of the next batch, first come first served; the first one that does not fit closes it."""
        queue, most, tokens = self.queue, self.fleet.limits.prefill_tokens, 0
        batch: list[Run] = []
        while queue:
            run = queue[0]
            if not self.takes(run) or (batch and tokens + run.prompt > most):
                break
            tokens += run.prompt
            self.admit(run)
            batch.append(queue.popleft())
        return batch

    def read(self, batch: list[Run]) -> None:
        """These prompts are computed."""
        for run in batch:
            self.queued_tokens -= run.prompt
            self.reading -= 1
            self.fleet.prefilled(run, self)


def prompts(batch: Sequence[Run]) -> Batch:
    """Whole prompts, read in one step."""
    tokens, squares = 0, 0.0
    for run in batch:
        tokens += run.prompt
        squares += run.prompt * run.prompt
    return Batch(tokens, squares)


def stage_times(cost: Cost, batch: Batch, stages: int) -> tuple[float, float]:
    """Seconds in the first stage, which is the slowest, and in each other: they share what is left of the step."""
    step_s = cost.step_s(batch)
    if stages == 1:
        return step_s, 0.0
    first_s = cost.stage_s(batch)
    return first_s, (step_s - first_s) / (stages - 1)
