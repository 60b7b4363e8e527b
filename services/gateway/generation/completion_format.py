"""Makes the response bodies of `/v1/completions`: whole, and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET, Raw

from services.gateway.generation.formats import (
    MAX_WRITTEN_TOKENS,
    ChunkEvents,
    ResponseHead,
    UsageField,
    obfuscation_padding,
    prompt_score_parts,
    split_at_field,
    split_json,
)
from services.gateway.generation.logprob_json import LogprobJson, floor_logprob
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.response_schema import Completion, CompletionChoice, DetailsField, Usage


@dataclass(frozen=True)
class CompletionFormat(ChunkEvents):
    """The completions format of `OutputFormat`. Chunks and whole bodies have the same shape."""

    head: ResponseHead
    resolved: ResolvedRequest
    logprob_json: LogprobJson

    def begin_chunks(self, choice: int, used: UsageField = UNSET) -> list[Completion]:
        """No chunks, since a completion begins with its text; but one with the prompt's token ids, if they were asked
        for.
        """
        if not self.resolved.return_ids:
            return []
        prompt = self.resolved.prompts[choice // self.resolved.n]
        first = CompletionChoice("", choice, token_ids=[], prompt_token_ids=prompt.tokens.tolist())
        return [self._make_chunk(first, used)]

    def delta_chunk(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> Completion:
        """A chunk with new text of one choice, and its log-probabilities if they were asked for."""
        ids = piece.token_ids if self.resolved.return_ids else UNSET
        new = CompletionChoice(piece.text, choice, self._logprobs_json(piece), token_ids=ids)
        return self._make_chunk(new, used)

    def end_chunk(self, choice: int, text: OutputText, used: UsageField = UNSET) -> Completion:
        """The last chunk of one choice: its finish reason, without text."""
        ids = text.take_token_ids() if self.resolved.return_ids else UNSET
        last = CompletionChoice(
            "", choice, finish_reason=text.finish, stop_reason=text.stop_reason, token_ids=ids
        )
        return self._make_chunk(last, used)

    def final_chunk(self, usage: UsageField, details: DetailsField = UNSET) -> Completion:
        """The chunk with the whole request's usage and timings, and no choices."""
        head = self.head
        return Completion(
            head.id, head.created, head.model, [], head.fingerprint, usage=usage, diptych=details
        )

    def full_body_parts(
        self, texts: Sequence[OutputText], usage: Usage, details: DetailsField = UNSET
    ) -> Iterator[bytes]:
        """The JSON of a whole response, in parts. Takes the text out of `texts`.

        Log-probabilities are written `MAX_WRITTEN_TOKENS` tokens at a time, so that each part takes only milliseconds.
        """
        head = self.head
        body = Completion(
            head.id, head.created, head.model, [], head.fingerprint, usage=usage, diptych=details
        )
        before, after = split_at_field(body, b"choices", b"[]")
        yield before + b"["
        for index, answer in enumerate(texts):
            yield from self._choice_parts(index, answer)
        yield b"]" + after

    def _choice_parts(self, index: int, answer: OutputText) -> Iterator[bytes]:
        """The JSON of one choice, in parts: its text, its log-probabilities, and those of its prompt."""
        piece, returns = answer.take_piece(), self.resolved.return_ids
        is_scored = self.resolved.prompt_logprobs is not None
        choice = CompletionChoice(
            piece.text,
            index,
            None,
            answer.finish,
            answer.stop_reason,
            [*piece.token_ids, *answer.take_token_ids()] if returns else UNSET,
            answer.prompt.tokens.tolist() if returns else UNSET,
            Raw(b"null") if is_scored else UNSET,
        )
        before, after = split_at_field(choice, b"logprobs", b"null")
        yield b"," * (index > 0) + before
        yield from self._logprob_parts(piece)
        if is_scored:
            between, after = split_json(after, b"prompt_logprobs", b"null")
            yield between
            yield from prompt_score_parts(answer, self.logprob_json)
        yield after

    def _make_chunk(self, choice: CompletionChoice, used: UsageField) -> Completion:
        """A chunk with one choice, padded if the client asked to hide its length."""
        head = self.head
        return Completion(
            head.id,
            head.created,
            head.model,
            [choice],
            head.fingerprint,
            usage=used,
            obfuscation=obfuscation_padding(self.resolved, choice.text) if choice.text else UNSET,
        )

    def _logprobs_json(self, piece: OutputPiece) -> Raw | None:
        """The JSON of a piece's log-probabilities; None if the client did not ask for them."""
        return None if self.resolved.logprobs is None else Raw(b"".join(self._logprob_parts(piece)))

    def _logprob_parts(self, piece: OutputPiece) -> Iterator[bytes]:
        """The JSON of `logprobs`, in parts: four lists of the same length."""
        most = self.resolved.logprobs
        if most is None:
            yield b"null"
            return
        lists: dict[str, Callable[[OutputPiece], str]] = {
            "tokens": lambda part: self.logprob_json.token_names(part.iter_rows()),
            "token_logprobs": lambda part: ",".join(
                [_logprob_number(row.logprob) for row in part.iter_rows()]
            ),
            "top_logprobs": lambda part: self.logprob_json.completion_tops(part.iter_rows(), most),
            "text_offset": lambda part: ",".join([str(row.offset) for row in part.iter_rows()]),
        }
        for i, (name, write) in enumerate(lists.items()):
            yield f'{"," if i else "{"}"{name}":['.encode()
            for part in piece.split_pieces(MAX_WRITTEN_TOKENS):
                yield b"," * (part.start > piece.start) + write(part).encode()
            yield b"]"
        yield b"}"


def _logprob_number(logprob: float | None) -> str:
    """A log-probability as JSON; null for the first token of a prompt, which has none."""
    return "null" if logprob is None else repr(floor_logprob(logprob))
