"""The model's tokenizer and chat template, as the gateway needs them; torch is not loaded.

Encoding and decoding go straight to the Rust tokenizer: no clean-up of spaces, so that decoding more tokens only ever
extends the text, which `text.Window` depends on. Rendering a template is transformers', in its sandbox.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

from diptych.errors import ModelError, RequestError
from services.gateway.text import Bytes, Detokeniser, Window

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # everything but weights


@lru_cache(maxsize=1)
def byte_of_symbol() -> Mapping[str, int]:
    """The alphabet of byte-level BPE (GPT-2): one printable character per byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def folder_of(model: str, revision: str | None) -> Path:
    """The local folder with the model's small files; fetched from the hub when `model` is not a folder.

    Raises:
        ModelError: neither a folder nor a repository that can be reached.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=SMALL_FILES))
    except Exception as error:  # the hub client raises many unrelated classes
        raise ModelError(
            f"the tokenizer of {model!r} cannot be found",
            f"it is no folder here, and the hub answered: {type(error).__name__}",
            "give a folder with tokenizer.json and config.json, or the id of a hub repository",
        ) from error


@dataclass(frozen=True)
class Tokens:
    """One model's vocabulary.

    `end_ids` end an answer unless the client asked to ignore them; `size` bounds the token ids that clients may send,
    and `context_tokens` is what the model was trained for.
    """

    hf: PreTrainedTokenizerFast
    end_ids: tuple[int, ...]
    size: int
    context_tokens: int

    @classmethod
    def load(cls, model: str, revision: str | None = None, chat_template: str | None = None) -> Tokens:
        """Read tokenizer, template and configuration of `model` (a folder or a hub id).

        Raises:
            ModelError: a file is missing or cannot be read.
        """
        folder = folder_of(model, revision)
        try:
            hf = PreTrainedTokenizerFast.from_pretrained(str(folder))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"the tokenizer in {folder} cannot be read",
                str(error).splitlines()[0][:200],
                "a folder with tokenizer.json and tokenizer_config.json is needed",
            ) from error
        if chat_template is not None:
            hf.chat_template = _template(Path(chat_template))
        config = _json(folder / "config.json")
        ends = [
            _json(folder / "generation_config.json").get("eos_token_id"),
            config.get("eos_token_id"),
            hf.eos_token_id,
        ]
        return cls(
            hf=hf,
            end_ids=tuple(sorted({int(token) for end in ends for token in _listed(end)})),
            size=int(config.get("vocab_size", len(hf))),
            context_tokens=int(config.get("max_position_embeddings", 2048)),
        )

    @cached_property
    def longest_bytes(self) -> int:
        """The most bytes of text that one token can stand for; a lower bound for the tokens of a text follows."""
        return max(len(token.encode()) for token in self.hf.get_vocab())

    @cached_property
    def byte_level(self) -> bool:
        decoder = self.hf.backend_tokenizer.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.hf.all_special_ids)

    def warm(self) -> None:
        """Do once what the first requests would otherwise wait for."""
        self.decode(self.encode("warm" * (self.longest_bytes + self.byte_level), True))
        if self.can_chat:
            with contextlib.suppress(RequestError):  # some templates want a system message first
                self.render([{"role": "user", "content": "warm"}], True, False)

    @property
    def can_chat(self) -> bool:
        return bool(self.hf.chat_template)

    @property
    def start_id(self) -> int:
        """What an empty prompt begins with."""
        first: int | None = self.hf.bos_token_id
        return first if first is not None else self.end_ids[0] if self.end_ids else 0

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of `text`; `special` adds what the model wants around a prompt (often a first token)."""
        ids: list[int] = self.hf.backend_tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        text: str = self.hf.backend_tokenizer.decode(ids, skip_special_tokens=skip_special)
        return text

    def detokeniser(self, skip_special: bool) -> Detokeniser:
        """Decodes one answer token by token; together that is what `decode` gives for all of them."""
        if not isinstance(self.hf.backend_tokenizer.decoder, ByteLevel):
            return Window(lambda ids: self.decode(ids, skip_special))
        return Bytes(self._plain.get if skip_special else self._all.get)

    @cached_property
    def _all(self) -> _Spelling:
        return _Spelling(self.hf, frozenset())

    @cached_property
    def _plain(self) -> _Spelling:
        added = self.hf.backend_tokenizer.get_added_tokens_decoder()
        return _Spelling(self.hf, frozenset(token for token, one in added.items() if one.special))

    def text_of(self, token: int) -> str:
        """One token as text, for log-probabilities; an unfinished character shows as U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes that `token` adds to a text."""
        piece: str | None = self.hf.backend_tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self.special_ids:
            return piece.encode()
        if self.byte_level:
            table = byte_of_symbol()
            if all(symbol in table for symbol in piece):
                return bytes(table[symbol] for symbol in piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def render(self, messages: Sequence[Mapping[str, Any]], generate: bool, resume: bool) -> str:
        """The prompt text of a conversation.

        Raises:
            RequestError: the model has no template, or its template refuses these messages.
        """
        if not self.can_chat:
            raise RequestError(
                "this model has no chat template; use /v1/completions",
                code="unsupported_parameter",
                param="messages",
            )
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generate,
                continue_final_message=resume,
            )
        except TemplateError as error:
            told = f": {error.message[:200]}" if type(error) is TemplateError and error.message else ""
            raise RequestError(f"the chat template refuses these messages{told}", param="messages") from error
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise RequestError("the chat template cannot render these messages", param="messages") from error
        return str(text)


class _Spelling:
    """What `ByteLevel` makes of each token: its symbols as bytes, or, if one is not in the alphabet, itself."""

    def __init__(self, hf: PreTrainedTokenizerFast, hidden: frozenset[int]) -> None:
        self._piece_of, self._hidden = hf.backend_tokenizer.id_to_token, hidden
        self._known: dict[int, bytes] = {}  # at most one entry per token of the vocabulary

    def get(self, token: int) -> bytes:
        """Empty for tokens that are hidden or do not exist."""
        found = self._known.get(token)
        return self._add(token) if found is None else found

    def _add(self, token: int) -> bytes:
        piece: str | None = None if token in self._hidden else self._piece_of(token)
        if piece is None:
            return b""
        table = byte_of_symbol()
        known = all(symbol in table for symbol in piece)
        self._known[token] = bytes(table[symbol] for symbol in piece) if known else piece.encode()
        return self._known[token]


def _template(path: Path) -> str:
    """The operator's template. What is wrong with it is told at start, and not to every client later."""
    try:
        text = path.read_text(encoding="utf-8")
        compile_template(text)
    except (OSError, ValueError, TemplateError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f"the chat template {path} cannot be used", f"{line}{why}"[:200], "see --chat-template"
        ) from error
    return text


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def _listed(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
