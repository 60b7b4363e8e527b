"""Builds the items of a response from the parts of an answer, and the events that tell of them.

reasoning:      added ─▶ part added ─▶ deltas ─▶ text done ─▶ part done ─▶ item done
message:        the same
function_call:  added ─▶ deltas of its arguments ─▶ arguments done ─▶ item done
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from services.gateway.generation.formats import named_event
from services.gateway.generation.output_text import OutputPiece
from services.gateway.openai.schemas.responses_objects import (
    CallItem,
    DeltaEvent,
    DoneEvent,
    ItemContent,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputTextPart,
    PartEvent,
    ReasoningItem,
    ResponseStreamEvent,
    SummaryPart,
    ThoughtPart,
)
from services.gateway.parsing.answer_parts import AnswerPart
from services.gateway.responses.input_items import seal_thought

ItemKind = Literal["message", "reasoning", "summary", "call"]
ID_PREFIXES: dict[ItemKind, str] = {"message": "msg", "reasoning": "rs", "summary": "rs", "call": "fc"}
# By kind of item, what the names of its events begin with: those of its parts, and those of its text.
PART_EVENTS: dict[ItemKind, str] = {
    "message": "response.content_part",
    "reasoning": "response.content_part",
    "summary": "response.reasoning_summary_part",
}
TEXT_EVENTS: dict[ItemKind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "summary": "response.reasoning_summary_text",
    "call": "response.function_call_arguments",
}
NO_LOGPROBS = Raw(b"[]")
ID_BYTES = 12
# How often the text of an item is written at the end, and so may be in memory: its last events, and the response.
NUM_COPIES = 5


@dataclass(slots=True)
class OpenItem:
    """The item that is being written. `name` and `call_id` are a call's."""

    kind: ItemKind
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def places(self) -> dict[str, int | UnsetType]:
        """Where in the item its one part is."""
        is_summary, is_call = self.kind == "summary", self.kind == "call"
        return {
            "content_index": UNSET if is_summary or is_call else 0,
            "summary_index": 0 if is_summary else UNSET,
        }

    def make_part(self, text: str, logprobs: Raw = NO_LOGPROBS) -> ItemContent:
        """Its part with this text."""
        if self.kind == "message":
            return OutputTextPart(text=text, logprobs=logprobs)
        return SummaryPart(text) if self.kind == "summary" else ThoughtPart(text)


