"""The interface between the generation routes and the response formats that differ between them.

`OutputFormat` is the interface. `chat_format` and `completion_format` implement it by chunks, see `ChunkEvents`;
`services.gateway.responses` and `services.gateway.messages` by named events.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from diptych.chunks import RAW_CLASS
from diptych.failure_statuses import RequestFailure
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.response_schema import DetailsField, KvDetails, Usage

UsageField = Usage | None | UnsetType

# Most tokens with log-probabilities that are written at once, before other tasks may run.
MAX_WRITTEN_TOKENS = 128
# Padding makes the number of characters of a chunk's text a multiple of this.
OBFUSCATION_CHARS = 16
SSE_PING = b": ping\n\n"
SSE_DONE = b"data: [DONE]\n\n"

# The header of an answer whose KV was coded: the KV class.
KV_CLASS_HEADER = "x-diptych-kv-class"


@dataclass(slots=True)
class ResponseHead:
    """The fields that the whole body, or every chunk, of one response repeats. `created` is in Unix seconds.

    `kv_class` is named when the first token is there: the class that KV is coded in, or "" for KV without a codec.
    `keep` is the threshold of a request that evicts, else 1, and `keep_rule` its rule. `cached_tokens` are those of
    the prompt, known with the first token, too.
    """

    id: str
    created: int
    model: str
    model_fingerprint: str | None
    kv_class: str = ""
    keep: float = 1.0
    keep_rule: str = ""
    cached_tokens: int = 0

    @property
    def fingerprint(self) -> str | None:
        """The `system_fingerprint`: it names the model, the KV class if KV is coded, and threshold and rule if KV is
        evicted.
        """
        if self.model_fingerprint is None:
            return None
        keep = f"keep{self.keep!r}.{self.keep_rule}" if self.keep < 1 else ""
        return ".".join(part for part in (self.model_fingerprint, self.kv_class, keep) if part)

    def name_kv_class(self, kv: KvDetails | None) -> None:
        """Name the KV class in the head of all bodies. `kv` is what the answer tells of its KV, if anything."""
        self.kv_class = "" if kv is None or kv.kv_class == RAW_CLASS else kv.kv_class

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that say how the answer was made."""
        return [(KV_CLASS_HEADER.encode(), self.kv_class.encode())] if self.kv_class else []


def sse_event(body: object) -> bytes:
    """One server-sent event with `body` as JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """One server-sent event with a name, and `body` as JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(body))


class OutputFormat(Protocol):
    """The response bodies of one route.

    A stream consists, per choice, of `begin_events`, any number of `delta_events`, and `end_events`; then come the
    `closing_events`, or after a failure the `failure_events`. All of them are bytes of server-sent events, large ones
    in several parts; iterators are read once, in this order. `choice` is the index of a choice, and `used` is the
    `usage` field of its chunk.
    """

    @property
    def head(self) -> ResponseHead:
        """The fields that all bodies of the response repeat."""

    @property
    def ping(self) -> bytes:
        """The event that says only that the server is alive."""

    @property
    def kept_bytes(self) -> int:
        """Roughly the memory of what the format keeps of an answer, in bytes."""

    def begin_events(self, choice: int, used: UsageField = UNSET) -> list[bytes]:
        """The events that precede the text of a choice; may be none."""

    def delta_events(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> Iterable[bytes]:
        """The events with new text and log-probabilities of a choice. The piece has at most one part."""

    def end_events(self, choice: int, text: OutputText, used: UsageField = UNSET) -> Iterable[bytes]:
        """The events that end a choice with the finish reason of `text`."""

    def closing_events(self, usage: UsageField, details: DetailsField = UNSET) -> Iterable[bytes]:
        """The last events, with the usage and the timings of the whole request, as far as they were asked for."""

    def failure_events(self, failure: RequestFailure) -> Iterable[bytes]:
        """The last events of a stream that has failed."""

    def full_body_parts(
        self, texts: Sequence[OutputText], usage: Usage, details: DetailsField = UNSET
    ) -> Iterator[bytes]:
        """The JSON of a whole response, in parts that each take some milliseconds. Takes the text out of `texts`."""


class ChunkEvents(ABC):
    """The events of routes whose streams are chunks of one shape, as `data:` lines with [DONE] at the end."""

    ping = SSE_PING
    # A chunk needs nothing of those before it.
    kept_bytes = 0

    @abstractmethod
    def begin_chunks(self, choice: int, used: UsageField = UNSET) -> Sequence[msgspec.Struct]:
        """The chunks that precede the text of a choice; may be none."""

    @abstractmethod
    def delta_chunk(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> msgspec.Struct:
        """A chunk with new text and log-probabilities of a choice."""

    @abstractmethod
    def end_chunk(self, choice: int, text: OutputText, used: UsageField = UNSET) -> msgspec.Struct:
        """The chunk that ends a choice with the finish reason of `text`, and its last token ids."""

    @abstractmethod
    def final_chunk(self, usage: UsageField, details: DetailsField = UNSET) -> msgspec.Struct:
        """The chunk with the usage and the timings of the whole request, as far as they were asked for."""

    def begin_events(self, choice: int, used: UsageField = UNSET) -> list[bytes]:
        """The `begin_chunks` as events."""
        return [sse_event(chunk) for chunk in self.begin_chunks(choice, used)]

    def delta_events(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> list[bytes]:
        """The `delta_chunk` as an event."""
        return [sse_event(self.delta_chunk(choice, piece, used))]

    def end_events(self, choice: int, text: OutputText, used: UsageField = UNSET) -> list[bytes]:
        """The `end_chunk` as an event."""
        return [sse_event(self.end_chunk(choice, text, used))]

    def closing_events(self, usage: UsageField, details: DetailsField = UNSET) -> list[bytes]:
        """The `final_chunk` if it was asked for, and [DONE]."""
        if usage is UNSET and details is UNSET:
            return [SSE_DONE]
        return [sse_event(self.final_chunk(usage, details)), SSE_DONE]

    def failure_events(self, failure: RequestFailure) -> list[bytes]:
        """The error, and [DONE]."""
        return [sse_event(failure.error_body()), SSE_DONE]


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
    return split_json(msgspec.json.encode(body), field, value)


def split_json(text: bytes, field: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The same for JSON that is written already."""
    before, found, after = text.partition(b'"%s":%s' % (field, value))
    assert found, field
    return before + b'"%s":' % field, after


def prompt_score_parts(text: OutputText, logprob_json: LogprobJson) -> Iterator[bytes]:
    """The JSON of `prompt_logprobs` of an answer, in parts: a list, with null for the prompt's first token.

    A part has at most `MAX_WRITTEN_TOKENS` tokens and alternatives together, or one token.
    """
    count = max(1, MAX_WRITTEN_TOKENS // (1 + text.prompt_scores.num_top))
    yield b"["
    for start in range(0, len(text.prompt_scores), count):
        rows = text.prompt_scores.iter_rows(start, start + count)
        yield b"," * (start > 0) + logprob_json.prompt_entries(rows).encode()
    yield b"]"
