"""The sequences of an HTTP request begin together and fail together, and each of them is counted once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest
from msgspec import UNSET, UnsetType
from starlette.types import Message

from diptych.channel.hub import ChannelHub
from diptych.failure_statuses import RequestFailure
from diptych.messages import Failed, Output, Prefill, Step
from diptych.request import Request
from diptych.slo import Slo
from router.requests.admission import Admission, AdmissionLimits
from router.requests.relay import Relay
from services.gateway.generation.answer_memory import AnswerMemory
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import ResponseHead
from services.gateway.generation.generation import Generation, SequenceSink
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputPiece
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.generation.streaming import GenerationResponse
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.resolve import make_prompt, resolve_completion
from services.gateway.openai.schemas.request_schema import CompletionRequest
from services.gateway.openai.schemas.response_schema import Completion, Usage
from services.gateway.openai.validate import RequestRules
from services.gateway.outcomes import RequestOutcomes
from tests.support.metric_values import values
from tests.unit.gateway.recorded_channel import Channel, until


class Gateway:
    """A relay with silent workers, and generations that run on it."""

    def __init__(self, rules: RequestRules, max_requests: int) -> None:
        self.channel, self.metrics = Channel(), GatewayMetrics(Slo(ttft_s=1.0))
        relay = Relay(admission=Admission(AdmissionLimits(max_requests=max_requests)))
        self.backend = RelayBackend(relay, cast(ChannelHub, self.channel), self.metrics)
        self.outcomes = RequestOutcomes(self.metrics.slo, [self.metrics, self.metrics.history])
        self.rules = rules

    def ask(
        self, name: str, n: int, tenant: str, timeout_s: float = 60.0, own_deadline: bool = False
    ) -> Generation:
        body = msgspec.json.encode({"model": "toy", "prompt": "x", "n": n, "max_tokens": 4})
        asked = parse_body(body, CompletionRequest, 16)
        ask = resolve_completion(asked, [make_prompt([1, 2, 3], "x")], None, self.rules, tenant)
        now_s = self.backend.clock()
        generation = Generation(
            name,
            ask,
            self.rules.tokenizer,
            self.backend,
            self.metrics,
            1 << 20,
            AnswerMemory(1 << 20),
            self.outcomes,
            arrived_s=now_s,
            deadline_s=now_s + timeout_s,
            own_deadline=own_deadline,
        )
        generation.submit_sequences()
        return generation

    @property
    def prefills(self) -> list[str]:
        """The sequences that workers were asked to prefill."""
        return [message.request for _, message in self.channel.sent if isinstance(message, Prefill)]


@pytest.fixture
def gateway(rules: RequestRules) -> Gateway:
    return Gateway(rules, 10)


def test_what_does_not_fit_whole_is_refused_whole_and_counted_once_each(gateway: Gateway) -> None:
    async def story() -> None:
        running = asyncio.create_task(gateway.backend.run_tasks())
        await until(lambda: bool(gateway.backend.worker_pairs()))
        first = gateway.ask("first", 5, "ann")
        assert first.failure is None and len(gateway.prefills) == 5
        second = gateway.ask("second", 8, "ann")
        assert second.failure is not None and second.failure.code == "too_many_requests"
        assert len(gateway.prefills) == 5, "none of the second's sequences was begun"
        assert gateway.backend.relay.admission.in_flight == 5
        found = values(gateway.metrics)
        assert found["diptych:request_failures_total{code=too_many_requests}"] == 8
        assert found["vllm:admission_rejections_total{reason=too_many_requests}"] == 8
        assert found["diptych:slo_requests_total{met=false,objective=ttft}"] == 0, (
            "ann has more than her share"
        )
        assert found["diptych:slo_outcomes_total{outcome=not_counted,reason=too_many_requests}"] == 8
        assert found["diptych:requests_cancelled_total{}"] == 0
        history = gateway.metrics.history.report(gateway.backend.clock(), 0.9)
        assert (sum(history["not_counted"]), sum(history["failed"])) == (8, 0)
        first.cancel_sequences()
        assert gateway.backend.relay.admission.in_flight == 0
        running.cancel()

    asyncio.run(story())


def test_when_one_sequence_fails_all_do_and_nobody_is_said_to_have_left(gateway: Gateway) -> None:
    async def story() -> None:
        running = asyncio.create_task(gateway.backend.run_tasks())
        await until(lambda: bool(gateway.backend.worker_pairs()))
        generation = gateway.ask("g", 3, "ann")
        gateway.channel.say("prefill-0", Step([Output("g.0", 0, [5])]))
        gateway.channel.say("prefill-0", Step([Output("g.1", 0, [5], finish="stop")]))
        await until(lambda: gateway.backend.relay.admission.in_flight == 2)
        gateway.channel.say("prefill-0", Failed("g.0", 0, "internal_error", "it broke"))
        await until(lambda: not gateway.backend.relay.live)
        assert generation.failure is not None and generation.failure.code == "internal_error"
        found = values(gateway.metrics)
        assert found["diptych:request_failures_total{code=internal_error}"] == 3, "the complete one too"
        assert found["diptych:slo_outcomes_total{outcome=missed,reason=internal_error}"] == 3
        assert found["diptych:requests_cancelled_total{}"] == 0
        running.cancel()

    asyncio.run(story())


def test_who_sets_a_deadline_decides_whether_it_was_missed(gateway: Gateway) -> None:
    """The relay ends both; a client's own deadline that is shorter than the SLO is not the service's miss."""

    async def story() -> None:
        running = asyncio.create_task(gateway.backend.run_tasks())
        await until(lambda: bool(gateway.backend.worker_pairs()))
        own = gateway.ask("own", 2, "ann", timeout_s=1e-6, own_deadline=True)
        service = gateway.ask("service", 1, "ann", timeout_s=1e-6)
        await until(lambda: not gateway.backend.relay.live)
        for generation in (own, service):
            assert generation.failure is not None and generation.failure.code == "deadline_exceeded"
        found = values(gateway.metrics)
        assert found["diptych:slo_outcomes_total{outcome=not_counted,reason=short_deadline}"] == 2
        assert found["diptych:slo_outcomes_total{outcome=missed,reason=deadline_exceeded}"] == 1
        assert found["diptych:slo_attainment{objective=ttft}"] == 0.0
        assert found["diptych:offered_requests_total{}"] == 3
        running.cancel()

    asyncio.run(story())


class Scripted:
    """A backend of one sequence, whose reader the test speaks to."""

    def __init__(self) -> None:
        self.reader: SequenceSink | None = None

    def submit_requests(self, arrivals: Sequence[tuple[Request, SequenceSink]]) -> None:
        ((_, self.reader),) = arrivals

    def cancel_request(self, request: str, *others: str) -> None:
        """Nothing runs."""

    stop_request = cancel_request

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        return None


def test_an_end_that_comes_while_a_piece_is_written_loses_nothing(rules: RequestRules) -> None:
    body = msgspec.json.encode({"model": "toy", "prompt": "x", "max_tokens": 9, "stream": True})
    ask = resolve_completion(parse_body(body, CompletionRequest, 16), [make_prompt([1, 2], "x")], None, rules)
    backend, metrics, sent = Scripted(), GatewayMetrics(), list[bytes]()
    generation = Generation(
        "r", ask, rules.tokenizer, backend, metrics, 1 << 20, AnswerMemory(1 << 20), arrived_s=0.0, deadline_s=60.0
    )  # fmt: skip

    class Late(CompletionFormat):
        """When the first piece is written, the rest and the end are on their way."""

        said = False

        def delta_chunk(
            self, choice: int, piece: OutputPiece, used: Usage | UnsetType | None = UNSET
        ) -> Completion:
            if not self.said:
                self.said = True
                asyncio.get_running_loop().call_soon(end)
            return super().delta_chunk(choice, piece, used)

    def end() -> None:
        assert backend.reader is not None
        backend.reader.deliver_output(Output("r", 0, [70], finish="length"), 2.0)
        backend.reader.finish_sequence("length", 2.0)

    async def story() -> None:
        view = Late(ResponseHead("r", 0, "toy", None), ask, LogprobJson(rules.tokenizer))
        respond = GenerationResponse(generation, view, set(), stall_s=1.0)

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))

        running = asyncio.create_task(respond({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await until(lambda: backend.reader is not None)
        assert backend.reader is not None
        backend.reader.deliver_output(Output("r", 0, [69]), 1.0)
        await running

    asyncio.run(story())
    stream_text = b"".join(sent).decode()
    chunks = [json.loads(line[6:]) for line in stream_text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == rules.tokenizer.decode([69, 70]) and len(text) == 2
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "length"