class OutputItems:
    """The items of one answer, in order. Each method returns the events of what it does.

    Item ids follow from `name`, the response's own. `call_id` makes the ids of calls. `summary` and `sealed` are those
    of `translate.RouteFields`. `pad` makes what hides the length of a text.
    """

    def __init__(
        self,
        name: str,
        call_id: Callable[[int], str],
        summary: bool = False,
        sealed: bool = False,
        pad: Callable[[str], str | UnsetType] = lambda text: UNSET,
    ) -> None:
        self.items: list[OutputItem] = []
        self.kept_bytes = 0
        self._name, self._call_id, self._sealed, self._pad = name, call_id, sealed, pad
        self._thought_kind: ItemKind = "summary" if summary else "reasoning"
        self._open: OpenItem | None = None
        self._number = 0
        # Log-probabilities of tokens whose text is not there yet.
        self._waiting: list[bytes] = []

    def next_number(self) -> int:
        """The sequence number of the next event."""
        self._number += 1
        return self._number - 1

    def add_piece(self, piece: OutputPiece, logprobs: bytes = b"") -> list[bytes]:
        """Add a piece with at most one part; `logprobs` are the elements of its tokens' list as JSON."""
        if logprobs:
            self._waiting.append(logprobs)
            self.kept_bytes += NUM_COPIES * len(logprobs)
        part = piece.parts[0] if piece.parts else AnswerPart("content", piece.text)
        if part.kind == "call":
            events = self.end_item("completed")
            return events + self._begin_item("call", part.text, self._call_id(part.call))
        kind: ItemKind = "call" if part.kind == "arguments" else "message"
        kind = self._thought_kind if part.kind == "reasoning" else kind
        if not part.text and not (self._waiting and self._is_open("message")):
            return []
        events = []
        if not self._is_open(kind):
            events = self.end_item("completed") + self._begin_item(kind)
        return [*events, self._add_text(part.text)]

    def end_item(self, status: ItemStatus) -> list[bytes]:
        """The open item is complete, or ends before it is."""
        item = self._open
        if item is None:
            return []
        events = [self._add_text("")] if self._waiting and item.kind == "message" else []
        text, logprobs = "".join(item.texts), Raw(b"[" + b",".join(item.logprobs) + b"]")
        done, name = f"{TEXT_EVENTS[item.kind]}.done", item.name or UNSET
        place = {"item_id": item.id, "output_index": item.index}
        shown: dict[str, object] = (
            {"arguments": text, "name": name} if item.kind == "call" else {"text": text}
        )
        if item.kind == "message":
            shown["logprobs"] = logprobs
        events.append(self._write(DoneEvent, done, **place, **item.places, **shown))
        if item.kind != "call":
            part = item.make_part(text, logprobs)
            events.append(
                self._write(PartEvent, f"{PART_EVENTS[item.kind]}.done", **place, **item.places, part=part)
            )
        complete = self._make_item(item, status, text, logprobs)
        events.append(
            self._write(ItemEvent, "response.output_item.done", output_index=item.index, item=complete)
        )
        self.items.append(complete)
        self._open = None
        return events

    def end_answer(self, is_cut: bool) -> list[bytes]:
        """Nothing follows. An answer has at least an empty message."""
        events = [] if self.items or self._open else self._begin_item("message")
        return events + self.end_item("incomplete" if is_cut else "completed")

    def abandon_item(self) -> None:
        """The answer has failed: the open item ends here, and nobody is told."""
        number = self._number
        self.end_item("incomplete")
        self._number = number

    def _is_open(self, kind: ItemKind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _begin_item(self, kind: ItemKind, name: str = "", call_id: str = "") -> list[bytes]:
        index = len(self.items)
        digest = hashlib.blake2b(f"{self._name} {index}".encode(), digest_size=ID_BYTES).hexdigest()
        item = self._open = OpenItem(kind, f"{ID_PREFIXES[kind]}_{digest}", index, name, call_id)
        begun = self._make_item(item, "in_progress", None, NO_LOGPROBS)
        events = [self._write(ItemEvent, "response.output_item.added", output_index=index, item=begun)]
        if kind != "call":
            added, place = f"{PART_EVENTS[kind]}.added", {"item_id": item.id, "output_index": index}
            events.append(self._write(PartEvent, added, **place, **item.places, part=item.make_part("")))
        return events

    def _add_text(self, text: str) -> bytes:
        """Add text to the open item, and log-probabilities if it is a message."""
        item = self._open
        assert item is not None
        item.texts.append(text)
        self.kept_bytes += NUM_COPIES * len(text)
        logprobs: Raw | UnsetType = UNSET
        if item.kind == "message":
            logprobs = Raw(b"[" + b",".join(self._waiting) + b"]")
            item.logprobs += self._waiting
            self._waiting = []
        name = f"{TEXT_EVENTS[item.kind]}.delta"
        delta = DeltaEvent(
            type=name,
            sequence_number=self.next_number(),
            item_id=item.id,
            output_index=item.index,
            content_index=0 if item.kind in ("message", "reasoning") else UNSET,
            summary_index=0 if item.kind == "summary" else UNSET,
            delta=text,
            logprobs=logprobs,
            obfuscation=self._pad(text),
        )
        return named_event(name, delta)

    def _make_item(self, item: OpenItem, status: ItemStatus, text: str | None, logprobs: Raw) -> OutputItem:
        """The item with its text; one that has just begun has none."""
        if item.kind == "call":
            return CallItem(
                id=item.id, status=status, call_id=item.call_id, name=item.name, arguments=text or ""
            )
        if item.kind == "message":
            content = [] if text is None else [OutputTextPart(text=text, logprobs=logprobs)]
            return MessageItem(id=item.id, status=status, content=content)
        summary = [SummaryPart(text)] if item.kind == "summary" and text is not None else []
        thought = [ThoughtPart(text)] if item.kind == "reasoning" and text is not None else []
        return ReasoningItem(
            id=item.id,
            status=status,
            summary=summary,
            content=UNSET if item.kind == "summary" else thought,
            encrypted_content=seal_thought(text) if self._sealed and text is not None else UNSET,
        )

    def _write(self, kind: Callable[..., ResponseStreamEvent], event_name: str, **fields: object) -> bytes:
        """An event with its name and the next number."""
        event: Struct = kind(type=event_name, sequence_number=self.next_number(), **fields)
        return named_event(event_name, event)
