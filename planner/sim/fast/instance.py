"""The parts that all instances of the fast simulator share: event clock, request in progress, and prompt queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

from planner.types import BOTH, CostModel, Job, KvClassWork, StepBatch

EventCall = Callable[[Any], None]
SAME_WORK = KvClassWork()


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """Limits of an instance besides its memory; everything is unlimited unless set.

    `prefill_tokens` limits a prefill batch (a longer prompt runs alone). `decode_rows` is the number of seats: a
    request that finds none waits with its KV, first come first served, and a colocated instance begins a prompt only
    if a seat is free. `chunk_tokens` turns on chunked prefill for colocated instances: prompts are cut into slices that
    share a step with the decode rows, at most `chunk_tokens` tokens in all per step (prefill instances then fill steps
    with slices, up to `prefill_tokens`); 0: whole prompts are prefilled before decoding goes on. With chunked prefill,
    `step_s` limits the seconds of a step with decode rows, though `slice_tokens` prompt tokens are always allowed.
    For DistServe's simulator: `batch_rows` and `batch_tokens` (of context) limit a decode batch, and rows beyond them
    alternate, step by step; `first_again` decodes the first token a second time.

    Raises ValueError if chunked prefill is combined with `batch_rows` or `batch_tokens`.
    """

    prefill_tokens: float = inf
    decode_rows: float = inf
    chunk_tokens: int = 0
    step_s: float = inf
    slice_tokens: int = 64
    batch_rows: float = inf
    batch_tokens: float = inf
    first_again: bool = False

    def __post_init__(self) -> None:
        if self.chunk_tokens and self.rotates_rows:
            raise ValueError(
                "rotating rows (batch_rows, batch_tokens) cannot be combined with chunked prefill"
            )

    @property
    def rotates_rows(self) -> bool:
        """Whether decode rows may have to alternate."""
        return min(self.batch_rows, self.batch_tokens) < inf


class FastRequest:
    """A request in progress.

    `total_tokens` is the most KV that it needs while it decodes: prompt and output tokens, or what it keeps of them.
    `steps` is its number of decode steps. `pool` is the number of the pool for its class of KV, and `work` says what
    work on that KV costs.

    The times are: begin of prefill, first token, memory for KV available, and KV transferred.
    """

    __slots__ = (
        "began_s", "done", "ends", "first_s", "index", "job", "moved_s", "pool", "prompt", "ready_s", "source", "steps",
        "total_tokens", "work",
    )  # fmt: skip

    def __init__(
        self, index: int, job: Job, steps: int, pool: int = 0, work: KvClassWork = SAME_WORK
    ) -> None:
        self.index, self.job, self.prompt, self.steps = index, job, job.prompt, steps
        self.pool, self.work = pool, work
        self.total_tokens = job.prompt + job.output
        # Number of the step, in its group, with which it is finished.
        self.ends = 0
        # Number of prompt tokens that are prefilled already, with chunked prefill.
        self.done = 0
        self.began_s = self.first_s = self.ready_s = self.moved_s = 0.0
        # The prefill instance that holds its KV until the transfer.
        self.source: FastInstance | None = None


class EventClock:
    """Virtual time. Events of one moment run in this order: arrivals, scheduled ends, then wake-ups."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, EventCall, Any]] = []
        self._count = 0

    def schedule_at(self, when_s: float, call: EventCall, what: Any) -> None:
        """Calls `call(what)` at the time `when_s`; calls of the same time run in the order of scheduling."""
        self._count += 1
        heappush(self._heap, (when_s, 0, self._count, call, what))

    def schedule_last(self, call: EventCall, what: Any) -> None:
        """Calls `call(what)` at the present time, after all other events of this time."""
        self._count += 1
        heappush(self._heap, (self.now_s, 1, self._count, call, what))

    def run_all(self, requests: Sequence[FastRequest], arrive: EventCall) -> None:
        """Lets `requests` arrive in order of time (by calling `arrive`), and runs until no event is left."""
        heap = self._heap
        for request in requests:
            at_s = request.job.at_s
            while heap and heap[0][0] < at_s:
                self.now_s, _, _, call, what = heappop(heap)
                call(what)
            self.now_s = at_s
            arrive(request)
        while heap:
            self.now_s, _, _, call, what = heappop(heap)
            call(what)


class InstanceListener(Protocol):
    """The callbacks of an instance: it calls them when a request's prefill or decode has ended."""

    clock: EventClock
    limits: InstanceLimits
    # By pool: how many tokens it holds for each token of an instance's `kv_tokens`.
    rooms: tuple[float, ...]

    def on_prefilled(self, request: FastRequest, instance: FastInstance) -> None:
        """The prompt of `request` has been prefilled on `instance`."""

    def on_finished(self, request: FastRequest, instance: FastInstance) -> None:
        """The last token of `request` has been generated on `instance`."""


