"""Makes the response bodies of `/v1/chat/completions`: whole, and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET, Raw, structs

from services.gateway.generation.chat_parts import make_call_id, make_delta, make_message
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
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.response_schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    DetailsField,
    TokenIds,
    Usage,
)


@dataclass(frozen=True)
class ChatFormat(ChunkEvents):
    """The chat format of `OutputFormat`.

    The role comes in a first chunk of its own, the finish reason in a last one: some clients fail if the finish reason
    comes together with text.
    """

    head: ResponseHead
    resolved: ResolvedRequest
    logprob_json: LogprobJson

    def begin_chunks(self, choice: int, used: UsageField = UNSET) -> list[ChatChunk]:
        """The chunk with the assistant's role."""
        first = Delta(role="assistant", content="", refusal=None)
        chunk = self._make_chunk(ChatChunkChoice(choice, first), "", used)
        return [structs.replace(chunk, prompt_token_ids=self._prompt_ids)]

    @property
    def _prompt_ids(self) -> TokenIds:
        """The prompt's token ids, if they were asked for."""
        return self.resolved.prompts[0].tokens.tolist() if self.resolved.return_ids else UNSET

    def delta_chunk(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> ChatChunk:
        """A chunk with what is new of one choice, and its log-probabilities if they were asked for."""
        delta, text = Delta(content=piece.text), piece.text
        for part in piece.parts:
            delta, text = make_delta(part, self._call_id(choice, part.call)), part.text
        ids = piece.token_ids if self.resolved.return_ids else UNSET
        new = ChatChunkChoice(choice, delta, self._logprobs_json(piece), token_ids=ids)
        return self._make_chunk(new, text, used)

    def end_chunk(self, choice: int, text: OutputText, used: UsageField = UNSET) -> ChatChunk:
        """The last chunk of one choice: its finish reason, without text."""
        ids = text.take_token_ids() if self.resolved.return_ids else UNSET
        last = ChatChunkChoice(
            choice, Delta(), finish_reason=text.finish, stop_reason=text.stop_reason, token_ids=ids
        )
        return self._make_chunk(last, "", used)

    def final_chunk(self, usage: UsageField, details: DetailsField = UNSET) -> ChatChunk:
        """The chunk with the whole request's usage and timings, and no choices."""
        head = self.head
        return ChatChunk(
            head.id, head.created, head.model, [], head.fingerprint, usage=usage, diptych=details
        )

    def full_body_parts(
        self, texts: Sequence[OutputText], usage: Usage, details: DetailsField = UNSET
    ) -> Iterator[bytes]:
        """The JSON of a whole response, in parts. Takes the text out of `texts`.

        Log-probabilities are written `MAX_WRITTEN_TOKENS` tokens at a time, so that each part takes only milliseconds.
        """
        head = self.head
        is_scored = self.resolved.prompt_logprobs is not None
        body = ChatCompletion(
            head.id,
            head.created,
            head.model,
            [],
            usage,
            head.fingerprint,
            diptych=details,
            prompt_logprobs=Raw(b"null") if is_scored else UNSET,
            prompt_token_ids=self._prompt_ids,
        )
        before, after = split_at_field(body, b"choices", b"[]")
        yield before + b"["
        for index, answer in enumerate(texts):
            yield from self._choice_parts(index, answer)
        if is_scored:
            between, after = split_json(after, b"prompt_logprobs", b"null")
            yield b"]" + between
            yield from prompt_score_parts(texts[0], self.logprob_json)
            yield after
        else:
            yield b"]" + after

    def _choice_parts(self, index: int, text: OutputText) -> Iterator[bytes]:
        """The JSON of one choice, in parts: its text, and then its log-probabilities."""
        piece = text.take_piece()
        choice = ChatChoice(
            index,
            make_message(piece, lambda call: self._call_id(index, call)),
            text.finish or "stop",
            stop_reason=text.stop_reason,
            token_ids=[*piece.token_ids, *text.take_token_ids()] if self.resolved.return_ids else UNSET,
        )
        before, after = split_at_field(choice, b"logprobs", b"null")
        yield b"," * (index > 0) + before
        if self.resolved.logprobs is None:
            yield b"null" + after
            return
        yield b'{"content":['
        # From here on only its tokens count.
        piece.parts = ()
        for part in piece.split_pieces(MAX_WRITTEN_TOKENS):
            yield (
                b"," * (part.start > 0)
                + self.logprob_json.chat_entries(part.iter_rows(), self.resolved.logprobs).encode()
            )
        yield b'],"refusal":null}' + after

    def _call_id(self, choice: int, call: int) -> str:
        """The id of a call in a choice."""
        is_short = self.resolved.context is not None and self.resolved.context.short_ids
        return make_call_id(f"{self.head.id} {choice} {call}", is_short)

    def _make_chunk(self, choice: ChatChunkChoice, text: str, used: UsageField) -> ChatChunk:
        """A chunk with one choice; `text` is the text in it, whose length the padding hides."""
        head = self.head
        return ChatChunk(
            head.id,
            head.created,
            head.model,
            [choice],
            head.fingerprint,
            usage=used,
            obfuscation=obfuscation_padding(self.resolved, text) if text else UNSET,
        )

    def _logprobs_json(self, piece: OutputPiece) -> Raw | None:
        """The JSON of a piece's log-probabilities; None if the client did not ask for them."""
        if self.resolved.logprobs is None:
            return None
        content = self.logprob_json.chat_entries(piece.iter_rows(), self.resolved.logprobs)
        return Raw(f'{{"content":[{content}],"refusal":null}}'.encode())
