"""Resolves a valid body, with its prompts as tokens, to a `ResolvedRequest`: workers never fill in a default.

Only what depends on the number of prompt tokens is refused here; `validate` checks everything else.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from diptych.chunks import AUTO_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.request import Grammar, SamplingParams, Tenancy
from router.routing.prefix_index import ChunkNames, name_chunks
from router.workers.kv_classes import ServedClasses, names_class
from services.gateway.openai.keep_options import (
    choose_keep_class,
    choose_keep_rule,
    find_asked_rule,
    resolve_keep,
)
from services.gateway.openai.schemas.pooling_schema import PooledAnswer
from services.gateway.openai.schemas.request_schema import ChatRequest, CompletionRequest, GenerationFields
from services.gateway.openai.tenancy import tenancy_of_body
from services.gateway.openai.thoughts import resolve_thought_budget
from services.gateway.openai.validate import (
    RequestRules,
    context_length_error,
    invalid_value_error,
    stop_strings,
    unsupported_error,
)
from services.gateway.openai.vllm_fields import check_some_token_left, tokenize_bad_words
from services.gateway.parsing.answer_parts import AnswerContext

DEFAULT_COMPLETION_LENGTH = 16  # OpenAI's
KV_FIELD = "diptych.kv"
NUM_SEEDS = 2**63

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids (C unsigned ints, so that a long prompt is moved between processes at the cost of a copy).

    If the answer echoes it: also its text, and where each token begins (C unsigned ints). `chunks` are the names of
    its chunks, if routing needs them.
    """

    ids: bytes
    text: str | None = None
    offsets: bytes | None = None
    chunks: ChunkNames | None = None

    @property
    def tokens(self) -> memoryview[int]:
        """The token ids."""
        return memoryview(self.ids).cast("I")


def make_prompt(tokens: Iterable[int], text: str | None = None) -> Prompt:
    """A prompt of these token ids."""
    return Prompt(array("I", tokens).tobytes(), text)


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """An HTTP request for generation with all defaults filled in.

    It has `len(prompts) * best_of` sequences, of which `n` per prompt are returned. `logprobs` is the number of
    alternatives that the answer lists per token; None means no log-probabilities at all.
    """

    model: str
    prompts: list[Prompt]
    sampling: SamplingParams
    context_tokens: int
    origin: Tenancy = Tenancy()
    n: int = 1
    best_of: int = 1
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True
    echo: bool = False
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    obfuscate: bool = False
    # The KV class that the request asks for, as its client wrote it (`router.workers.kv_classes.names_class`).
    kv: str | None = None
    # The client wrote none; `kv` is the class that a request gets then, because it evicts.
    default_kv: bool = False
    # What may be dropped of its KV.
    keep: KeepSpec = KEEP_ALL
    # The rule of eviction that it names, if any; `keep` has the one that counts once workers are known.
    keep_rule: str | None = None
    # What the reader of its answers needs to know; None: they are plain text.
    context: AnswerContext | None = None
    # Whether only tokens of its text have log-probabilities, none of thoughts and calls.
    text_logprobs: bool = False
    # Whether its answer is as long as the context allows, if its length is beyond that.
    clips_length: bool = False
    # What the format of its answer needs to know, if it is not a chat's or a completion's.
    route_fields: bytes = b""
    # The number of alternatives that the answer lists for each token of the prompt; None: it does not list them.
    prompt_logprobs: int | None = None
    # Whether the first answer alone lists them, for all answers of a prompt.
    first_lists_prompt: bool = False
    # Whether the answer has the ids of its tokens, and whether tokens have ids for names in log-probabilities.
    return_ids: bool = False
    ids_as_names: bool = False
    # The tokens that end an answer because the request asks for it.
    own_stop_ids: tuple[int, ...] = ()
    # Fields of its body that were passed over, since nobody knows them.
    ignored_fields: tuple[str, ...] = ()
    # What is made of its prompts if they are pooled.
    pooled: PooledAnswer | None = None

    def with_chunk_names(self) -> ResolvedRequest:
        """The request with names for the chunks of its prompts. Takes some microseconds per chunk."""
        scope = self.origin.scope
        named = [replace(prompt, chunks=name_chunks(prompt.tokens, scope)) for prompt in self.prompts]
        return replace(self, prompts=named)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts together."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def sampling_for(self, prompt: Prompt, index: int) -> SamplingParams:
        """Sampling of the `index`-th sequence of `prompt`, with its own seed, and a length that fits the context.

        The prompt is scored for those sequences alone whose answers list it.
        """
        lists = not self.first_lists_prompt or index == 0
        return msgspec.structs.replace(
            self.sampling,
            prompt_logprobs=self.sampling.prompt_logprobs if lists else None,
            max_tokens=min(self.sampling.max_tokens, self.context_tokens - len(prompt.tokens)),
            seed=(self.sampling.seed + index) % NUM_SEEDS,
        )


