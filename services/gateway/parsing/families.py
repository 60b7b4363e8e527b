"""The formats of model families, and how a chat template tells which one is a model's.

Names are those of vLLM's parsers. A format of calls and one of reasoning may come from different families.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.gateway.parsing.answer_format import AnswerFormat, load_format

CHATML_ANCHOR = "<|im_start|>assistant\n"
DEEPSEEK_ANCHOR = "<｜Assistant｜>"
_DEEPSEEK_CALL = {
    "open": "<｜tool▁call▁begin｜>",
    "close": "<｜tool▁call▁end｜>",
    "wrap": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
    "content": "named",
}


def _dsml_calls(block: str, space: str = "") -> dict[str, Any]:
    """Calls of DeepSeek's markup language; `space` stands before its tags."""
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return {
        "open": f"{begin}{block}>",
        "close": f"{end}{block}>",
        "content": "tagged",
        "content_args": {
            "name": [f'{begin}invoke name="', ['">', '"/>']],
            "empty": '"/>',
            "key": [f'{begin}parameter name="', '">'],
            "value": ["", f"{end}parameter>"],
            "end": f"{end}invoke>",
            "string": '" string="',
            "marks": ["｜DSML｜"],
        },
    }


TOOL_CALLS: dict[str, dict[str, Any]] = {
    "hermes": {"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
    "qwen3_coder": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "tagged",
        "content_args": {
            "name": ["<function=", [">"]],
            "key": ["<parameter=", ">"],
            "value": ["", "</parameter>"],
            "end": "</function>",
            "trim": "\n",
        },
        "bare_open": "<function=",
    },
    "llama3_json": {"open": "<|python_tag|>", "content": "json", "bare": True},
    "mistral": {
        "open": "[TOOL_CALLS]",
        "content": "json-or-named",
        "content_args": {"separator": ["[ARGS]", "{"], "id": "[CALL_ID]", "marks": ["[ARGS]", "[CALL_ID]"]},
    },
    "openai": {"open": [], "content": "json"},
    "gemma4": {
        "open": "<|tool_call>",
        "close": "<tool_call|>",
        "content": "gemma",
        "content_args": {"quote": '<|"|>', "marks": ['<|"|>']},
    },
    "functiongemma": {
        "open": "<start_function_call>",
        "close": "<end_function_call>",
        "content": "gemma",
        "content_args": {"quote": "<escape>", "marks": ["<escape>"]},
    },
    "glm45": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "tagged",
        "content_args": {
            "name": ["", ["\n", "<arg_key>", "</tool_call>"]],
            "key": ["<arg_key>", "</arg_key>"],
            "value": ["<arg_value>", "</arg_value>"],
            "marks": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        },
    },
    "deepseek_v3": _DEEPSEEK_CALL
    | {
        "content_args": {
            "prefix": "function<｜tool▁sep｜>",
            "separator": ["\n```json\n"],
            "suffix": "\n```",
            "marks": ["<｜tool▁sep｜>"],
        }
    },
    "deepseek_v31": _DEEPSEEK_CALL
    | {"content_args": {"separator": ["<｜tool▁sep｜>"], "marks": ["<｜tool▁sep｜>"]}},
    "deepseek_v32": _dsml_calls("function_calls"),
    "deepseek_v4": _dsml_calls("tool_calls"),
    "deepseek_v41": _dsml_calls("calls", " "),
    "tiny": {"open": "<|tool|>", "close": ")", "content": "named", "content_args": {"separator": ["("]}},
}
_THINK = {"open": "<think>", "close": "</think>"}
REASONING: dict[str, dict[str, Any]] = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "mistral": {"open": "[THINK]", "close": "[/THINK]"},
    "gemma4": {"open": "<|channel>thought\n", "close": "<channel|>", "marks": ["<|channel>"]},
    # The channel "analysis".
    "openai_gptoss": {"open": [], "close": []},
}
# Texts that a chat template has, all of them, and what this tells; the first row that fits counts.
_CALL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<｜DSML｜tool_calls>",), "deepseek_v4"),
    (("<｜DSML｜ calls>",), "deepseek_v41"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|start_header_id|>", "parameters"), "llama3_json"),
    (("'<|tool|>' ~ call.function.name",), "tiny"),
)
_REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<|channel>",), "gemma4"),
    (("</think>",), "qwen3"),
)
_ANCHORS = (
    CHATML_ANCHOR,
    DEEPSEEK_ANCHOR,
    "<|start|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|assistant|>",
    "<|turn>model\n",
    "<start_of_turn>model\n",
    "[/INST]",
)


def choose_format(
    template: str, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> AnswerFormat | None:
    """The format of answers to prompts that a chat template renders; None: they are plain text.

    `tool_parser` and `reasoning_parser` name formats in place of what the template tells; "none" is none.
    """
    calls = tool_parser or _first_sign(_CALL_SIGNS, template)
    reasoning = reasoning_parser or _first_sign(_REASONING_SIGNS, template)
    has_channels = calls == "openai" or reasoning == "openai_gptoss"
    fields: dict[str, Any] = {}
    if calls in TOOL_CALLS:
        fields["tool_calls"] = TOOL_CALLS[calls] | {"writing": calls}
    if reasoning in REASONING:
        fields["reasoning"] = REASONING[reasoning]
    if not fields:
        return None
    found = load_format({"fields": fields, "channels": has_channels, "short_ids": calls == "mistral"})
    return replace(found, anchors=tuple(anchor for anchor in _ANCHORS if anchor.strip() in template))


def _first_sign(signs: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str:
    """The name of the first row whose texts are all in the template."""
    return next((name for texts, name in signs if all(text in template for text in texts)), "none")
