"""The bodies of the routes that pool prompts, and their answers: vectors, scores of pairs, ranked documents.

The shapes are OpenAI's for `/v1/embeddings`, and vLLM's, which are Jina's and Cohere's, for the others.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from services.gateway.openai.schemas.request_schema import Count, ShortText, TokenId
from services.gateway.openai.schemas.response_schema import DetailsField, PromptDetails

Text = Annotated[str, Meta(min_length=1)]
TextList = Annotated[list[Text], Meta(min_length=1)]


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all routes that pool take, with the same meaning."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    user: ShortText | None = None
    # Extensions of vLLM, with the same meaning.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-10, le=10)] | None = None


class EmbeddingRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/embeddings`."""

    input: Text | Annotated[list[Text | TokenId | list[TokenId]], Meta(min_length=1)]
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    # An extension of vLLM.
    add_special_tokens: bool | None = None


class PairFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """What the routes take that score pairs of texts. `instruction` says to the model what makes a pair a good one."""

    instruction: Text | None = None


class DocumentText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document, as an object with its text."""

    text: Text


class RerankRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /rerank` and `POST /v1/rerank`. Without `top_n`, or with 0, all documents are ranked."""

    query: Text
    documents: Annotated[list[Text | DocumentText], Meta(min_length=1)]
    top_n: Count | None = None
    return_documents: bool | None = None


class ScoreRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /score` and `POST /v1/score`: either `text_1` and `text_2`, or `queries` and `documents`."""

    text_1: Text | TextList | None = None
    text_2: Text | TextList | None = None
    queries: Text | TextList | None = None
    documents: Text | TextList | None = None


class PooledAnswer(msgspec.Struct, frozen=True):
    """What is made of the vectors or scores of a request's prompts, for `route`: "embeddings", "rerank" or "score".

    `pairs` are prompts whose vectors' cosine is a score, by number; without any, each prompt has a score. `documents`
    are what ranked results repeat; None: nothing.
    """

    route: str
    base64: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    top_n: int = 0
    documents: tuple[str, ...] | None = None


class PooledUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Embedding(msgspec.Struct, frozen=True):
    """A list of numbers, or the same as float32 in base64."""

    index: int
    embedding: list[float] | str | Raw
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage
    object: str = "list"
    diptych: DetailsField = UNSET


class PairScore(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[PairScore]
    usage: PooledUsage
    object: str = "list"
    diptych: DetailsField = UNSET


class RankedDocument(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankList(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[RankedDocument]
    usage: PooledUsage
    diptych: DetailsField = UNSET
