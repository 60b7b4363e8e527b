"""Which format a chat template tells."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.parsing.answer_format import load_format
from services.gateway.parsing.families import REASONING, TOOL_CALLS, choose_format

# Fragments of the families' own templates.
TEMPLATES = {
    ("hermes", "qwen3"): "{{- '<|im_start|>assistant\\n<think>\\n</think>' }}<tool_call>",
    ("hermes", "none"): "<|im_start|>assistant\\n<tool_call>\\n{\"name\": ",
    ("qwen3_coder", "qwen3"): "<tool_call>\\n<function=x>\\n<parameter=y></think>",
    ("llama3_json", "none"): "<|start_header_id|>assistant<|end_header_id|>\\n\\n {\"name\": , \"parameters\": ",
    ("mistral", "mistral"): "[TOOL_CALLS] [THINK]",
    ("openai", "openai_gptoss"): "<|start|>assistant<|channel|>final<|message|>",
    ("gemma4", "gemma4"): "<|turn>model\\n<|channel>thought<|tool_call>call:",
    ("functiongemma", "none"): "<start_of_turn>model\\n<start_function_call>",
    ("glm45", "qwen3"): "<|assistant|></think><tool_call><arg_key>",
    ("deepseek_v3", "qwen3"): "<｜Assistant｜><｜tool▁call▁begin｜>```json</think>",
    ("deepseek_v31", "qwen3"): "<｜Assistant｜></think><｜tool▁call▁begin｜>",
    ("deepseek_v32", "qwen3"): "<｜Assistant｜></think><｜DSML｜invoke",
    ("none", "qwen3"): "<think></think>",
}  # fmt: skip


@pytest.mark.parametrize("names", TEMPLATES)
def test_a_template_tells_its_format(names: tuple[str, str]) -> None:
    calls, reasoning = names
    found = choose_format(TEMPLATES[names])
    assert found is not None
    assert found.calls is None or found.calls.writing == calls
    fields: dict[str, Any] = {name: table[key] for name, table, key in (
        ("tool_calls", TOOL_CALLS, calls), ("reasoning", REASONING, reasoning)
    ) if key != "none"}  # fmt: skip
    if "tool_calls" in fields:
        fields["tool_calls"] = fields["tool_calls"] | {"writing": calls}
    described = load_format({"fields": fields})
    assert (found.calls, found.reasoning) == (described.calls, described.reasoning)
    assert found.channels == (calls == "openai")
    assert found.short_ids == (calls == "mistral")


def test_other_templates_tell_none_and_settings_come_first() -> None:
    assert choose_format("<|user|>{{ message.content }}") is None
    chosen = choose_format(TEMPLATES["hermes", "qwen3"], "glm45", "none")
    assert chosen is not None and chosen.calls is not None
    assert chosen.calls.content == "tagged" and chosen.reasoning is None
    assert chosen.anchors == ("<|im_start|>assistant\n",)
    assert choose_format(TEMPLATES["hermes", "qwen3"], "none", "none") is None
