"""Rates: what is refused, what is counted, what a client is told, and that nothing is counted without limits."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from diptych.failure_statuses import FailureReason
from diptych.keys.named_key import NamedKey, digest_key
from diptych.messages import Output
from diptych.request import BULK_PRIORITY
from services.gateway.keys.key_rates import RATE_HEADERS, format_duration
from services.gateway.keys.named_keys import NamedKeys, tenant_of_name
from services.gateway.keys.rated_backend import CountedSink, RatedBackend, RateMiddleware
from services.gateway.outcomes import EndedSequence, Outcome, OutcomeSink, RequestOutcomes
from tests.unit.gateway.keys.named_file import Backend, Sink, request

TEAM = tenant_of_name("team")
PATH = "/v1/completions"


class World:
    """One named key with limits, and a clock that tests set."""

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self.now_s = 1000.0
        self.keys = NamedKeys([NamedKey("team", digest_key("k" * 20), requests, tokens)], ("p" * 20,))
        self.inner = Backend()
        self.backend = RatedBackend(self.inner, self.keys, lambda: self.now_s)
        found = self.keys.rates_of_tenant(TEAM)
        assert found is not None
        self.rates = found

    def submit(
        self, tenant: str = TEAM, prompt: Any = (1, 2, 3), priority: int = 0, n: int = 1
    ) -> list[Sink]:
        sinks = [Sink() for _ in range(n)]
        self.backend.submit_requests([(request(tenant, prompt, priority), sink) for sink in sinks])
        return sinks

    def refused(self, **asked: Any) -> Any:
        """The failure of a request that is refused."""
        num_before = len(self.inner.submitted)
        [sink] = self.submit(**asked)
        assert len(self.inner.submitted) == num_before
        [failure] = sink.failures
        return failure


def test_requests_are_counted_when_admitted_and_come_back_after_a_minute() -> None:
    world = World(requests=2)
    world.submit(n=4)
    world.now_s += 10
    world.submit()
    failure = world.refused()
    assert (failure.reason, failure.status, failure.code) == (
        FailureReason.RATE_LIMIT_EXCEEDED,
        429,
        "rate_limit_exceeded",
    )
    assert failure.wait_s == pytest.approx(50.0) and failure.client_may_retry
    assert failure.is_clients_fault and not failure.is_overload
    assert "team" not in failure.message and failure.cause == "key team", "the name is for the log"
    world.now_s += failure.wait_s
    assert not world.submit()[0].failures
    assert world.rates.use.requests == 3 and world.rates.use.refused == {"requests": 1, "tokens": 0}


def test_prompts_count_once_and_generated_tokens_as_they_come() -> None:
    world = World(tokens=100)
    prompt = array("I", range(30)).tobytes()
    [first, *_] = world.submit(prompt=memoryview(prompt).cast("I"), n=1)
    sinks = [Sink(), Sink()]
    # Two choices of one prompt: each has a view of its own.
    world.backend.submit_requests([(request(TEAM, memoryview(prompt).cast("I")), sink) for sink in sinks])
    assert world.rates.use.prompt_tokens == 60
    [[_, counted]] = world.inner.submitted[0]
    assert isinstance(counted, CountedSink)
    counted.deliver_output(Output("r", 0, [1] * 50), world.now_s)
    counted.finish_sequence("stop", world.now_s)
    assert first.outputs and first.finished == "stop"
    assert world.rates.use.generated_tokens == 50
    assert world.rates.windows["tokens"].used(world.now_s) == 110
    failure = world.refused(prompt=[1] * 5)
    assert "100 tokens per minute: 0 are left, and 5 are asked for" in failure.message


def test_a_prompt_above_the_limit_learns_that_waiting_does_not_help() -> None:
    world = World(tokens=10)
    failure = world.refused(prompt=[1] * 11)
    assert (failure.status, failure.code, failure.client_may_retry) == (429, "rate_limit_exceeded", False)
    assert not world.submit(prompt=[1] * 10)[0].failures


def test_lines_of_batches_leave_a_quarter_of_each_limit() -> None:
    world = World(requests=8)
    for _ in range(6):
        assert not world.submit(priority=BULK_PRIORITY)[0].failures
    failure = world.refused(priority=BULK_PRIORITY)
    assert failure.client_may_retry
    for _ in range(2):
        assert not world.submit()[0].failures
    world.refused()
    world.now_s += 60
    assert not world.submit(priority=BULK_PRIORITY)[0].failures
    one = World(requests=1)
    assert not one.submit(priority=BULK_PRIORITY)[0].failures, "a small limit serves lines, too"


def test_a_line_whose_name_has_left_the_file_waits() -> None:
    world = World()
    world.keys.replace_keys([NamedKey("other", digest_key("o" * 20))])
    failure = world.refused(priority=BULK_PRIORITY)
    assert failure.reason is FailureReason.RATE_LIMIT_EXCEEDED and failure.client_may_retry
    assert not world.submit(TEAM)[0].failures, "a request that was let in before the change is answered"


def test_keys_without_a_name_have_no_rates() -> None:
    world = World(requests=1)
    for priority in (0, BULK_PRIORITY):
        [plain] = world.keys._plain_tenants
        for _ in range(3):
            assert not world.submit(plain, priority=priority)[0].failures
    assert not any(isinstance(sink, CountedSink) for [[_, sink]] in world.inner.submitted)


class Ends(OutcomeSink):
    def __init__(self) -> None:
        self.ended: list[EndedSequence] = []

    def on_ended(self, ended: EndedSequence) -> None:
        self.ended.append(ended)


def ask(
    world: World, path: str = PATH, tenant: str = TEAM, method: str = "POST", ends: Ends | None = None
) -> Message:
    """The start of the answer to a request that is known to be of `tenant`."""
    starts: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        world.submit(tenant)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            starts.append(message)

    async def receive() -> Message:
        raise AssertionError("the body of a refused request is not read")

    outcomes = RequestOutcomes(sinks=[ends] if ends else [])
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [],
        "state": {"tenant": tenant},
    }
    middleware = RateMiddleware(app, world.keys, outcomes, [PATH], lambda: world.now_s)
    asyncio.run(middleware(scope, receive, send))
    return starts[0]


def test_headers_say_what_is_left_as_openai_does() -> None:
    world = World(requests=60, tokens=1000)
    headers = {name.decode(): value.decode() for name, value in ask(world)["headers"]}
    assert headers["x"] == "y" and set(RATE_HEADERS) <= set(headers)
    assert headers["x-ratelimit-limit-requests"] == "60" and headers["x-ratelimit-remaining-requests"] == "59"
    assert headers["x-ratelimit-limit-tokens"] == "1000" and headers["x-ratelimit-remaining-tokens"] == "997"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"
    for other in (ask(world, path="/v1/models"), ask(world, tenant="other"), ask(World())):
        assert not any(name.startswith(b"x-ratelimit") for name, _ in other["headers"])


def test_a_refusal_comes_before_the_body_and_is_the_clients_fault() -> None:
    world, ends = World(requests=1), Ends()
    ask(world)
    world.now_s += 17.9
    answer = ask(world, ends=ends)
    headers = dict(answer["headers"])
    assert answer["status"] == 429 and len(world.inner.submitted) == 1
    assert headers[b"retry-after"] == b"43" and headers[b"retry-after-ms"] in (b"42100", b"42101")
    assert headers[b"x-ratelimit-remaining-requests"] == b"0" and headers[b"x-should-retry"] == b"true"
    [ended] = ends.ended
    assert ended.checked.outcome is Outcome.NOT_COUNTED and ended.checked.reason == "rate_limit_exceeded"
    assert not ended.is_refused


def test_a_key_without_tokens_is_refused_early_for_the_prompt_that_it_sent_before() -> None:
    world = World(tokens=100)
    world.submit(prompt=[1] * 60)
    world.now_s += 20
    world.submit(prompt=[1] * 40)
    world.refused(prompt=[1] * 80)
    answer = ask(world)
    assert answer["status"] == 429 and dict(answer["headers"])[b"retry-after"] == b"60", (
        "when 80 fit, not when 1 does"
    )


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (0.0004, "0s"), (0.02, "20ms"), (1, "1s"), (6.5, "6.5s"), (60, "1m0s"), (86.25, "1m26.25s")],
)
def test_durations_are_written_as_openai_does(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown
