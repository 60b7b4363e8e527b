"""Builds the items of a response from the parts of an answer, and the events of a stream about them.

reasoning:      added ─▶ part added ─▶ deltas ─▶ text done ─▶ part done ─▶ item done
message:        the same
function_call:  added ─▶ deltas of its arguments ─▶ arguments done ─▶ item done

The last events of a message repeat its log-probabilities, which can be many megabytes. They are kept once, as JSON, and
each event is written around them in parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from services.gateway.generation.formats import named_event, split_json
from services.gateway.generation.output_text import CHAR_BYTES, OutputPiece
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
# Most bytes of log-probabilities in one part of an event.
PART_BYTES = 64 << 10


@dataclass(slots=True)
class OpenItem:
    """The item that is being written.

    `name` and `call_id` are a call's. `entries` are the elements of a message's list of log-probabilities, as JSON.
    """

    kind: ItemKind
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    entries: bytearray = field(default_factory=bytearray)

    @property
    def places(self) -> dict[str, int | UnsetType]:
        """Where in the item its one part is."""
        is_summary, is_call = self.kind == "summary", self.kind == "call"
        return {
            "content_index": UNSET if is_summary or is_call else 0,
            "summary_index": 0 if is_summary else UNSET,
        }

    def make_part(self, text: str) -> ItemContent:
        """Its part with this text."""
        if self.kind == "message":
            return OutputTextPart(text=text, logprobs=NO_LOGPROBS)
        return SummaryPart(text) if self.kind == "summary" else ThoughtPart(text)


class OutputItems:
    """The items of one answer, in order. Each method gives the events of what it does, which is done as they are read.

    Item ids follow from `name`, the response's own. `call_id` makes the ids of calls. `summary` and `sealed` are those
    of `translate.ResponseRouteFields`. `pad` makes what hides the length of a text.
    """

    def __init__(
        self,
        name: str,
        call_id: Callable[[int], str],
        summary: bool = False,
        sealed: bool = False,
        pad: Callable[[str], str | UnsetType] = lambda text: UNSET,
    ) -> None:
        # Without their log-probabilities, which `_entries` has as elements of a list.
        self.items: list[OutputItem] = []
        self.kept_bytes = 0
        self._entries: list[bytearray] = []
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

    def add_piece(self, piece: OutputPiece, logprobs: bytes = b"") -> Iterator[bytes]:
        """Add a piece with at most one part; `logprobs` are the elements of its tokens' list as JSON."""
        if logprobs:
            self._waiting.append(logprobs)
            self.kept_bytes += len(logprobs)
        part = piece.parts[0] if piece.parts else AnswerPart("content", piece.text)
        if part.kind == "call":
            yield from self.end_item("completed")
            yield from self._begin_item("call", part.text, self._call_id(part.call))
            return
        kind: ItemKind = "call" if part.kind == "arguments" else "message"
        kind = self._thought_kind if part.kind == "reasoning" else kind
        if not part.text and not (self._waiting and self._is_open("message")):
            return
        if not self._is_open(kind):
            yield from self.end_item("completed")
            yield from self._begin_item(kind)
        yield self._add_text(part.text)

    def end_item(self, status: ItemStatus) -> Iterator[bytes]:
        """The open item is complete, or ends before it is."""
        item = self._open
        if item is None:
            return
        if self._waiting and item.kind == "message":
            yield self._add_text("")
        self._open, text = None, "".join(item.texts)
        self.items.append(self._make_item(item, status, text))
        self._entries.append(item.entries)
        done, name = f"{TEXT_EVENTS[item.kind]}.done", item.name or UNSET
        place = {"item_id": item.id, "output_index": item.index}
        shown: dict[str, object] = (
            {"arguments": text, "name": name} if item.kind == "call" else {"text": text}
        )
        if item.kind == "message":
            shown["logprobs"] = NO_LOGPROBS
        yield from _fill_list(self._write(DoneEvent, done, **place, **item.places, **shown), item.entries)
        if item.kind != "call":
            name, part = f"{PART_EVENTS[item.kind]}.done", item.make_part(text)
            yield from _fill_list(
                self._write(PartEvent, name, **place, **item.places, part=part), item.entries
            )
        complete = self._write(
            ItemEvent, "response.output_item.done", output_index=item.index, item=self.items[-1]
        )
        yield from _fill_list(complete, item.entries)

    def end_answer(self, is_cut: bool) -> Iterator[bytes]:
        """Nothing follows. An answer has at least an empty message."""
        if not self.items and not self._open:
            yield from self._begin_item("message")
        yield from self.end_item("incomplete" if is_cut else "completed")

    def abandon_item(self) -> None:
        """The answer has failed: the open item ends here, without events."""
        number = self._number
        for _ in self.end_item("incomplete"):
            pass
        self._number = number

    def item_parts(self, index: int) -> Iterator[bytes]:
        """The JSON of an item that has ended, in parts."""
        return _fill_list(msgspec.json.encode(self.items[index]), self._entries[index])

    def _is_open(self, kind: ItemKind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _begin_item(self, kind: ItemKind, name: str = "", call_id: str = "") -> Iterator[bytes]:
        index = len(self.items)
        digest = hashlib.blake2b(f"{self._name} {index}".encode(), digest_size=ID_BYTES).hexdigest()
        item = self._open = OpenItem(kind, f"{ID_PREFIXES[kind]}_{digest}", index, name, call_id)
        begun = self._make_item(item, "in_progress", None)
        yield self._write(ItemEvent, "response.output_item.added", output_index=index, item=begun)
        if kind != "call":
            added, place = f"{PART_EVENTS[kind]}.added", {"item_id": item.id, "output_index": index}
            yield self._write(PartEvent, added, **place, **item.places, part=item.make_part(""))

    def _add_text(self, text: str) -> bytes:
        """Add text to the open item, and log-probabilities if it is a message."""
        item = self._open
        assert item is not None
        item.texts.append(text)
        is_sealed = self._sealed and item.kind == self._thought_kind
        self.kept_bytes += CHAR_BYTES * len(text) * (1 + is_sealed)
        logprobs: Raw | UnsetType = UNSET
        if item.kind == "message":
            entries, self._waiting = b",".join(self._waiting), []
            logprobs = Raw(b"[" + entries + b"]")
            item.entries += b"," * bool(item.entries and entries) + entries
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

    def _make_item(self, item: OpenItem, status: ItemStatus, text: str | None) -> OutputItem:
        """The item with its text; one that has just begun has none."""
        if item.kind == "call":
            return CallItem(
                id=item.id, status=status, call_id=item.call_id, name=item.name, arguments=text or ""
            )
        if item.kind == "message":
            content = [] if text is None else [OutputTextPart(text=text, logprobs=NO_LOGPROBS)]
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


def _fill_list(text: bytes, entries: bytearray) -> Iterator[bytes]:
    """JSON with `entries` in its empty list of log-probabilities, in parts."""
    if not entries:
        yield text
        return
    before, after = split_json(text, b"logprobs", b"[]")
    yield before + b"["
    for start in range(0, len(entries), PART_BYTES):
        yield bytes(entries[start : start + PART_BYTES])
    yield b"]" + after
