"""Cuts and cleans text of others, such as a client's, before it is shown in an answer, a log or a report.

Text is cut before it is looked at, so the cost does not depend on how much somebody sent. The text that is left has no
line ends, no control characters, no characters that turn the direction of writing, and no halves of surrogate pairs:
they are written as escapes.
"""

from __future__ import annotations

# What stands for the part that was cut off.
CUT_MARK = "…"
# Most characters of a name that is quoted in a sentence.
MAX_QUOTED_CHARS = 100


def shorten_text(text: str, max_chars: int) -> str:
    """At most `max_chars` characters of `text`, all of them printable. What was cut ends with `CUT_MARK`."""
    if len(text) <= max_chars and text.isprintable():
        return text
    clean = escape_text(text[: max_chars + 1])
    return clean if len(clean) <= max_chars else clean[: max_chars - len(CUT_MARK)] + CUT_MARK


def quote_text(text: str, max_chars: int = MAX_QUOTED_CHARS) -> str:
    """A name that somebody sent, for the middle of a sentence: shortened, and in single quotes."""
    return f"'{shorten_text(text, max_chars)}'"


def escape_text(text: str) -> str:
    """`text` with escapes such as `\\n` instead of its unprintable characters. The cost is that of its length."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
