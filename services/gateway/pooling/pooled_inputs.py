"""Checks bodies whose prompts are pooled, makes the prompts of pairs, and resolves them to a `ResolvedRequest`.

A model that embeds scores a pair by the cosine of its two vectors; one that scores reads both as one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from diptych.errors import RequestError
from diptych.request import Pooling, SamplingParams
from engine.model.pooling import ModelPooler
from services.gateway.openai.resolve import Prompt, ResolvedRequest
from services.gateway.openai.schemas.pooling_schema import (
    DocumentText,
    EmbeddingRequest,
    PairFields,
    PooledAnswer,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.openai.tenancy import Caller, check_priority, tenancy_of_body
from services.gateway.openai.validate import (
    RequestRules,
    check_model_name,
    context_length_error,
    invalid_value_error,
    split_prompts,
    unsupported_error,
)
from services.gateway.pooling.pair_prompt import render_pair


@dataclass(frozen=True, slots=True)
class PooledInputs:
    """The inputs of a body before they are tokenized, how they are pooled, and what is made of that.

    `field` is the field that they come from. `special`: the tokenizer adds its special tokens to them.
    """

    sources: Sequence[str | list[int]]
    special: bool
    field: str
    pooling: Pooling
    answer: PooledAnswer


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Texts and their pairs, by number: a query, or the first text of a pair, then a document. `field` has the last."""

    texts: Sequence[str]
    pairs: Sequence[tuple[int, int]]
    field: str


def read_embedding(request: EmbeddingRequest, caller: Caller, rules: RequestRules) -> PooledInputs:
    """The inputs of an `/v1/embeddings` body.

    Raises:
        RequestError: 400, 403 or 404: the model does not embed, or a field is invalid.
    """
    pooler = _check_fields(request, caller, rules)
    if not pooler.embeds:
        raise unsupported_error("model", "scores pairs and does not embed: use /rerank or /score")
    sources = split_prompts(request.input, rules, field="input", most=rules.limits.max_inputs)
    pooling, asked = _pooling_of(pooler), request.dimensions
    if asked is not None:
        if asked > pooler.size:
            raise invalid_value_error(
                "dimensions", f"is {asked}, and this model's vectors have {pooler.size} numbers"
            )
        if pooler.sizes is not None and asked not in pooler.sizes:
            known = " or ".join(map(str, pooler.sizes))
            raise invalid_value_error("dimensions", f"is {asked}, and this model's vectors may have {known}")
        pooling = structs.replace(pooling, dimensions=asked)
    answer = PooledAnswer("embeddings", base64=request.encoding_format == "base64")
    return PooledInputs(sources, request.add_special_tokens is not False, "input", pooling, answer)


def read_rerank(request: RerankRequest, caller: Caller, rules: RequestRules) -> PooledInputs:
    """The inputs of a `/rerank` body. Raises RequestError: 400, 403 or 404."""
    pooler = _check_fields(request, caller, rules)
    texts = tuple(one.text if isinstance(one, DocumentText) else one for one in request.documents)
    answer = PooledAnswer(
        "rerank",
        top_n=request.top_n or 0,
        documents=None if request.return_documents is False else texts,
    )
    pairs = TextPairs((request.query, *texts), [(0, i + 1) for i in range(len(texts))], "documents")
    return _read_pairs(pairs, request, answer, pooler, rules)


def read_score(request: ScoreRequest, caller: Caller, rules: RequestRules) -> PooledInputs:
    """The inputs of a `/score` body. Raises RequestError: 400, 403 or 404."""
    pooler = _check_fields(request, caller, rules)
    by_texts, by_names = (request.text_1, request.text_2), (request.queries, request.documents)
    if (by_texts == (None, None)) == (by_names == (None, None)):
        raise invalid_value_error("text_1", "with 'text_2', or 'queries' with 'documents', must be given")
    names, given = (
        (("text_1", "text_2"), by_texts) if by_names == (None, None) else (("queries", "documents"), by_names)
    )
    for name, texts in zip(names, given, strict=True):
        if texts is None:
            raise invalid_value_error(name, "must be given with the other texts of the pairs")
    first, second = ([texts] if isinstance(texts, str) else texts or [] for texts in given)
    if len(first) not in (1, len(second)):
        raise invalid_value_error(
            names[0], f"holds {len(first)} texts: 1, or as many as '{names[1]}' ({len(second)}), make pairs"
        )
    numbers = [(0 if len(first) == 1 else i, len(first) + i) for i in range(len(second))]
    pairs = TextPairs((*first, *second), numbers, names[1])
    return _read_pairs(pairs, request, PooledAnswer("score"), pooler, rules)


