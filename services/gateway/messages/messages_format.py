"""Makes the response bodies of `/v1/messages`: whole, and as events of a stream.

A call whose arguments a grammar binds is sent as they come. Another one is sent when it is complete, since clients run
whatever begins as a call: if its arguments are no JSON object, it is sent as text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, Raw

from diptych.failure_statuses import RequestFailure
from diptych.logs.request_ids import REQUEST_PREFIX
from services.gateway.generation.chat_parts import make_call_id
from services.gateway.generation.formats import ResponseHead, UsageField, named_event
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.output_text import CHAR_BYTES, OutputPiece, OutputText
from services.gateway.http.error_shapes import message_error
from services.gateway.messages.translate import MessageRouteFields
from services.gateway.openai.resolve import ResolvedRequest
from services.gateway.openai.schemas.messages_objects import (
    AnswerBlock,
    BlockDelta,
    BlockDeltaPart,
    BlockStart,
    BlockStop,
    JsonDelta,
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDetails,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThinkingDetails,
    ToolUseBlock,
)
from services.gateway.openai.schemas.response_schema import DetailsField, Usage
from services.gateway.parsing.answer_parts import AnswerPart

BlockKind = Literal["text", "thinking", "tool_use"]
SIGNATURE_BYTES = 24
PREFIX = "msg_"


@dataclass(slots=True)
class OpenCall:
    """The call that is being written, with the pieces of its arguments and roughly their memory.

    The client has the first `num_shown` of them already. `is_marked`: see `AnswerPart`.
    """

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    num_bytes: int = 0
    is_marked: bool = True
    num_shown: int = 0

    @property
    def is_object(self) -> bool:
        """Whether the arguments are a JSON object."""
        return _is_object("".join(self.arguments))

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments."""
        self.arguments.append(text)
        self.num_bytes += CHAR_BYTES * len(text)

    def show_arguments(self) -> str:
        """Return what waits, and wait no more, if it is, or follows, the beginning of an object; else nothing."""
        text = "".join(self.arguments[self.num_shown :])
        if not self.num_shown and not text.lstrip().startswith("{"):
            return ""
        self.num_shown = len(self.arguments)
        return text


