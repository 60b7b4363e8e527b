"""Workers of a deployment that this process drives over the channel itself: relay and hub, but no gateway, HTTP or Ray.

Token ids go in and come out, with their log-probabilities and what the relay says about each hand-off. The workers are
those that `diptych serve` would start with the same arguments, each a process under its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from diptych.channel.keys import make_keys
from diptych.failure_statuses import RequestFailure
from diptych.messages import Logprob, Output, SwitchRole, WorkerStats
from diptych.request import Request, RequestStage, SamplingParams, Tenancy
from engine.model.checkpoint import tokenizer_identity
from router.effects import AttemptRetried, KvMoved, StageEntered, TelemetryEffect
from router.routing.handoff_cost import HandoffCost
from services.gateway.__main__ import build_relay, make_hub
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.schemas.response_schema import KvDetails
from services.host.supervision.supervisor import Supervisor
from tests.support.deployment import make_part, plan_deployment, wait_part_ready
from tests.support.waiting import comes_true

T = TypeVar("T")
READY_S, ANSWER_S, STOP_S = 120.0, 300.0, 2.0
# Statistics that are 0 in every worker at rest.
BOOKS = ("slabs_used", "leases", "staging_bytes", "running", "waiting")
# Those of workers whose pool is on a device.
DEVICE_BOOKS = (*BOOKS, "buffer_used", "buffer_leased", "copies_in_flight", "offers_waiting")


@dataclass(slots=True, eq=False)
class ChannelAnswer:
    """The answer to one request, a `SequenceSink`. Times are on the monotonic clock."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    # When each token came.
    times_s: list[float] = field(default_factory=list)
    moved: list[KvMoved] = field(default_factory=list)
    retries: list[AttemptRetried] = field(default_factory=list)
    # When each stage was entered last.
    entered_s: dict[RequestStage, float] = field(default_factory=dict)
    finish: str = ""
    failure: RequestFailure | None = None
    begun_s: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    def deliver_output(self, output: Output, now_s: float) -> None:
        """Take the new tokens of a step."""
        self.tokens += output.tokens
        self.logprobs += output.logprobs or []
        self.times_s += [now_s] * len(output.tokens)

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None:
        """Keep what is said of stages, hand-offs and attempts that were given up."""
        match effect:
            case KvMoved():
                self.moved.append(effect)
            case AttemptRetried():
                self.retries.append(effect)
            case StageEntered():
                self.entered_s[effect.stage] = now_s

    def record_kv_class(self, kv_class: str, reason: str, details: KvDetails | None) -> None:
        """Of no interest here."""

    def finish_sequence(self, reason: str, now_s: float) -> None:
        """The answer is complete."""
        self.finish = reason
        self.ended.set()

    def fail_sequence(self, failure: RequestFailure) -> None:
        """The request has failed."""
        self.failure = failure
        self.ended.set()

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite without one."""
        return self.times_s[0] - self.begun_s if self.times_s else math.inf


class NoHandoffCost(HandoffCost):
    """The messages of a hand-off always count as free."""

    def record_handoff(self, whole_s: float, parts: Mapping[str, float]) -> None:
        """Learn nothing."""


class ChannelDeployment:
    """The workers of `diptych serve ARGUMENTS`, until the `with` block ends.

    A worker that was ready for `steady_s` seconds before it died is started again without delay.

    Raises:
        AssertionError: a worker does not start, or its workers do not become ready to serve together.
    """

    def __init__(self, *arguments: str, steady_s: float = 30.0) -> None:
        self._steady_s = steady_s
        self._arguments = ("--max-queue-wait-s", "600", *arguments)
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-channel-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="channel", daemon=True)
        self._parts: dict[str, Supervisor] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> ChannelDeployment:
        self.spec = plan_deployment(self._arguments, Path(self._folder.name))
        make_keys(self.spec.gateway.keys_dir)
        self._thread.start()
        self._parts = {
            worker.worker: make_part(
                worker.worker, self.spec.worker_module, worker, self.spec, self._steady_s
            )
            for worker in self.spec.workers
        }
        try:
            self._call(self._open)
            for part in self._parts.values():
                part.start()
            for part in self._parts.values():
                wait_part_ready(part)
            gateway = self.spec.gateway
            self._num_pairs = max(1, gateway.num_prefill) * gateway.num_decode
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        with ThreadPoolExecutor(len(self._parts)) as threads:
            list(threads.map(lambda part: part.stop(STOP_S), self._parts.values()))
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(READY_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()

    @property
    def workers(self) -> list[str]:
        """The names of all workers."""
        return list(self._parts)

    def wait_ready(self) -> None:
        """Until every prefill worker can hand over to every decode worker. Raises AssertionError."""

        def all_linked() -> bool:
            return len(self._call(self._backend.worker_pairs)) == self._num_pairs

        assert comes_true(all_linked, READY_S) is not None, (
            f"no pair after {READY_S:.0f} s: {self.log_tails()}"
        )

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, scope: str = "", kv_class: str = ""
    ) -> ChannelAnswer:
        """Send a request. Those of another `scope` share no prefix with it."""
        name = f"request-{next(self._numbers)}"
        request = Request(
            name, list(prompt), sampling, time.monotonic() + ANSWER_S, tenancy=Tenancy(scope=scope)
        )
        if kv_class:
            request.kv_class = kv_class
        answer = ChannelAnswer(request)
        self._call(lambda: self._backend.submit_requests([(request, answer)]))
        return answer

    def cancel(self, answer: ChannelAnswer) -> None:
        """The client of this request leaves."""
        self._call(lambda: self._backend.cancel_request(answer.request.id))

    def pid(self, worker: str) -> int:
        """The number of a worker's process."""
        return self._parts[worker].status().pid

    def kill(self, worker: str) -> None:
        """Kill a worker's process; its supervisor starts another one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(worker), signal.SIGKILL)

    @contextlib.contextmanager
    def paused(self, worker: str) -> Iterator[None]:
        """Let a worker's process stand still until the block ends."""
        pid = self.pid(worker)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def roles(self) -> dict[str, str]:
        """The roles of the workers that are there, by name."""
        return {one.worker: one.role for one in self._call(lambda: list(self._backend.worker_stats()))}

    def switch_role(self, worker: str, role: str) -> None:
        """Let a worker change its role; returns when it serves in it. Raises AssertionError if it does not."""
        self._call(lambda: self._backend.send_order(worker, SwitchRole(role)))
        changed = comes_true(lambda: self.roles().get(worker) == role, READY_S)
        assert changed is not None, f"{worker} is no {role} worker after {READY_S:.0f} s: {self.log_tails()}"

    def wait_stage(self, stage: RequestStage, role: str, within_s: float) -> str:
        """Wait until a request is in `stage`; returns its worker of this role. Empty if none is in time."""

        def find_worker() -> str:
            for state in self._backend.relay.live.values():
                if state.request.stage is stage and state.pair is not None:
                    return (state.pair.prefill if role == "prefill" else state.pair.decode) or ""
            return ""

        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if worker := self._call(find_worker):
                return worker
        return ""

    def ticket(self, answer: ChannelAnswer) -> bytes:
        """The ticket with which the KV of a request is offered now; empty if there is none."""
        state = self._call(lambda: self._backend.relay.live.get(answer.request.id))
        return state.ticket if state is not None else b""

    def source(self, answer: ChannelAnswer) -> str:
        """The prefill worker of a request now; empty if there is none."""
        state = self._call(lambda: self._backend.relay.live.get(answer.request.id))
        return (state.source or "") if state is not None else ""

    def pull_ahead(self) -> None:
        """From now on KV is pulled while it is computed, even where the messages for that cost more than it gains."""

        def set_cost() -> None:
            self._backend.relay.attempts.handoff_cost = NoHandoffCost(0.0)

        self._call(set_cost)

    def stats(self) -> dict[str, WorkerStats]:
        """The latest statistics of the workers that are there."""
        return {one.worker: one.stats for one in self._call(lambda: list(self._backend.worker_stats()))}

    def held(self, books: Sequence[str] = BOOKS) -> dict[str, Any]:
        """Whatever is not 0 in the books of the workers, and requests that are open; empty at rest."""
        found: dict[str, Any] = {
            f"{name}.{book}": getattr(stats, book)
            for name, stats in self.stats().items()
            for book in books
            if getattr(stats, book, 0)
        }
        still_open = self._call(lambda: len(self._backend.relay.live))
        return found | ({"open": still_open} if still_open else {})

    def wait_rest(self, within_s: float, books: Sequence[str] = BOOKS) -> dict[str, Any]:
        """Wait until nothing is held; what is held after `within_s` seconds."""
        comes_true(lambda: not self.held(books), within_s)
        return self.held(books)

    def log_tails(self, num_lines: int = 15) -> str:
        """The last lines of each worker's log."""
        tails = {one.name: one.read_text(errors="replace") for one in sorted(self.spec.logs.glob("*.log"))}
        return "\n".join(
            f"--- {name}\n" + "\n".join(text.splitlines()[-num_lines:])
            for name, text in tails.items()
            if text
        )

    def _call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread, where relay and hub live."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(READY_S)

    def _open(self) -> None:
        gateway = self.spec.gateway
        self._hub = make_hub(gateway)
        relay = build_relay(gateway, tokenizer_identity(gateway.model, gateway.revision))
        self._backend = RelayBackend(relay, self._hub, GatewayMetrics(gateway.slo))
        self._hub.open()
        self._tasks = self._loop.create_task(self._backend.run_tasks())

    async def _close(self) -> None:
        if hasattr(self, "_tasks"):
            self._tasks.cancel()
            await asyncio.wait([self._tasks])
            self._hub.close()


def wait_answers(answers: Sequence[ChannelAnswer], within_s: float = ANSWER_S) -> int:
    """Wait until all have ended; returns how many have not after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    return sum(not answer.ended.wait(max(0.0, deadline_s - time.monotonic())) for answer in answers)
