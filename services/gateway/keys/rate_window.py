"""What an API key has taken of a limit per minute (pure).

What is taken comes back a minute later, so no 60 seconds ever hold more than the limit. Whoever is refused learns when
there is room, behind those who were refused before and may come again: so a client that waits succeeds.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 60.0
# Of a limit above `MAX_ENTRIES`, what is taken within so many seconds comes back together.
SLOT_S = 0.25
MAX_ENTRIES = int(WINDOW_S / SLOT_S)
# Times that differ by less are the same: a wait that is added to a time is rounded.
ROUNDING_S = 1e-6


class RateWindow:
    """The last minute of one limit. Amounts are requests or tokens; times are seconds on any clock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # (when it comes back, amount), oldest first, and their sum.
        self._taken: deque[tuple[float, int]] = deque()
        self._used = 0
        # (when a refused client may come again, amount), in the order of refusals, at most `MAX_ENTRIES`; their sum.
        self._expected: deque[tuple[float, int]] = deque()
        self._num_expected = 0

    def used(self, now_s: float) -> int:
        """What is taken now. It may be more than the limit, by tokens that were generated since."""
        while self._taken and self._taken[0][0] <= now_s + ROUNDING_S:
            self._used -= self._taken.popleft()[1]
        return self._used

    def remaining(self, now_s: float) -> int:
        """What can be taken now."""
        return max(0, self.limit - self.used(now_s))

    def take(self, amount: int, now_s: float) -> None:
        """Take `amount`, whether it fits or not."""
        if amount <= 0:
            return
        self._used = self.used(now_s) + amount
        back_s = now_s if self.limit <= MAX_ENTRIES else (math.floor(now_s / SLOT_S) + 1) * SLOT_S
        back_s += WINDOW_S
        if self._taken and self._taken[-1][0] >= back_s:
            # Also if the limit was a higher one before.
            back_s, before = self._taken.pop()
            amount += before
        self._taken.append((back_s, amount))

    def wait_s(self, amount: int, now_s: float, limit: int | None = None) -> float:
        """Seconds until `amount` fits if nobody else takes any; 0: it fits now. `limit` replaces a larger one.

        An amount above the limit is said to fit when nothing is taken.
        """
        limit = self.limit if limit is None else limit
        excess = self.used(now_s) + min(amount, limit) - limit
        if excess <= 0:
            return 0.0
        for back_s, freed in self._taken:
            excess -= freed
            if excess <= 0:
                return back_s - now_s
        return WINDOW_S

    def expect(self, amount: int, now_s: float, limit: int | None = None) -> float:
        """Seconds after which a refused client may come again with `amount`, behind those refused before it."""
        while self._expected and self._expected[0][0] <= now_s + ROUNDING_S:
            self._num_expected -= self._expected.popleft()[1]
        ahead, most = self._num_expected, self.limit if limit is None else limit
        if ahead + amount > most or len(self._expected) >= MAX_ENTRIES:
            # They fill the next minute already, or are many: the order of later ones is not kept.
            return self.wait_s(ahead, now_s, limit) or SLOT_S
        wait_s = self.wait_s(ahead + amount, now_s, limit)
        self._expected.append((now_s + wait_s, amount))
        self._num_expected += amount
        return wait_s

    def reset_s(self, now_s: float) -> float:
        """Seconds until nothing is taken."""
        self.used(now_s)
        return self._taken[-1][0] - now_s if self._taken else 0.0
