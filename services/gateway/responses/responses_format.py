"""Makes the response bodies of `/v1/responses`: whole, and as events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw

from diptych.failure_statuses import TOO_MANY_REQUESTS, RequestFailure
from services.gateway.generation.chat_parts import make_call_id
from services.gateway.generation.formats import (
    MAX_WRITTEN_TOKENS,
    SSE_DONE,
    SSE_PING,
    ResponseHead,
    UsageField,
    named_event,
    obfuscation_padding,
    split_at_field,
    split_json,
)
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import OutputPiece, OutputText
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.response_schema import DetailsField, Usage
from services.gateway.openai.schemas.responses_objects import (
    AnsweredFields,
    IncompleteDetails,
    InputDetails,
    MessageItem,
    OutputDetails,
    ResponseEvent,
    ResponseProblem,
    ResponseUsage,
)
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.responses.output_items import OutputItems
from services.gateway.responses.translate import ResponseRouteFields

Status = Literal["in_progress", "completed", "incomplete", "failed"]
# How often a stream writes what it repeats of its request.
NUM_REPEATED = 3


class ResponsesFormat:
    """The Responses format of `OutputFormat`. A response has one choice."""

    ping = SSE_PING

    def __init__(self, head: ResponseHead, resolved: ResolvedRequest, logprob_json: LogprobJson) -> None:
        self.head, self.resolved, self.logprob_json = head, resolved, logprob_json
        asked = msgspec.json.decode(resolved.route_fields, type=ResponseRouteFields)
        self._repeated = bytes(asked.repeated)
        is_short = resolved.context is not None and resolved.context.short_ids
        self._items = OutputItems(
            head.id,
            lambda call: make_call_id(f"{head.id} 0 {call}", is_short),
            asked.summary,
            asked.sealed,
            lambda text: obfuscation_padding(resolved, text) if text else UNSET,
        )
        self._status: Status = "in_progress"

    @property
    def kept_bytes(self) -> int:
        """Roughly the memory of the items, and of what is repeated of the request."""
        return self._items.kept_bytes + NUM_REPEATED * len(self._repeated)

    def begin_events(self, choice: int, used: UsageField = UNSET) -> list[bytes]:
        """The response, twice: it exists, and it is in progress."""
        body = self._response_json()
        return [self._response_event(f"response.{name}", body) for name in ("created", "in_progress")]

    def delta_events(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> Iterator[bytes]:
        """What is new of the items."""
        most, logprobs = self.resolved.logprobs, b""
        if most is not None:
            logprobs = self.logprob_json.chat_entries(piece.iter_rows(), most).encode()
        return self._items.add_piece(piece, logprobs)

    def end_events(self, choice: int, text: OutputText, used: UsageField = UNSET) -> Iterator[bytes]:
        """The end of the last item."""
        self._status = _status_of(text)
        return self._items.end_answer(self._status == "incomplete")

    def closing_events(self, usage: UsageField, details: DetailsField = UNSET) -> Iterator[bytes]:
        """The whole response, and [DONE]."""
        body = self._response_json(usage, details)
        yield from self._fill_output(self._response_event(f"response.{self._status}", body))
        yield SSE_DONE

    def failure_events(self, failure: RequestFailure) -> Iterator[bytes]:
        """The response so far, with its failure, and [DONE]."""
        self._items.abandon_item()
        self._status = "failed"
        body = self._response_json(failure=failure)
        yield from self._fill_output(self._response_event("response.failed", body))
        yield SSE_DONE

    def full_body_parts(
        self, texts: Sequence[OutputText], usage: Usage, details: DetailsField = UNSET
    ) -> Iterator[bytes]:
        """The JSON of a whole response, in parts. Takes the text out of `texts`.

        Log-probabilities are written `MAX_WRITTEN_TOKENS` tokens at a time.
        """
        [text] = texts
        piece = text.take_piece()
        plain = (AnswerPart("content", piece.text),) if piece.text else ()
        for part in piece.parts or plain:
            _pass_over(self._items.add_piece(OutputPiece(part.text, piece.scored, 0, 0, (part,))))
        self._status = _status_of(text)
        _pass_over(self._items.end_answer(self._status == "incomplete"))
        return self._fill_output(self._response_json(usage, details), piece)

    def _fill_output(self, text: bytes, piece: OutputPiece | None = None) -> Iterator[bytes]:
        """JSON with the items in its empty `output`, in parts. Messages have the tokens of a piece."""
        # What clients have written is behind it.
        before, after = split_json(text, b"output", b"[]")
        yield before + b"["
        is_scored = piece is not None and self.resolved.logprobs is not None
        pieces = _message_pieces(piece) if piece is not None and is_scored else iter(())
        for i, item in enumerate(self._items.items):
            yield b"," * (i > 0)
            if is_scored and isinstance(item, MessageItem):
                yield from self._scored_item(item, next(pieces))
            else:
                yield from self._items.item_parts(i)
        yield b"]" + after

    def _scored_item(self, item: MessageItem, piece: OutputPiece) -> Iterator[bytes]:
        """The JSON of a message with the log-probabilities of a piece, in parts."""
        before, after = split_at_field(item, b"logprobs", b"[]")
        yield before + b"["
        most = self.resolved.logprobs or 0
        for part in piece.split_pieces(MAX_WRITTEN_TOKENS):
            entries = self.logprob_json.chat_entries(part.iter_rows(), most).encode()
            yield b"," * (part.start > piece.start) + entries
        yield b"]" + after

    def _response_event(self, name: str, body: bytes) -> bytes:
        event = ResponseEvent(type=name, sequence_number=self._items.next_number(), response=Raw(body))
        return named_event(name, event)

    def _response_json(
        self,
        usage: UsageField = UNSET,
        details: DetailsField = UNSET,
        failure: RequestFailure | None = None,
    ) -> bytes:
        """The JSON of the response as it is now, without its items."""
        head, sampling = self.head, self.resolved.sampling
        answered = AnsweredFields(
            id=head.id,
            created_at=head.created,
            completed_at=int(time.time()) if self._status == "completed" else None,
            status=self._status,
            error=None if failure is None else _describe_problem(failure),
            incomplete_details=IncompleteDetails() if self._status == "incomplete" else None,
            model=head.model,
            output=[],
            usage=_count_tokens(usage) if isinstance(usage, Usage) else None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            diptych=details,
        )
        return msgspec.json.encode(answered)[:-1] + b"," + self._repeated[1:]


def _message_pieces(piece: OutputPiece) -> Iterator[OutputPiece]:
    """The tokens of each message of a whole answer, with those before it that have no text."""
    start = 0
    for part, stop in piece.part_ranges():
        if part is None or (part.kind == "content" and part.text):
            yield OutputPiece("", piece.scored, start, stop)
            start = stop
    # Of an answer without text, which has one empty message.
    yield OutputPiece("", piece.scored, start)


def _pass_over(events: Iterable[bytes]) -> None:
    """Do what makes these events, which nobody reads."""
    for _ in events:
        pass


def _status_of(text: OutputText) -> Status:
    """The status of a response whose answer has ended."""
    return "incomplete" if text.finish == "length" else "completed"


def _count_tokens(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
        diptych=usage.diptych,
    )


def _describe_problem(failure: RequestFailure) -> ResponseProblem:
    """A failure with the nearest of OpenAI's codes."""
    is_rate, is_prompt = failure.status == TOO_MANY_REQUESTS, failure.status < 500
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = (
        "rate_limit_exceeded" if is_rate else "invalid_prompt" if is_prompt else "server_error"
    )
    return ResponseProblem(code=code, message=failure.message, type=failure.code, param=failure.param)
