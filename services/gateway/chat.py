"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET

from services.gateway.answer import Answer, Piece, Scored
from services.gateway.replies import (
    LEAST_LOGPROB,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from services.gateway.tokens import Tokens
from services.gateway.validate import Ask
from services.gateway.views import Head, padding, usage_field


@dataclass(frozen=True)
class ChatView:
    """`begin` gives the role, `end` a chunk of its own: clients break when the finish reason comes with text."""

    head: Head
    ask: Ask
    tokens: Tokens

    def begin(self, choice: int) -> list[ChatChunk]:
        return [self._chunk(ChatChunkChoice(choice, Delta(role="assistant", content="", refusal=None)), "")]

    def delta(self, choice: int, piece: Piece) -> ChatChunk:
        return self._chunk(
            ChatChunkChoice(choice, Delta(content=piece.text), self._logprobs(piece.scored)), piece.text
        )

    def end(self, choice: int, reason: str) -> ChatChunk:
        return self._chunk(ChatChunkChoice(choice, Delta(), finish_reason=reason), "")

    def usage(self, usage: Usage) -> ChatChunk:
        head = self.head
        return ChatChunk(head.id, head.created, head.model, [], head.fingerprint, usage=usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
        head = self.head
        choices = [self._choice(index, answer, answer.take()) for index, answer in enumerate(answers)]
        return ChatCompletion(head.id, head.created, head.model, choices, usage, head.fingerprint)

    def _choice(self, index: int, answer: Answer, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index, ChatMessage(piece.text), answer.finish or "stop", self._logprobs(piece.scored)
        )

    def _chunk(self, choice: ChatChunkChoice, text: str) -> ChatChunk:
        head = self.head
        return ChatChunk(
            head.id,
            head.created,
            head.model,
            [choice],
            head.fingerprint,
            usage=usage_field(self.ask),
            obfuscation=padding(self.ask, text) if text else UNSET,
        )

    def _logprobs(self, scored: Sequence[Scored]) -> ChatLogprobs | None:
        if self.ask.logprobs is None:
            return None
        return ChatLogprobs([self._token(entry) for entry in scored])

    def _token(self, entry: Scored) -> TokenLogprob:
        top = entry.logprob.top[: self.ask.logprobs] if entry.logprob is not None else []
        value = entry.logprob.logprob if entry.logprob is not None else LEAST_LOGPROB
        return TokenLogprob(
            *self._named(entry.token, value), [TopLogprob(*self._named(token, value)) for token, value in top]
        )

    def _named(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = self.tokens.bytes_of(token)
        return raw.decode("utf-8", "replace"), max(logprob, LEAST_LOGPROB), list(raw)
