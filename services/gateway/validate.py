"""What both generation routes share: from a checked body to an `Ask`, before any work is done.

A request that leaves this file is not refused later for a reason that could have been known here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych.errors import RequestError
from diptych.request import Grammar, Origin, Sampling
from services.gateway.limits import Limits
from services.gateway.origin import origin_of
from services.gateway.parse import depth
from services.gateway.schema import ChatRequest, CompletionRequest, Message, ResponseFormat, Shared
from services.gateway.tokens import Tokens

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request is checked against."""

    tokens: Tokens
    names: tuple[str, ...]  # the models that clients may ask for; the first is the one that answers carry
    context_tokens: int  # prompt and answer together
    limits: Limits


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text they came from when the client sent text."""

    tokens: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request for generation, resolved: `len(prompts) * best_of` sequences; `n` per prompt are answered.

    `logprobs` is how many alternatives the answer lists per token, None for no log-probabilities at all.
    """

    model: str
    prompts: list[Prompt]
    sampling: Sampling
    context_tokens: int
    origin: Origin = Origin()
    n: int = 1
    best_of: int = 1
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True
    echo: bool = False
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    obfuscate: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def sampling_of(self, prompt: Prompt, index: int) -> Sampling:
        """Sampling of the `index`-th sequence of `prompt`: a seed of its own, and no more tokens than there is room."""
        return msgspec.structs.replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, self.context_tokens - len(prompt.tokens)),
            seed=(self.sampling.seed + index) % SEEDS,
        )


def refuse(field: str, told: str = "is not supported") -> RequestError:
    return RequestError(f"'{field}' {told}", code="unsupported_parameter", param=field)


def wrong(field: str, told: str) -> RequestError:
    return RequestError(f"'{field}' {told}", code="invalid_value", param=field)


def check_model(name: str | None, rules: Rules) -> str:
    """The name to answer with.

    Raises:
        RequestError: 404, no such model is served.
    """
    if name is not None and name not in rules.names:
        raise RequestError(
            f"the model '{name[:100]}' does not exist; served here: {', '.join(rules.names)}",
            status=404,
            code="model_not_found",
            param="model",
        )
    return name or rules.names[0]


def ask_chat(body: ChatRequest, prompt: Prompt, rules: Rules, tenant: str = "") -> Ask:
    """An `Ask` for `/v1/chat/completions`; `prompt` is the rendered conversation. `check_chat` came before."""
    newer = body.max_completion_tokens is not None
    wanted = body.max_completion_tokens if newer else body.max_tokens
    name = "max_completion_tokens" if newer else "max_tokens"
    if wanted == 0:
        raise wrong(name, "must be at least 1")
    most = _fit([prompt], wanted, ("messages", name), rules)
    top = (body.top_logprobs or 0) if body.logprobs else None
    return Ask(
        model=body.model,
        prompts=[prompt],
        sampling=_sampling(body, most, top, None, rules),
        context_tokens=rules.context_tokens,
        origin=origin_of(body, tenant),
        n=body.n or 1,
        best_of=body.n or 1,
        logprobs=top,
        **_presentation(body, rules),
    )


def ask_completion(body: CompletionRequest, prompts: list[Prompt], rules: Rules, tenant: str = "") -> Ask:
    """An `Ask` for `/v1/completions`. `check_completion` came before."""
    n, echo = body.n or 1, bool(body.echo)
    best_of = body.best_of or n
    if body.max_tokens == 0 and not echo:
        raise wrong("max_tokens", "may be 0 only together with 'echo'")
    most = _fit(prompts, body.max_tokens, ("prompt", "max_tokens"), rules)
    ranked = 0 if best_of > n else None  # by mean log-probability, which then has to be known
    return Ask(
        model=body.model,
        prompts=prompts,
        sampling=_sampling(
            body,
            min(most, DEFAULT_COMPLETION_TOKENS) if body.max_tokens is None else most,
            ranked if body.logprobs is None else body.logprobs,
            body.logprobs if echo else None,
            rules,
        ),
        context_tokens=rules.context_tokens,
        origin=origin_of(body, tenant),
        n=n,
        best_of=best_of,
        echo=echo,
        logprobs=body.logprobs,
        **_presentation(body, rules),
    )