def resolve_chat(
    request: ChatRequest,
    prompt: Prompt,
    grammar: Grammar | None,
    rules: RequestRules,
    tenant: str = "",
    system_tokens: int = 0,
    context: AnswerContext | None = None,
) -> ResolvedRequest:
    """The `ResolvedRequest` of a `/v1/chat/completions` body that passed `check_chat_fields`.

    `prompt` is the rendered conversation, `grammar` that of the body's `response_format`. The first `system_tokens` of
    the prompt are its system message. `context` is for the reader of answers.

    Raises:
        RequestError: the length is invalid, the context is too short for the request, or what it keeps is beyond it.
    """
    newer = request.max_completion_tokens is not None
    wanted = request.max_completion_tokens if newer else request.max_tokens
    name = "max_completion_tokens" if newer else "max_tokens"
    if wanted == 0:
        raise invalid_value_error(name, "must be at least 1")
    most = _max_new_tokens([prompt], wanted, ("messages", name), rules)
    if wanted is None:
        most = min(most, rules.defaults.max_new_tokens or most)
    top = (request.top_logprobs or 0) if request.logprobs else None
    sampling = _resolve_sampling(request, most, top, request.prompt_logprobs, grammar, rules)
    if request.thinking_token_budget is not None and context is not None:
        thought = resolve_thought_budget(request, context, most, rules)
        sampling = msgspec.structs.replace(sampling, thought=thought)
    return ResolvedRequest(
        model=request.model,
        prompts=[prompt],
        sampling=sampling,
        context_tokens=rules.context_tokens,
        origin=tenancy_of_body(request, tenant),
        n=request.n or 1,
        best_of=request.n or 1,
        logprobs=top,
        first_lists_prompt=True,
        keep=resolve_keep(request, [len(prompt.tokens)], system_tokens, rules),
        keep_rule=find_asked_rule(request),
        context=context,
        **_output_options(request, rules),
    )


def resolve_completion(
    request: CompletionRequest,
    prompts: list[Prompt],
    grammar: Grammar | None,
    rules: RequestRules,
    tenant: str = "",
) -> ResolvedRequest:
    """The `ResolvedRequest` of a `/v1/completions` body that passed `check_completion_fields`.

    `grammar` is that of the body's `response_format`.

    Raises:
        RequestError: the length is invalid, the context is too short for the request, or what it keeps is beyond it.
    """
    n, echo = request.n or 1, bool(request.echo)
    best_of = request.best_of or n
    if request.max_tokens == 0 and not echo and request.prompt_logprobs is None:
        raise invalid_value_error("max_tokens", "may be 0 only together with 'echo' or 'prompt_logprobs'")
    most = _max_new_tokens(prompts, request.max_tokens, ("prompt", "max_tokens"), rules)
    # Answers are ranked by mean log-probability, which is then needed.
    ranked = 0 if best_of > n else None
    return ResolvedRequest(
        model=request.model,
        prompts=prompts,
        sampling=_resolve_sampling(
            request,
            min(most, _default_tokens(rules)) if request.max_tokens is None else most,
            ranked if request.logprobs is None else request.logprobs,
            _most_given(request.logprobs if echo else None, request.prompt_logprobs),
            grammar,
            rules,
        ),
        context_tokens=rules.context_tokens,
        origin=tenancy_of_body(request, tenant),
        n=n,
        best_of=best_of,
        echo=echo,
        logprobs=request.logprobs,
        keep=resolve_keep(request, [len(prompt.tokens) for prompt in prompts], 0, rules),
        keep_rule=find_asked_rule(request),
        **_output_options(request, rules),
    )


