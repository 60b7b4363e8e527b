"""Every way in which a request can end leaves each of its sequences with one outcome: met, missed, or not counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
import pytest
from starlette.types import Message

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import Output
from diptych.request import Request
from diptych.slo import Slo
from services.gateway.generation.answer_memory import MIN_READ_S, AnswerMemory
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import ResponseHead
from services.gateway.generation.generation import Generation, SequenceSink
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.streaming import GenerationResponse
from services.gateway.http.connection import ClientStalled
from services.gateway.http.error_response import SHUTTING_DOWN
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.resolve import make_prompt, resolve_completion
from services.gateway.openai.schemas.request_schema import CompletionRequest
from services.gateway.openai.validate import RequestRules
from services.gateway.outcomes import RequestOutcomes
from tests.unit.gateway.outcome_watcher import Watcher

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
SEQUENCES = 3
TEXT = 69  # a token with visible text
# One for all tests, since making it is slow.
METRICS = GatewayMetrics(SLO)


class Backend:
    """Sequences that do what the test says. `cancelled` are those that were given up."""

    def __init__(self) -> None:
        self.sinks: dict[str, SequenceSink] = {}
        self.cancelled: list[str] = []
        self.refusal: RequestFailure | None = None

    def submit_requests(self, asked: Sequence[tuple[Request, SequenceSink]]) -> None:
        self.sinks = {request.id: sink for request, sink in asked}
        if self.refusal is not None:
            for sink in self.sinks.values():
                sink.fail_sequence(self.refusal)

    def cancel_request(self, request: str, *others: str) -> None:
        self.cancelled += request, *others

    def stop_request(self, request: str) -> None:
        """No sequence here has stop strings."""

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        return None


class Exchange:
    """One HTTP request of three sequences. Its clock stands at `now_s`; the request came at 0 s."""

    def __init__(self, rules: RequestRules, stream: bool, max_bytes: int, deadline_s: float | None) -> None:
        self.now_s, self.watcher = 0.2, Watcher()
        outcomes = RequestOutcomes(SLO, [self.watcher, METRICS], clock=lambda: self.now_s)
        fields = {"model": "toy", "prompt": "x", "n": SEQUENCES, "max_tokens": 9, "stream": stream}
        asked = parse_body(msgspec.json.encode(fields), CompletionRequest, 16)
        ask = resolve_completion(asked, [make_prompt([1, 2], "x")], None, rules)
        self.backend, self.memory = Backend(), AnswerMemory(1 << 20, lambda: self.now_s)
        self.generation = Generation(
            "r", ask, rules.tokenizer, self.backend, METRICS, max_bytes, self.memory, outcomes, arrived_s=0.0,
            deadline_s=600.0 if deadline_s is None else deadline_s, own_deadline=deadline_s is not None,
        )  # fmt: skip
        self.view = CompletionFormat(ResponseHead("r", 0, "toy", None), ask, LogprobJson(rules.tokenizer))
        self.open: set[Generation] = set()
        self.gone, self.may_write = asyncio.Event(), asyncio.Event()
        self.may_write.set()
        self.write_error: Exception | None = None
        self.written: list[Message] = []

    async def respond(self) -> None:
        response = GenerationResponse(self.generation, self.view, self.open, stall_s=1.0)
        await response({"type": "http"}, self._receive, self._send)

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.write_error is not None:
            raise self.write_error
        await self.may_write.wait()
        self.written.append(message)

    # ---- what may happen to it

    def deliver(self, now_s: float = 0.3, count: int = 1, sequences: int = SEQUENCES) -> None:
        """`count` tokens come for each of the first `sequences`, and are written at once."""
        self.now_s = now_s
        for each in self.generation.streams:
            # Writers use the real clock, which the test does not set.
            each.record.first_written_s = each.record.first_written_s or now_s
        for name, sink in [*self.backend.sinks.items()][:sequences]:
            sink.deliver_output(Output(name, 0, [TEXT] * count), now_s)

    def finish(self, now_s: float = 0.4, sequences: int = SEQUENCES) -> None:
        self.now_s = now_s
        for sink in [*self.backend.sinks.values()][:sequences]:
            sink.finish_sequence("length", now_s)

    def fail(self, reason: FailureReason) -> None:
        [*self.backend.sinks.values()][-1].fail_sequence(RequestFailure(reason, "as the test says"))


def counted_so_far() -> tuple[float, float]:
    """Sequences offered, and those with an outcome, in the metrics of all tests."""
    totals: dict[str, float] = {}
    for metric in (METRICS.offered, METRICS.slos.outcomes):
        for one in (sample for family in metric.collect() for sample in family.samples):
            totals[one.name] = totals.get(one.name, 0.0) + one.value
    return totals["diptych:offered_requests_total"], totals["diptych:slo_outcomes_total"]


async def settle() -> None:
    """All tasks have done what they can."""
    for _ in range(60):
        await asyncio.sleep(0)


def run_exchange(
    rules: RequestRules,
    story: Callable[[Exchange, asyncio.Task[None]], Awaitable[None]],
    stream: bool,
    max_bytes: int = 1 << 20,
    deadline_s: float | None = None,
    refusal: RequestFailure | None = None,
) -> Counter[tuple[str, str]]:
    """Run a request through `story`; returns its outcomes, of which every sequence has exactly one."""

    async def run() -> Exchange:
        exchange = Exchange(rules, stream, max_bytes, deadline_s)
        exchange.backend.refusal = refusal
        responding = asyncio.create_task(exchange.respond())
        await settle()
        await story(exchange, responding)
        async with asyncio.timeout(30):
            await asyncio.wait([responding])
        if not responding.cancelled():
            responding.exception()
        assert not exchange.open and not exchange.memory.held_bytes
        return exchange

    before = counted_so_far()
    exchange = asyncio.run(run())
    ended = exchange.watcher.ended
    assert [id(record) for record in exchange.watcher.arrived] == [
        id(stream.record) for stream in exchange.generation.streams
    ]
    assert Counter(id(one.record) for one in ended) == Counter(id(one) for one in exchange.watcher.arrived)
    offered, counted = counted_so_far()
    assert (offered - before[0], counted - before[1]) == (SEQUENCES, SEQUENCES)
    return exchange.watcher.counts


def all_of(outcome: str, reason: str) -> Counter[tuple[str, str]]:
    return Counter({(outcome, reason): SEQUENCES})


both_forms = pytest.mark.parametrize("stream", [False, True])


@pytest.mark.parametrize("reason", FailureReason)
def test_every_failure_in_every_phase(rules: RequestRules, reason: FailureReason) -> None:
    failure = RequestFailure(reason, "as the test says")
    expected = all_of("not_counted" if failure.is_clients_fault else "missed", failure.code)

    async def waiting(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.fail(reason)

    async def decoding(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.deliver()
        await settle()
        exchange.fail(reason)

    async def one_is_complete(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.deliver()
        exchange.finish(sequences=1)
        await settle()
        exchange.fail(reason)

    async def no_more(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        """It failed when it was submitted."""

    for stream in (False, True):
        for story in (waiting, decoding, one_is_complete):
            assert run_exchange(rules, story, stream) == expected
        assert run_exchange(rules, no_more, stream, refusal=failure) == expected


@both_forms
@pytest.mark.parametrize(
    ("first_s", "last_s", "outcome", "reason"),
    [
        (None, 0.9, "not_counted", "left_early"),
        (None, 1.1, "missed", "left_late"),
        (0.5, 0.6, "not_counted", "left_early"),
        (0.5, 0.9, "missed", "left_late"),
        (1.2, 1.25, "missed", "left_late"),
    ],
)
def test_a_client_that_leaves(
    rules: RequestRules, first_s: float | None, last_s: float, outcome: str, reason: str, stream: bool
) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        if first_s is not None:
            exchange.deliver(first_s)
            await settle()
            exchange.deliver(first_s + 0.05)
        exchange.now_s = last_s
        exchange.gone.set()

    assert run_exchange(rules, story, stream) == all_of(outcome, reason)


@both_forms
def test_a_client_that_leaves_when_all_tokens_are_there_and_not_written(
    rules: RequestRules, stream: bool
) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.may_write.clear()
        exchange.deliver(count=2)
        exchange.finish()
        await settle()
        exchange.now_s = 50.0
        exchange.gone.set()

    assert run_exchange(rules, story, stream) == all_of("not_counted", "left_early")


@both_forms
def test_an_answer(rules: RequestRules, stream: bool) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.deliver()
        exchange.finish()

    assert run_exchange(rules, story, stream) == all_of("met", "answered")


@both_forms
def test_a_reader_that_stalls(rules: RequestRules, stream: bool) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.write_error = ClientStalled()
        exchange.deliver()
        exchange.finish()
        await settle()

    assert run_exchange(rules, story, stream) == all_of("not_counted", "slow_reader")


@both_forms
def test_an_answer_that_waits_for_its_reader_while_others_need_its_memory(
    rules: RequestRules, stream: bool
) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.deliver(0.3)
        await settle()
        exchange.may_write.clear()
        exchange.deliver(0.35)
        exchange.finish()
        await settle()
        written, exchange.now_s = len(exchange.written), 0.4 + MIN_READ_S
        with suppress(RequestError):
            exchange.memory.hold_bytes("", 1 << 20)
        await settle()
        exchange.memory.hold_bytes("", -(1 << 20))
        assert not exchange.open and len(exchange.written) == written
        exchange.gone.set()

    assert run_exchange(rules, story, stream) == all_of("not_counted", "slow_reader")


def test_a_stream_that_floods_its_reader(rules: RequestRules) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.deliver(0.3)
        await settle()
        exchange.may_write.clear()
        exchange.deliver(0.31, count=2)
        await settle()
        exchange.deliver(0.32, count=200)
        exchange.may_write.set()

    assert run_exchange(rules, story, True, max_bytes=400) == all_of("not_counted", "slow_reader")


@both_forms
@pytest.mark.parametrize(
    ("deadline_s", "outcome", "reason"),
    [
        (0.01, "not_counted", "short_deadline"),
        (2.0, "missed", "deadline_exceeded"),
        (None, "missed", "deadline_exceeded"),
    ],
)
def test_a_deadline(
    rules: RequestRules, deadline_s: float | None, outcome: str, reason: str, stream: bool
) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.now_s = 2.1
        exchange.fail(FailureReason.DEADLINE_EXCEEDED)

    assert run_exchange(rules, story, stream, deadline_s=deadline_s) == all_of(outcome, reason)


@both_forms
def test_a_shutdown_in_order_and_one_at_once(rules: RequestRules, stream: bool) -> None:
    async def in_order(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.deliver()
        await settle()
        exchange.generation.fail_request(SHUTTING_DOWN)

    async def at_once(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.deliver()
        await settle()
        responding.cancel()

    for story in (in_order, at_once):
        assert run_exchange(rules, story, stream) == all_of("missed", "server_shutting_down")


@both_forms
def test_a_fault_of_the_gateway_itself(rules: RequestRules, stream: bool) -> None:
    async def story(exchange: Exchange, responding: asyncio.Task[None]) -> None:
        exchange.write_error = ZeroDivisionError()
        exchange.deliver()
        exchange.finish()

    assert run_exchange(rules, story, stream) == all_of("missed", "internal_error")
