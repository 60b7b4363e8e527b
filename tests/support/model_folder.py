"""A small model folder without weights: a byte-level BPE, a chat template and a configuration, made in a moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|end_of_text|>", "<|user|>", "<|assistant|>", "<|end|>"]
END_OF_TEXT, END = 0, 3
CONTEXT = 256
TEXT = (
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
    '👩‍👩‍👧 says: 你好，世界! Здравствуй, мир. {"key": [1, 2, 3]}\n'
)
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'function' -%}{{- raise_exception('no functions here') -}}{%- endif -%}"
    "<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>{{ message.content or '' }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def make_folder(
    folder: Path, context: int = CONTEXT, markers: Sequence[str] = (), template: str = TEMPLATE
) -> Path:
    """Write the folder and return it. `markers` are further added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*SPECIAL, *markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END_OF_TEXT],
        "chat_template": template,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = {"vocab_size": 320, "eos_token_id": END_OF_TEXT, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [END_OF_TEXT, END]}), encoding="utf-8"
    )
    return folder
