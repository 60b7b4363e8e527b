"""How `benchmarks.parsing` replays a public suite: which markers are tokens, and what counts as a difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parsing import read_pieces
from benchmarks.parsing_parts.suite import (
    RecordedOutput,
    find_difference,
    iter_cuts,
    mark_tokens,
    match_places,
    measure_suite,
    same_json,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def record(number: int, text: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"qwen3-hermes/{number}",
        "models": ["Qwen/Qwen3-0.6B"],
        "raw_output": text,
        "tools": [TOOL],
        "tags": [],
        **more,
    }


def expected(content: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"expected": {"content": content, "reasoning_content": None, "tool_calls": list(calls)}}


def write_suite(folder: Path, *records: dict[str, Any]) -> Path:
    (folder / "qwen3-hermes").mkdir()
    family = {
        "reference_models": [
            {"repo": "Qwen/Qwen3-0.6B", "default_generation_prompt": "<|im_start|>assistant\n"}
        ]
    }
    (folder / "qwen3-hermes" / "family.json").write_text(json.dumps(family))
    lines = "\n".join(map(json.dumps, records))
    (folder / "qwen3-hermes" / "a.jsonl").write_text(lines)
    return folder


def test_figures_of_a_suite(tmp_path: Path) -> None:
    called = expected(None, {"name": "f", "arguments": {"a": 1}})
    suite = write_suite(
        tmp_path,
        record(1, CALL, **called),
        record(2, CALL, **expected("another text")),
        record(3, CALL[:-20], tags=["truncated"], expected_error={"reason": "", "accept": ["no_tool_calls"]}),
        record(4, "[f()]", **expected("[f()]")) | {"models": ["meta-llama/Llama-4-Scout"]},
    )
    found = measure_suite(suite, read_pieces)
    assert (found["suite_outputs"], found["suite_read"], found["parser_fail"]) == (4, 3, 1)
    assert found["failed"] == ["qwen3-hermes/2: content"] and found["cut_differs"] == []
    assert list(found["policies"].values()) == [["qwen3-hermes/3"]]
    assert found["other_families"] == {"meta-llama/Llama-4-Scout": 1}


def test_markers_that_are_spelled_are_no_tokens() -> None:
    text = f"say <tool_call> or\n{CALL.replace('1', chr(34) + '</tool_call>' + chr(34))}"
    # A token for the call's own markers alone: the second and the last.
    tokens = [*range(9), 151657, *range(20), 151658]
    output = RecordedOutput("a", "Qwen/Qwen3-0.6B", text, tokens, "", (TOOL,), frozenset(), None, frozenset())
    marked = mark_tokens(output, output.make_markup())
    assert marked.startswith("say <tool_call> or\n") and '"</tool_call>"' in marked
    assert marked.count("tool_call") == 2


def test_places_are_matched_in_order() -> None:
    places = [(0.1, "a"), (0.5, "a"), (0.6, "b"), (0.9, "a")]
    assert match_places([(0.55, "a"), (0.6, "b")], places) == [False, True, True, False]
    assert match_places([(0.0, "b"), (1.0, "a")], places) == [False, False, True, True]
    assert match_places([], places) == [False] * 4
    assert match_places([(0.2, "c")], places) == [False] * 4


def test_every_cut_comes_once() -> None:
    assert list(iter_cuts("abc")) == [["abc"], ["a", "b", "c"], ["a", "bc"], ["ab", "c"]]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        ("1", 1, False),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1], [1, 2], False),
        ([0], [False], False),
    ],
)
def test_json_values_are_compared_with_their_types(one: Any, other: Any, same: bool) -> None:
    assert same_json(one, other) is same


def test_differences_are_named() -> None:
    call = {"name": "f", "arguments": {"a": 1}}

    def differs(said: dict[str, Any], **fields: Any) -> str | None:
        output = RecordedOutput(
            "a",
            "m",
            "the text",
            (),
            "",
            (),
            frozenset(),
            fields.get("expected"),
            frozenset(fields.get("accepts", ())),
        )
        return find_difference({"content": "", "reasoning": "", "tool_calls": []} | said, output)

    want = expected(None, call)
    assert differs({"tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}, **want) is None
    assert differs({"tool_calls": [{"name": "f", "arguments": '{"a": "1"}'}]}, **want) == "arguments"
    assert differs({"tool_calls": [{"name": "f", "arguments": '{"a": 1'}]}, **want) == "arguments are no JSON"
    assert differs({}, **want) == "names of calls"
    assert differs({"content": " x "}, **expected("x")) is None
    assert differs({"reasoning": "x"}, **expected()) == "reasoning"
    assert differs({"tool_calls": [call]}, accepts=["no_tool_calls"]) == "a call"
    assert differs({"content": "the text"}, accepts=["content_passthrough"]) is None
    assert differs({"content": "the"}, accepts=["content_passthrough"]) == "the text is not kept"
