"""Checks a decoded body, for all routes, before its prompts are rendered and tokenized.

Together with `resolve`, which needs the number of prompt tokens, this refuses all that could be refused later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.shown_text import quote_text
from diptych.request import Grammar
from engine.model.pooling import ModelPooler
from services.gateway.openai.parse_body import json_depth, missing_parameter_error
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.openai.sampling_defaults import SamplingDefaults
from services.gateway.openai.schemas.request_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
)
from services.gateway.parsing.model_markup import ModelMarkup
from services.gateway.tokenization.tokenizer import GatewayTokenizer


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Everything that requests are checked against."""

    tokenizer: GatewayTokenizer
    # Models that clients may ask for. Answers carry the first one.
    served_names: tuple[str, ...]
    # Most tokens of prompt and answer together.
    context_tokens: int
    limits: RequestLimits
    # Values of fields that a request does not set.
    defaults: SamplingDefaults = SamplingDefaults()
    # Threshold of eviction of requests that give none (`diptych.eviction_spec.KeepSpec`).
    keep_threshold: float = 1.0
    # Whether workers share prefixes, so that routing needs the names of a prompt's chunks.
    prefix_caching: bool = False
    # How the model writes thoughts and calls; None: its answers are plain text.
    markup: ModelMarkup | None = None
    # Whether fields that are not known are passed over instead of refused.
    ignore_unknown: bool = False
    # How prompts are pooled, or why they are not.
    pooler: ModelPooler = ModelPooler()


def unsupported_error(field: str, problem: str = "is not supported") -> RequestError:
    """The error of a request with a field, or a value of it, that this server does not support."""
    return RequestError(RequestFailure(FailureReason.UNSUPPORTED_PARAMETER, f"'{field}' {problem}", field))


def invalid_value_error(field: str, problem: str) -> RequestError:
    """The error of a request with an invalid value in `field`; `problem` completes the sentence."""
    return RequestError(RequestFailure(FailureReason.INVALID_VALUE, f"'{field}' {problem}", field))


def check_model_name(name: str | None, rules: RequestRules) -> str:
    """The model name for the answer: `name`, or the first served name without one.

    Raises:
        RequestError: 404, no such model is served.
    """
    if name is not None and name not in rules.served_names:
        problem = f"the model {quote_text(name)} does not exist; served here: {', '.join(rules.served_names)}"
        raise RequestError(RequestFailure(FailureReason.MODEL_NOT_FOUND, problem, "model"))
    return name or rules.served_names[0]


def check_chat_fields(request: ChatRequest, rules: RequestRules) -> None:
    """Refuse fields that are invalid, or that would change the meaning of the answer and are not supported.

    Raises:
        RequestError: 400, or 404 for an unknown model.
    """
    _check_generation_fields(request, request.n or 1, 1, rules)
    if request.top_logprobs and not request.logprobs:
        raise invalid_value_error("top_logprobs", "needs 'logprobs' to be true")
    for field in (
        "audio",
        "prediction",
        "web_search_options",
        "moderation",
        "prompt_cache_options",
        "chat_template",
    ):
        if getattr(request, field) is not None:
            raise unsupported_error(field)
    if request.store:
        raise unsupported_error("store", "cannot be true: nothing is stored here")
    if request.modalities is not None and request.modalities != ["text"]:
        raise unsupported_error("modalities", "other than text are not supported")
    if request.function_call not in (None, "none", "auto"):
        raise unsupported_error("function_call", "other than 'none' is not supported; send 'tool_choice'")
    if request.functions and request.function_call != "none":
        raise unsupported_error("functions", "are not supported; send 'tools'")
    if request.continue_final_message and (
        request.add_generation_prompt or request.messages[-1].role != "assistant"
    ):
        raise invalid_value_error(
            "continue_final_message", "needs an assistant message at the end and no 'add_generation_prompt'"
        )


def check_completion_fields(request: CompletionRequest, num_prompts: int, rules: RequestRules) -> None:
    """The same as `check_chat_fields`, for `/v1/completions`. Raises RequestError: 400 or 404."""
    n = request.n or 1
    if request.suffix:
        raise unsupported_error("suffix")
    if request.best_of is not None and request.best_of < n:
        raise invalid_value_error("best_of", f"({request.best_of}) must not be below 'n' ({n})")
    if request.best_of is not None and request.best_of > n and request.stream:
        raise invalid_value_error("best_of", "above 'n' cannot be streamed")
    _check_generation_fields(request, request.best_of or n, num_prompts, rules)


def split_prompts(
    prompt: str | list[Any] | None,
    rules: RequestRules,
    is_cut: bool = False,
    field: str = "prompt",
    most: int | None = None,
) -> list[str | list[int]]:
    """The prompts of a body, each as a text or a list of token ids. OpenAI's API allows four forms.

    If a prompt `is_cut` later, it may be longer than the context. They are in `field`, at most `most`; None: as many as
    a completion may have.

    Raises:
        RequestError: forms are mixed, there are too many prompts, or a token id is not in the vocabulary.
    """
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    kinds, most = {type(item) for item in prompt}, most or rules.limits.max_prompts
    if len(kinds) != 1:
        raise invalid_value_error(field, "must be all text, all token ids or all lists of token ids")
    split: list[str | list[int]] = [prompt] if kinds == {int} else prompt
    if len(split) > most:
        raise invalid_value_error(field, f"holds {len(split)} prompts; at most {most} are served at once")
    for item in split:
        if isinstance(item, list):
            if not item:
                raise invalid_value_error(field, "holds an empty list of token ids")
            # Checked first, before each of the tokens is looked at.
            if len(item) > rules.context_tokens and not is_cut:
                raise context_length_error(f"has {len(item)} prompt tokens", rules.context_tokens, field)
            check_token_ids(item, field, rules)
    return split