class FastInstance:
    """One copy of the model: a queue of prompts, memory for `free` more tokens of KV by pool, and rows that decode."""

    def __init__(self, listener: InstanceListener, role: str, cost: CostModel, kv_tokens: float) -> None:
        self.listener, self.clock, self.role, self.cost = listener, listener.clock, role, cost
        self.capacity = [kv_tokens * room for room in listener.rooms]
        self.free = list(self.capacity)
        # Prompts that wait for prefill.
        self.queue: deque[FastRequest] = deque()
        # Requests that were prefilled elsewhere and whose KV has no room here yet.
        self.pulls: deque[FastRequest] = deque()
        # Number of tokens of the prompts that wait or are being prefilled.
        self.queued_tokens = 0
        # Number of prompts that are being prefilled.
        self.prefilling = 0
        # Number of requests that decode here or are about to.
        self.seats = 0
        # The time at which the instance's end of the KV link is free again.
        self.port_s = 0.0
        self.token_s = cost.step_s(StepBatch(512, 512.0 * 512.0)) / 512
        self.row_s = cost.step_s(StepBatch(0, 0.0, 32, 32 * 512)) / 32

    def wake(self) -> None:
        """Starts work if the instance is idle; called when new work may have arrived. Subclasses implement it."""
        raise NotImplementedError

    def start_decode(self, request: FastRequest) -> None:
        """Lets `request` decode here from the next step on. Subclasses implement it."""
        raise NotImplementedError

    def wait_s(self, request: FastRequest) -> tuple[float, float]:
        """Estimated seconds until `request` would be prefilled here; as a tie-breaker, seconds of its decode rows."""
        return (self.queued_tokens + request.prompt) * self.token_s, self.seats * self.row_s

    def enqueue_prompt(self, request: FastRequest) -> None:
        """Queues a prompt for prefill."""
        self.queue.append(request)
        self.queued_tokens += request.prompt
        self.wake()

    def release_kv(self, request: FastRequest, tokens: int) -> None:
        """Frees `tokens` of the KV memory of `request`; prompts may have waited for it."""
        self.free[request.pool] += tokens
        if self.queue:
            self.wake()

    def kv_needed(self, request: FastRequest) -> int:
        """KV tokens that must be free to begin the prompt: on a colocated instance also those of the answer.

        A request that evicts may need more for its prompt than later for what it keeps.
        """
        return max(request.total_tokens, request.prompt) if self.role == BOTH else request.prompt

    def can_begin(self, request: FastRequest) -> bool:
        """Whether `request`'s prompt may begin: memory is free, and on a colocated instance also a seat."""
        if self.waits_for_seat():
            return False
        return self.kv_needed(request) <= self.free[request.pool]

    def waits_for_seat(self) -> bool:
        """Whether no prompt may begin here, whatever its class of KV, since all seats are taken."""
        return self.role == BOTH and self.seats + self.prefilling >= self.listener.limits.decode_rows

    def begin_prompt(self, request: FastRequest) -> None:
        """Reserves memory for `request`'s prompt and notes the begin of its prefill."""
        self.free[request.pool] -= self.kv_needed(request)
        self.prefilling += 1
        request.began_s = self.clock.now_s

    def take_batch(self) -> list[FastRequest]:
        """Takes the prompts of the next batch from the queue, in order, up to the first one that does not fit.

        Prompts that find their pool full are passed by those of other pools.
        """
        queue, most, tokens = self.queue, self.listener.limits.prefill_tokens, 0
        requests: list[FastRequest] = []
        full, passed = FullPools(self), list[FastRequest]()
        while queue:
            request = queue[0]
            if requests and tokens + request.prompt > most and request.pool not in full:
                break
            if request.pool in full or not self.can_begin(request):
                if full.is_last(request):
                    break
                passed.append(queue.popleft())
                continue
            tokens += request.prompt
            self.begin_prompt(request)
            requests.append(queue.popleft())
        queue.extendleft(reversed(passed))
        return requests

    def finish_prefill(self, requests: list[FastRequest]) -> None:
        """Reports the prompts of a batch as prefilled."""
        for request in requests:
            self.queued_tokens -= request.prompt
            self.prefilling -= 1
            self.listener.on_prefilled(request, self)


class FullPools:
    """The pools of an instance that are full, as far as a look through its queue has found."""

    def __init__(self, instance: FastInstance) -> None:
        self._instance, self._pools = instance, set[int]()

    def __contains__(self, pool: int) -> bool:
        return pool in self._pools

    def is_last(self, request: FastRequest) -> bool:
        """`request` cannot begin. Returns whether no other can either: all pools are full, or all seats taken."""
        self._pools.add(request.pool)
        return len(self._pools) == len(self._instance.free) or self._instance.waits_for_seat()


def prefill_batch(requests: Sequence[FastRequest]) -> StepBatch:
    """The batch of a step that prefills whole prompts."""
    tokens, squares = 0.0, 0.0
    for request in requests:
        tokens += request.prompt * request.work.token
        squares += request.prompt * request.prompt * request.work.square
    return StepBatch(tokens, squares)


def stage_times(cost: CostModel, batch: StepBatch, stages: int) -> tuple[float, float]:
    """Seconds of a step in the first stage (the slowest), and in each other stage; these share the rest equally."""
    step_s = cost.step_s(batch)
    if stages == 1:
        return step_s, 0.0
    first_s = cost.stage_s(batch)
    return first_s, (step_s - first_s) / (stages - 1)
