"""What readers of answers share: the text that has arrived, what was found in it, and where the answer is."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.parsing.answer_markup import AnswerMarkup
from services.gateway.parsing.answer_parts import PartList, ToolTypes
from services.gateway.parsing.text_cursor import TextCursor


@dataclass(slots=True)
class ReadingState:
    """One answer while it is read.

    `thinking`: it is within a thought. `takes_content`: it is within the text for the client, where stop strings count.
    `first_doubtful`: how many calls there were before what may be one within a thought.
    """

    markup: AnswerMarkup
    tools: ToolTypes
    thinking: bool = False
    takes_content: bool = True
    first_doubtful: int | None = None
    cursor: TextCursor = field(default_factory=TextCursor)
    parts: PartList = field(init=False)

    def __post_init__(self) -> None:
        self.parts = PartList(self.markup.markers.unmark_text)

    def add_text(self, text: str, in_thought: bool = False) -> None:
        """Add marked text that is no markup here."""
        if in_thought:
            self.parts.add_thought(text)
        else:
            self.parts.add_content(text)
