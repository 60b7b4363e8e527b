"""Bodies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET

from diptych.messages import Logprob
from services.gateway.answer import Answer, Piece, Scored
from services.gateway.replies import LEAST_LOGPROB, Completion, CompletionChoice, LegacyLogprobs, Usage
from services.gateway.tokens import Tokens
from services.gateway.validate import Ask
from services.gateway.views import Head, padding, usage_field


@dataclass(frozen=True)
class CompletionView:
    """Chunks of a stream and whole answers have the same shape."""

    head: Head
    ask: Ask
    tokens: Tokens

    def begin(self, choice: int) -> list[Completion]:
        return []

    def delta(self, choice: int, piece: Piece) -> Completion:
        return self._chunk(CompletionChoice(piece.text, choice, self._logprobs(piece.scored)))

    def end(self, choice: int, reason: str) -> Completion:
        return self._chunk(CompletionChoice("", choice, finish_reason=reason))

    def usage(self, usage: Usage) -> Completion:
        head = self.head
        return Completion(head.id, head.created, head.model, [], head.fingerprint, usage=usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Completion:
        head = self.head
        choices = [self._choice(index, answer, answer.take()) for index, answer in enumerate(answers)]
        return Completion(head.id, head.created, head.model, choices, head.fingerprint, usage=usage)

    def _choice(self, index: int, answer: Answer, piece: Piece) -> CompletionChoice:
        return CompletionChoice(piece.text, index, self._logprobs(piece.scored), answer.finish)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        head = self.head
        return Completion(
            head.id,
            head.created,
            head.model,
            [choice],
            head.fingerprint,
            usage=usage_field(self.ask),
            obfuscation=padding(self.ask, choice.text) if choice.text else UNSET,
        )

    def _logprobs(self, scored: Sequence[Scored]) -> LegacyLogprobs | None:
        if self.ask.logprobs is None:
            return None
        return LegacyLogprobs(
            tokens=[self._name(entry.token) for entry in scored],
            token_logprobs=[_floor(entry.logprob.logprob) if entry.logprob else None for entry in scored],
            top_logprobs=[self._top(entry.logprob) for entry in scored],
            text_offset=[entry.offset for entry in scored],
        )

    def _top(self, logprob: Logprob | None) -> dict[str, float] | None:
        """The alternatives and the token itself, as OpenAI lists them; null for the first token of a prompt."""
        if logprob is None:
            return None
        rows = [*logprob.top[: self.ask.logprobs], (logprob.token, logprob.logprob)]
        return {self._name(token): _floor(value) for token, value in rows}

    def _name(self, token: int) -> str:
        """A token's text; one that is not whole characters is told by its bytes, so that names stay apart."""
        raw = self.tokens.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _floor(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