class MessagesFormat:
    """The Messages format of `OutputFormat`. A message has one choice."""

    ping = named_event("ping", Ping())

    def __init__(self, head: ResponseHead, resolved: ResolvedRequest, logprob_json: LogprobJson) -> None:
        self.head, self.resolved = head, resolved
        self._asked = msgspec.json.decode(resolved.route_fields, type=MessageRouteFields)
        # A token that the client names may end a call that is bound, too.
        self._shows_arguments = (
            resolved.context is not None and resolved.context.calls_bound and not resolved.own_stop_ids
        )
        # The block that is being written, if any, and how many have begun.
        self._kind: BlockKind | None = None
        self._num_blocks = self._num_calls = 0
        self._call: OpenCall | None = None
        # Whether a call that the client has seen did not become whole.
        self._is_broken = False
        self._digest = hashlib.blake2b(digest_size=SIGNATURE_BYTES)
        self._stop = StopDetails("end_turn", None)

    @property
    def kept_bytes(self) -> int:
        """Roughly the memory of the call that is being written."""
        return 0 if self._call is None else self._call.num_bytes

    def begin_events(self, choice: int, used: UsageField = UNSET) -> list[bytes]:
        """The message, without content."""
        cached = self.head.cached_tokens
        usage = MessageUsage(
            input_tokens=self.resolved.prompt_tokens - cached, cache_read_input_tokens=cached, output_tokens=0
        )
        message = MessageObject(id=self.head.id, model=self.head.model, content=[], usage=usage)
        return [named_event("message_start", MessageStart(message))]

    def delta_events(self, choice: int, piece: OutputPiece, used: UsageField = UNSET) -> list[bytes]:
        """What is new of the blocks."""
        part = piece.parts[0] if piece.parts else AnswerPart("content", piece.text)
        if part.kind == "call":
            events = self._end_call()
            self._call = OpenCall(self._call_id(part.call), part.text, is_marked=part.is_marked)
            return events
        if not part.text:
            return []
        if part.kind == "arguments":
            return self._add_arguments(part.text)
        events = self._end_call()
        if part.kind == "reasoning":
            events += [] if self._kind == "thinking" else self._begin_thought()
            self._digest.update(part.text.encode())
            return events if self._asked.hides_thoughts else [*events, self._delta(ThinkingDelta(part.text))]
        if self._kind != "text":
            events += self._end_block() + self._begin_block("text", TextBlock(""))
        return [*events, self._delta(TextDelta(part.text))]

    def end_events(self, choice: int, text: OutputText, used: UsageField = UNSET) -> list[bytes]:
        """The end of the last block."""
        events = self._end_call(is_cut=text.finish == "length") + self._end_block()
        self._stop = self._describe_stop(text)
        return events

    def closing_events(self, usage: UsageField, details: DetailsField = UNSET) -> list[bytes]:
        """How the message ended, and what was counted."""
        assert isinstance(usage, Usage)
        delta = MessageDelta(self._stop, _count_tokens(usage), details)
        return [named_event("message_delta", delta), named_event("message_stop", MessageStop())]

    def failure_events(self, failure: RequestFailure) -> list[bytes]:
        """The error."""
        request_id = REQUEST_PREFIX + self.head.id.removeprefix(PREFIX)
        return [named_event("error", message_error(failure, request_id))]

    def full_body_parts(
        self, texts: Sequence[OutputText], usage: Usage, details: DetailsField = UNSET
    ) -> Iterator[bytes]:
        """The JSON of a whole message. Takes the text out of `texts`."""
        [text] = texts
        blocks = self._make_blocks(text.take_piece(), is_cut=text.finish == "length")
        stop = self._describe_stop(text)
        body = MessageObject(
            id=self.head.id,
            model=self.head.model,
            content=blocks,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=_count_tokens(usage),
            diptych=details,
        )
        yield msgspec.json.encode(body)

    def _make_blocks(self, piece: OutputPiece, is_cut: bool) -> list[AnswerBlock]:
        """The blocks of a whole answer. If it is cut, that may be within its last call."""
        blocks: list[AnswerBlock] = []
        arguments: dict[int, str] = {}
        for part in piece.parts:
            if part.kind == "arguments":
                arguments[part.call] = arguments.get(part.call, "") + part.text
        for part in piece.parts or (AnswerPart("content", piece.text),):
            if part.kind == "call":
                given = arguments.get(part.call, "")
                ends_here = is_cut and piece.parts[-1].call == part.call
                blocks.append(
                    self._make_call(OpenCall(self._call_id(part.call), part.text, [given]), ends_here)
                )
            elif part.kind == "reasoning":
                self._digest = hashlib.blake2b(part.text.encode(), digest_size=SIGNATURE_BYTES)
                shown = "" if self._asked.hides_thoughts else part.text
                blocks.append(ThinkingBlock(shown, self._signature()))
            elif part.kind == "content" and part.text:
                blocks.append(TextBlock(part.text))
        return blocks

    def _add_arguments(self, text: str) -> list[bytes]:
        """The events of more arguments of the open call; they wait if they may yet be no object."""
        call = self._call
        assert call is not None
        call.add_arguments(text)
        was_shown, events = call.num_shown > 0, list[bytes]()
        shown = call.show_arguments() if self._shows_arguments and call.is_marked else ""
        if shown and not was_shown:
            self._num_calls += 1
            events = self._end_block() + self._begin_block("tool_use", ToolUseBlock(call.id, call.name, {}))
        return [*events, self._delta(JsonDelta(shown))] if shown else events

    def _make_call(self, call: OpenCall, is_cut: bool) -> ToolUseBlock | TextBlock:
        """The block of a call, or text if its arguments are no object and are not cut."""
        arguments = "".join(call.arguments)
        is_object = _is_object(arguments)
        if not is_object and not is_cut:
            return TextBlock(f"{call.name} {arguments}")
        self._num_calls += 1
        return ToolUseBlock(call.id, call.name, Raw(arguments.encode()) if is_object else {})

    def _end_call(self, is_cut: bool = False) -> list[bytes]:
        """The events of the open call, if any, which is complete or cut."""
        call, self._call = self._call, None
        if call is None or call.num_shown:
            self._is_broken |= call is not None and not call.is_object
            return []
        block, arguments = self._make_call(call, is_cut), "".join(call.arguments)
        events = self._end_block()
        if isinstance(block, TextBlock):
            events += self._begin_block("text", TextBlock(""))
            return [*events, self._delta(TextDelta(block.text)), *self._end_block()]
        events += self._begin_block("tool_use", ToolUseBlock(call.id, call.name, {}))
        return [*events, self._delta(JsonDelta(arguments))] if arguments else events

    def _begin_thought(self) -> list[bytes]:
        self._digest = hashlib.blake2b(digest_size=SIGNATURE_BYTES)
        return self._end_block() + self._begin_block("thinking", ThinkingBlock(""))

    def _begin_block(self, kind: BlockKind, block: AnswerBlock) -> list[bytes]:
        self._kind, self._num_blocks = kind, self._num_blocks + 1
        return [named_event("content_block_start", BlockStart(self._num_blocks - 1, block))]

    def _end_block(self) -> list[bytes]:
        """End the open block, if any; a thought with its signature."""
        if self._kind is None:
            return []
        events = [self._delta(SignatureDelta(self._signature()))] if self._kind == "thinking" else []
        self._kind = None
        return [*events, named_event("content_block_stop", BlockStop(self._num_blocks - 1))]

    def _delta(self, delta: BlockDeltaPart) -> bytes:
        return named_event("content_block_delta", BlockDelta(self._num_blocks - 1, delta))

    def _signature(self) -> str:
        return base64.b64encode(self._digest.digest()).decode()

    def _call_id(self, call: int) -> str:
        is_short = self.resolved.context is not None and self.resolved.context.short_ids
        return make_call_id(f"{self.head.id} 0 {call}", is_short).replace("call_", "toolu_", 1)

    def _describe_stop(self, text: OutputText) -> StopDetails:
        """Why an answer has ended."""
        if text.finish == "length":
            most = self.resolved.sampling_for(self.resolved.prompts[0], 0).max_tokens
            is_clipped = most < self._asked.max_tokens
            return StopDetails("model_context_window_exceeded" if is_clipped else "max_tokens", None)
        if self._is_broken:
            # Whatever has ended it: a client must not run it.
            return StopDetails("max_tokens", None)
        if text.finish == "tool_calls" and self._num_calls:
            return StopDetails("tool_use", None)
        # A token of `stop_token_ids` is no text.
        found = text.stop_reason if isinstance(text.stop_reason, str) else None
        reason: StopReason = "end_turn" if found is None else "stop_sequence"
        return StopDetails(reason, found)


def _is_object(arguments: str) -> bool:
    """Whether the arguments of a call are a JSON object."""
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _count_tokens(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingDetails(usage.completion_tokens_details.reasoning_tokens),
        diptych=usage.diptych,
    )
