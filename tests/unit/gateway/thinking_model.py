"""A small model whose template lets it think, as Qwen3's does, and answers of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diptych.messages import Logprob, Output
from services.gateway.generation.output_text import OutputPiece
from services.gateway.generation.parsed_text import ParsedText
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.validate import RequestRules
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THINKING_TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\n{%- for tool in tools -%}{{ tool | tojson }}\n{%- endfor -%}"
    "<|end|>\n{%- endif -%}"
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '\n<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}{%- endfor -%}<|end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)
# One that always thinks, as DeepSeek-R1's.
ALWAYS_TEMPLATE = THINKING_TEMPLATE.partition("{%- if enable_thinking")[0] + "{{ '<think>\n' }}{%- endif -%}"


def thinking_rules(folder: Path, template: str = THINKING_TEMPLATE) -> RequestRules:
    """The rules of a gateway that serves the model."""
    tokenizer = GatewayTokenizer.load(str(make_folder(folder, 512, MARKERS, template)))
    return RequestRules(
        tokenizer, ("toy",), 512, RequestLimits(), markup=ModelMarkup.load(tokenizer, "hermes", "qwen3")
    )


def token_ids(rules: RequestRules, text: str) -> list[int]:
    return rules.tokenizer.encode(text, False)


def parse_text(
    rules: RequestRules, resolved: ResolvedRequest, tokens: Sequence[int], reason: str = "stop", step: int = 1
) -> tuple[ParsedText, list[OutputPiece]]:
    """An answer whose tokens come `step` at a time, and what was taken of it."""
    assert rules.markup is not None
    text = ParsedText(resolved, 0, resolved.prompts[0], rules.tokenizer, rules.markup)
    pieces = []
    for at in range(0, len(tokens), step):
        group = list(tokens[at : at + step])
        logprobs = [Logprob(token, -1.0, []) for token in group]
        text.feed_output(Output("r", 0, group, logprobs))
        pieces.append(text.take_piece())
        if text.finish is not None:
            break
    text.end_sequence(reason)
    return text, [*pieces, text.take_piece()]