def check_chat(body: ChatRequest, rules: Rules) -> None:
    """Refuse, by name, what would change the meaning of an answer and is not served.

    Raises:
        RequestError: 400 or 404.
    """
    _check_shared(body, body.n or 1, 1, rules)
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs", "needs 'logprobs' to be true")
    for field in (
        "audio",
        "prediction",
        "web_search_options",
        "moderation",
        "prompt_cache_options",
        "chat_template",
    ):
        if getattr(body, field) is not None:
            raise refuse(field)
    if body.chat_template_kwargs:
        raise refuse("chat_template_kwargs")
    if body.store:
        raise refuse("store", "cannot be true: nothing is stored here")
    if body.modalities is not None and body.modalities != ["text"]:
        raise refuse("modalities", "other than text are not supported")
    if body.reasoning_effort not in (None, "none"):
        raise refuse("reasoning_effort", "is not supported by this model")
    for field, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if getattr(body, choice) not in (None, "none", "auto"):
            raise refuse(choice, "other than 'none' is not supported")
        if getattr(body, field) and getattr(body, choice) != "none":
            raise refuse(field, f"are not supported yet; send '{choice}': \"none\" to have them ignored")
    if body.continue_final_message and (body.add_generation_prompt or body.messages[-1].role != "assistant"):
        raise wrong(
            "continue_final_message", "needs an assistant message at the end and no 'add_generation_prompt'"
        )


def check_completion(body: CompletionRequest, num_prompts: int, rules: Rules) -> None:
    """The same for `/v1/completions`."""
    n = body.n or 1
    if body.suffix:
        raise refuse("suffix")
    if body.best_of is not None and body.best_of < n:
        raise wrong("best_of", f"({body.best_of}) must not be below 'n' ({n})")
    if body.best_of is not None and body.best_of > n and body.stream:
        raise wrong("best_of", "above 'n' cannot be streamed")
    _check_shared(body, body.best_of or n, num_prompts, rules)


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template expects them: text parts joined, null fields left out, arguments parsed.

    Raises:
        RequestError: a part or a field is not served, or one that its role needs is missing.
    """
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def split_prompts(prompt: str | list[Any] | None, rules: Rules) -> list[str | list[int]]:
    """The four forms of `prompt` as a list of texts and token lists.

    Raises:
        RequestError: forms are mixed, there are too many, or a token id is not in the vocabulary.
    """
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        raise wrong("prompt", "must be all text, all token ids or all lists of token ids")
    split: list[str | list[int]] = [prompt] if kinds == {int} else prompt
    if len(split) > rules.limits.max_prompts:
        raise wrong(
            "prompt", f"holds {len(split)} prompts; at most {rules.limits.max_prompts} are served at once"
        )
    for item in split:
        if isinstance(item, list):
            if not item:
                raise wrong("prompt", "holds an empty list of token ids")
            if len(item) > rules.context_tokens:  # before anything looks at each of them
                raise too_long(f"has {len(item)} prompt tokens", rules, "prompt")
            _check_ids(item, "prompt", rules)
    return split


def check_length(text: str, rules: Rules, param: str) -> None:
    """Refuse a text that is too long whatever its tokens are, without tokenising it."""
    least = len(text.encode()) // rules.tokens.longest_bytes
    if least >= rules.context_tokens:
        raise too_long(f"has at least {least} tokens", rules, param)


def too_long(told: str, rules: Rules, param: str) -> RequestError:
    return RequestError(
        f"this model's context is {rules.context_tokens} tokens, and your request {told}; shorten it",
        code="context_length_exceeded",
        param=param,
    )


def grammar_of(asked: ResponseFormat | None, limits: Limits) -> Grammar | None:
    """The grammar behind `response_format`, within its bounds; whether it compiles is checked elsewhere."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Grammar(kind="json_object")
    if asked.json_schema is None:
        raise RequestError(
            "missing required parameter: 'response_format.json_schema'",
            code="missing_required_parameter",
            param="response_format.json_schema",
        )
    schema = {} if asked.json_schema.schema is None else asked.json_schema.schema
    text = msgspec.json.encode(schema)
    where = "response_format.json_schema.schema"
    if len(text) > limits.max_schema_bytes:
        raise _bad_schema(where, f"is larger than {limits.max_schema_bytes} bytes")
    if depth(text) > limits.max_schema_depth:
        raise _bad_schema(where, f"is nested deeper than {limits.max_schema_depth} levels")
    if any(len(pattern) > limits.max_pattern_chars for pattern in _patterns(schema)):
        raise _bad_schema(where, f"has a pattern of more than {limits.max_pattern_chars} characters")
    return Grammar(kind="json_schema", text=text.decode())


def _bad_schema(where: str, told: str) -> RequestError:
    return RequestError(f"'{where}' {told}", code="invalid_schema", param=where)


