"""Small models without weights whose chat templates and tokens are of the kinds of Qwen3, DeepSeek-R1 and gpt-oss."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from services.gateway.tokenization.tokenizer import GatewayTokenizer
from tests.support.model_folder import make_folder

CONTEXT = 2048
QWEN3_TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\n{%- for tool in tools -%}{{ tool | tojson }}\n{%- endfor -%}"
    "<|end|>\n{%- endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '\n<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}{%- endfor -%}<|end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)
R1_TEMPLATE = (
    "{%- for tool in tools or [] -%}{{ tool | tojson }}\n{%- endfor -%}"
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
    "<｜Assistant｜>{{ (message.content or '').split('</think>')[-1] }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ call.function.name ~ '\n```json\n' }}"
    "{{ call.function.arguments | tojson }}{{ '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}{%- endfor -%}<|end|>"
    "{%- else -%}<｜User｜>{{ message.role }} {{ message.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\n' }}{%- endif -%}"
)
GPT_OSS_TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{%- for tool in tools or [] -%}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- for call in message.tool_calls or [] -%}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>{%- endfor -%}"
    "{%- if message.content -%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)


@dataclass(frozen=True)
class ReasoningModel:
    """A model. `opens` and `closes` are around its thoughts and `text` before its answer; `call` is how it calls
    with `NAME` and `ARGS`. Its answers end with one of `ends`.
    """

    name: str
    template: str
    markers: tuple[str, ...]
    opens: str
    closes: str
    text: str
    call: str
    ends: tuple[str, ...]
    # Whether its prompts begin the thought, and whether a request can turn thoughts off.
    is_open: bool = False
    has_switch: bool = False

    def write_folder(self, folder: Path) -> Path:
        """Write the model and return its folder."""
        make_folder(folder, CONTEXT, self.markers, self.template)
        tokenizer = GatewayTokenizer.load(str(folder)).backend
        ends = [tokenizer.token_to_id(end) for end in self.ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}), encoding="utf-8")
        return folder

    def write_answer(self, thought: str | None, rest: str) -> str:
        """An answer behind the prompt: a thought, if there is one, and the rest."""
        if thought is None:
            return rest
        return f"{'' if self.is_open else self.opens}{thought}{self.closes}{rest}"


MODELS = (
    ReasoningModel(
        "qwen3",
        QWEN3_TEMPLATE,
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        "<think>\n",
        "\n</think>\n\n",
        "",
        '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>',
        ("<|end|>", "<|end_of_text|>"),
        has_switch=True,
    ),
    ReasoningModel(
        "r1",
        R1_TEMPLATE,
        ("<think>", "</think>", "<｜Assistant｜>", "<｜User｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
         "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        "<think>\n",
        "\n</think>\n\n",
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("<|end|>", "<|end_of_text|>"),
        is_open=True,
    ),
    ReasoningModel(
        "gpt-oss",
        GPT_OSS_TEMPLATE,
        ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>"),
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS",
        ("<|return|>", "<|call|>", "<|end_of_text|>"),
    ),
)  # fmt: skip
