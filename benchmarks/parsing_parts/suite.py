"""Outputs of models that the public suite `canitoolcall` has recorded, with what a right reader finds in them.

Its files have the ids of each output's tokens, but not the vocabularies; the ids of markers that are one token are
listed here. Where a marker's text comes more often than its token, it is also spelled, and the places in the two
sequences tell which of them are tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.openai.schemas.request_schema import FunctionTool
from services.gateway.openai.tools import ToolPlan
from services.gateway.parsing.answer_markup import AnswerMarkup
from services.gateway.parsing.families import choose_format

# By the beginning of a model's name: the formats of its calls and of its thoughts.
PARSERS = {
    "Qwen/Qwen3-Coder": ("qwen3_coder", "none"),
    "Qwen/Qwen3.": ("qwen3_coder", "qwen3"),
    "Qwen/Qwen3-4B-Instruct": ("hermes", "none"),
    "Qwen/Qwen3-": ("hermes", "qwen3"),
    "mistralai/Magistral-Small-2506": ("mistral", "qwen3"),
    "mistralai/": ("mistral", "mistral"),
    "openai/gpt-oss": ("openai", "openai_gptoss"),
    "google/gemma-4": ("gemma4", "gemma4"),
    "zai-org/GLM": ("glm45", "glm45"),
    "deepseek-ai/DeepSeek-V3-": ("deepseek_v3", "none"),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek_v31", "deepseek_v3"),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek_v32", "deepseek_v3"),
    "deepseek-ai/DeepSeek-V4-": ("deepseek_v4", "deepseek_v3"),
    "deepseek-ai/DeepSeek-V4.1": ("deepseek_v41", "deepseek_v3"),
    "meta-llama/Llama-3": ("llama3_json", "none"),
}
_TEKKEN = {"[TOOL_CALLS]": 9, "[ARGS]": 32, "[CALL_ID]": 33}
_TEKKEN_THINK = _TEKKEN | {"[THINK]": 34, "[/THINK]": 35}
_DEEPSEEK_THINK = {"<think>": 128798, "</think>": 128799}
_DEEPSEEK_CALL = {
    "<｜tool▁calls▁begin｜>": 128806,
    "<｜tool▁calls▁end｜>": 128807,
    "<｜tool▁call▁begin｜>": 128808,
    "<｜tool▁call▁end｜>": 128809,
    "<｜tool▁sep｜>": 128814,
}


def _glm_tokens(first: int) -> dict[str, int]:
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>", "", "", "<arg_key>", "</arg_key>")
    found = {name: first + i for i, name in enumerate((*names, "<arg_value>", "</arg_value>"))}
    return {name: token for name, token in found.items() if name}


# By the beginning of a model's name: the markers that are one token.
MARKER_TOKENS: dict[str, dict[str, int]] = {
    "Qwen/Qwen3.": {"<tool_call>": 248058, "</tool_call>": 248059, "<think>": 248068, "</think>": 248069},
    "Qwen/Qwen3-": {"<tool_call>": 151657, "</tool_call>": 151658, "<think>": 151667, "</think>": 151668},
    "mistralai/Mistral-7B": {"[TOOL_CALLS]": 5},
    "mistralai/Magistral-Small-2506": _TEKKEN,
    "mistralai/Devstral-Small-2507": _TEKKEN,
    "mistralai/Mistral-Small-3.2": _TEKKEN,
    "mistralai/": _TEKKEN_THINK,
    "openai/gpt-oss": {
        "<|return|>": 200002,
        "<|constrain|>": 200003,
        "<|channel|>": 200005,
        "<|start|>": 200006,
        "<|end|>": 200007,
        "<|message|>": 200008,
        "<|call|>": 200012,
    },
    "google/gemma-4": {
        "<|tool_call>": 48, "<tool_call|>": 49, '<|"|>': 52, "<|channel>": 100, "<channel|>": 101,
    },
    "zai-org/GLM-4": _glm_tokens(151350),
    "zai-org/GLM-5": _glm_tokens(154841),
    "deepseek-ai/DeepSeek-V3-": _DEEPSEEK_CALL,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_CALL | _DEEPSEEK_THINK,
    "deepseek-ai/DeepSeek-V3.2": {"｜DSML｜": 128793} | _DEEPSEEK_THINK,
    "deepseek-ai/DeepSeek-V4": {"｜DSML｜": 128825, "<think>": 128821, "</think>": 128822},
    "meta-llama/Llama-3": {"<|python_tag|>": 128010},
}  # fmt: skip


@dataclass(frozen=True)
class RecordedOutput:
    """An output. `expected` is what it says. Without it, it is cut or malformed, and `accepts` is what may be read."""

    id: str
    model: str
    text: str
    tokens: Sequence[int]
    # What the prompt had written of the answer, and before.
    prompt: str
    tools: Sequence[Mapping[str, Any]]
    tags: frozenset[str]
    expected: Mapping[str, Any] | None
    accepts: frozenset[str]

    @property
    def parsers(self) -> tuple[str, str] | None:
        """The formats of its calls and thoughts; None: there are none of its model."""
        return next((found for begin, found in PARSERS.items() if self.model.startswith(begin)), None)

    @property
    def token_of(self) -> dict[str, int]:
        """The markers that are one token of its model."""
        return next((ids for begin, ids in MARKER_TOKENS.items() if self.model.startswith(begin)), {})

    def make_markup(self) -> AnswerMarkup:
        """How its model's answers are read. It must have `parsers`."""
        assert self.parsers is not None
        answer_format = choose_format(self.prompt, *self.parsers)
        assert answer_format is not None
        shown = answer_format if self.tools else answer_format.without_calls()
        return AnswerMarkup(shown, self.token_of.get)

    def parameter_types(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """The types of its tools' parameters, by tool."""
        functions = [tool.get("function", tool) for tool in self.tools]
        shown = [FunctionTool(one["name"], None, one.get("parameters") or {}) for one in functions]
        return ToolPlan(shown, shown, "auto", True).types


def load_suite(folder: Path) -> list[RecordedOutput]:
    """All outputs of the suite's folder `fixtures`."""
    found = []
    for family_file in sorted(folder.glob("*/family.json")):
        family = json.loads(family_file.read_text(encoding="utf-8"))
        prompts = {one["repo"]: one.get("default_generation_prompt") for one in family["reference_models"]}
        for path in sorted(family_file.parent.glob("*.jsonl")):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [_read_output(json.loads(line), prompts) for line in lines if line.strip()]
    return found


def _read_output(record: Mapping[str, Any], prompts: Mapping[str, str | None]) -> RecordedOutput:
    model = record["models"][0]
    return RecordedOutput(
        record["id"],
        model,
        record["raw_output"],
        record.get("output_token_ids") or (),
        record.get("generation_prompt") or prompts.get(model) or "",
        record["tools"],
        frozenset(record["tags"]),
        record.get("expected"),
        frozenset((record.get("expected_error") or {}).get("accept", ())),
    )


def mark_tokens(output: RecordedOutput, markup: AnswerMarkup) -> str:
    """The output as marked text: markers that are tokens in it as their characters, what spells them as text."""
    known = {
        literal: token
        for literal, token in output.token_of.items()
        if markup.markers.token_of(literal) is not None
    }
    if not known:
        return output.text
    if not output.tokens:
        return markup.markers.mark_text(output.text)
    pattern = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))))
    spelled = list(pattern.finditer(output.text))
    names = {token: literal for literal, token in known.items()}
    tokens = [
        (at / len(output.tokens), names[token]) for at, token in enumerate(output.tokens) if token in names
    ]
    places = [(one.start() / len(output.text), one[0]) for one in spelled]
    chosen = match_places(tokens, places)
    pieces, end = [], 0
    for one, is_token in zip(spelled, chosen, strict=True):
        pieces += [output.text[end : one.start()], markup.markers.mark_text(one[0]) if is_token else one[0]]
        end = one.end()
    return "".join([*pieces, output.text[end:]])


