"""The interface between the two generation routes and the response formats that differ between them.

`OutputFormat` is the interface; `chat_format` and `completion_format` implement it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from diptych.chunks import RAW_CLASS
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.response_schema import DetailsField, KvDetails, Usage

UsageField = Usage | None | UnsetType

# Most tokens with log-probabilities that are written at once, before other tasks may run.
MAX_WRITTEN_TOKENS = 128
# Padding makes the number of characters of a chunk's text a multiple of this.
OBFUSCATION_CHARS = 16


# The header of an answer whose KV was coded: the KV class.
KV_CLASS_HEADER = "x-diptych-kv-class"


@dataclass(slots=True)
class ResponseHead:
    """The fields that the whole body, or every chunk, of one response repeats. `created` is in Unix seconds.

    `kv_class` is named when the first token is there: the class that KV is coded in, or "" for KV without a codec.
    `keep` is the threshold of a request that evicts, else 1.
    """

    id: str
    created: int
    model: str
    model_fingerprint: str | None
    kv_class: str = ""
    keep: float = 1.0

    @property
    def fingerprint(self) -> str | None:
        """The `system_fingerprint`: it names the model, the KV class if KV is coded, and the threshold if KV is
        evicted.
        """
        if self.model_fingerprint is None:
            return None
        keep = f"keep{self.keep!r}" if self.keep < 1 else ""
        return ".".join(part for part in (self.model_fingerprint, self.kv_class, keep) if part)

    def name_kv_class(self, kv: KvDetails | None) -> None:
        """Name the KV class in the head of all bodies. `kv` is what the answer tells of its KV, if anything."""
        self.kv_class = "" if kv is None or kv.kv_class == RAW_CLASS else kv.kv_class

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that say how the answer was made."""
        return [(KV_CLASS_HEADER.encode(), self.kv_class.encode())] if self.kv_class else []


class OutputFormat(Protocol):
    """The response bodies of one route.

    A stream consists, per choice, of `begin_chunks`, any number of `delta_chunk`, and `end_chunk`. The `final_chunk`
    follows if the client asked for it. `choice` is the index of a choice, and `used` is the `usage` field of its chunk.
    """

    @property
    def head(self) -> ResponseHead:
        """The fields that all bodies of the response repeat."""

    def begin_chunks(self, choice: int, used: UsageField = UNSET) -> Sequence[msgspec.Struct]:
        """The chunks that precede the text of a choice; may be none."""

    def delta_chunk(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> msgspec.Struct:
        """A chunk with new text and log-probabilities of a choice."""

    def end_chunk(self, choice: int, reason: str, used: UsageField = UNSET) -> msgspec.Struct:
        """The chunk that ends a choice with its finish reason."""

    def final_chunk(self, usage: UsageField, details: DetailsField = UNSET) -> msgspec.Struct:
        """The chunk with the usage and the timings of the whole request, as far as they were asked for."""

    def full_body_parts(
        self, texts: Sequence[OutputText], usage: Usage, details: DetailsField = UNSET
    ) -> Iterator[bytes]:
        """The JSON of a whole response, in parts that each take some milliseconds. Takes the text out of `texts`."""


def best_answers(resolved: ResolvedRequest, texts: Sequence[OutputText]) -> list[OutputText]:
    """The `n` answers of each prompt with the highest mean log-probability; all in order if `best_of` is `n`."""
    if resolved.best_of == resolved.n:
        return list(texts)
    groups = (texts[i : i + resolved.best_of] for i in range(0, len(texts), resolved.best_of))
    return [answer for group in groups for answer in _best_of_prompt(group, resolved.n)]


def _best_of_prompt(texts: Iterable[OutputText], n: int) -> list[OutputText]:
    """The `n` answers with the highest mean log-probability per token, best first."""
    return sorted(texts, key=lambda answer: -answer.sum_logprob / max(1, answer.num_tokens))[:n]


def obfuscation_padding(resolved: ResolvedRequest, text: str) -> str | UnsetType:
    """Random characters that hide the length of `text` from observers who see only packet sizes."""
    if not resolved.obfuscate:
        return UNSET
    return secrets.token_urlsafe(OBFUSCATION_CHARS)[
        : OBFUSCATION_CHARS - len(text.encode()) % OBFUSCATION_CHARS
    ]


def split_at_field(body: msgspec.Struct, field: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The JSON of `body` before and after the value of `field`, whose JSON is now `value` (null or an empty list).

    The caller writes its own value between the two parts.
    """
    before, found, after = msgspec.json.encode(body).partition(b'"%s":%s' % (field, value))
    assert found, field
    return before + b'"%s":' % field, after
