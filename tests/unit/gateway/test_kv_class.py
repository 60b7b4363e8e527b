"""Answers tell in which class their KV was kept, and requests may insist on the class that there is."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest
from starlette.types import Message

from diptych.channel.hub import ChannelHub
from diptych.errors import RequestError
from diptych.messages import Output, Step
from router.requests.relay import Relay
from services.gateway.generation.answer_memory import AnswerMemory
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import ResponseHead
from services.gateway.generation.generation import Generation
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.generation.streaming import GenerationResponse
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.resolve import ResolvedRequest, check_kv_class, make_prompt, resolve_completion
from services.gateway.openai.schemas.request_schema import CompletionRequest
from services.gateway.openai.validate import RequestRules
from services.gateway.outcomes import RequestOutcomes
from tests.support.metric_values import values
from tests.unit.gateway.recorded_channel import Channel, until

TQ4 = "tq4.s0"
# 64 tokens of 144 bytes; without a codec they would have 1,024 bytes each.
CODED = {"kv_classes": {TQ4: (64, 144 * 64)}, "raw_chunk_bytes": 1024 * 64}


def resolve(rules: RequestRules, **fields: Any) -> ResolvedRequest:
    body = msgspec.json.encode({"model": "toy", "prompt": "x", "max_tokens": 1} | fields)
    return resolve_completion(
        parse_body(body, CompletionRequest, 16), [make_prompt([1, 2], "x")], None, rules
    )


def answer(rules: RequestRules, stream: bool, **hello: Any) -> tuple[dict[str, str], str, dict[str, float]]:
    """Headers and body of one answer by workers that introduce themselves with `hello`, and the metrics."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    ask, metrics, sent = resolve(rules, **options), GatewayMetrics(), list[Message]()
    found: dict[str, float] = {}

    async def story() -> None:
        channel = Channel(**hello)
        backend = RelayBackend(Relay(), cast(ChannelHub, channel), metrics)
        metrics.watch_workers(backend.worker_stats, list, "toy")
        running = asyncio.create_task(backend.run_tasks())
        await until(lambda: bool(backend.worker_pairs()))
        memory, outcomes = AnswerMemory(1 << 20), RequestOutcomes(None, [metrics])
        now_s = backend.clock()
        generation = Generation(
            "r", ask, rules.tokenizer, backend, metrics, 1 << 20, memory, outcomes,
            arrived_s=now_s, deadline_s=now_s + 60.0,
        )  # fmt: skip
        view = CompletionFormat(ResponseHead("r", 0, "toy", "fp_0"), ask, LogprobJson(rules.tokenizer))
        respond = GenerationResponse(generation, view, set(), stall_s=1.0)

        async def send(message: Message) -> None:
            sent.append(message)

        writing = asyncio.create_task(respond({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await until(lambda: bool(backend.relay.live))
        channel.say("prefill-0", Step([Output("r", 0, [70], finish="length")]))
        await writing
        found.update(values(metrics))
        running.cancel()

    asyncio.run(story())
    headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return headers, b"".join(message.get("body", b"") for message in sent).decode(), found


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_how_its_kv_was_coded(rules: RequestRules, stream: bool) -> None:
    headers, body, found = answer(rules, stream, **CODED)
    assert headers["x-diptych-kv-class"] == TQ4
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    chunks = chunks or [json.loads(body)]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {f"fp_0.{TQ4}"}
    assert chunks[-1]["usage"]["diptych"] == {
        "kv_class": TQ4,
        "kv_bytes_per_token": 144,
        "kv_bytes_saved_per_token": 880,
        "kv_reason": "default",
    }
    assert found[f"diptych:kv_class_requests_total{{kv_class={TQ4},reason=default}}"] == 1
    tokens = chunks[-1]["usage"]["total_tokens"]
    assert found[f"diptych:kv_saved_bytes_total{{kv_class={TQ4},where=pool}}"] == 880 * tokens
    assert found[f"diptych:kv_class_chunk_bytes{{kv_class={TQ4},role=decode,worker=decode-0}}"] == 144 * 64


@pytest.mark.parametrize("hello", [{}, {"kv_classes": {"raw": (64, 4096)}, "raw_chunk_bytes": 4096}])
def test_an_answer_without_a_codec_says_nothing_of_it(rules: RequestRules, hello: dict[str, Any]) -> None:
    headers, body, found = answer(rules, False, **hello)
    assert "x-diptych-kv-class" not in headers and "diptych" not in body
    assert json.loads(body)["system_fingerprint"] == "fp_0"
    assert found["diptych:kv_class_requests_total{kv_class=raw,reason=default}"] == 1


def test_a_class_that_the_router_chose_is_named_even_if_it_is_raw(rules: RequestRules) -> None:
    classes = {TQ4: (64, 1024), "raw": (64, 4096)}
    hello = {"kv_classes": classes, "raw_chunk_bytes": 4096, "kv_auto": True, "kv_losses": {TQ4: 0.5}}
    headers, body, found = answer(rules, False, **hello)
    assert "x-diptych-kv-class" not in headers and json.loads(body)["system_fingerprint"] == "fp_0"
    assert json.loads(body)["usage"]["diptych"] == {
        "kv_class": "raw",
        "kv_bytes_per_token": 64,
        "kv_bytes_saved_per_token": 0,
        "kv_reason": "quality",
    }
    assert found["diptych:kv_class_requests_total{kv_class=raw,reason=quality}"] == 1


@pytest.mark.parametrize("kv", ["tq4", "tq4.s0"])
def test_a_request_may_name_the_class_that_there_is(rules: RequestRules, kv: str) -> None:
    ask = resolve(rules, diptych={"kv": kv})
    assert ask.kv == kv and resolve(rules, diptych={}).kv is None
    check_kv_class(ask, [TQ4])
    check_kv_class(ask, ["raw", TQ4])
    check_kv_class(resolve(rules, diptych={}), [TQ4])
    check_kv_class(resolve(rules, diptych={"kv": "raw"}), ["raw"])
    check_kv_class(resolve(rules, diptych={"kv": "tq4"}), [])  # no worker is up: it waits


def test_auto_needs_a_class_within_the_budget(rules: RequestRules) -> None:
    ask = resolve(rules, diptych={"kv": "auto"})
    check_kv_class(ask, [TQ4, "raw"], ["raw"])
    with pytest.raises(RequestError, match="--kv-quality-budget"):
        check_kv_class(ask, [TQ4], [])


@pytest.mark.parametrize(
    ("kv", "served"),
    [
        ("int8", [TQ4]),
        ("raw", [TQ4]),
        ("tq4", ["raw"]),
        ("tq4.s1", [TQ4]),
        ("auto", [TQ4]),
        ("nuq4-1%.g4@aaaaaaaaaaaaaaaa", ["raw", "nuq4-1%.g4@bbbbbbbbbbbbbbbb"]),
    ],
)
def test_any_other_class_is_a_400_that_names_both(rules: RequestRules, kv: str, served: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check_kv_class(resolve(rules, diptych={"kv": kv}), served)
    failure = caught.value.failure
    assert (failure.status, failure.code, failure.param) == (400, "unsupported_parameter", "diptych.kv")
    assert f"'{kv}'" in failure.message and all(name in failure.message for name in served)


def test_unknown_options_are_refused_by_name(rules: RequestRules) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(rules, diptych={"kv_class": TQ4})
    assert caught.value.failure.param == "diptych.kv_class"
