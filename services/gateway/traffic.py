"""What clients' requests are like, kept for a replanner (`services.cluster.replanner`) until it has asked for it.

Lengths and whether objectives were kept; never a text, a key or an id. What nobody asks for is dropped and counted.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from diptych.metrics import Lived

KEPT = 100_000
Count = Annotated[int, msgspec.Meta(ge=0)]
Event = tuple[float, str, int, int, bool, int]  # moment, what, prompt tokens, new tokens, good, cached tokens
ARRIVED, ENDED, FAILED, REFUSED = "a", "e", "f", "r"


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replanner says when it asks: how far it has heard (`boot`, `after`), and for `/metrics` and `/ready` what
    it has done since it began. `pools` are the numbers of workers that were started as prefill and as decode workers.
    """

    boot: str = ""
    after: Count = 0
    pools: tuple[Count, Count] | None = None
    decisions: dict[str, Count] = {}
    alarms: dict[str, Count] = {}
    actions: dict[str, dict[str, Count]] = {}
    target: dict[str, Count] = {}
    attainment: float | None = None


class Heard(msgspec.Struct, frozen=True):
    """Events after those heard, with moments of this machine's monotonic clock. The next question goes on at `after`;
    `lost` were dropped since the last.
    """

    boot: str
    after: int
    lost: int
    events: list[Event]


class Traffic:
    """The latest events. Implements `diptych.metrics.Listener`."""

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._clock = clock
        self._count = 0
        self._boot = secrets.token_hex(8)  # another process counts anew

    def arrived(self, prompt_tokens: int) -> None:
        self._note(ARRIVED, prompt_tokens)

    def ended(self, lived: Lived, good: bool) -> None:
        self._note(ENDED, lived.prompt_tokens, lived.tokens, good, lived.cached_tokens)

    def failed(self, lived: Lived) -> None:
        self._note(FAILED, lived.prompt_tokens)

    def refused(self) -> None:
        """A request was turned away before it was read."""
        self._note(REFUSED)

    def since(self, boot: str, after: int) -> Heard:
        """What came after event `after` of this process; those up to it are forgotten."""
        asked = min(after, self._count) if boot == self._boot else 0
        first = self._count - len(self._events)
        while first < asked:
            self._events.popleft()
            first += 1
        return Heard(self._boot, self._count, first - asked, list(self._events))

    def _note(self, what: str, prompt: int = 0, output: int = 0, good: bool = False, cached: int = 0) -> None:
        self._count += 1
        self._events.append((round(self._clock(), 4), what, prompt, output, good, cached))


class Totals:
    """Brings counters up to totals that another process keeps."""

    def __init__(self) -> None:
        self._told: dict[Any, int] = {}

    def news(self, name: Any, total: int) -> int:
        """By how much a total has grown; one that is smaller than before has begun anew."""
        before = self._told.get(name, 0)
        self._told[name] = total
        return total - before if total >= before else total
