"""Turns tokens into text, one token at a time, with the same result whether a client streams or not.

    tokens ─▶ Detokenizer ─▶ text that can no longer change ─▶ StopStrings ─▶ text that is not part of a stop string

Both hold back what is not certain yet: the detokenizer the bytes of an unfinished character, `StopStrings` a tail that
may begin a stop string. The cost per token is bounded. If a token always stands for the same bytes, only these are
decoded (`ByteDetokenizer`). Otherwise a short window is decoded again (`WindowDetokenizer`), never the whole answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

DecodeFunction = Callable[[list[int]], str]

# Decoders return it for bytes that do not (yet) form a character.
REPLACEMENT_CHAR = "\ufffd"
# Most bytes of an unfinished UTF-8 character. They are at most 3 tokens, which decode to 3 replacement characters.
MAX_UNFINISHED_BYTES = 3
# Number of tokens that are decoded again for every token. The window is shortened when it is full, or at the latest
# when it is twice as long.
WINDOW_TOKENS = 32


class Detokenizer(Protocol):
    """Decodes the tokens of one answer in order."""

    def feed(self, token: int) -> str:
        """The text that became certain with `token`; often empty within a multi-byte character."""

    def flush(self) -> str:
        """The text that was held back. Call it when no token will follow."""


class ByteDetokenizer:
    """Decodes byte-level BPE and other vocabularies in which a token always stands for the same bytes.

    Bytes that cannot be a character become U+FFFD as soon as that is certain, one for each "maximal subpart" (Unicode).
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes by difference: returns the text of a window with the new token, minus what was returned before.

    It works for SentencePiece-like decoders and any other. It only requires that a longer window extends the text of
    a shorter one, except for unfinished characters at the end. (With byte tokens, a decoder may show a whole run of
    them as unfinished while its last character is.) Unfinished characters are held back until the next token settles
    them. Bytes that cannot form a character are returned once that is certain.
    """

    def __init__(self, decode: DecodeFunction) -> None:
        self._decode = decode
        self._window: list[int] = []
        # Number of characters of the window's text that were returned.
        self._shown = 0
        # Number of tokens since the text last ended in a whole character.
        self._unclear = 0

    def feed(self, token: int) -> str:
        """See `Detokenizer`."""
        self._window.append(token)
        text = self._decode(self._window)
        self._unclear = self._unclear + 1 if text.endswith(REPLACEMENT_CHAR) else 0
        end = self._num_certain(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) >= WINDOW_TOKENS:
            self._shorten_window(text)
        return new

    def flush(self) -> str:
        """See `Detokenizer`."""
        text = self._decode(self._window)
        new, self._shown = text[self._shown :], len(text)
        return new

    def _num_certain(self, text: str) -> int:
        """How many leading characters of `text` the next token cannot change."""
        most = len(text) if self._unclear <= MAX_UNFINISHED_BYTES else MAX_UNFINISHED_BYTES
        end = len(text)
        while end > 0 and len(text) - end < most and text[end - 1] == REPLACEMENT_CHAR:
            end -= 1
        return end

    def _shorten_window(self, text: str) -> None:
        """Drop the older half of the window, at a place that does not cut a character in two."""
        # The tail's text must be the end of the whole text, or the cut would change characters at its beginning.
        half = WINDOW_TOKENS // 2
        for start in range(half, half + MAX_UNFINISHED_BYTES + 1):
            tail = self._decode(self._window[start:])
            if self._unclear == 0 and text.endswith(tail):
                del self._window[:start]
                self._shown = len(tail)
                return
        if len(self._window) >= 2 * WINDOW_TOKENS:
            # No good place was found in a very long window. It is cut anyway, so that the cost per token stays
            # bounded.
            del self._window[:-half]
            self._shown = self._num_certain(self._decode(self._window))
