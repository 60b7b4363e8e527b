"""Reads marked text that arrives in pieces, as if all of it were there.

A reader is a generator over a `TextCursor`. It yields where it needs more text, so what it finds depends on the text
alone, never on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
# What waits for more text, and returns a T.
Reading = Generator[None, None, T]

WHITESPACE = " \t\r\n"
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,\]}\s;)]")


class NotACall(Exception):
    """The text behind a call's marker is not a call."""


class TextCursor:
    """A position in marked text, of which only a part has arrived. `closed`: no more will."""

    def __init__(self) -> None:
        self.text, self.at, self.closed = "", 0, False
        # From here on the text is kept, to be read again as something else.
        self.kept: int | None = None

    def add_text(self, text: str) -> None:
        """Append text that has arrived, and forget what was read."""
        begin = self.at if self.kept is None else self.kept
        self.text = self.text[begin:] + text
        self.at -= begin
        if self.kept is not None:
            self.kept = 0

    def keep(self) -> None:
        """Keep the text from here on."""
        self.kept = self.at

    def release(self) -> None:
        """What was kept is not needed any more."""
        self.kept = None

    @property
    def is_over(self) -> bool:
        """Whether nothing but whitespace follows, and no more text will arrive."""
        return self.closed and not self.text[self.at :].strip(WHITESPACE)

    def follows(self, literals: LiteralSet) -> str:
        """The literal that is here; empty if none is."""
        return next((literal for literal in literals.literals if self.text.startswith(literal, self.at)), "")

    def go_back(self, skipped: int) -> None:
        """Return to `skipped` characters behind the place from which on text was kept."""
        assert self.kept is not None
        self.at, self.kept = self.kept + skipped, None

    def read_char(self) -> Reading[str]:
        """The next character, which is not consumed; empty at the end."""
        while self.at >= len(self.text):
            if self.closed:
                return ""
            yield
        return self.text[self.at]

    def skip_space(self) -> Reading[str]:
        """Consume whitespace, and return the character behind it; empty at the end."""
        while (char := (yield from self.read_char())) and char in WHITESPACE:
            self.at += 1
        return char

    def skip_literal(self, literal: str) -> Reading[bool]:
        """Consume `literal` if it follows. What is left of one that the end of the answer has cut is consumed, too."""
        while len(self.text) - self.at < len(literal):
            if not literal.startswith(self.text[self.at :]):
                return False
            if self.closed:
                self.at = len(self.text)
                return False
            yield
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) * found
        return found

    def leads_to(self, literals: LiteralSet, skipped: int = 0, or_end: bool = True) -> Reading[bool]:
        """Whether one of `literals` is the next behind `skipped` characters and whitespace, or else nothing at all.

        It consumes nothing.
        """
        while True:
            rest = self.text[self.at + skipped :].lstrip(WHITESPACE)
            if any(rest.startswith(literal) for literal in literals.literals):
                return True
            if self.closed:
                return or_end and not rest
            if not any(literal.startswith(rest) for literal in literals.literals):
                return False
            yield

    def read_until(self, literals: LiteralSet, most: int) -> Reading[tuple[str, str]]:
        """The text before the first of `literals`, and this one; both are consumed. Empty: the text ends before.

        Raises:
            NotACall: there are more than `most` characters before it.
        """
        while True:
            found = literals.find(self.text, self.at)
            certain = (
                len(self.text) - literals.num_doubtful(self.text, self.at) if found is None else found[0]
            )
            if certain - self.at > most:
                raise NotACall
            if found is not None:
                begin, literal = found
                text, self.at = self.text[self.at : begin], begin + len(literal)
                return text, literal
            if self.closed:
                text, self.at = self.text[self.at :], len(self.text)
                return text, ""
            yield

    def read_piece(self, literals: LiteralSet) -> Reading[str]:
        """Text before the next of `literals`, as much as is certain. Empty: one of them follows, or the end."""
        while True:
            found = literals.find(self.text, self.at)
            if found is not None:
                end = found[0]
            else:
                end = len(self.text) - (0 if self.closed else literals.num_doubtful(self.text, self.at))
            if end > self.at or found is not None or self.closed:
                piece, self.at = self.text[self.at : end], end
                return piece
            yield

    def read_value(self, literals: LiteralSet, take_piece: Callable[[str], None]) -> Reading[bool]:
        """Give one JSON value to `take_piece`. The characters `literals` end it, unless they stand in a string.

        Returns whether the value is complete.
        """
        scanner = ValueScanner()
        while True:
            found = literals.find(self.text, self.at)
            limit = len(self.text) if found is None else found[0]
            ended = scanner.find_end(self.text, self.at, limit)
            if ended is None and found is not None and scanner.in_string:
                limit += len(found[1])
            end = limit if ended is None else ended
            if end > self.at:
                take_piece(self.text[self.at : end])
                self.at = end
            if ended is not None:
                return True
            if found is not None and not scanner.in_string:
                return scanner.is_scalar
            if found is None and self.closed:
                return scanner.is_scalar
            if found is None:
                yield


class LiteralSet:
    """Literals of which none begins another one."""

    def __init__(self, literals: Sequence[str]) -> None:
        self.literals = tuple(dict.fromkeys(literals))
        self.longest = max((len(literal) for literal in self.literals), default=0)
        self._begins = frozenset(literal[0] for literal in self.literals if len(literal) > 1)

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Where the first literal begins, and which one it is."""
        first: tuple[int, str] | None = None
        for literal in self.literals:
            begin = text.find(literal, start)
            if begin >= 0 and (first is None or begin < first[0]):
                first = begin, literal
        return first

    def num_doubtful(self, text: str, start: int) -> int:
        """Length of the longest tail of `text` from `start` that may begin a literal."""
        most = 0
        for char in self._begins:
            at = text.find(char, max(start, len(text) - self.longest + 1))
            while at >= 0 and len(text) - at > most:
                tail = text[at:]
                if any(literal.startswith(tail) for literal in self.literals):
                    most = len(tail)
                    break
                at = text.find(char, at + 1)
        return most


class ValueScanner:
    """The position within one JSON value, whose first character comes first. It checks brackets and strings, nothing
    else.
    """

    def __init__(self) -> None:
        self._depth, self._is_begun = 0, False
        self.in_string = self._is_escaped = False
        # A number or a name has no end of its own.
        self.is_scalar = False

    def find_end(self, text: str, start: int, limit: int) -> int | None:
        """The end of the value in `text[start:limit]`; None: it goes on behind it."""
        at = start
        while at < limit:
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            if not self._is_begun:
                self._is_begun, self.is_scalar = True, text[at] not in '"{['
            pattern = _STRING_END if self.in_string else _SCALAR_END if self.is_scalar else _STRUCTURE
            found = pattern.search(text, at, limit)
            if found is None:
                return None
            if self.is_scalar:
                return found.start()
            at = found.end()
            if self._take_char(found[0]):
                return at
        return None

    def _take_char(self, char: str) -> bool:
        """Pass a character of the structure; returns whether the value ends with it."""
        if char == "\\":
            self._is_escaped = True
        elif char == '"':
            self.in_string = not self.in_string
            return not self.in_string and self._depth == 0
        else:
            self._depth += 1 if char in "{[" else -1
            return self._depth <= 0
        return False