def _default_tokens(rules: RequestRules) -> int:
    """The length of a completion whose request sets none."""
    return min(DEFAULT_COMPLETION_LENGTH, rules.defaults.max_new_tokens or DEFAULT_COMPLETION_LENGTH)


def count_kept(fields: ChatRequest | CompletionRequest, rules: RequestRules) -> int | None:
    """How many tokens of a prompt are kept; None: all."""
    kept, is_chat = fields.truncate_prompt_tokens, isinstance(fields, ChatRequest)
    if kept != -1:
        return kept
    wanted = fields.max_completion_tokens if isinstance(fields, ChatRequest) else None
    wanted = fields.max_tokens if wanted is None else wanted
    least = 1 if is_chat else _default_tokens(rules)
    return max(1, rules.context_tokens - max(least if wanted is None else wanted, fields.min_tokens or 0))


def truncate_prompts(
    fields: ChatRequest | CompletionRequest, prompts: list[Prompt], rules: RequestRules
) -> list[Prompt]:
    """The last tokens of the prompts, as many as `truncate_prompt_tokens` says; -1: as leave room for the answer.

    A text that is cut is lost, but that of a conversation, whose end is needed.
    """
    kept, is_chat = count_kept(fields, rules), isinstance(fields, ChatRequest)
    if kept is None:
        return prompts
    return [
        prompt
        if len(prompt.tokens) <= kept
        else Prompt(bytes(prompt.tokens[-kept:]), prompt.text if is_chat else None)
        for prompt in prompts
    ]


def fit_worker_context(resolved: ResolvedRequest, context_tokens: int) -> ResolvedRequest:
    """The request for workers that take `context_tokens`, which may be fewer than it was checked against.

    Raises:
        RequestError: `context_length_exceeded`, it is longer than the workers can take.
    """
    if context_tokens >= resolved.context_tokens:
        return resolved
    lengths, wanted = [len(prompt.tokens) for prompt in resolved.prompts], resolved.sampling.max_tokens
    if max(lengths) + min(wanted, 1) > context_tokens:
        raise context_length_error(f"has {max(lengths)} prompt tokens", context_tokens, None)
    # The request set no length, or takes what there is.
    is_open = resolved.clips_length or wanted == resolved.context_tokens - min(lengths)
    if not is_open and max(lengths) + wanted > context_tokens:
        problem = f"asks for {max(lengths) + wanted} ({max(lengths)} in the prompt, {wanted} to be generated)"
        raise context_length_error(problem, context_tokens, None)
    return replace(resolved, context_tokens=context_tokens)


def check_kv_class(resolved: ResolvedRequest, served: Collection[str], auto: Collection[str] = ()) -> None:
    """Check that workers have a KV class that the request asks for, if it asks for one.

    If a name fits several, for example two calibrations during an upgrade, the router takes one that the chosen workers
    have. While no worker is up the request passes: it waits, or fails, like any other one.

    Args:
        resolved: the request.
        served: the classes that workers have.
        auto: those of them that the router may choose by itself.

    Raises:
        RequestError: 400, the workers do not have the class, or the name is not one of a codec.
    """
    if resolved.kv is None or not served:
        return
    if any(names_class(resolved.kv, one) for one in (auto if resolved.kv == AUTO_CLASS else served)):
        return
    problem = f"asks for '{resolved.kv}', and the workers have {' and '.join(sorted(served))}"
    if resolved.kv == AUTO_CLASS:
        problem += ", none with a recorded loss within --kv-quality-budget"
    raise unsupported_error(KV_FIELD, problem)


