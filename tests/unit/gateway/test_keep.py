"""`diptych.keep`: what is accepted, which boundary and class a request gets, and what its answer tells."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from starlette.types import Message

from diptych.channel.hub import ChannelHub
from diptych.errors import RequestError
from diptych.eviction_report import KeptReport
from diptych.eviction_spec import ADA, FASTGEN, KEEP_ALL, ZAP, KeepSpec
from diptych.messages import Offer, Output, Prefill, Pulled, Step
from router.requests.relay import Relay
from router.workers.kv_classes import ServedClasses
from services.gateway.generation.answer_memory import AnswerMemory
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import ResponseHead
from services.gateway.generation.generation import Generation
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.generation.streaming import GenerationResponse
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.openai.keep_options import choose_keep_class, find_system_end
from services.gateway.openai.resolve import ResolvedRequest, fit_kv_class
from services.gateway.openai.schemas.response_schema import KeepDetails, KvDetails
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.outcomes import RequestOutcomes
from services.gateway.preparation.resolve_body import resolve_body
from tests.support.metric_values import values
from tests.unit.gateway.recorded_channel import Channel, until

RAW, TQ4 = "raw", "tq4.s0"
USER = {"role": "user", "content": "What is it?"}
PROMPT = list(range(5, 205))


def resolve(rules: RequestRules, keep: Any = None, **fields: Any) -> ResolvedRequest:
    """The request of a body for 200 prompt tokens, or of a chat if there are `messages`."""
    route, prompt = ("chat", {}) if "messages" in fields else ("completion", {"prompt": PROMPT})
    more = {} if keep is None else {"diptych": {"keep": keep}}
    body = msgspec.json.encode({"model": "toy", "max_tokens": 1} | prompt | more | fields)
    ask = resolve_body(route, body, Caller(0.0), rules, lambda grammar, field: None)
    assert isinstance(ask, ResolvedRequest)
    return ask


@pytest.mark.parametrize(
    ("keep", "spec"),
    [
        (None, KEEP_ALL),
        (1, KEEP_ALL),
        ({}, KEEP_ALL),
        (0.95, KeepSpec(0.95)),
        ({"threshold": 0.9}, KeepSpec(0.9)),
        ({"threshold": 0.9, "boundary": 128}, KeepSpec(0.9, 128)),
        ({"threshold": 0.9, "boundary": 192}, KeepSpec(0.9, 192)),
        ({"threshold": 0.9, "boundary": 0}, KeepSpec(0.9)),
        ({"threshold": 0.9, "rule": "fastgen"}, KeepSpec(0.9, rule=FASTGEN)),
        ({"threshold": 0.9, "boundary": 64, "rule": "zap"}, KeepSpec(0.9, 64, ZAP)),
        ({"threshold": 1, "rule": "ada"}, KEEP_ALL),
    ],
)
def test_a_request_says_what_it_keeps(rules: RequestRules, keep: Any, spec: KeepSpec) -> None:
    assert resolve(rules, keep).keep == spec


@pytest.mark.parametrize("keep", [0, -0.5, 1.01, "0.95", True, {"threshold": 0}, {"threshold": 2}])
def test_a_threshold_out_of_range_is_a_400(rules: RequestRules, keep: Any) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(rules, keep)
    failure = caught.value.failure
    assert (failure.status, failure.code) == (400, "invalid_value")
    assert str(failure.param).startswith("diptych.keep")


@pytest.mark.parametrize(
    ("boundary", "named"),
    [(100, ["(100)", "64 or 128"]), (1, ["(1)", "0 or 64"]), (256, ["256 tokens", "200 tokens"])],
)
def test_a_boundary_that_is_cut_or_beyond_the_prompt_is_a_400_that_names_both(
    rules: RequestRules, boundary: int, named: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(rules, {"threshold": 0.9, "boundary": boundary})
    failure = caught.value.failure
    assert (failure.status, failure.code, failure.param) == (400, "invalid_value", "diptych.keep.boundary")
    assert all(part in failure.message for part in named)


@pytest.mark.parametrize("rule", ["h2o", "", "Ada", "zap@0123456789abcdef"])
def test_an_unknown_rule_is_a_400_that_names_the_field_and_the_rules(rules: RequestRules, rule: Any) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(rules, {"threshold": 0.9, "rule": rule})
    failure = caught.value.failure
    assert (failure.status, failure.code, failure.param) == (400, "invalid_value", "diptych.keep.rule")
    assert all(name in failure.message for name in ("ada", "fastgen", "zap")), failure.message


def test_a_rule_without_a_threshold_is_a_400_if_the_default_keeps_everything(rules: RequestRules) -> None:
    with pytest.raises(RequestError, match="needs a threshold below 1; the default is 1") as caught:
        resolve(rules, {"rule": "fastgen"})
    assert caught.value.failure.param == "diptych.keep.rule"
    assert resolve(replace(rules, keep_threshold=0.9), {"rule": "fastgen"}).keep.rule == FASTGEN


def test_the_rule_is_zap_where_all_workers_have_its_weights(rules: RequestRules) -> None:
    weights = "zap@0123456789abcdef"
    plain, able = (ServedClasses([RAW], [], [RAW], RAW, some) for some in ((ADA, FASTGEN), (ADA, weights)))
    default, asked = resolve(rules, 0.9), resolve(rules, {"threshold": 0.9, "rule": "zap"})
    assert fit_kv_class(default, plain).keep.rule == ADA
    assert fit_kv_class(default, able).keep.rule == fit_kv_class(asked, able).keep.rule == weights
    assert fit_kv_class(resolve(rules, {"threshold": 0.9, "rule": "ada"}), able).keep.rule == ADA
    with pytest.raises(RequestError) as caught:
        fit_kv_class(asked, plain)
    failure = caught.value.failure
    assert (failure.status, failure.param) == (400, "diptych.keep.rule")
    assert "diptych calibrate" in failure.message and "'ada' or 'fastgen'" in failure.message
    assert fit_kv_class(asked, ServedClasses([], [])).keep.rule == ZAP, "no worker is up yet"


def test_the_shortest_prompt_of_a_request_bounds_its_boundary(rules: RequestRules) -> None:
    keep = {"threshold": 0.9, "boundary": 128}
    with pytest.raises(RequestError, match="which has 100 tokens"):
        resolve(rules, keep, prompt=[PROMPT, PROMPT[:100]])
    assert resolve(rules, keep, prompt=[PROMPT, PROMPT[:128]]).keep.boundary == 128


def test_the_deployments_threshold_counts_where_a_request_gives_none(rules: RequestRules) -> None:
    evicting = replace(rules, keep_threshold=0.91)
    assert resolve(evicting).keep == KeepSpec(0.91)
    assert resolve(evicting, {"boundary": 64}).keep == KeepSpec(0.91, 64)
    assert resolve(evicting, 0.98).keep == KeepSpec(0.98)
    assert not resolve(evicting, 1).keep.evicts


@pytest.mark.parametrize("boundary", [0, 128])
def test_a_boundary_without_a_threshold_is_a_400_if_the_default_keeps_everything(
    rules: RequestRules, boundary: int
) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(rules, {"boundary": boundary})
    failure = caught.value.failure
    assert (failure.status, failure.code, failure.param) == (400, "invalid_value", "diptych.keep.boundary")
    assert "needs a threshold below 1; the default is 1" in failure.message
    assert "'diptych.keep.threshold'" in failure.message
    assert resolve(rules, {"threshold": 1, "boundary": boundary}).keep == KEEP_ALL


def test_the_boundary_of_a_chat_is_the_end_of_its_system_message_in_whole_chunks(rules: RequestRules) -> None:
    system = {"role": "system", "content": "x" * 70}
    developer = {"role": "developer", "content": "y" * 70}
    boundary = {
        name: resolve(rules, 0.9, messages=messages).keep.boundary
        for name, messages in {
            "none": [USER],
            "one": [system, USER],
            "two": [system, developer, USER],
            "short": [{"role": "system", "content": "be brief"}, USER],
            "late": [USER, {"role": "assistant", "content": "a"}, system, USER],
        }.items()
    }
    assert boundary == {"none": 0, "one": 64, "two": 128, "short": 0, "late": 0}
    asked = resolve(rules, {"threshold": 0.9, "boundary": 0}, messages=[system, USER])
    assert asked.keep.boundary == 0
    assert not resolve(rules, messages=[system, USER]).keep.evicts


def test_a_system_message_that_the_template_moves_or_changes_gives_no_boundary() -> None:
    system = {"role": "system", "content": " Be brief. "}
    assert find_system_end([system, USER], "<s>Be brief.</s><u>What is it?</u>") == 12
    assert find_system_end([system, USER], "<u>What is it? Be brief.</u>") == 0
    assert find_system_end([system, USER], "<s>BE BRIEF.</s><u>What is it?</u>") == 0
    assert find_system_end([system], "<s>Be brief.</s>") == 12
    assert find_system_end([USER, system], "<u>What is it?</u><s>Be brief.</s>") == 0


# ---- the class


@pytest.mark.parametrize(
    ("asked", "classes", "chosen"),
    [
        (None, ServedClasses([RAW], [RAW], [RAW], RAW), RAW),
        (RAW, ServedClasses([RAW, TQ4], [RAW], [RAW], TQ4), RAW),
        (None, ServedClasses([RAW, TQ4], [RAW], [RAW], RAW), RAW),
        (None, ServedClasses([RAW], [RAW], [RAW], None), RAW),
        (None, ServedClasses([], []), RAW),
        ("tq4", ServedClasses([], []), "tq4"),
    ],
)
def test_a_request_that_evicts_gets_a_class_in_which_workers_can(
    asked: str | None, classes: ServedClasses, chosen: str
) -> None:
    assert choose_keep_class(asked, classes) == chosen


@pytest.mark.parametrize(
    ("asked", "classes", "named"),
    [
        ("tq4", ServedClasses([RAW, TQ4], [RAW], [RAW], RAW), ["'tq4'", "evict KV of raw", "GPUs"]),
        (None, ServedClasses([RAW, TQ4], [RAW], [RAW], TQ4), ["'tq4.s0'", "evict KV of raw"]),
        (None, ServedClasses([TQ4], [], [], TQ4), ["have KV of tq4.s0", "none of it"]),
        (None, ServedClasses([RAW], [RAW], [], RAW), ["have KV of raw", "none of it", "GPUs"]),
        ("auto", ServedClasses([RAW, TQ4], [RAW], [RAW], RAW), ["does not change", "{'kv': 'raw'}"]),
        (None, ServedClasses([RAW, TQ4], [RAW], [RAW], "auto"), ["does not change", "{'kv': 'raw'}"]),
        (None, ServedClasses([RAW, TQ4], [RAW], [], "auto"), ["have KV of raw and tq4.s0", "none of it"]),
    ],
)
def test_a_class_in_which_workers_cannot_evict_is_a_400_that_names_both(
    asked: str | None, classes: ServedClasses, named: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        choose_keep_class(asked, classes)
    failure = caught.value.failure
    assert (failure.status, failure.code, failure.param) == (400, "unsupported_parameter", "diptych.keep")
    assert all(part in failure.message for part in named)
    assert failure.message.startswith("'diptych.keep' below 1 ")


# ---- the answer

FIRST = KeptReport(30, 100, {"special": 5, "full": 3}, 1)
SECOND = KeptReport(40, 120, {"special": 5, "full": 3}, 2)
# 64 bytes of a token in 8 heads: 8 bytes a row.
HELLO = {
    "kv_classes": {RAW: (64, 4096)},
    "raw_chunk_bytes": 4096,
    "keep_classes": [RAW],
    "keep_rules": (ADA,),
}


def answer(
    rules: RequestRules, stream: bool, reports: bool, kv: str | None = None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The events of an answer that was handed over, or its one body, and the metrics. `kv`: the class it asks for."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    ask = resolve(rules, {"threshold": 0.95, "boundary": 64}, max_tokens=9, **options)
    ask = fit_kv_class(replace(ask, kv=kv), ServedClasses([RAW], [], [RAW], RAW))
    metrics, sent, found = GatewayMetrics(), list[Message](), dict[str, float]()

    async def story() -> None:
        channel = Channel(**HELLO)
        backend = RelayBackend(Relay(), cast(ChannelHub, channel), metrics)
        running = asyncio.create_task(backend.run_tasks())
        await until(lambda: bool(backend.worker_pairs()))
        memory, outcomes = AnswerMemory(1 << 20), RequestOutcomes(None, [metrics])
        now_s = backend.clock()
        generation = Generation(
            "r", ask, rules.tokenizer, backend, metrics, 1 << 20, memory, outcomes,
            arrived_s=now_s, deadline_s=now_s + 60.0,
        )  # fmt: skip
        head = ResponseHead("r", 0, "toy", "fp_0", keep=ask.keep.threshold, keep_rule=ask.keep.rule)
        view = CompletionFormat(head, ask, LogprobJson(rules.tokenizer))
        respond = GenerationResponse(generation, view, set(), stall_s=1.0)

        async def send(message: Message) -> None:
            sent.append(message)

        writing = asyncio.create_task(respond({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await until(lambda: bool(backend.relay.live))
        [order] = [message for _, message in channel.sent if isinstance(message, Prefill)]
        assert (order.keep, order.kv_class) == (KeepSpec(0.95, 64), RAW)
        channel.say("prefill-0", Step([Output("r", 0, [70], kept=FIRST if reports else None)]))
        channel.say("prefill-0", Offer("r", 0, b"ticket", 200, 100))
        await until(lambda: any(name == "decode-0" and hasattr(one, "ticket") for name, one in channel.sent))
        channel.say("decode-0", Pulled("r", 0, "shm", 100, {}))
        kept = SECOND if reports else None
        channel.say("decode-0", Step([Output("r", 0, [71], kept=kept)]))
        channel.say("decode-0", Step([Output("r", 0, [72], finish="length")]))
        await writing
        found.update(values(metrics))
        running.cancel()

    asyncio.run(story())
    body = b"".join(message.get("body", b"") for message in sent).decode()
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")] or [
        json.loads(body)
    ], found


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_what_was_kept_at_the_last_decision(rules: RequestRules, stream: bool) -> None:
    events, found = answer(rules, stream, reports=True)
    assert {event["system_fingerprint"] for event in events} == {"fp_0.keep0.95.ada"}
    assert events[-1]["usage"]["diptych"] == {
        "kv_class": RAW,
        "kv_bytes_per_token": 64,
        "kv_bytes_saved_per_token": 0,
        "kv_reason": "default",
        "keep": {
            "threshold": 0.95,
            "boundary": 64,
            "rule": "ada",
            "kept_rows": 40,
            "all_rows": 120,
            "freed_bytes": 8192,
            "heads": {"special": 5, "full": 3},
        },
    }
    assert found["diptych:kv_pruned_heads_total{policy=special}"] == 5
    assert found["diptych:kv_pruned_heads_total{policy=full}"] == 3
    assert found["diptych:kv_pruned_bytes_total{outcome=kept}"] == 40 * 8
    assert found["diptych:kv_pruned_bytes_total{outcome=dropped}"] == 80 * 8
    assert found["diptych:kv_pruned_freed_bytes_total{}"] == 8192


@pytest.mark.parametrize(("kv", "reason"), [(None, "default"), (RAW, "asked")])
def test_a_class_is_asked_for_only_by_a_request_that_names_it(
    rules: RequestRules, kv: str | None, reason: str
) -> None:
    [body], found = answer(rules, False, reports=True, kv=kv)
    assert body["usage"]["diptych"]["kv_reason"] == reason
    requests = {name: n for name, n in found.items() if name.startswith("diptych:kv_class_requests_total")}
    assert requests == {f"diptych:kv_class_requests_total{{kv_class={RAW},reason={reason}}}": 1}


def test_an_answer_that_ended_before_a_decision_tells_that_nothing_was_dropped(rules: RequestRules) -> None:
    [body], found = answer(rules, False, reports=False)
    keep = body["usage"]["diptych"]["keep"]
    assert (keep["kept_rows"], keep["all_rows"], keep["freed_bytes"], keep["heads"]) == (0, 0, 0, {})
    assert not any(name.startswith("diptych:kv_pruned_heads_total") for name in found)


def test_sequences_of_one_request_are_added_up(rules: RequestRules) -> None:
    ask = resolve(rules, 0.9, n=2, logprobs=0)
    generation = Generation(
        "r", ask, rules.tokenizer, cast(Any, None), GatewayMetrics(), 1 << 20, AnswerMemory(1 << 20),
        arrived_s=0.0, deadline_s=60.0,
    )  # fmt: skip
    assert [stream.kv for stream in generation.streams] == [None, None], "no attempt has begun"
    details = KvDetails(RAW, 64, 0, "asked")
    for stream, report in zip(generation.streams, (FIRST, SECOND), strict=True):
        stream.record_kv_class(RAW, "asked", details)
        stream.record.kv.kept = report
    kv = generation.kv
    assert kv is not None and isinstance(kv.keep, KeepDetails)
    assert (kv.keep.kept_rows, kv.keep.all_rows, kv.keep.heads) == (70, 220, {"special": 10, "full": 6})
