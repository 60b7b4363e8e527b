"""Tokenizers are read as transformers reads them, and what cannot be read is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from diptych.errors import ModelError
from engine.model.tokenizer import ModelTokenizer
from tests.support.model_folder import make_folder

TINY = Path(__file__).parents[3] / "models" / "tiny"
TEXTS = [
    "",
    "Hello <|user|> there",
    " two  blanks\n\n\t",
    "Zwölf 👩‍👩‍👧 你好 <|extra|>x<|extra|> </s><tool>",
    "<|end_of_text|><|end|>[PAD] [SEP] <|late|>  <|early|>",
    "a" * 300,
]
Change = Callable[[Path], None]


def settings(**more: Any) -> Change:
    """A change of `tokenizer_config.json`; None removes a key."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        merged = json.loads(path.read_text()) | more
        path.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))

    return change


def write(name: str, content: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    return change


def backend(edit: Callable[[Tokenizer], object]) -> Change:
    def change(folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        edit(tokenizer)
        tokenizer.save(str(folder / "tokenizer.json"))

    return change


def first_token(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end_of_text|> $A", special_tokens=[("<|end_of_text|>", 0)]
    )


def token(content: str, **flags: bool) -> dict[str, Any]:
    state: dict[str, Any] = AddedToken(content, **flags).__getstate__()
    return state


MAP = {
    "bos_token": token("<|user|>", lstrip=True),
    "eos_token": "<|end|>",
    "additional_special_tokens": ["</s>"],
}
FOLDERS: dict[str, list[Change]] = {
    "plain": [],
    "no settings": [write("tokenizer_config.json", {})],
    "a first token": [backend(first_token), settings(bos_token="<|end_of_text|>", add_bos_token=False)],
    "bos asked for": [settings(bos_token="<|end_of_text|>", add_bos_token=True, add_eos_token=True)],
    "truncated": [backend(lambda tokenizer: tokenizer.enable_truncation(4))],
    "padded": [backend(lambda tokenizer: tokenizer.enable_padding(length=64, pad_token="<|end|>", pad_id=3))],
    "extra tokens": [settings(extra_special_tokens=["<|extra|>", "<|user|>"], pad_token="[PAD]")],
    "older extra tokens": [
        settings(additional_special_tokens=["<|extra|>"], sep_token={"__type": "AddedToken"} | token("[SEP]"))
    ],
    "named extra tokens": [settings(extra_special_tokens={"tool_token": "<tool>"}, image_token="<|extra|>")],
    "added tokens": [
        settings(
            added_tokens_decoder={
                "330": token("<|late|>", lstrip=True),
                "320": token("<|early|>", special=True),
                "3": token("<|end|>", rstrip=True, special=True),
            }
        )
    ],
    "a map": [write("special_tokens_map.json", MAP)],
    "a map that does not count": [
        settings(added_tokens_decoder={"3": token("<|end|>", special=True)}),
        write("special_tokens_map.json", MAP),
    ],
    "split": [settings(split_special_tokens=True)],
    "template file": [write("chat_template.jinja", "file {{ 1 }}")],
    "template list": [
        settings(chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    ],
    "template folder": [
        write("chat_template.jinja", "file"),
        write("additional_chat_templates/rag.jinja", "rag"),
    ],
    "no template": [settings(chat_template=None)],
    "no end": [settings(eos_token=None)],
    "an end that is no token": [settings(eos_token="<|nowhere|>", unk_token="<|user|>")],
}


def made(folder: Path, name: str) -> Path:
    if name == "tiny":
        return TINY
    make_folder(folder)
    for change in FOLDERS[name]:
        change(folder)
    return folder


@pytest.mark.parametrize("name", [*FOLDERS, "tiny"])
def test_tokens_and_names_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", name)
    expected = PreTrainedTokenizerFast.from_pretrained(str(folder))
    read = ModelTokenizer.load(folder)
    for text in TEXTS:
        for special in (False, True):
            ids = read.backend.encode(text, add_special_tokens=special).ids
            assert ids == expected.encode(text, add_special_tokens=special), text
        for skip in (False, True):
            decoded: Any = expected.decode(ids, skip_special_tokens=skip)
            assert read.backend.decode(ids, skip_special_tokens=skip) == decoded
    assert read.backend.get_vocab() == expected.get_vocab()
    assert dict(read.special) == expected.special_tokens_map
    assert read.special_ids == set(expected.all_special_ids)
    assert read.id_of("eos_token") == expected.eos_token_id
    templates = expected.chat_template or {}
    assert dict(read.templates) == (templates if isinstance(templates, dict) else {"default": templates})


def test_end_ids_come_from_all_three_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert ModelTokenizer.load(folder).end_ids(folder) == (0, 3, 7, 9)


def test_the_template_of_a_processor_is_read_when_there_is_no_other(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write("chat_template.json", {"chat_template": "processor"})(folder)
    assert ModelTokenizer.load(folder).templates["default"] != "processor"
    settings(chat_template=None)(folder)
    assert ModelTokenizer.load(folder).templates == {"default": "processor"}


def test_a_slow_tokenizer_alone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ModelError) as caught:
        ModelTokenizer.load(folder)
    assert "has no tokenizer.json" in caught.value.what and "save_pretrained" in caught.value.fix


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"model": 1, "extra_special_tokens": [{}]}'])
def test_unreadable_files_are_reported(name: str, content: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(ModelError) as caught:
        ModelTokenizer.load(folder)
    assert caught.value.what == f"the tokenizer in {folder} cannot be read" and caught.value.why
