"""A checkpoint's own `response_template`: read as transformers reads it, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from diptych.errors import ModelError
from services.gateway.parsing.own_template import convert_template
from tests.unit.gateway.parsing.answer_samples import make_markup, read_pieces

THOUGHT = {"open": "<think>", "close": "</think>", "content": "text"}
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "json": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": THOUGHT,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    },
    "tags": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": THOUGHT,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
                },
                "transform": CALL,
            },
            "content": {"content": "text"},
        },
    },
    "gemma": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": CALL,
            },
            "content": {"close": ["<turn|>"], "content": "text"},
        },
    },
    "named": {
        "start_anchor": "<a>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<call>(?P<name>\w+)<sep>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": CALL,
            },
            "content": {"content": "text"},
        },
    },
}
ANSWERS = {
    "json": [
        "just text",
        '<think>\nhm\n</think>\n\nok\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ],
    "tags": [
        "<think>hm</think>ok",
        "<think>hm</think>\n<tool_call>\n<function=f>\n<parameter=a>\nsome words\n</parameter>\n"
        "<parameter=b>\nx y\n</parameter>\n</function>\n</tool_call>",
    ],
    "gemma": [
        "plain",
        '<|channel>thought\nhm<channel|>ok<|tool_call>call:f{a:<|"|>x<|"|>,n:3,o:{k:true,l:[1,<|"|>z<|"|>]}}<tool_call|>',
    ],
    "named": ['so <call>f<sep>{"a": 1}</call><call>g<sep>{}</call>'],
}


def read_message(template: dict[str, Any], text: str) -> dict[str, Any]:
    """What our reader finds, in the form of transformers' message."""
    message: dict[str, Any] = {}
    markup = make_markup(convert_template(template, "the model"))
    thought_name = next(
        (name for name in ("reasoning_content", "thinking") if name in template["fields"]), ""
    )
    for part in read_pieces(markup, list(text)):
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            message.setdefault("tool_calls", []).append({"type": "function", "function": function})
        elif part.kind == "arguments":
            message["tool_calls"][part.call]["function"]["arguments"] += part.text
        else:
            name = "content" if part.kind == "content" else thought_name
            message[name] = message.get(name, "") + part.text
    for one in message.get("tool_calls", ()):
        one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    return message


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in ANSWERS.items() for text in texts]
)
def test_a_template_is_read_as_transformers_reads_it(name: str, text: str) -> None:
    expected = parse_response(text, TEMPLATES[name], prefix="")
    for call in expected.get("tool_calls", ()):
        call.setdefault("type", "function")
    assert read_message(TEMPLATES[name], text) == expected


def test_the_anchor_is_taken() -> None:
    assert convert_template(TEMPLATES["gemma"], "m").anchors == ("<|turn>model\n", "<tool_response|>")


def change_calls(**changes: Any) -> dict[str, Any]:
    calls = TEMPLATES["named"]["fields"]["tool_calls"] | changes
    return {"fields": {"tool_calls": calls}}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("text", "string indices"),
        ({}, "no 'fields'"),
        ({"fields": {"audio": {}}}, "'audio' is not known"),
        (change_calls(open_pattern="(a+)+$"), "more than literals"),
        (change_calls(open_pattern="("), "more than literals"),
        (change_calls(open_pattern=r"<a>(?P<id>\w+)"), "captures id"),
        (change_calls(content="kv-lines"), "'kv-lines'"),
        (change_calls(open_pattern="<a>", transform={"function": {"name": "{content.tool}"}}), "'tool'"),
        ({"fields": {"thinking": {"open_pattern": r"<a>\s*<b>", "close": "x"}}}, "not one literal"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_at_the_start(template: Any, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        convert_template(template, "the model")
    assert reason in caught.value.why
    assert "--tool-call-parser" in (caught.value.fix or "")
    assert len(str(caught.value).splitlines()) <= 6
