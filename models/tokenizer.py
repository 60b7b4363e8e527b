"""The byte-level BPE of the embedded model and its chat template.

Every byte string that is valid UTF-8 survives a round trip; bytes that are not are still covered by the
alphabet, one entry each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
END_OF_TEXT, SYSTEM, USER, ASSISTANT, TOOL, END, PAD = (
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<|pad|>",
)
# These tokens have ids 0 to 6.
SPECIAL = [END_OF_TEXT, SYSTEM, USER, ASSISTANT, TOOL, END, PAD]

# A developer message is treated as a system message. Text parts are joined; any other part is refused. Tools are listed
# in a system message of their own; within an answer `<|tool|>` begins a call.
CHAT_TEMPLATE = """\
{{- '<|endoftext|>' -}}
{%- if tools -%}
    {{- '<|system|>\\n' -}}
    {%- for tool in tools -%}
        {{- tool.function | tojson ~ '\\n' -}}
    {%- endfor -%}
    {{- '<|end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'system' if message.role == 'developer' else message.role -%}
    {%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role: ' ~ message.role) -}}
    {%- endif -%}
    {{- '<|' ~ role ~ '|>\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('unsupported content part: ' ~ part.type) -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set arguments = call.function.arguments -%}
        {{- '<|tool|>' ~ call.function.name ~ '(' -}}
        {{- (arguments if arguments is string else arguments | tojson) ~ ')' -}}
    {%- endfor -%}
    {{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def render_chat(turns: Iterable[tuple[str, str]]) -> str:
    """What the template renders for plain (role, text) turns; used to write training documents."""
    return END_OF_TEXT + "".join(f"<|{role}|>\n{text}{END}\n" for role, text in turns)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of exactly `VOCABULARY` entries; the same texts give the same merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, TOOL, END],
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # This name is known to transformers 4 and 5.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def make_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return encode


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [item.ids for item in tokenizer.encode_batch(texts)]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no entry {token!r}")
    return found
