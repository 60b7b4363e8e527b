"""Records clients' traffic for the replanner (`services.replan.driver`), which fetches it regularly.

The events hold request lengths and whether SLOs were met, never a text, a key or an id. If nobody fetches them, the
oldest events are dropped and counted.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from services.gateway.outcomes import EndedSequence, Ending, Outcome, OutcomeSink, SequenceRecord

MAX_KEPT_EVENTS = 100_000
# Characters of the replanner's reason.
MAX_REASON = 500
Count = Annotated[int, msgspec.Meta(ge=0)]
# (time in s, kind of request, prompt tokens, new tokens, whether all SLOs were met, cached tokens).
TrafficEvent = tuple[float, str, int, int, bool, int]
ARRIVED, ENDED, FAILED, REFUSED = "a", "e", "f", "r"


class ReplanReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message that the replanner sends when it fetches traffic events.

    `boot` and `after` say which events it has already. The rest is shown in `/metrics` and used for `/ready`: totals
    since the replanner started, and in `pools` how many workers were started as (prefill, decode) workers.
    `reason` says in words what was decided last, and why.
    """

    boot: str = ""
    after: Count = 0
    pools: tuple[Count, Count] | None = None
    decisions: dict[str, Count] = {}
    alarms: dict[str, Count] = {}
    actions: dict[str, dict[str, Count]] = {}
    target: dict[str, Count] = {}
    attainment: float | None = None
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class TrafficEvents(msgspec.Struct, frozen=True):
    """The events that the replanner does not have yet. Times are seconds on this machine's monotonic clock.

    `after` is the position for the next request. `lost` events were dropped before they were fetched.
    """

    boot: str
    after: int
    lost: int
    events: list[TrafficEvent]


class TrafficFeed(OutcomeSink):
    """The latest events. A sequence that is not counted has no end here: only the service's misses call for workers."""

    def __init__(self, kept: int = MAX_KEPT_EVENTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._events: deque[TrafficEvent] = deque(maxlen=kept)
        self._clock = clock
        self._count = 0
        # Identifies this process, since every process numbers its events anew.
        self._boot = secrets.token_hex(8)

    def on_arrived(self, record: SequenceRecord, now_s: float) -> None:
        """Record that a sequence was handed to the backend, unless its own deadline has passed: it costs nothing."""
        if record.client_deadline_s is None or now_s < record.client_deadline_s:
            self._append_event(ARRIVED, record.prompt_tokens)

    def on_ended(self, ended: EndedSequence) -> None:
        """Record an answer, and whether it met all SLOs; or a failure or refusal that is the service's fault."""
        record, outcome = ended.record, ended.checked.outcome
        if outcome is Outcome.NOT_COUNTED:
            return
        if record is None:
            self._append_event(REFUSED)
        elif ended.ending is Ending.ANSWERED:
            is_met = outcome is Outcome.MET
            self._append_event(ENDED, record.prompt_tokens, record.tokens, is_met, record.cached_tokens)
        else:
            self._append_event(FAILED, record.prompt_tokens)

    def events_since(self, boot: str, after: int) -> TrafficEvents:
        """The events after number `after` of the process `boot`. Events up to `after` are forgotten.

        If `boot` is another process, all events are returned.
        """
        asked = min(after, self._count) if boot == self._boot else 0
        first = self._count - len(self._events)
        while first < asked:
            # The replanner has received these events.
            self._events.popleft()
            first += 1
        return TrafficEvents(self._boot, self._count, first - asked, list(self._events))

    def _append_event(
        self, what: str, prompt: int = 0, output: int = 0, good: bool = False, cached: int = 0
    ) -> None:
        """Append an event with the present time."""
        self._count += 1
        self._events.append((round(self._clock(), 4), what, prompt, output, good, cached))


class CounterTotals:
    """Turns totals that another process reports into increases of local counters."""

    def __init__(self) -> None:
        self._totals: dict[Any, int] = {}

    def take_increase(self, name: Any, total: int) -> int:
        """How much a total has grown since the last call. A smaller total means that its process was restarted."""
        before = self._totals.get(name, 0)
        self._totals[name] = total
        return total - before if total >= before else total
