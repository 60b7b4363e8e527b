"""Finds where a JSON value ends in text that arrives in pieces. It checks brackets and strings, nothing else."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,\]}\s;)]")


class ValueScanner:
    """The position within one JSON value, whose first character comes first."""

    def __init__(self) -> None:
        self._depth, self._is_begun = 0, False
        self._in_string = self._is_escaped = False
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
            pattern = _STRING_END if self._in_string else _SCALAR_END if self.is_scalar else _STRUCTURE
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
            self._in_string = not self._in_string
            return not self._in_string and self._depth == 0
        else:
            self._depth += 1 if char in "{[" else -1
            return self._depth <= 0
        return False
