"""Finds stop strings in an answer's text while it is streamed."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that ends first, however the text is split, and never returns a part of it.

    If two end at the same character, the longer one counts. The result does not depend on how the text was cut into
    pieces. `keep` leaves the stop string in the text. `hit` is the stop string that was found.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self.stops = tuple(stops)
        self.hit: str | None = None
        self._keep = keep
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that may be shown now. After a hit (`self.hit`) it is always empty."""
        if self.hit is not None:
            return ""
        if not self.stops:
            return text
        self._held += text
        found = self._first_match()
        if found is not None:
            start, end, self.hit = found
            out, self._held = self._held[: end if self._keep else start], ""
            return out
        sure = len(self._held) - self._num_doubtful()
        out, self._held = self._held[:sure], self._held[sure:]
        return out

    def skip(self, text: str) -> str:
        """Let `text` pass unexamined (before `min_tokens`). A stop string cannot begin in it."""
        return self.flush() + text

    def flush(self) -> str:
        """The text that was held back. Call it when no text will follow."""
        out, self._held = self._held, ""
        return out

    def _first_match(self) -> tuple[int, int, str] | None:
        """(start, end, stop string) of the match that ends first in the held text; of equals, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = start, start + len(stop), stop
        return best

    def _num_doubtful(self) -> int:
        """Length of the longest tail of the held text that is the begin of some stop string."""
        longest = min(max(len(stop) for stop in self.stops) - 1, len(self._held))
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                return length
        return 0
