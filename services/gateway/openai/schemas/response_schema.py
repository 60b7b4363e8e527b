"""The bodies that clients receive: OpenAI's shapes, with every required field always there.

`UNSET` fields are left out; `None` is written as null, since clients tell the two apart. Log-probabilities are JSON
already, see `logprob_json`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType

# OpenAI writes this value for "very unlikely". Minus infinity does not exist in JSON.
MIN_LOGPROB = -9999.0


# vLLM's: the stop string or token that was asked for and ended the answer; ids of tokens.
StopReason = str | int | None
TokenIds = Sequence[int] | UnsetType


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


class KeepDetails(msgspec.Struct, frozen=True):
    """What eviction kept of a request's KV (`diptych.eviction_spec`), after the latest decision of each sequence.

    A row is one token's KV in one head of one layer. `heads` counts heads by their policy. All counts are 0 if the
    answer ended before anything was decided.
    """

    threshold: float
    boundary: int
    rule: str
    kept_rows: int
    all_rows: int
    freed_bytes: int
    heads: dict[str, int]


class KvDetails(msgspec.Struct, frozen=True):
    """How KV was stored and moved: its class, bytes per token, how many fewer these are than without a codec, why the
    request had this class (`router.routing.class_choice`), and what was kept if the request evicts.
    """

    kv_class: str
    kv_bytes_per_token: int
    kv_bytes_saved_per_token: int
    kv_reason: str
    keep: KeepDetails | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails = CompletionDetails()
    diptych: KvDetails | UnsetType = UNSET


class TransferTimings(msgspec.Struct, frozen=True, kw_only=True):
    """The last transfer of a sequence's KV, as its decode worker measured it: `hidden_ms` while the prompt was still
    computed, `exposed_ms` from the ticket to the last byte.
    """

    hidden_ms: float
    exposed_ms: float
    num_bytes: int


class SequenceTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where one sequence's time went, in milliseconds. The stages sum to what is named before them."""

    index: int
    attempts: int
    ttft_ms: float
    ttft_stages_ms: dict[str, float]
    # From the first token to the second; left out without a hand-off.
    handoff_ms: float | UnsetType = UNSET
    handoff_stages_ms: dict[str, float] | UnsetType = UNSET
    transfer: TransferTimings | UnsetType = UNSET
    total_ms: float


class AnswerDetails(msgspec.Struct, frozen=True):
    """What an answer says about how it was made, if the client asks for it: one entry per sequence."""

    timings: list[SequenceTimings]


DetailsField = AnswerDetails | UnsetType


class CalledFunction(msgspec.Struct, frozen=True):
    """The tool that is called; in later chunks of a stream only more of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool. Only chunks have an `index`, and only the first one of a call has id and type."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True):
    """`reasoning` and `reasoning_content` are the same: two names that clients know for thoughts."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: Raw | None = None
    stop_reason: StopReason = None
    token_ids: TokenIds = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    object: str = "chat.completion"
    diptych: DetailsField = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: Raw | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    object: str = "chat.completion.chunk"
    usage: Usage | None | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
    diptych: DetailsField = UNSET
    prompt_token_ids: TokenIds = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    index: int
    logprobs: Raw | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET


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
    diptych: DetailsField = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "diptych"
    object: str = "model"
    parent: str | None = None
    # The KV classes that the model is served with; left out if it is "raw" alone.
    kv_classes: list[str] | UnsetType = UNSET


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
