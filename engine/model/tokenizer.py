"""Reads the tokenizer of a model folder without transformers, from `tokenizer.json` and the files beside it.

The result equals that of transformers' fast tokenizers, with which the tests compare. Slow tokenizers
(`tokenizer.model`, `vocab.json` alone) are not supported. Chat templates are read here but rendered elsewhere.
"""

from __future__ import annotations

import json
import string
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, processors

from diptych.errors import ModelError
from diptych.model_config import load_model_config
from kvcache.eviction.policies import PUNCT_KIND, SPECIAL_KIND

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelTokenizer:
    """The Rust tokenizer of one model, with the special tokens and chat templates of its folder.

    `special` maps names such as `bos_token` to the token's text; chat templates use these names. `extra` are further
    special tokens without a name. `templates` are the chat templates by name; a single one is called "default".
    `response_template` says how answers are written, in transformers' form, if the model does.
    """

    backend: Tokenizer
    special: Mapping[str, str]
    extra: tuple[str, ...]
    templates: Mapping[str, str]
    response_template: Any = None

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Read the tokenizer of the model in `folder`.

        Raises:
            ModelError: there is no `tokenizer.json`, or a file cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"the folder {folder} has no tokenizer.json",
                "only fast tokenizers are read, not tokenizer.model or vocab.json alone",
                "convert it: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
        try:
            backend = Tokenizer.from_file(str(path))
            settings = _read_settings(folder)
            if backend.padding is not None:
                settings.setdefault("pad_token", backend.padding["pad_token"])
            special, extra = _special_tokens(settings)
            _add_missing_tokens(backend, settings, [*special.values(), *extra])
            templates = _read_templates(folder, settings)
        except Exception as error:  # the Rust library raises plain `Exception`
            raise ModelError(
                f"the tokenizer in {folder} cannot be read",
                (str(error).splitlines() or [type(error).__name__])[0][:200],
                "a folder with tokenizer.json and tokenizer_config.json is needed",
            ) from error
        texts = {name: token.content for name, token in special.items()}
        written = settings.get("response_template")
        return cls(backend, texts, tuple(token.content for token in extra), templates, written)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, with and without a name."""
        ids = (self.backend.token_to_id(token) for token in (*self.special.values(), *self.extra))
        return frozenset(token for token in ids if token is not None)

    def id_of(self, name: str) -> int | None:
        """Id of the special token with this name, such as `bos_token`; None if the model has none."""
        text = self.special.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def end_ids(self, folder: Path) -> tuple[int, ...]:
        """Ids of all tokens that end an answer, from the tokenizer and from the model's configuration files."""
        ends = [
            self.id_of("eos_token"),
            read_json_object(folder / "generation_config.json").get("eos_token_id"),
            load_model_config(folder, missing_ok=True).get("eos_token_id"),
        ]
        listed = [end if isinstance(end, list) else [end] for end in ends if end is not None]
        return tuple(sorted({int(token) for end in listed for token in end}))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist.

    Raises:
        OSError: the file cannot be read.
        ValueError: its content is not a JSON object.
    """
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return content


def _read_settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`; if it lists no added tokens, `special_tokens_map.json` overrides its values."""
    settings = read_json_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json_object(folder / "special_tokens_map.json")
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The special tokens with a name, and those without."""
    listed = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = {
        name: value
        for name, value in settings.items()
        if value and name.endswith("_token") and (name in NAMED_TOKENS or isinstance(value, str))
    }
    if isinstance(listed, dict):
        named |= listed
        listed = []
    order = [*NAMED_TOKENS, *(name for name in named if name not in NAMED_TOKENS)]
    return (
        {name: _added_token(named[name], special=True) for name in order if name in named},
        [_added_token(token, special=True) for token in listed],
    )


def _add_missing_tokens(
    backend: Tokenizer, settings: Mapping[str, Any], special: Iterable[AddedToken]
) -> None:
    """Add the tokens that only `tokenizer_config.json` lists, and turn truncation and padding off in `backend`."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    present = backend.get_added_tokens_decoder().values()
    known, texts = {repr(token) for token in present}, {token.content for token in present}
    decoder = settings.get("added_tokens_decoder") or {}
    listed = [_added_token(decoder[index]) for index in sorted(decoder, key=int)]
    missing = [token for token in listed if repr(token) not in known]
    texts |= {token.content for token in missing}
    for token in special:
        if token.content not in texts:
            texts.add(token.content)
            missing.append(token)
    if missing:
        backend.add_tokens(missing)
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")


def _added_token(token: str | Mapping[str, Any], special: bool | None = None) -> AddedToken:
    """A token from the files, with its flags. `special`, if given, overrides the file's own flag."""
    if isinstance(token, str):
        return AddedToken(token, special=bool(special))
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    chosen = {name: bool(token[name]) for name in flags if name in token}
    return AddedToken(token["content"], **(chosen if special is None else chosen | {"special": special}))


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Template files take precedence over templates in `tokenizer_config.json`."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    found = settings.get("chat_template") or read_json_object(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(found, list):
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    if isinstance(found, dict):
        return {str(name): str(template) for name, template in found.items()}
    return {"default": str(found)} if found else {}


def read_token_kinds(tokenizer: ModelTokenizer, vocab_size: int) -> NDArray[np.uint8]:
    """The kind of each token id (FastGen, arXiv 2310.01801, section 3).

    `SPECIAL_KIND` are the tokenizer's special tokens, and added tokens that a chat template writes. `PUNCT_KIND` are
    tokens whose text is punctuation, blanks or both, as `is_punctuation` says. No token has both kinds.

    A kind belongs to an id, so a marker of a chat template that consists of several ordinary tokens, such as Llama 2's
    `[INST]`, has none. The first tokens of a prompt count as special by their position (`kvcache.eviction.policies`).

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the size of the model's vocabulary. Ids for which the tokenizer has no token have no kind.

    Returns:
        Shape [vocab_size].
    """
    kinds = np.zeros(vocab_size, np.uint8)
    known = sorted(index for index in tokenizer.backend.get_vocab().values() if index < vocab_size)
    # One at a time: a token's text must not depend on the tokens around it.
    texts = tokenizer.backend.decode_batch([[index] for index in known], skip_special_tokens=False)
    kinds[[index for index, text in zip(known, texts, strict=True) if is_punctuation(text)]] = PUNCT_KIND
    kinds[[index for index in _marker_ids(tokenizer) if index < vocab_size]] = SPECIAL_KIND
    return kinds


def is_punctuation(text: str) -> bool:
    """Whether a token's text is punctuation, blanks or both.

    Punctuation is ASCII's (which includes symbols such as `=`), and what Unicode calls punctuation. Blanks count as in
    the reproduction that FastGen's authors point to: in code and tables line breaks and indents separate parts as dots
    do in prose, and tokens often hold both (` (`, or `:` with a line break). A text without characters counts as a
    blank, since some tokenizers decode a lone blank to nothing.
    """
    return all(
        one.isspace() or one in string.punctuation or unicodedata.category(one)[0] == "P" for one in text
    )


def _marker_ids(tokenizer: ModelTokenizer) -> set[int]:
    """Ids of all special tokens, and of other added tokens that stand in a chat template."""
    templates = "\n".join(tokenizer.templates.values())
    added = tokenizer.backend.get_added_tokens_decoder().items()
    marked = {index for index, one in added if one.special or _is_marker(one.content, templates)}
    return marked | tokenizer.special_ids


def _is_marker(text: str, templates: str) -> bool:
    """Whether a token that is not declared special is a marker: templates also contain punctuation by themselves."""
    return text in templates and not is_punctuation(text)