def _patterns(node: Any) -> Iterable[str]:
    """All regular expressions of a JSON schema (depth is bounded by the caller)."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            elif key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _patterns(value)
    elif isinstance(node, list):
        for value in node:
            yield from _patterns(value)


def _check_shared(body: Shared, best_of: int, num_prompts: int, rules: Rules) -> None:
    check_model(body.model, rules)
    limits = rules.limits
    if (body.n or 1) > limits.max_n:
        raise wrong("n", f"is at most {limits.max_n} here")
    if best_of * num_prompts > limits.max_sequences:
        raise wrong(
            "n",
            f"times prompts is {best_of * num_prompts}; at most {limits.max_sequences} are served at once",
        )
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "needs 'stream' to be true")
    stops = _stops(body)
    if any(not stop or len(stop) > limits.max_stop_chars for stop in stops):
        raise wrong("stop", f"strings must have 1 to {limits.max_stop_chars} characters")
    _check_ids(body.stop_token_ids or [], "stop_token_ids", rules)
    _check_ids(body.logit_bias or {}, "logit_bias", rules)


def _check_ids(ids: Iterable[int], field: str, rules: Rules) -> None:
    strange = next((token for token in ids if token >= rules.tokens.size), None)
    if strange is not None:
        raise wrong(field, f"holds token id {strange}; this model's are below {rules.tokens.size}")


def _stops(body: Shared) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _fit(prompts: list[Prompt], wanted: int | None, fields: tuple[str, str], rules: Rules) -> int:
    """The most new tokens a sequence may have: `wanted` when it fits behind the longest prompt, else the rest.

    `fields` are the names of the prompt and of the length.

    Raises:
        RequestError: `context_length_exceeded`, with the arithmetic.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    rest = rules.context_tokens - longest
    if rest < (0 if wanted == 0 else 1):
        raise too_long(f"has {longest} prompt tokens", rules, fields[0])
    if wanted is not None and wanted > rest:
        told = f"asks for {longest + wanted} ({longest} in the prompt, {wanted} in '{fields[1]}')"
        raise too_long(told, rules, fields[1])
    if wanted is None:  # shorter prompts have more room, see `Ask.sampling_of`
        return rules.context_tokens - min(len(prompt.tokens) for prompt in prompts)
    return wanted


def _sampling(body: Shared, most: int, logprobs: int | None, scored: int | None, rules: Rules) -> Sampling:
    fewest = body.min_tokens or 0
    if fewest > most:
        raise wrong("min_tokens", f"({fewest}) is more than the {most} tokens the answer may have")
    ends = () if body.ignore_eos else rules.tokens.end_ids
    return Sampling(
        max_tokens=most,
        seed=secrets.randbelow(SEEDS) if body.seed is None else body.seed % SEEDS,
        min_tokens=fewest,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=scored,
        stop_token_ids=tuple(sorted({*ends, *(body.stop_token_ids or ())})),
        grammar=grammar_of(body.response_format, rules.limits),
    )


def _presentation(body: Shared, rules: Rules) -> dict[str, Any]:
    options = body.stream_options
    return {
        "stops": _stops(body),
        "keep_stop": bool(body.include_stop_str_in_output),
        "skip_special": body.skip_special_tokens is not False,
        "stream": bool(body.stream),
        "include_usage": options is not None and bool(options.include_usage),
        "obfuscate": options is not None and bool(options.include_obfuscation),
    }


def _turn(message: Message, where: str) -> dict[str, Any]:
    for field in ("function_call", "audio"):
        if getattr(message, field) is not None:
            raise refuse(f"{where}.{field}")
    if message.role == "tool" and message.tool_call_id is None:
        raise RequestError(
            f"missing required parameter: '{where}.tool_call_id'",
            code="missing_required_parameter",
            param=f"{where}.tool_call_id",
        )
    content = _content(message, where)
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise wrong(f"{where}.content", "must be text")
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _content(message: Message, where: str) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.refusal if message.content is None else message.content
    texts: list[str] = []
    for i, part in enumerate(message.content):
        if part.type not in ("text", "refusal"):
            raise refuse(
                f"{where}.content[{i}].type", f"'{part.type[:40]}' is not supported; this model reads text"
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise wrong(f"{where}.content[{i}].{part.type}", "must be text")
        texts.append(text)
    return "".join(texts)


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A past tool call with its arguments as an object, which is what templates print."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f"{where}.function", "must have a name")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise wrong(f"{where}.function.arguments", "must be a JSON text")
    try:
        parsed = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        parsed = arguments
    return {**call, "function": {**function, "arguments": parsed}}
