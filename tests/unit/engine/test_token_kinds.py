"""Kinds of tokens for eviction: those of the embedded model, and of tokenizers with other markers for blanks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.model.tokenizer import ModelTokenizer, is_punctuation, read_token_kinds
from kvcache.eviction.policies import PUNCT_KIND, SPECIAL_KIND
from tests.support.model_folder import SPECIAL, make_folder

TINY = Path(__file__).parents[3] / "models" / "tiny"


def write_model(folder: Path, tokenizer: Tokenizer, **settings: object) -> ModelTokenizer:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ModelTokenizer.load(folder)


def kinds_by_text(tokenizer: ModelTokenizer) -> dict[str, int]:
    """The kind of each token by its name in the vocabulary."""
    vocabulary: dict[str, int] = tokenizer.backend.get_vocab()
    kinds = read_token_kinds(tokenizer, max(vocabulary.values()) + 1)
    return {text: int(kinds[index]) for text, index in vocabulary.items()}


def test_the_embedded_model_has_377_tokens_of_punctuation_of_which_71_are_blank() -> None:
    tokenizer = ModelTokenizer.load(TINY)
    kinds = read_token_kinds(tokenizer, 4096)
    assert kinds.dtype == np.uint8 and kinds.shape == (4096,)
    assert np.flatnonzero(kinds == SPECIAL_KIND).tolist() == sorted(tokenizer.special_ids) == list(range(7))
    punctuation = np.flatnonzero(kinds == PUNCT_KIND).tolist()
    texts = [tokenizer.backend.decode([index]) for index in punctuation]
    assert len(texts) == 377
    assert sum(text.isspace() for text in texts) == 71
    assert {"(", " (", "\n    ", '"""', " =", "):", "’"} <= set(texts)
    # Every other token has a letter, a digit, a control character, or a part of a character.
    others = [tokenizer.backend.decode([index]) for index in np.flatnonzero(kinds == 0).tolist()]
    assert all(
        any(one.isalnum() or one == "\ufffd" or not one.isprintable() for one in text) for text in others
    )


def test_byte_level_tokens_count_by_what_they_decode_to(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(make_folder(tmp_path / "model"))
    kinds = kinds_by_text(tokenizer)
    assert [kinds[text] for text in SPECIAL] == [SPECIAL_KIND] * 4
    # Ġ is a blank and Ċ a line break; É is a byte that begins a character, and no character by itself.
    assert [kinds[text] for text in ("Ġ", "Ċ", ".", '"', "{")] == [PUNCT_KIND] * 5
    assert [kinds[text] for text in ("a", "É", "1", "Ġj")] == [0] * 4


def test_markers_of_sentencepiece_are_blanks(tmp_path: Path) -> None:
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "<0x2E>",
        "<0xE2>",
        "▁",
        "▁▁",
        "▁(",
        "(",
        "▁a",
        "a▁",
        "。",
        "é",
        "€",
    ]
    backend = Tokenizer(
        models.BPE({text: i for i, text in enumerate(texts)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    kinds = kinds_by_text(
        write_model(tmp_path / "model", backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )
    assert [text for text in texts if kinds[text] == SPECIAL_KIND] == ["<unk>", "<s>", "</s>"]
    # This decoder leaves nothing of a lone blank.
    assert [text for text in texts if kinds[text] == PUNCT_KIND] == [
        "<0x0A>",
        "<0x2E>",
        "▁",
        "▁▁",
        "▁(",
        "(",
        "。",
    ]


def test_markers_that_a_chat_template_writes_are_special(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "(": 1, "unknown": 2}, "unknown"))
    backend.add_tokens([AddedToken(text, special=False) for text in ("<turn>", "<fim>", "--", "  ")])
    backend.add_special_tokens([AddedToken("<|reserved_0|>", special=True)])
    template = "{%- for one in messages -%}<turn>{{ one.content }}  {%- endfor -%}"
    tokenizer = write_model(tmp_path / "model", backend, chat_template=template)
    assert kinds_by_text(tokenizer) == {
        "a": 0,
        "(": PUNCT_KIND,
        "unknown": 0,
        "<turn>": SPECIAL_KIND,
        "<fim>": 0,
        "--": PUNCT_KIND,
        "  ": PUNCT_KIND,
        "<|reserved_0|>": SPECIAL_KIND,
    }


def test_a_vocabulary_of_another_size_than_the_tokenizers_is_filled_up_or_cut() -> None:
    tokenizer = ModelTokenizer.load(TINY)
    whole = read_token_kinds(tokenizer, 4096)
    padded = read_token_kinds(tokenizer, 4160)
    assert padded.shape == (4160,) and not padded[4096:].any()
    np.testing.assert_array_equal(padded[:4096], whole)
    np.testing.assert_array_equal(read_token_kinds(tokenizer, 3), whole[:3])


@pytest.mark.parametrize("text", ["", " ", "\n\t ", ".", " ...", "):\n    ", "=", "«", "。", "\u00a0", "—"])
def test_punctuation_and_blanks(text: str) -> None:
    assert is_punctuation(text)


@pytest.mark.parametrize("text", ["a", " a", "1", "a.", "é", "\ufffd", "€", "🙂", "Ⅳ"])
def test_all_else_is_no_punctuation(text: str) -> None:
    assert not is_punctuation(text)
