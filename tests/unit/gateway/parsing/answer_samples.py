"""Answers of every family as its models write them, and what they say; and how a test reads one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.gateway.parsing.answer_format import AnswerFormat
from services.gateway.parsing.answer_markup import AnswerMarkup
from services.gateway.parsing.answer_parts import AnswerPart, ToolTypes
from services.gateway.parsing.answer_reader import AnswerReader
from services.gateway.parsing.families import choose_format

TOOLS: ToolTypes = {"f": {"a": ("string",), "n": ("integer",)}, "g": {}, "now": {}}
Said = list[tuple[str, str]]


@dataclass(frozen=True)
class AnswerSample:
    """An answer in the format of a family, and what it says: kinds with their texts."""

    calls: str
    reasoning: str
    text: str
    said: Said

    @property
    def answer_format(self) -> AnswerFormat:
        found = choose_format("", self.calls, self.reasoning)
        assert found is not None
        return found


def call(name: str, arguments: str = "{}") -> Said:
    return [("call", name), ("arguments", arguments)]


SAMPLES = [
    AnswerSample(
        "hermes",
        "qwen3",
        '<think>\nhm\n</think>\n\nLet me.\n<tool_call>\n{"name": "f", "arguments": {"a": "}]"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"n": 2}, "name": "g"}\n</tool_call>',
        [("reasoning", "hm"), ("content", "Let me."), *call("f", '{"a": "}]"}'), *call("g", '{"n": 2}')],
    ),
    # A call ends a thought.
    AnswerSample(
        "hermes",
        "qwen3",
        '<think>so <tool_call>{"name": "g", "arguments": null}</tool_call> done',
        [("reasoning", "so"), *call("g"), ("content", "done")],
    ),
    # Arguments within a string, and the form of OpenAI's API.
    AnswerSample(
        "hermes",
        "none",
        '<tool_call>[{"function": {"name": "f", "arguments": "{\\"n\\": 1}"}, "type": "function"}, '
        '{"name": "g"}]}</tool_call>',
        [*call("f", '{"n": 1}'), *call("g")],
    ),
    AnswerSample(
        "qwen3_coder",
        "qwen3",
        "<think></think>ok\n<tool_call>\n<function=f>\n<parameter=a>\nx\n\"y\"\n\n</parameter>\n<parameter=n>\n5\n"
        "</parameter>\n</function>\n</tool_call>\nand\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [
            ("content", "ok"),
            *call("f", '{"a": "x\\n\\"y\\"\\n", "n": 5}'),
            ("content", "\nand"),
            *call("now"),
        ],
    ),
    AnswerSample(
        "llama3_json",
        "none",
        '{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}',
        [*call("f", '{"n": 1}'), *call("g")],
    ),
    AnswerSample("llama3_json", "none", ' {"answer": [3]}', [("content", ' {"answer": [3]}')]),
    AnswerSample(
        "llama3_json", "none", '<|python_tag|>{"name": "f", "parameters": {}}<|python_tag|>print(1)',
        [*call("f"), ("content", "<|python_tag|>print(1)")],
    ),
    AnswerSample(
        "mistral",
        "mistral",
        '[THINK]t[/THINK]hi[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, {"name":"g","arguments":{}}]',
        [("reasoning", "t"), ("content", "hi"), *call("f", '{"n": 1}'), *call("g")],
    ),
    AnswerSample(
        "mistral",
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]now{"z": 2}',
        [*call("f", '{"n": 1}'), *call("g"), *call("now", '{"z": 2}')],
    ),
    AnswerSample(
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n":1}<|call|>',
        [("reasoning", "think"), ("content", "So."), *call("f", '{"n":1}')],
    ),
    AnswerSample(
        "openai",
        "openai_gptoss",
        " to=functions.g<|channel|>commentary<|message|><|call|><|start|>assistant<|channel|>final<|message|>hello",
        [*call("g"), ("content", "hello")],
    ),
    AnswerSample("openai", "openai_gptoss", "no header at all", [("content", "no header at all")]),
    AnswerSample(
        "gemma4",
        "gemma4",
        '<|channel>thought\nhm\n<channel|>ok'
        '<|tool_call>call:f{a:<|"|>x "y"<|"|>,n:3,o:{k:true,l:[1,<|"|>z<|"|>]}}<tool_call|>',
        [
            ("reasoning", "hm"),
            ("content", "ok"),
            *call("f", '{"a":"x \\"y\\"","n":3,"o":{"k":true,"l":[1,"z"]}}'),
        ],
    ),
    AnswerSample(
        "functiongemma",
        "none",
        "<start_function_call>call:f{a:<escape>b{c}<escape>}<end_function_call>",
        call("f", '{"a":"b{c}"}'),
    ),
    AnswerSample(
        "glm45",
        "glm45",
        "<think>t</think>\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n<arg_key>a</arg_key>\n"
        "<arg_value>5 x</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        [("reasoning", "t"), *call("f", '{"n": 5, "a": "5 x"}'), *call("now")],
    ),
    AnswerSample(
        "deepseek_v3",
        "deepseek_r1",
        "x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"n\": 1}\n```"
        "<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("content", "x"), *call("f", '{"n": 1}'), *call("g")],
    ),
    AnswerSample(
        "deepseek_v31",
        "deepseek_r1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        call("f", '{"n": 1}'),
    ),
    AnswerSample(
        "deepseek_v32",
        "deepseek_r1",
        'ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="z" string="false">[5]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [("content", "ok"), *call("f", '{"a": "1", "z": [5]}'), *call("g")],
    ),
    # A tag that is its own end.
    AnswerSample(
        "deepseek_v4",
        "deepseek_r1",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="n" string="false">7</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g"/>\n</｜DSML｜tool_calls>',
        [*call("f", '{"n": 7}'), *call("g")],
    ),
    AnswerSample(
        "deepseek_v41",
        "deepseek_r1",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="a" string="true"> x\n</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        call("f", '{"a": " x\\n"}'),
    ),
    # A text that holds the tags of its own call.
    AnswerSample(
        "qwen3_coder",
        "none",
        "<tool_call>\n<function=f>\n<parameter=a>\nclose </parameter> and </function> or </tool_call>; "
        "open <parameter=a> <tool_call>\n</parameter>\n</function>\n</tool_call>",
        call("f", '{"a": "close </parameter> and </function> or </tool_call>; open <parameter=a> <tool_call>"}'),
    ),
    AnswerSample(
        "glm45",
        "none",
        "<tool_call>f<arg_key>a</arg_key><arg_value>in <tool_call> and </tool_call>; <arg_key>.</arg_value>"
        "</tool_call>",
        call("f", '{"a": "in <tool_call> and </tool_call>; <arg_key>."}'),
    ),
    # Values that are not closed: before another one, before the end of the function, before that of the call.
    AnswerSample(
        "qwen3_coder",
        "none",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=n>\n5\n</function>\n</tool_call>",
        call("f", '{"a": "x", "n": 5}'),
    ),
    AnswerSample(
        "glm45", "none", "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>", call("f", '{"a": "x"}')
    ),
    # A call whose first marker is missing, and words that only name a tool.
    AnswerSample(
        "qwen3_coder",
        "none",
        "Write <function=f> so:\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
        [("content", "Write <function=f> so:"), *call("f", '{"n": 5}')],
    ),
    AnswerSample(
        "tiny",
        "none",
        '<|tool|>f({"n": 1})<|tool|>now()\nmore',
        [*call("f", '{"n": 1}'), *call("now"), ("content", "more")],
    ),
]  # fmt: skip


def make_markup(answer_format: AnswerFormat, tokens: Iterable[str] = ()) -> AnswerMarkup:
    """The format in a vocabulary that has `tokens` as added tokens."""
    ids = {literal: token for token, literal in enumerate(tokens)}
    return AnswerMarkup(answer_format, ids.get)


def read_pieces(markup: AnswerMarkup, pieces: Sequence[str], prefix: str = "") -> list[AnswerPart]:
    """All parts of an answer of marked text that comes in pieces."""
    reader = AnswerReader(markup, prefix, TOOLS)
    parts: list[AnswerPart] = []
    for piece in pieces:
        reader.feed(piece)
        parts += reader.take_parts()
    reader.close()
    return parts + reader.take_parts()


def join_parts(parts: Iterable[AnswerPart]) -> Said:
    """What parts say, however they were cut."""
    said: Said = []
    for part in parts:
        if said and said[-1][0] == part.kind and part.kind != "call":
            said[-1] = part.kind, said[-1][1] + part.text
        else:
            said.append((part.kind, part.text))
    return said
