"""The batches that have not ended, in memory: which of their lines wait, which are in flight, and what is due.

Nothing here walks all batches: sums are counters, what has an order is in heaps, and who has to be looked at is noted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from services.gateway.batches.fair_share import ShareQueue
from services.gateway.batches.records import BatchRecord, InputLine

# Lines that are fetched from the database at a time.
FETCHED_LINES = 128


@dataclass(eq=False, slots=True)
class OpenBatch:
    """The state of a batch. `order` grows with its creation.

    `ready` are lines that were fetched and wait; `cursor` is the last line that was fetched, and `fetched_all` says
    that there are no more. `num_waiting` are its lines without a result, those in flight included. `attempts` counts
    the failures of lines that are tried again.
    """

    record: BatchRecord
    order: int
    # Lines may run: it is valid, and neither cancelled nor expired.
    feeding: bool = False
    ready: deque[InputLine] = field(default_factory=deque)
    cursor: int = -1
    fetched_all: bool = False
    in_flight: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    num_waiting: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    # Its key has used its rate: no line starts before (monotonic seconds).
    held_s: float | None = None
    # The task that checks the file, fetches lines or ends the batch; at most one runs.
    work: asyncio.Task[None] | None = None
    # What the batch will end as, once that is decided.
    outcome: str = ""

    @property
    def is_busy(self) -> bool:
        """Whether its file is being checked, lines are being fetched, or it is being ended."""
        return self.work is not None and not self.work.done()

    @property
    def has_lines(self) -> bool:
        """Whether a line of it may be chosen, as far as is known; where none is `ready`, some have to be fetched."""
        return (
            self.feeding
            and self.held_s is None
            and (bool(self.ready) or not (self.fetched_all or self.is_busy))
        )

    @property
    def needs_check(self) -> bool:
        """Whether its file is to be checked. If it expires before, its lines are still to have their results."""
        return self.record.status == "validating" and not self.is_busy and self.outcome in ("", "expired")

    @property
    def is_over(self) -> bool:
        """Whether no line of it runs or may run any more, so that it can be ended."""
        drained = self.feeding and not self.ready and (self.fetched_all or self.num_waiting <= 0)
        is_quiet = not self.in_flight and not self.is_busy and not self.needs_check
        return is_quiet and (drained or bool(self.outcome))


class OpenBatches:
    """All open batches by their ids, oldest first. `num_running` are all lines in flight."""

    def __init__(self) -> None:
        self.by_id: dict[str, OpenBatch] = {}
        self.num_running = 0
        self._num_unfinished = 0
        self._num_adopted = 0
        self._shares = ShareQueue()
        # When batches expire, with their ids. Those that have ended since are skipped.
        self._expiries: list[tuple[int, str]] = []
        self._touched: dict[str, OpenBatch] = {}
        # When lines of batches may start again that wait for the rate of their key. Later times replace earlier ones.
        self._held: list[tuple[float, str]] = []

    @property
    def num_waiting(self) -> int:
        """How many lines have no result and are not in flight."""
        return max(0, self._num_unfinished - self.num_running)

    def add(self, record: BatchRecord) -> OpenBatch:
        """Take a batch that has not ended."""
        self._num_adopted += 1
        batch = self.by_id[record.id] = OpenBatch(record, self._num_adopted)
        self._shares.open_batch(record.tenant)
        heapq.heappush(self._expiries, (record.expires_at, record.id))
        self.touch(batch)
        return batch

    def remove(self, batch: OpenBatch) -> None:
        """A batch has ended."""
        self.set_waiting(batch, 0)
        del self.by_id[batch.record.id]
        self._touched.pop(batch.record.id, None)
        self._shares.close_batch(batch.record.tenant, batch.record.id)

    # ---- lines

    def set_waiting(self, batch: OpenBatch, num_waiting: int) -> None:
        """A batch has so many lines without a result."""
        self._num_unfinished += num_waiting - batch.num_waiting
        batch.num_waiting = num_waiting

    def feed(self, batch: OpenBatch, num_waiting: int) -> None:
        """Lines of a batch may run, from the first that has no result."""
        self.set_waiting(batch, num_waiting)
        batch.outcome, batch.cursor, batch.fetched_all, batch.feeding = "", -1, False, True
        heapq.heappush(self._expiries, (batch.record.expires_at, batch.record.id))
        self.touch(batch)

    def add_fetched(self, batch: OpenBatch, lines: list[InputLine]) -> None:
        """Take lines from the database."""
        batch.ready.extend(lines)
        batch.fetched_all = len(lines) < FETCHED_LINES
        if lines:
            batch.cursor = lines[-1].number
        self.touch(batch)

    def choose(self) -> OpenBatch | None:
        """The batch whose line runs next (`fair_share.choose_batch`); None if none has lines."""
        chosen = self._shares.choose()
        return None if chosen is None else self.by_id[chosen]

    def take_line(self, batch: OpenBatch) -> InputLine:
        """Its next line, which counts as in flight until `end_line`."""
        line = batch.ready.popleft()
        self.num_running += 1
        self._shares.count_running(batch.record.tenant, 1)
        self.update_claim(batch)
        return line

    def return_line(self, batch: OpenBatch, line: InputLine, first: bool) -> None:
        """A line waits again, before or behind the others that were fetched; not if its batch is about to end."""
        if batch.feeding:
            (batch.ready.appendleft if first else batch.ready.append)(line)

    def end_line(self, batch: OpenBatch, number: int) -> None:
        """A line is in flight no more."""
        del batch.in_flight[number]
        self.num_running -= 1
        self._shares.count_running(batch.record.tenant, -1)
        self.touch(batch)

    def count_tokens(self, batch: OpenBatch, num_tokens: int) -> None:
        """The tenant of a batch was served so many tokens."""
        self._shares.count_tokens(batch.record.tenant, num_tokens)

    def hold(self, batch: OpenBatch, until_s: float) -> None:
        """Start no line of a batch before `until_s` (monotonic seconds): its key has used its rate."""
        if batch.record.id in self.by_id and until_s > (batch.held_s or 0.0):
            batch.held_s = until_s
            heapq.heappush(self._held, (until_s, batch.record.id))
            self.update_claim(batch)

    def release_held(self, now_s: float) -> float | None:
        """Lines of batches may start that were held until now; returns when the next one is due, if any is held."""
        while self._held and self._held[0][0] <= now_s:
            batch = self.by_id.get(heapq.heappop(self._held)[1])
            if batch is not None and batch.held_s is not None and batch.held_s <= now_s:
                batch.held_s = None
                self.update_claim(batch)
        return self._held[0][0] if self._held else None

    def close(self, batch: OpenBatch, outcome: str) -> None:
        """Start no more lines of a batch. The first outcome counts."""
        batch.outcome = batch.outcome or outcome
        batch.feeding = False
        batch.ready.clear()
        self.touch(batch)

    # ---- what is due

    def update_claim(self, batch: OpenBatch) -> None:
        """Something has changed in whether a batch has lines."""
        record = batch.record
        self._shares.set_ready(record.tenant, record.id, record.expires_at, batch.order, batch.has_lines)

    def touch(self, batch: OpenBatch) -> None:
        """Something has changed in a batch, so that its next step may be due."""
        if batch.record.id in self.by_id:
            self._touched[batch.record.id] = batch

    def take_touched(self, limit: int) -> list[OpenBatch]:
        """At most `limit` batches in which something has changed since they were taken."""
        taken = list(islice(self._touched.values(), limit))
        for batch in taken:
            del self._touched[batch.record.id]
        return taken

    @property
    def any_touched(self) -> bool:
        """Whether `take_touched` has more."""
        return bool(self._touched)

    def next_expiry(self) -> int | None:
        """When the next batch expires whose end is not decided, in Unix seconds."""
        while self._expiries:
            expires_at, batch_id = self._expiries[0]
            batch = self.by_id.get(batch_id)
            if batch is not None and not batch.outcome:
                return expires_at
            heapq.heappop(self._expiries)
        return None

    def take_expired(self, now: float) -> OpenBatch | None:
        """A batch whose window is over at `now` (Unix seconds), each once; None if there is no other one."""
        expires_at = self.next_expiry()
        if expires_at is None or now < expires_at:
            return None
        return self.by_id[heapq.heappop(self._expiries)[1]]