def resolve_pooled(
    fields: PoolingFields, inputs: PooledInputs, prompts: list[Prompt], tenant: str, rules: RequestRules
) -> ResolvedRequest:
    """The `ResolvedRequest` of a body whose inputs are `prompts` now.

    Raises:
        RequestError: 400, an input is empty, or longer than the context.
    """
    lengths = [len(prompt.tokens) for prompt in prompts]
    if not min(lengths):
        raise invalid_value_error(inputs.field, f"[{lengths.index(0)}] has no tokens")
    if max(lengths) > rules.context_tokens:
        raise context_length_error(f"has {max(lengths)} tokens", rules.context_tokens, inputs.field)
    return ResolvedRequest(
        model=check_model_name(fields.model, rules),
        prompts=[Prompt(prompt.ids) for prompt in prompts],
        # Nothing is sampled: a worker answers with what it pooled.
        sampling=SamplingParams(0, 0, temperature=0.0, pooling=inputs.pooling),
        context_tokens=rules.context_tokens,
        origin=tenancy_of_body(fields, tenant),
        pooled=inputs.answer,
    )


def _check_fields(fields: PoolingFields, caller: Caller, rules: RequestRules) -> ModelPooler:
    """Check what all routes take. Returns how the model pools. Raises RequestError."""
    check_priority(fields, caller)
    check_model_name(fields.model, rules)
    if rules.pooler.pooling is None:
        raise cannot_pool_error(rules.pooler.why)
    return rules.pooler


def cannot_pool_error(why: str) -> RequestError:
    """The error of a request for a model that cannot pool."""
    return unsupported_error("model", f"cannot pool: {why}")


def _pooling_of(pooler: ModelPooler) -> Pooling:
    assert pooler.pooling is not None
    return pooler.pooling


def _read_pairs(
    pairs: TextPairs, fields: PairFields, answer: PooledAnswer, pooler: ModelPooler, rules: RequestRules
) -> PooledInputs:
    """The inputs of pairs: the texts of a model that embeds, a prompt for each pair of one that scores."""
    sources = list[str | list[int]](pairs.texts)
    if pooler.scores:
        if len(pairs.pairs) > rules.limits.max_inputs:
            raise _too_many_error(pairs.field, len(pairs.pairs), rules)
        texts, said = pairs.texts, fields.instruction
        # A query stands in the prompt of each of its documents, so that a small body could ask for gigabytes.
        num_chars = sum(len(texts[i]) + len(texts[j]) + len(said or "") for i, j in pairs.pairs)
        if num_chars > (most := rules.limits.max_body_bytes):
            problem = (
                f"makes prompts of {num_chars} characters with the texts before it; at most {most} are read"
            )
            raise invalid_value_error(pairs.field, problem)
        sources = [render_pair(rules.tokenizer, texts[i], texts[j], said) for i, j in pairs.pairs]
        # The template has what the model expects around a prompt.
        return PooledInputs(sources, False, pairs.field, _pooling_of(pooler), answer)
    if fields.instruction is not None:
        raise unsupported_error("instruction", "has no place in the prompts of a model that embeds")
    if len(sources) > rules.limits.max_inputs:
        raise _too_many_error(pairs.field, len(sources), rules)
    answer = structs.replace(answer, pairs=tuple(pairs.pairs))
    return PooledInputs(sources, True, pairs.field, _pooling_of(pooler), answer)


def _too_many_error(field: str, count: int, rules: RequestRules) -> RequestError:
    most = rules.limits.max_inputs
    return invalid_value_error(field, f"needs {count} prompts; at most {most} are served at once")
