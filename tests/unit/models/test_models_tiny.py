"""The committed model: its files agree with each other and load where a Llama loads."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from models.card import count_parameters, render_card
from models.llama import load_model
from models.tokenizer import CHAT_TEMPLATE, SPECIAL, load_tokenizer, render_chat

TINY = Path(__file__).parents[3] / "models" / "tiny"
TEXTS = [
    "",
    " ",
    "def f(x):\n\treturn x\n",
    "größe 漢字 🙂 \u0000\u200d",
    "a\r\nb  c\n\n\n",
    "\ufeff½ µ",
    "1234567890" * 3,
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(TINY)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_the_tokenizer_has_4096_entries_and_fixed_special_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 4096
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == list(range(len(SPECIAL)))
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_an_entry() -> None:
    plain = load_tokenizer(TINY)
    for point in range(0x3000):
        text = chr(point)
        assert plain.decode(plain.encode(text).ids) == text
    single = [token for token in plain.get_vocab() if len(token) == 1]
    assert len(single) == 256


def test_the_chat_template_renders_what_training_wrote(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [("system", "Be brief."), ("user", "What is abc?"), ("assistant", "A module.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == render_chat(turns)
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert asked == render_chat(turns[:2]) + "<|assistant|>\n"


def test_the_chat_template_takes_developer_tool_and_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Find "}, {"type": "text", "text": "x."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    expected = [
        ("system", "Be brief."),
        ("user", "Find x."),
        ("assistant", '<|tool|>find({"x": 1})'),
        ("tool", "42"),
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == render_chat(expected)
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    listed = '{"name": "find", "parameters": {"type": "object"}}\n'
    shown = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert shown == render_chat([("system", listed), *expected])
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)
    assert (TINY / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE


def test_weights_are_half_precision_and_small_enough_to_commit() -> None:
    assert (TINY / "model.safetensors").stat().st_size <= 16 * 1024 * 1024
    with safe_open(str(TINY / "model.safetensors"), framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118 == {torch.float16}
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 32)
    assert (config["max_position_embeddings"], config["vocab_size"]) == (2048, 4096)
    assert 5_000_000 < count_parameters(TINY) < 7_000_000


def test_hugging_face_computes_the_same_logits() -> None:
    ids = torch.randint(0, 4096, (1, 40), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(load_model(TINY)(ids), theirs(ids).logits, atol=1e-3, rtol=1e-3)


def test_the_card_quotes_metrics() -> None:
    metrics = json.loads((TINY / "metrics.json").read_text(encoding="utf-8"))
    assert (TINY / "README.md").read_text(encoding="utf-8") == render_card(metrics)
    weights = (TINY / "model.safetensors").read_bytes()
    assert metrics["weight_bytes"] == len(weights)
    assert metrics["weight_sha256"] == hashlib.sha256(weights).hexdigest()
    assert metrics["held_out_bits_per_byte"] < metrics["xz_bits_per_byte"]
