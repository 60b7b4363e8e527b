"""How families write calls of tools, for the grammar that binds models to it (`engine.sampling.tool_grammar`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.sampling.tool_grammar import CallSyntax, Markup
from services.gateway.parsing.answer_format import CHANNEL, MESSAGE, START
from services.gateway.parsing.answer_markup import AnswerMarkup

_DEEPSEEK_OUTER = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]


def _write_dsml(block: str, space: str = "") -> dict[str, Any]:
    """Calls of DeepSeek's markup language; `space` stands before its tags."""
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return {
        "opener": "",
        "outer": [f"{begin}{block}>\n", f"{end}{block}>"],
        "begin": f'{begin}invoke name="',
        "name_end": '">\n',
        "end": f"{end}invoke>\n",
        "style": "tagged",
        "key": [f'{begin}parameter name="', '"'],
        "flags": [' string="true">', ' string="false">'],
        "value": ["", f"{end}parameter>\n"],
    }


# The fields of `CallSyntax` as text. Without an opener a call begins with that of the format.
WRITING: dict[str, dict[str, Any]] = {
    "hermes": {
        "begin": '\n{"name": "',
        "name_end": '", "arguments": ',
        "end": "}\n</tool_call>",
        "join": "\n",
    },
    "qwen3_coder": {
        "begin": "\n<function=",
        "name_end": ">\n",
        "end": "</function>\n</tool_call>",
        "join": "\n",
        "style": "tagged",
        "key": ["<parameter=", ">\n"],
        "value": ["", "\n</parameter>\n"],
    },
    "llama3_json": {
        "opener": "",
        "begin": '{"name": "',
        "name_end": '", "parameters": ',
        "end": "}",
        "join": "; ",
    },
    "mistral": {"begin": "", "name_end": "[ARGS]", "end": ""},
    # The first models, which have no token [ARGS].
    "mistral_list": {"begin": '[{"name": "', "name_end": '", "arguments": ', "end": "}]"},
    "openai": {
        "opener": f"{CHANNEL}commentary to=functions.",
        "begin": "",
        "name_end": f" <|constrain|>json{MESSAGE}",
        "end": "",
        "thought": [f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant"],
        "text_begin": f"{CHANNEL}final{MESSAGE}",
    },
    "gemma4": {
        "begin": "call:",
        "name_end": "",
        "end": "<tool_call|>",
        "style": "gemma",
        "quote": '<|"|>',
    },
    "functiongemma": {
        "begin": "call:",
        "name_end": "",
        "end": "<end_function_call>",
        "style": "gemma",
        "quote": "<escape>",
    },
    "glm45": {
        "begin": "",
        "name_end": "\n",
        "end": "</tool_call>",
        "join": "\n",
        "style": "tagged",
        "key": ["<arg_key>", "</arg_key>\n"],
        "value": ["<arg_value>", "</arg_value>\n"],
    },
    "deepseek_v3": {
        "outer": _DEEPSEEK_OUTER,
        "begin": "function<｜tool▁sep｜>",
        "name_end": "\n```json\n",
        "end": "\n```<｜tool▁call▁end｜>",
        "join": "\n",
    },
    "deepseek_v31": {
        "outer": _DEEPSEEK_OUTER,
        "begin": "",
        "name_end": "<｜tool▁sep｜>",
        "end": "<｜tool▁call▁end｜>",
    },
    "deepseek_v32": _write_dsml("function_calls"),
    "deepseek_v4": _write_dsml("tool_calls"),
    "deepseek_v41": _write_dsml("calls", " "),
    "tiny": {"begin": "", "name_end": "(", "end": ")"},
}
MANY = ("outer", "key", "value", "flags", "thought")


def choose_syntax(markup: AnswerMarkup) -> CallSyntax | None:
    """How the model writes calls, in its vocabulary; None: it is not known."""
    calls = markup.format.calls
    if calls is None or calls.writing not in WRITING:
        return None
    name = calls.writing
    if name == "mistral" and markup.markers.token_of("[ARGS]") is None:
        name = "mistral_list"
    written: Mapping[str, Any] = {"opener": (calls.opens or ("",))[0], **WRITING[name]}
    fields: dict[str, Any] = {}
    for field, text in written.items():
        if field == "style":
            fields[field] = text
        elif field in MANY:
            fields[field] = tuple(split_marks(markup, part) for part in text)
        else:
            fields[field] = split_marks(markup, text)
    return CallSyntax(**fields)


def split_marks(markup: AnswerMarkup, text: str) -> Markup:
    """Text as literals and the ids of markers that are tokens."""
    token_of_mark = {mark: token for token, mark in markup.mark_of.items()}
    parts: list[str | int] = []
    for char in markup.markers.mark_text(text):
        if char in token_of_mark:
            parts.append(token_of_mark[char])
        elif parts and isinstance(parts[-1], str):
            parts[-1] += char
        else:
            parts.append(char)
    return tuple(parts)