def match_places(tokens: Sequence[tuple[float, str]], places: Sequence[tuple[float, str]]) -> list[bool]:
    """Which of `places` are `tokens`: in the same order, with the same names, and as near by as can be."""
    if [name for _, name in tokens] == [name for _, name in places]:
        return [True] * len(places)
    # The least distance, and which places were taken, for the first so many tokens and places.
    best: list[tuple[float, list[bool]] | None] = [(0.0, [])] + [None] * len(tokens)
    for at, name in places:
        for used in range(len(tokens), -1, -1):
            before, kept = best[used - 1] if used else None, best[used]
            options = [] if kept is None else [(kept[0], [*kept[1], False])]
            if used and before is not None and tokens[used - 1][1] == name:
                options.append((before[0] + abs(tokens[used - 1][0] - at), [*before[1], True]))
            best[used] = min(options, key=lambda option: option[0], default=None)
    found = best[-1]
    return [False] * len(places) if found is None else found[1]


def find_difference(said: Mapping[str, Any], output: RecordedOutput) -> str | None:
    """How what was read differs from what the output says; None: it does not."""
    if output.expected is None:
        if said["tool_calls"]:
            return "a call"
        is_kept = said["content"].strip() == output.text.strip()
        return None if "no_tool_calls" in output.accepts or is_kept else "the text is not kept"
    names = {"content": "content", "reasoning": "reasoning_content"}
    for ours, theirs in names.items():
        if said[ours].strip() != (output.expected.get(theirs) or "").strip():
            return ours
    calls = output.expected.get("tool_calls") or []
    if [call["name"] for call in said["tool_calls"]] != [call["name"] for call in calls]:
        return "names of calls"
    for found, call in zip(said["tool_calls"], calls, strict=True):
        try:
            value = json.loads(found["arguments"])
        except ValueError:
            return "arguments are no JSON"
        if not same_json(value, call["arguments"]):
            return "arguments"
    return None


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same; 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


