"""Our sampling parameters as vLLM's: what is left of a request, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diptych.request import Grammar
from tests.unit.vllm_worker.fake_port import FACTS, request
from vllm_worker.port import LoadPlan, PortFacts, PortRefused, PortRequest
from vllm_worker.sampling import build_grammar, build_sampling

BY_POSITION = replace(FACTS, seeds_by_position=True)
CHUNKED = replace(FACTS, chunks_seeded=False)


def build(asked: PortRequest, facts: PortFacts = FACTS, end_id: int | None = 2) -> dict[str, object]:
    return build_sampling(asked, facts, end_id)


def test_everything_is_passed_on() -> None:
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 12,
        "min_p": 0.02,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "max_tokens": 8,
        "seed": 11,
        "logprobs": 4,
        "prompt_logprobs": 2,
    }
    values = build(request(sampling=given | {"logit_bias": {5: -1.0}, "stop_token_ids": (1, 9)}))
    assert {name: values[name] for name in given} == given
    assert values["logit_bias"] == {5: -1.0} and values["stop_token_ids"] == [1, 9]
    assert values["allowed_token_ids"] is None
    assert build(request(sampling={"allowed_token_ids": (4, 7)}))["allowed_token_ids"] == [4, 7]
    assert values["ignore_eos"] is True, "the gateway's end tokens are the only ones"
    assert values["extra_args"] is None


def test_delivered_tokens_reduce_the_limits() -> None:
    left = build(request(output=[1, 2, 3], sampling={"max_tokens": 8, "min_tokens": 5, "prompt_logprobs": 1}))
    assert (left["max_tokens"], left["min_tokens"], left["prompt_logprobs"]) == (5, 2, None)
    assert build(request(output=[1, 2, 3], sampling={"min_tokens": 2}))["min_tokens"] == 0


def test_a_prefill_attempt_generates_one_token() -> None:
    values = build(request(save=True, sampling={"max_tokens": 8, "min_tokens": 5}))
    assert (values["max_tokens"], values["min_tokens"]) == (1, 1)
    assert values["extra_args"] == {
        "kv_transfer_params": {"diptych_key": "r#1", "save": True, "load_slabs": [], "load_tokens": 0}
    }


def test_a_token_that_is_thrown_away_is_not_shaped() -> None:
    shaped = {
        "temperature": 1.0,
        "grammar": Grammar("regex", "a"),
        "stop_token_ids": (4,),
        "presence_penalty": 1.0,
    }
    for asked in (
        request(save=True, defer_first=True, sampling=shaped | {"prompt_logprobs": 3}),
        request(sampling=shaped | {"max_tokens": 0, "prompt_logprobs": 3}),
    ):
        values = build(asked)
        assert (values["temperature"], values["max_tokens"], values["prompt_logprobs"]) == (0.0, 1, 3)
        assert not values.keys() & {"structured_outputs", "seed", "stop_token_ids", "presence_penalty"}


def test_a_load_is_described_and_scores_no_prompt() -> None:
    values = build(request(load=LoadPlan((7, 3), 100), sampling={"prompt_logprobs": 1}))
    assert values["prompt_logprobs"] is None
    assert values["extra_args"] == {
        "kv_transfer_params": {"diptych_key": "r#1", "save": False, "load_slabs": [7, 3], "load_tokens": 100}
    }


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"grammar": Grammar("json_object")}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"temperature": 0.5}, False),
        ({"repetition_penalty": 1.5}, True),
        ({"logit_bias": {1: 2.0}}, True),
        ({"min_tokens": 4}, True),
        ({"allowed_token_ids": (1, 2)}, True),
        ({"bad_words": ((1,), (2,))}, True),
        ({"bad_words": ((1,), (2, 3))}, False),
        ({}, True),
    ],
)
def test_what_vllm_would_continue_with_other_tokens_is_refused(
    changes: dict[str, object], exact: bool
) -> None:
    build(request(sampling=changes))
    begun = request(output=[1], sampling=changes)
    if exact:
        build(begun)
        return
    with pytest.raises(PortRefused) as refused:
        build(begun)
    assert refused.value.code == "internal_error"


def test_noise_by_position_can_be_continued() -> None:
    assert build(request(output=[1], sampling={"temperature": 0.5}), BY_POSITION)["seed"] == 3


def test_seeds_are_refused_where_they_end_vllm() -> None:
    with pytest.raises(PortRefused) as refused:
        build(request(sampling={"temperature": 0.5}), CHUNKED)
    assert refused.value.code == "unsupported_parameter" and "--enable-chunked-prefill" in refused.value.why
    build(request(sampling={"temperature": 0.0}), CHUNKED)
    build(request(save=True, defer_first=True, sampling={"temperature": 0.5}), CHUNKED)


def test_grammars_end_at_the_end_token() -> None:
    values = build(request(sampling={"grammar": Grammar("regex", "a+"), "stop_token_ids": (9,)}))
    assert values["structured_outputs"] == {"regex": "a+"} and values["stop_token_ids"] == [9, 2]
    assert build(request(sampling={"grammar": Grammar("regex", "a+")}), end_id=None)["stop_token_ids"] == []


def test_each_kind_of_grammar_becomes_vllms() -> None:
    assert build_grammar(Grammar("lark", "start: /a/")) == {"grammar": "start: /a/"}
    assert build_grammar(Grammar("choice", '["a","b"]')) == {"choice": ["a", "b"]}
    schema = json.loads(build_grammar(Grammar("json_schema", '{"type":"array"}'))["json"])
    assert schema["type"] == "array" and "whitespace_pattern" in schema["x-guidance"]
    assert json.loads(build_grammar(Grammar("json_object"))["json"])["type"] == "object"
    for bad in (Grammar("json_schema", "{"), Grammar("json_schema", "[]"), Grammar("other", "")):
        with pytest.raises(PortRefused) as refused:
            build_grammar(bad)
        assert refused.value.code == "invalid_grammar"
