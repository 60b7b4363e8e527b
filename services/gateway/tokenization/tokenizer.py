"""Wraps the model's tokenizer and chat template for the gateway, without torch and transformers.

Encoding and decoding use the Rust tokenizer directly, without its clean-up of spaces. So decoding more tokens only ever
extends the text, which `WindowDetokenizer` depends on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from diptych.errors import ModelError, RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.model_config import load_model_config
from engine.model.checkpoint import DESCRIPTION_FILES, locate_folder
from engine.model.tokenizer import ModelTokenizer
from services.gateway.tokenization.chat_template import ChatTemplate
from services.gateway.tokenization.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)


@lru_cache(maxsize=1)
def byte_of_symbol() -> Mapping[str, int]:
    """The alphabet of byte-level BPE (GPT-2): the byte for each of its 256 printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# A text of more characters is tokenized without noting where each token stands.
LONG_CHARS = 4096


@dataclass(frozen=True)
class GatewayTokenizer:
    """One model's vocabulary and chat template.

    `end_ids` end an answer unless the client ignores them. `size` bounds the token ids that clients may send.
    `context_tokens` is the context length that the model was trained for.
    """

    model: ModelTokenizer
    template: ChatTemplate | None
    end_ids: tuple[int, ...]
    size: int
    context_tokens: int

    @classmethod
    def load(
        cls, model: str, revision: str | None = None, chat_template: str | None = None
    ) -> GatewayTokenizer:
        """Read tokenizer, template and configuration of `model` (a folder or a hub id).

        `chat_template` is the path of a template that replaces the model's.

        Raises:
            ModelError: a file is missing or cannot be read.
        """
        folder = locate_folder(model, revision, DESCRIPTION_FILES)
        tokenizer = ModelTokenizer.load(folder)
        try:
            config = load_model_config(folder, missing_ok=True)
            return cls(
                model=tokenizer,
                template=_load_template(tokenizer, folder, chat_template),
                end_ids=tokenizer.end_ids(folder),
                size=int(config.get("vocab_size", tokenizer.backend.get_vocab_size())),
                context_tokens=int(config.get("max_position_embeddings", 2048)),
            )
        except (OSError, ValueError, TypeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise ModelError(f"the configuration in {folder} cannot be read", why) from error

    @property
    def backend(self) -> Tokenizer:
        """The Rust tokenizer."""
        return self.model.backend

    @cached_property
    def longest_bytes(self) -> int:
        """The most bytes of text that one token stands for; it gives a lower bound for the tokens of a text."""
        return max(len(token.encode()) for token in self.backend.get_vocab())

    @cached_property
    def byte_level(self) -> bool:
        """Whether the tokens are byte-level BPE."""
        decoder = self.backend.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        return self.model.special_ids

    def warm_up(self) -> None:
        """Do the lazy initialisation that would otherwise delay the first requests."""
        self.decode(self.encode("warm" * (self.longest_bytes + self.byte_level), True))
        if self.can_chat:
            # Some templates refuse a conversation without a system message.
            with contextlib.suppress(RequestError):
                self.render_conversation([{"role": "user", "content": "warm"}], True, False)

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.template is not None

    @property
    def start_id(self) -> int:
        """The token that replaces an empty prompt."""
        first = self.model.id_of("bos_token")
        return first if first is not None else self.end_ids[0] if self.end_ids else 0

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of `text`; with `special`, also the tokens that the model expects around a prompt.

        Raises:
            RequestError: 400 if the text has a token that the tokenizer knows, but not the model.
        """
        if len(text) > LONG_CHARS:
            # It takes two thirds of the time.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=special)
        else:
            encoding = self.backend.encode(text, add_special_tokens=special)
        ids: list[int] = encoding.ids
        if self._has_unknown_tokens and (largest := max(ids, default=0)) >= self.size:
            found = f"the text holds {self.token_text(largest)!r}, token {largest}"
            problem = f"{found}; this model's are below {self.size}"
            raise RequestError(RequestFailure(FailureReason.INVALID_VALUE, problem))
        return ids

    @cached_property
    def _has_unknown_tokens(self) -> bool:
        """Whether the tokenizer has tokens that the model has no embedding for."""
        return max(self.backend.get_vocab().values(), default=0) >= self.size

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """The text of token ids, without special tokens unless `skip_special` is false."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special)
        return text

    def new_detokenizer(self, skip_special: bool) -> Detokenizer:
        """A detokenizer for one answer. Its pieces together are what `decode` returns for all tokens."""
        if not isinstance(self.backend.decoder, ByteLevel):
            return WindowDetokenizer(lambda ids: self.decode(ids, skip_special))
        return ByteDetokenizer(self._plain_token_bytes.get if skip_special else self._all_token_bytes.get)

    @cached_property
    def _all_token_bytes(self) -> _TokenBytes:
        """The bytes of all tokens, special ones included."""
        return _TokenBytes(self.backend, frozenset())

    @cached_property
    def _plain_token_bytes(self) -> _TokenBytes:
        """The bytes of all tokens; special tokens are empty."""
        added = self.backend.get_added_tokens_decoder()
        return _TokenBytes(self.backend, frozenset(token for token, one in added.items() if one.special))

    def token_text(self, token: int) -> str:
        """One token as text, for log-probabilities; an unfinished character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to a text."""
        piece: str | None = self.backend.id_to_token(token)
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

    def render_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool,
        resume: bool,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a conversation; see `ChatTemplate.render_conversation`.

        Raises:
            RequestError: the model has no template, or its template refuses these messages.
        """
        if self.template is None:
            problem = "this model has no chat template; use /v1/completions"
            raise RequestError(RequestFailure(FailureReason.UNSUPPORTED_PARAMETER, problem, "messages"))
        return self.template.render_conversation(messages, generate, resume, options, tools)


class _TokenBytes:
    """The bytes of each token as `ByteLevel` decodes them; a token with other symbols stands for its own text."""

    def __init__(self, backend: Tokenizer, hidden: frozenset[int]) -> None:
        self._piece_of, self._hidden = backend.id_to_token, hidden
        # Has at most one entry per token of the vocabulary.
        self._known: dict[int, bytes] = {}

    def get(self, token: int) -> bytes:
        """The bytes of a token; empty for hidden tokens and ids that do not exist."""
        found = self._known.get(token)
        return self._add(token) if found is None else found

    def _add(self, token: int) -> bytes:
        """Compute a token's bytes and cache them."""
        piece: str | None = None if token in self._hidden else self._piece_of(token)
        if piece is None:
            return b""
        table = byte_of_symbol()
        known = all(symbol in table for symbol in piece)
        self._known[token] = bytes(table[symbol] for symbol in piece) if known else piece.encode()
        return self._known[token]


def _load_template(tokenizer: ModelTokenizer, folder: Path, given: str | None) -> ChatTemplate | None:
    """The operator's template, or the model's. Raises ModelError if it is not valid, so that the start fails."""
    path = Path(given) if given is not None else folder
    named = tokenizer.templates
    try:
        if given is not None:
            source = path.read_text(encoding="utf-8")
        elif not named:
            return None
        elif "default" not in named:
            raise ValueError(f"none of its templates is named 'default': {', '.join(sorted(named))}")
        else:
            source = named["default"]
        return ChatTemplate(source, tokenizer.special)
    except (OSError, ValueError, TemplateError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f"the chat template {'' if given else 'of '}{path} cannot be used",
            f"{line}{why}"[:200],
            "see --chat-template",
        ) from error
