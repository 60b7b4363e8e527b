"""The bodies that clients send: every field of OpenAI's schema that is known here, with its range.

Decoded and checked in one pass by msgspec; the same classes give the components of `/openapi.json`. A field that is
known but not served (functions, audio, ...) is declared too, so that `validate` can refuse it by name instead of
calling it unrecognised. `docs/api.md` is the table for people.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai.schemas.message_parts import Part, PastCall, ToolChoice

INT64_RANGE = Meta(ge=-(2**63), le=2**63 - 1)

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
# 0 and -1 mean no limit.
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=100)]
ShortText = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopField = str | Annotated[list[str], Meta(max_length=4)] | None
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
# Tokens that an answer may have, texts that it must not have, and texts of which it must be one.
AllowedTokens = Annotated[list[TokenId], Meta(min_length=1, max_length=4096)]
BadWords = Annotated[list[Annotated[str, Meta(min_length=1, max_length=64)]], Meta(max_length=64)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]
TemplateOptions = Annotated[dict[str, Any], Meta(max_length=64)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only with `stream: true`."""

    include_usage: bool | None = None
    # An extension of vLLM: every chunk carries the usage so far.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` is always so here: the answer can only be what the schema allows."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer has to be; exactly one of the fields. `grammar` is Lark's, and `json` a schema or its text."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool that the model may call. With `strict` a schema that cannot be kept to the letter is refused."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Meta(max_length=256)] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=128)] | None = None
    tool_call_id: ShortText | None = None
    refusal: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None

    # Fields of earlier answers, which clients send back.
    annotations: Annotated[list[dict[str, Any]], Meta(max_length=256)] | None = None
    parsed: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None


# With 1 nothing is dropped.
KeepThreshold = Annotated[float, Meta(gt=0, le=1)]


class KeepOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much attention is kept at least, by which rule, and how many tokens at the beginning always stay."""

    threshold: KeepThreshold | None = None
    boundary: Count | None = None
    rule: Annotated[str, Meta(examples=["ada", "fastgen", "zap"])] | None = None


class DiptychOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that only this server has. `kv` is a KV class by its codec's name or its whole id, or "auto"; `keep` says
    how much of its KV the request keeps (`diptych.eviction_spec.KeepSpec`), by a threshold alone, or with a rule and a
    boundary.
    """

    kv: Annotated[str, Meta(min_length=1, max_length=80)] | None = None
    keep: KeepThreshold | KeepOptions | None = None


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both generation routes take, with the same meaning."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: StopField = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, INT64_RANGE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = None
    response_format: ResponseFormat | None = None

    # Extensions of vLLM, with the same meaning.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-10, le=10)] | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # -1 means as many as fit.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Names of earlier versions of vLLM, which are refused with the new ones.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None

    # An extension of this server.
    diptych: DiptychOptions | None = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=2048)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # An extension of vLLM.
    thinking_token_budget: Count | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    # A mode, a function, or allowed tools (`tools.plan_tools`).
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Fields that are accepted and have no effect here.
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Annotated[list[str], Meta(max_length=8)] | None = None

    # Fields that are known and are refused by name, unless they ask for nothing.
    functions: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    function_call: str | dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    chat_template: str | None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    # Known, and refused unless it is empty.
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=2048)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]
    skip_special_tokens: bool | None = None
