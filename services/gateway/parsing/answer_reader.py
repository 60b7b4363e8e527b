"""Reads a model's answer token by token: what is thought, what is said, and which tools are called.

    tokens ─ AnswerMarkup.mark_of, detokenizer ─▶ marked text ─ AnswerReader ─▶ AnswerPart, AnswerPart, …

What is found depends on the tokens alone: not on how many come at a time, nor on which worker they came from. What
cannot be read is text, never an error.
"""

from __future__ import annotations

from services.gateway.parsing.answer_markup import AnswerMarkup
from services.gateway.parsing.answer_parts import AnswerPart, ToolTypes
from services.gateway.parsing.channels import read_channels
from services.gateway.parsing.reading_state import ReadingState
from services.gateway.parsing.regions import read_regions


class AnswerReader:
    """Reads one answer behind `prefix`: what the prompt has written of it, which is read, but is no part of it."""

    def __init__(self, markup: AnswerMarkup, prefix: str = "", tools: ToolTypes | None = None) -> None:
        self._state = ReadingState(markup, tools or {})
        self._reading = (read_channels if markup.format.channels else read_regions)(self._state)
        next(self._reading)
        self.feed(markup.markers.mark_text(prefix))
        self._state.parts.forget_parts()

    @property
    def thinking(self) -> bool:
        """Whether the answer is within a thought."""
        return self._state.thinking

    @property
    def may_think(self) -> bool:
        """Whether the answer is within what may be a call that ends a thought, or a part of the thought."""
        return self._state.first_doubtful == self._state.parts.num_calls

    @property
    def takes_content(self) -> bool:
        """Whether the answer is within the text for the client, where stop strings count."""
        return self._state.takes_content

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return self._state.parts.num_calls > 0

    def feed(self, text: str) -> None:
        """Read more marked text."""
        if text:
            self._state.cursor.add_text(text)
            next(self._reading)

    def close(self) -> None:
        """Read what is left; nothing will follow."""
        self._state.cursor.closed = True
        for _ in self._reading:
            pass
        self._state.parts.end_answer()

    def take_parts(self) -> list[AnswerPart]:
        """Remove and return what was found."""
        return self._state.parts.take_parts()
