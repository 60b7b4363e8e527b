"""The bodies that clients receive: OpenAI's shapes, with every required field always there.

`UNSET` fields are left out; `None` is written as null, since clients tell the two apart.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

LEAST_LOGPROB = -9999.0  # what OpenAI writes for "very unlikely"; minus infinity is not JSON


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of an error inside a stream."""

    error: ErrorDetail


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails = CompletionDetails()


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob] | None
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    object: str = "chat.completion.chunk"
    usage: Usage | None | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class LegacyLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    index: int
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True):
    """A whole answer and a chunk of a stream: both say `text_completion`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    object: str = "text_completion"
    usage: Usage | None | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "diptych"
    object: str = "model"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class Version(msgspec.Struct, frozen=True):
    version: str


class Readiness(msgspec.Struct, frozen=True):
    """`reasons` says what is missing, or not as it should be; a service that is ready may lack something, too."""

    ready: bool
    reasons: list[str]
