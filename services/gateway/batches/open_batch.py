"""One batch that has not ended, in memory: which of its lines wait, which are in flight, and why it is about to end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from services.gateway.batches.fair_share import BatchClaim
from services.gateway.batches.records import BatchRecord, InputLine

# Lines that are fetched from the database at a time.
FETCHED_LINES = 128


@dataclass(eq=False, slots=True)
class OpenBatch:
    """The state of a batch. `order` grows with its creation.

    `ready` are lines that were fetched and wait; `cursor` is the last line that was fetched, and `fetched_all` says
    that there are no more. `attempts` counts the failures of lines that are tried again.
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
    # The task that checks the file, fetches lines or ends the batch; at most one runs.
    work: asyncio.Task[None] | None = None
    # What the batch will end as, once that is decided, and when lines in flight are given up (monotonic seconds).
    outcome: str = ""
    give_up_s: float = float("inf")

    @property
    def is_busy(self) -> bool:
        """Whether its file is being checked, lines are being fetched, or it is being ended."""
        return self.work is not None and not self.work.done()

    @property
    def needs_lines(self) -> bool:
        """Whether lines should be fetched."""
        return self.feeding and not self.ready and not self.fetched_all and not self.is_busy

    @property
    def is_over(self) -> bool:
        """Whether no line of it runs or may run any more, so that it can be ended."""
        drained = self.feeding and self.fetched_all and not self.ready
        return not self.in_flight and not self.is_busy and (drained or bool(self.outcome))

    def claim(self) -> BatchClaim:
        """What the choice of the next line needs to know."""
        record = self.record
        has_lines = self.feeding and bool(self.ready)
        return BatchClaim(
            record.id, record.tenant, record.expires_at, self.order, len(self.in_flight), has_lines
        )

    def add_fetched(self, lines: list[InputLine]) -> None:
        """Take lines from the database."""
        self.ready.extend(lines)
        self.fetched_all = len(lines) < FETCHED_LINES
        if lines:
            self.cursor = lines[-1].number

    def close(self, outcome: str, give_up_s: float) -> None:
        """Start no more lines; those in flight may go on until `give_up_s`. The first outcome counts."""
        if not self.outcome:
            self.outcome = outcome
            self.give_up_s = give_up_s
        self.give_up_s = min(self.give_up_s, give_up_s)
        self.feeding = False
        self.ready.clear()