# Why an output is read otherwise than the suite says.
POLICIES = {
    "gemma4/sglang-text-around-call": "whitespace beside a call belongs to its markup",
    "deepseek/vllm-v3-malformed-missing-brace": "arguments stream as they are written; no grammar allows these",
    "gpt-oss/llamacpp-builtin-python-recipient": "what is sent to a tool that the request does not have is a thought",
    "mistral/llamacpp-ministral3-marker-in-reasoning": "a call ends the thought that it stands in",
}
CUT_POLICY = "a call that is cut is shown as far as it came, in an answer that ends for `length`"


def find_policy(difference: str, output: RecordedOutput) -> str | None:
    """Why a difference is meant to be; None: it is not."""
    if "truncated" in output.tags and difference in ("a call", "names of calls"):
        return CUT_POLICY
    return POLICIES.get(output.id)


def iter_cuts(text: str) -> Iterator[list[str]]:
    """The text in one piece, in single characters, and in two pieces at every cut."""
    yield [text]
    yield list(text)
    for cut in range(1, len(text)):
        yield [text[:cut], text[cut:]]


def measure_suite(folder: Path, read_pieces: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The figures of the suite. `read_pieces` takes a markup, a prefix, tools and pieces of marked text."""
    outputs = load_suite(folder)
    failed, cut, others = list[str](), list[str](), Counter[str]()
    policies: dict[str, list[str]] = {}
    for output in outputs:
        if output.parsers is None:
            others[output.model] += 1
            continue
        markup = output.make_markup()
        tools = output.parameter_types() if output.tools else None
        prefix, text = markup.find_prefix(output.prompt), mark_tokens(output, markup)
        whole, *streamed = (read_pieces(markup, prefix, tools, pieces) for pieces in iter_cuts(text))
        if any(said != whole for said in streamed):
            cut.append(output.id)
        difference = find_difference(whole, output)
        if difference is not None and (why := find_policy(difference, output)) is not None:
            policies.setdefault(why, []).append(output.id)
        elif difference is not None:
            failed.append(f"{output.id}: {difference}")
    return {
        "suite_outputs": len(outputs),
        "suite_read": len(outputs) - others.total(),
        "parser_fail": len(failed) + len(cut),
        "failed": failed,
        "cut_differs": cut,
        "policies": policies,
        "other_families": dict(others),
    }
