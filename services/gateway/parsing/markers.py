"""Tells markers of an answer's markup from text that spells them.

A marker that is one token of the vocabulary, such as `<tool_call>` of Qwen3, counts only as this token. In *marked
text* it is one character that no decoded text can have (a low surrogate). Other markers are found by their text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

FIRST_MARK = 0xDC00


class MarkerTable:
    """The markers of one format in one vocabulary. `token_id` gives the id of a text that is one added token."""

    def __init__(self, literals: Iterable[str], token_id: Callable[[str], int | None]) -> None:
        # Token id -> the character that stands for it.
        self.mark_of: dict[int, str] = {}
        self._text_of: dict[str, str] = {}
        self._char_of: dict[str, str] = {}
        for literal in sorted(set(literals), key=lambda text: (-len(text), text)):
            token = token_id(literal)
            if token is not None and token not in self.mark_of:
                char = chr(FIRST_MARK + len(self.mark_of))
                self.mark_of[token] = self._char_of[literal] = char
                self._text_of[char] = literal
        spelled = "|".join(re.escape(literal) for literal in self._char_of)
        self._spelled = re.compile(spelled) if spelled else None
        self._marks = re.compile(f"[{''.join(self._text_of)}]") if self._text_of else None

    def mark_text(self, text: str) -> str:
        """`text` with every marker in it that is one token replaced by its character."""
        if self._spelled is None:
            return text
        return self._spelled.sub(lambda found: self._char_of[found[0]], text)

    def unmark_text(self, text: str) -> str:
        """Marked text as the model wrote it."""
        return text if self._marks is None else self._marks.sub(lambda found: self._text_of[found[0]], text)

    def token_of(self, literal: str) -> int | None:
        """The id of a marker that is one token."""
        char = self._char_of.get(literal)
        return next((token for token, mark in self.mark_of.items() if mark == char), None)
