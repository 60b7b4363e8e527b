"""From tokens to text, one token at a time, the same whether a client streams or not.

    tokens ─▶ Detokeniser ─▶ text that can no longer change ─▶ StopStrings ─▶ text that is not part of a stop string

Both keep back what they are not sure of: the detokeniser the bytes of an unfinished character, the stop strings a tail
that may be the beginning of one. Cost per token is bounded: where a token always stands for the same bytes, these are
all that is looked at (`Bytes`); elsewhere a short window is decoded again (`Window`), never the whole answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

Decode = Callable[[list[int]], str]

UNFINISHED = "\ufffd"  # what decoders print for bytes that are no character (yet)
MOST_BYTES = 3  # of an unfinished UTF-8 character, so at most as many tokens and as many of these signs
WINDOW_TOKENS = 32  # decoded again for every token; shortened when full, at the latest when twice as long


class Detokeniser(Protocol):
    """From tokens to text, in order."""

    def feed(self, token: int) -> str:
        """The text that became certain with `token`; often empty within a multi-byte character."""

    def flush(self) -> str:
        """What was held back, as it is, when no token will follow."""


class Bytes:
    """For vocabularies in which every token stands for bytes, whatever its neighbours are: byte-level BPE.

    What cannot be a character comes out as U+FFFD as soon as that is certain: one sign per "maximal subpart" (Unicode).
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """See `Detokeniser`."""
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        """See `Detokeniser`."""
        return self._decoder.decode(b"", True)


class Window:
    """Incremental decoding by difference: the text of a window with the new token, minus what was given out of it.

    Works for SentencePiece-like decoders and any other, since it only asks that decoding a longer window
    extends the text of a shorter one, unfinished characters at its end aside. (With byte tokens a decoder may
    show a whole run of them as unfinished while its last character is.) Those are held until the next token settles
    them; bytes that are no character at all are given out when that is certain.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were given out
        self._unclear = 0  # tokens since the text last ended in a whole character

    def feed(self, token: int) -> str:
        """See `Detokeniser`."""
        self._window.append(token)
        text = self._decode(self._window)
        self._unclear = self._unclear + 1 if text.endswith(UNFINISHED) else 0
        end = self._certain(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) >= WINDOW_TOKENS:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """See `Detokeniser`."""
        text = self._decode(self._window)
        new, self._shown = text[self._shown :], len(text)
        return new

    def _certain(self, text: str) -> int:
        """How many leading characters of `text` the next token cannot change."""
        most = len(text) if self._unclear <= MOST_BYTES else MOST_BYTES
        end = len(text)
        while end > 0 and len(text) - end < most and text[end - 1] == UNFINISHED:
            end -= 1
        return end

    def _shorten(self, text: str) -> None:
        """Forget the older half of the window, where that does not cut a character in two."""
        half = WINDOW_TOKENS // 2
        for start in range(half, half + MOST_BYTES + 1):
            tail = self._decode(self._window[start:])
            if self._unclear == 0 and text.endswith(tail):
                del self._window[:start]
                self._shown = len(tail)
                return
        if len(self._window) >= 2 * WINDOW_TOKENS:
            del self._window[:-half]
            self._shown = self._certain(self._decode(self._window))


class StopStrings:
    """Finds the stop string that ends first, across any split of the text, and never lets a part of it out.

    When two end at the same character the longer one counts. The result does not depend on how the text was cut into
    pieces. `keep` leaves the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self.stops = tuple(stops)
        self.hit: str | None = None
        self._keep = keep
        self._held = ""

    def feed(self, text: str) -> str:
        """Text that may be shown. After a hit (`self.hit`) nothing more comes out."""
        if self.hit is not None:
            return ""
        if not self.stops:
            return text
        self._held += text
        found = self._first()
        if found is not None:
            start, end, self.hit = found
            out, self._held = self._held[: end if self._keep else start], ""
            return out
        sure = len(self._held) - self._doubtful()
        out, self._held = self._held[:sure], self._held[sure:]
        return out

    def skip(self, text: str) -> str:
        """Let `text` through unexamined (before `min_tokens`); a stop string cannot begin in it."""
        return self.flush() + text

    def flush(self) -> str:
        """What was held back, when no text will follow."""
        out, self._held = self._held, ""
        return out

    def _first(self) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = start, start + len(stop), stop
        return best

    def _doubtful(self) -> int:
        """Length of the longest tail of the held text with which some stop string begins."""
        longest = min(max(len(stop) for stop in self.stops) - 1, len(self._held))
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                return length
        return 0
