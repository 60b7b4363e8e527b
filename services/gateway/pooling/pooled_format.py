"""Makes the response bodies of the routes that pool: vectors, scores of pairs, and ranked documents."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import numpy as np
from msgspec import UNSET, Raw
from numpy.typing import NDArray

from services.gateway.generation.formats import ChunkEvents, ResponseHead, UsageField, split_at_field
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.pooling_schema import (
    DocumentText,
    Embedding,
    EmbeddingList,
    PairScore,
    PooledAnswer,
    PooledUsage,
    RankedDocument,
    RerankList,
    ScoreList,
)
from services.gateway.openai.schemas.response_schema import DetailsField, Usage

# Below this a vector's length counts as this, as in PyTorch's `cosine_similarity`.
MIN_LENGTH = 1e-8


@dataclass(frozen=True)
class PooledFormat(ChunkEvents, ABC):
    """The format of `OutputFormat` for answers without text, which are never streamed."""

    head: ResponseHead
    resolved: ResolvedRequest
    logprob_json: LogprobJson

    @property
    def answer(self) -> PooledAnswer:
        """What is made of what was pooled."""
        assert self.resolved.pooled is not None
        return self.resolved.pooled

    def begin_chunks(self, choice: int, used: UsageField = UNSET) -> NoReturn:
        """Never called."""
        raise AssertionError("what was pooled is not streamed")

    def delta_chunk(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> NoReturn:
        """Never called."""
        raise AssertionError("what was pooled is not streamed")

    def end_chunk(self, choice: int, text: OutputText, used: UsageField = UNSET) -> NoReturn:
        """Never called."""
        raise AssertionError("what was pooled is not streamed")

    def final_chunk(self, usage: UsageField, details: DetailsField = UNSET) -> NoReturn:
        """Never called."""
        raise AssertionError("what was pooled is not streamed")

    def full_body_parts(
        self, texts: Sequence[OutputText], usage: Usage, details: DetailsField = UNSET
    ) -> Iterator[bytes]:
        """The JSON of a whole response, an item at a time."""
        before, after = split_at_field(*self.empty_body(_count_tokens(usage), details), b"[]")
        yield before + b"["
        for place, item in enumerate(self.list_items(texts)):
            yield b"," * (place > 0) + msgspec.json.encode(item)
        yield b"]" + after

    @abstractmethod
    def empty_body(self, usage: PooledUsage, details: DetailsField) -> tuple[msgspec.Struct, bytes]:
        """The response without items, and the field that they belong to."""

    @abstractmethod
    def list_items(self, texts: Sequence[OutputText]) -> Iterator[msgspec.Struct]:
        """The items of the response."""


class ListFormat(PooledFormat):
    """A format whose answers are OpenAI's lists, of the class `kind`."""

    kind: type[EmbeddingList | ScoreList]

    def empty_body(self, usage: PooledUsage, details: DetailsField) -> tuple[msgspec.Struct, bytes]:
        """The response without items."""
        head = self.head
        return self.kind(head.id, head.created, head.model, [], usage, diptych=details), b"data"


class EmbeddingFormat(ListFormat):
    """The format of `/v1/embeddings`."""

    kind = EmbeddingList

    def list_items(self, texts: Sequence[OutputText]) -> Iterator[msgspec.Struct]:
        """The vectors, in the order of inputs."""
        for index, text in enumerate(texts):
            if self.answer.base64:
                yield Embedding(index, base64.b64encode(text.pooled).decode())
            else:
                yield Embedding(index, Raw(msgspec.json.encode(_numbers(text).tolist())))


class ScoreFormat(ListFormat):
    """The format of `/score`."""

    kind = ScoreList

    def list_items(self, texts: Sequence[OutputText]) -> Iterator[msgspec.Struct]:
        """The scores, in the order of pairs."""
        for index, score in enumerate(score_pairs(texts, self.answer)):
            yield PairScore(index, score)


class RerankFormat(PooledFormat):
    """The format of `/rerank`."""

    def empty_body(self, usage: PooledUsage, details: DetailsField) -> tuple[msgspec.Struct, bytes]:
        """The response without documents."""
        return RerankList(self.head.id, self.head.model, [], usage, diptych=details), b"results"

    def list_items(self, texts: Sequence[OutputText]) -> Iterator[msgspec.Struct]:
        """The documents with the best scores, best first; equal ones in their order."""
        answer = self.answer
        ranked = sorted(enumerate(score_pairs(texts, answer)), key=lambda one: -one[1])
        for index, score in ranked[: answer.top_n or None]:
            shown = UNSET if answer.documents is None else DocumentText(answer.documents[index])
            yield RankedDocument(index, score, shown)


def score_pairs(texts: Sequence[OutputText], answer: PooledAnswer) -> list[float]:
    """The scores of all pairs: as they were computed, or the cosines of their vectors."""
    if not answer.pairs:
        return [float(_numbers(text)[0]) for text in texts]
    vectors = np.stack([_numbers(text) for text in texts]).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), MIN_LENGTH)
    return [float(vectors[first] @ vectors[second]) for first, second in answer.pairs]


def _numbers(text: OutputText) -> NDArray[np.float32]:
    return np.frombuffer(text.pooled, "<f4")


def _count_tokens(usage: Usage) -> PooledUsage:
    """The usage of an answer without new tokens."""
    return PooledUsage(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details)
