"""The relay driven over a channel: losses that the channel tells, refusals before a body is read, and the books."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import cast

from diptych.channel.hub import ChannelHub
from diptych.failure_statuses import RequestFailure
from diptych.messages import Abort, Logprob, Output, Step
from diptych.request import Request, SamplingParams
from router.effects import TelemetryEffect
from router.requests.admission import Admission, AdmissionLimits
from router.requests.relay import Relay
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.request_log import RequestLog, RequestLogFile
from services.gateway.openai.schemas.response_schema import KvDetails
from tests.support.metric_values import values
from tests.unit.gateway.recorded_channel import WAIT_S, Channel, until


class Client:
    """A reader that keeps what it hears."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: RequestFailure | None = None

    def deliver_output(self, output: Output, now_s: float) -> None:
        self.tokens += output.tokens

    def record_effect(self, effect: TelemetryEffect, now_s: float) -> None: ...

    def record_kv_class(self, kv_class: str, reason: str, details: KvDetails | None) -> None: ...

    def finish_sequence(self, reason: str, now_s: float) -> None: ...

    def fail_sequence(self, failure: RequestFailure) -> None:
        self.error = failure


def ask(backend: RelayBackend, name: str) -> Client:
    client = Client()
    request = Request(name, [1, 2], SamplingParams(max_tokens=4, seed=0), backend.clock() + WAIT_S)
    backend.submit_requests([(request, client)])
    return client


def test_a_closed_connection_is_a_loss_within_a_tick(tmp_path: Path) -> None:
    async def story() -> None:
        channel, metrics = Channel(), GatewayMetrics()
        log = RequestLogFile(str(tmp_path / "log"))
        relay = Relay(local_prefill="never", recovery_s=0.0)
        backend = RelayBackend(relay, cast(ChannelHub, channel), metrics, request_log=RequestLog(log))
        running = asyncio.create_task(backend.run_tasks())
        await until(lambda: bool(backend.worker_pairs()))
        client = ask(backend, "a")
        channel.say("prefill-0", Step([Output("a", 0, [5])]))
        channel.say("prefill-0", Step([Output("nobody", 0, [5])]))
        await until(lambda: bool(relay.late_messages))
        channel.closed = ["prefill-0", "stranger"]
        await until(lambda: client.error is not None)
        assert client.tokens == [5] and client.error is not None
        assert (client.error.status, client.error.code) == (503, "worker_lost")
        assert client.error.retry_after_s is not None, "recovery failed: come back later"
        await until(lambda: values(metrics).get("diptych:gateway_late_messages_total{kind=Output}") == 1.0)
        running.cancel()
        log.close()
        found = values(metrics)
        assert found["diptych:migrated_streams_total{code=worker_lost}"] == 1.0
        assert found["diptych:queued_requests{}"] == 0.0

    asyncio.run(story())
    events = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    assert [one["reason"] for one in events if one["event"] == "down"] == ["its connection is closed"]
    assert [one["worker"] for one in events if one["event"] == "tokens"] == ["prefill-0"]
    assert [one["outcome"] for one in events if one["event"] == "end"] == ["failed"]


def test_who_would_be_refused_anyway_is_refused_before_the_body_is_read() -> None:
    async def story() -> None:
        channel = Channel()
        relay = Relay(admission=Admission(AdmissionLimits(max_requests=2)))
        backend = RelayBackend(relay, cast(ChannelHub, channel), GatewayMetrics())
        running = asyncio.create_task(backend.run_tasks())
        await until(lambda: bool(backend.worker_pairs()))
        ask(backend, "a")
        assert backend.find_refusal(1, "") is None
        error = backend.find_refusal(2, "")
        assert error is not None and (error.status, error.code) == (429, "too_many_requests")
        assert error.kind == "rate_limit_error" and error.client_may_retry and error.retry_after_s is not None
        ask(backend, "b")
        late = ask(backend, "c")
        assert late.error is not None and late.error.status == 429
        backend.cancel_request("a")
        assert backend.find_refusal(1, "") is None
        assert ("prefill-0", Abort("a", 0)) in channel.sent
        running.cancel()

    asyncio.run(story())


def test_a_scored_prompt_that_comes_in_pieces_is_delivered_whole() -> None:
    backend = RelayBackend(Relay(), cast(ChannelHub, Channel()), GatewayMetrics())
    scores: list[Logprob | None] = [None, *(Logprob(token, -1.0, []) for token in range(9))]
    assert backend._join_prompt_logprobs(Output("r", 1, [], prompt_logprobs=scores[:4])) is None
    assert backend._join_prompt_logprobs(Output("q", 1, [7])) == Output("q", 1, [7])
    assert backend._join_prompt_logprobs(Output("r", 1, [], prompt_logprobs=scores[4:6])) is None
    whole = backend._join_prompt_logprobs(Output("r", 1, [5], prompt_logprobs=scores[6:]))
    assert whole == Output("r", 1, [5], prompt_logprobs=scores)
    assert backend._join_prompt_logprobs(Output("r", 1, [], prompt_logprobs=scores[:4])) is None
    again = Output("r", 2, [5], prompt_logprobs=scores)  # another attempt begins anew
    assert backend._join_prompt_logprobs(again) == again