def check_text_length(text: str, rules: RequestRules, param: str) -> None:
    """Refuse a text that is too long however it is tokenized. Raises RequestError: `context_length_exceeded`."""
    least = len(text.encode()) // rules.tokenizer.longest_bytes
    if least >= rules.context_tokens:
        raise context_length_error(f"has at least {least} tokens", rules.context_tokens, param)


def context_length_error(problem: str, context_tokens: int, param: str | None) -> RequestError:
    """The error of a request that is longer than the context. `problem` says by how much; `param` is its field."""
    text = f"this model's context is {context_tokens} tokens, and your request {problem}; shorten it"
    return RequestError(RequestFailure(FailureReason.CONTEXT_LENGTH_EXCEEDED, text, param))


def build_grammar(response_format: ResponseFormat | None, limits: RequestLimits) -> Grammar | None:
    """The grammar of `response_format`; None for plain text. Whether it compiles is checked in a preparer.

    Raises:
        RequestError: the schema is missing, too large, nested too deep, or has a pattern that is too long.
    """
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return Grammar(kind="json_object")
    if response_format.json_schema is None:
        raise missing_parameter_error("response_format.json_schema")
    schema = {} if response_format.json_schema.schema is None else response_format.json_schema.schema
    text = check_schema(schema, "response_format.json_schema.schema", limits)
    return Grammar(kind="json_schema", text=text.decode())


def check_schema(schema: dict[str, Any], where: str, limits: RequestLimits) -> bytes:
    """The JSON of a schema in the field `where`. Raises RequestError if it is beyond its bounds."""
    text = msgspec.json.encode(schema)
    if len(text) > limits.max_schema_bytes:
        raise schema_error(where, f"is larger than {limits.max_schema_bytes} bytes")
    # A text with few brackets cannot nest deep, and one without the word has no pattern.
    num_open = text.count(b"{") + text.count(b"[")
    if num_open > limits.max_schema_depth and json_depth(text) > limits.max_schema_depth:
        raise schema_error(where, f"is nested deeper than {limits.max_schema_depth} levels")
    has_patterns = b'"pattern' in text
    if has_patterns and any(len(pattern) > limits.max_pattern_chars for pattern in _schema_patterns(schema)):
        raise schema_error(where, f"has a pattern of more than {limits.max_pattern_chars} characters")
    return text


def grammar_error(why: str, field: str) -> RequestError:
    """The error for a client whose grammar cannot be served; `why` completes the sentence."""
    problem = f"'{field}' cannot be served: {why}"
    return RequestError(RequestFailure(FailureReason.INVALID_SCHEMA, problem, field))


def schema_error(where: str, problem: str) -> RequestError:
    """The error of a request with an invalid schema in the field `where`; `problem` completes the sentence."""
    return RequestError(RequestFailure(FailureReason.INVALID_SCHEMA, f"'{where}' {problem}", where))


def _schema_patterns(node: Any) -> Iterable[str]:
    """All regular expressions in a JSON schema. The caller bounds its depth."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            elif key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _schema_patterns(value)
    elif isinstance(node, list):
        for value in node:
            yield from _schema_patterns(value)


def _check_generation_fields(
    fields: GenerationFields, best_of: int, num_prompts: int, rules: RequestRules
) -> None:
    check_model_name(fields.model, rules)
    limits = rules.limits
    if (fields.n or 1) > limits.max_n:
        raise invalid_value_error("n", f"is at most {limits.max_n} here")
    if best_of * num_prompts > limits.max_sequences:
        raise invalid_value_error(
            "n",
            f"times prompts is {best_of * num_prompts}; at most {limits.max_sequences} are served at once",
        )
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise invalid_value_error("stream_options", "needs 'stream' to be true")
    stops = stop_strings(fields)
    if any(not stop or len(stop) > limits.max_stop_chars for stop in stops):
        raise invalid_value_error("stop", f"strings must have 1 to {limits.max_stop_chars} characters")
    check_token_ids(fields.stop_token_ids or [], "stop_token_ids", rules)
    check_token_ids(fields.logit_bias or {}, "logit_bias", rules)


def check_token_ids(ids: Iterable[int], field: str, rules: RequestRules) -> None:
    """Refuse token ids beyond the vocabulary. Raises RequestError: 400."""
    strange = next((token for token in ids if token >= rules.tokenizer.size), None)
    if strange is not None:
        raise invalid_value_error(
            field, f"holds token id {strange}; this model's are below {rules.tokenizer.size}"
        )


def stop_strings(fields: GenerationFields) -> tuple[str, ...]:
    """The stop strings of a body, which may have one, several or none."""
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