def fit_kv_class(resolved: ResolvedRequest, classes: ServedClasses) -> ResolvedRequest:
    """The request for workers that have `classes`: one that evicts gets its class here, if it asks for none.

    Raises:
        RequestError: 400, the workers do not have the class that it asks for, or cannot evict in its class.
    """
    check_kv_class(resolved, classes.served, classes.auto)
    if not resolved.keep.evicts:
        return resolved
    keep = resolved.keep
    if classes.served:
        keep = structs.replace(keep, rule=choose_keep_rule(resolved.keep_rule, classes.rules))
    kv = choose_keep_class(resolved.kv, classes)
    return replace(resolved, kv=kv, default_kv=resolved.kv is None, keep=keep)


def _max_new_tokens(
    prompts: list[Prompt], wanted: int | None, fields: tuple[str, str], rules: RequestRules
) -> int:
    """The most new tokens of a sequence: `wanted` if it fits behind the longest prompt, else an error.

    Without `wanted`, all the room behind the shortest prompt. `fields` are the names of the prompt and the length.

    Raises:
        RequestError: `context_length_exceeded`, with the arithmetic.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    rest = rules.context_tokens - longest
    if rest < (0 if wanted == 0 else 1):
        raise context_length_error(f"has {longest} prompt tokens", rules.context_tokens, fields[0])
    if wanted is not None and wanted > rest:
        problem = f"asks for {longest + wanted} ({longest} in the prompt, {wanted} in '{fields[1]}')"
        raise context_length_error(problem, rules.context_tokens, fields[1])
    # A shorter prompt leaves more room for its answer, see `ResolvedRequest.sampling_for`.
    if wanted is None:
        return rules.context_tokens - min(len(prompt.tokens) for prompt in prompts)
    return wanted


def _resolve_sampling(
    fields: GenerationFields,
    most: int,
    logprobs: int | None,
    scored: int | None,
    grammar: Grammar | None,
    rules: RequestRules,
) -> SamplingParams:
    fewest = fields.min_tokens or 0
    if fewest > most:
        raise invalid_value_error(
            "min_tokens", f"({fewest}) is more than the {most} tokens the answer may have"
        )
    ends = () if fields.ignore_eos else rules.tokenizer.end_ids
    defaults = rules.defaults
    sampling = SamplingParams(
        max_tokens=most,
        seed=secrets.randbelow(NUM_SEEDS) if fields.seed is None else fields.seed % NUM_SEEDS,
        seeded=fields.seed is not None,
        min_tokens=fewest,
        temperature=_first_given(fields.temperature, defaults.temperature, 1.0),
        top_p=_first_given(fields.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first_given(fields.top_k, defaults.top_k, 0)),
        min_p=_first_given(fields.min_p, defaults.min_p, 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first_given(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=fields.logit_bias or {},
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        bad_words=tokenize_bad_words(fields.bad_words or (), rules.tokenizer),
        logprobs=logprobs,
        prompt_logprobs=scored,
        stop_token_ids=tuple(sorted({*ends, *(fields.stop_token_ids or ())})),
        grammar=grammar,
    )
    check_some_token_left(sampling)
    return sampling


def _first_given(asked: Number | None, default: Number | None, otherwise: Number) -> Number:
    return asked if asked is not None else default if default is not None else otherwise


def _most_given(*counts: int | None) -> int | None:
    given = [count for count in counts if count is not None]
    return max(given) if given else None


def _output_options(fields: GenerationFields, rules: RequestRules) -> dict[str, Any]:
    options = fields.stream_options
    ends = () if fields.ignore_eos else rules.tokenizer.end_ids
    return {
        "stops": stop_strings(fields),
        "keep_stop": bool(fields.include_stop_str_in_output),
        "skip_special": fields.skip_special_tokens is not False,
        "stream": bool(fields.stream),
        "include_usage": options is not None and bool(options.include_usage),
        "continuous_usage": options is not None and bool(options.continuous_usage_stats),
        "kv": None if fields.diptych is None else fields.diptych.kv,
        "obfuscate": options is not None and bool(options.include_obfuscation),
        "prompt_logprobs": fields.prompt_logprobs,
        "return_ids": bool(fields.return_token_ids),
        "ids_as_names": bool(fields.return_tokens_as_token_ids),
        "own_stop_ids": tuple(token for token in fields.stop_token_ids or () if token not in ends),
    }
