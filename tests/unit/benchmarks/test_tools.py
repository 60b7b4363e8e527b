"""What `benchmarks.tools` compares: streams as they were joined, times per token, and a model with thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tool_parts.killed import WAYS, StreamedAnswer, find_part, plan_rounds
from benchmarks.tool_parts.paces import compare_rounds, make_body, pace_of
from benchmarks.tool_parts.thinking_tiny import write_thinking_model
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.tokenization.tokenizer import GatewayTokenizer


def chunk(**delta: object) -> dict[str, object]:
    return {"id": "chatcmpl-1", "choices": [{"delta": delta, "finish_reason": None, "logprobs": None}]}


def read(*events: Mapping[str, Any]) -> StreamedAnswer:
    answer = StreamedAnswer()
    for event in events:
        answer.add_event(event)
    return answer


def call(arguments: str, **first: object) -> dict[str, object]:
    return chunk(tool_calls=[{"index": 0, **first, "function": {"name": "f", "arguments": arguments}}])


def test_the_cut_of_a_stream_does_not_count_but_its_order_does() -> None:
    one = read(chunk(reasoning="a"), chunk(reasoning="b"), call("", id="x"), call('{"a'), call('":1}'))
    other = read(chunk(reasoning="ab"), call("", id="y"), call('{"a":1}'))
    assert one.said() == other.said() and one.id == "chatcmpl-1"
    assert one.events == [["reasoning", "ab"], ["call", 0, "f"], ["arguments 0", '{"a":1}']]
    assert (one.pieces["thought"], one.pieces["call"]) == (2, 2)
    assert (
        read(chunk(content="b"), chunk(reasoning="a")).said()
        != read(chunk(reasoning="a"), chunk(content="b")).said()
    )
    assert (
        read(chunk(content="b"), {"error": {"code": "x"}, "type": "error"}).said()
        != read(chunk(content="b")).said()
    )


def test_events_of_the_other_routes_are_joined_too() -> None:
    def delta(text: str) -> dict[str, object]:
        return {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": text},
        }

    start = {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 3}}}
    answer = read(start, delta('{"a'), delta('": 1}'), {"type": "content_block_stop", "index": 1})
    assert answer.id == "msg_1" and answer.pieces["call"] == 2
    assert answer.events[1:] == [["input_json_delta 1", '{"a": 1}'], ["content_block_stop", 1, None]]
    made = read(
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "a"},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "b"},
    )
    assert made.id == "resp_1" and made.events[-1] == ["response.reasoning_text.delta 0", "ab"]


def test_parts_have_the_names_of_all_routes() -> None:
    kinds = ("arguments 0", "input_json_delta 1", "response.function_call_arguments.delta 2")
    assert {find_part(kind) for kind in kinds} == {"call"}
    kinds = ("reasoning", "thinking_delta 0", "response.reasoning_text.delta 0")
    assert {find_part(kind) for kind in kinds} == {"thought"}
    assert {way.within for way in WAYS.values()} == {"call", "thought"}


def test_workers_are_killed_alone_and_together() -> None:
    one, other, both = ["decode-0"], ["decode-1"], ["decode-0", "decode-1"]
    assert plan_rounds(1) == [one] and plan_rounds(3) == [one, both]
    assert plan_rounds(7) == [one, both, other, both, one]
    for kills in range(12):
        assert sum(map(len, plan_rounds(kills))) == kills


def test_the_pace_is_that_of_the_tokens_behind_the_first() -> None:
    # The role, three tokens, the finish reason.
    assert pace_of([0.0, 1.0, 1.5, 2.0, 2.0], 3) == pytest.approx(0.5)
    found = compare_rounds([2.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    assert (found["tool_tpot_ratio"], found["tool_tpot_range"], found["rounds"]) == (1.5, [1.0, 2.0], 3)


def test_prompts_with_and_without_a_tool_are_about_as_long() -> None:
    with_tool, without = make_body(3, True), make_body(3, False)
    assert "tools" in with_tool and "tools" not in without
    written = len(str(with_tool["messages"])) + len(str(with_tool["tools"]))
    assert written == pytest.approx(len(str(without["messages"])), rel=0.15)


def test_the_model_with_thoughts_begins_one_and_can_end_it(tmp_path: Path) -> None:
    write_thinking_model(tmp_path / "model")
    tokenizer = GatewayTokenizer.load(str(tmp_path / "model"))
    markup = ModelMarkup.load(tokenizer, reasoning_parser="qwen3")
    assert markup is not None and markup.call_opener is not None and len(markup.thought_ends) == 1
    prompt = tokenizer.render_conversation([{"role": "user", "content": "hi"}], True, False, None, None)
    assert markup.calls.find_prefix(prompt).endswith("<think>\n")
