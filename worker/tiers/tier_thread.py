"""A thread that reads and writes one tier of stored KV, so that the engine's thread never waits for a file.

What somebody waits for (look-ups, reads) goes before what nobody waits for, and that before what is stored. What is to
be stored waits in a bounded queue, from which the oldest is dropped. A failure costs misses: it is counted, logged
once, and pauses storing for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sized
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

# For how long nothing is stored after a failure, in seconds.
PAUSE_S = 10.0
# A thread that has not come back for this many seconds is not asked: its tier stands still, or is slow.
STUCK_S = 0.1
# Most measurements that wait: a busy thread is asked for one with each look-up.
MAX_IDLE = 16
# For how long a thread may go on when it is closed, in seconds; one whose disk stands still is left behind.
CLOSE_S = 2.0

Job = Callable[[], None]


# A few chunks to store.
B = TypeVar("B", bound=Sized)


class TierThread(Generic[B]):
    """The thread of one tier, `name`. `store` stores one batch; at most `max_chunks` chunks wait for that."""

    def __init__(
        self,
        name: str,
        store: Callable[[B], None],
        max_chunks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._store, self._max_chunks = name, store, max_chunks
        self._clock = clock
        self._news = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._idle: deque[Job] = deque(maxlen=MAX_IDLE)
        self._batches: deque[B] = deque()
        self._num_waiting, self._closing = 0, False
        # Since when the thread is at its present job, in clock seconds; None while it waits.
        self._busy_since_s: float | None = None
        self._paused_until_s = float("-inf")
        self.num_failed = self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. What waits to be stored is dropped. Idempotent."""
        with self._news:
            self._closing = True
            self._batches.clear()
            self._news.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    @property
    def is_alive(self) -> bool:
        """Whether it runs: after `close` only if its tier stands still."""
        return self._thread.is_alive()

    @property
    def is_stuck(self) -> bool:
        """Whether it has been at one job for long, so that nobody should wait for it."""
        since_s = self._busy_since_s
        return since_s is not None and self._clock() - since_s > STUCK_S

    @property
    def is_paused(self) -> bool:
        """Whether nothing is stored for now, since something failed."""
        return self._clock() < self._paused_until_s

    @property
    def num_waiting(self) -> int:
        """Chunks that wait to be stored."""
        return self._num_waiting

    def ask(self, job: Job) -> None:
        """Run `job` before anything is stored. It handles its own failures (`note_failure`)."""
        with self._news:
            self._urgent.append(job)
            self._news.notify()

    def ask_idle(self, job: Job) -> None:
        """Run `job`, which only measures, when nobody waits for anything; of too many the oldest are left out."""
        with self._news:
            self._idle.append(job)
            self._news.notify()

    def add_batch(self, batch: B) -> None:
        """Store a batch when nobody waits for anything."""
        with self._news:
            if self.is_paused or self._closing:
                self.num_dropped += len(batch)
                return
            self._batches.append(batch)
            self._num_waiting += len(batch)
            while self._num_waiting > self._max_chunks:
                gone = len(self._batches.popleft())
                self._num_waiting -= gone
                self.num_dropped += gone
            self._news.notify()

    def note_failure(self, error: Exception) -> None:
        """Something failed that costs misses alone: storing pauses."""
        self.num_failed += 1
        if self.num_failed == 1:
            log.warning("the %s tier of KV fails, which costs prefixes alone: %r", self.name, error)
        with self._news:
            self._paused_until_s = self._clock() + PAUSE_S
            self.num_dropped += self._num_waiting
            self._batches.clear()
            self._num_waiting = 0

    def _next_job(self) -> Job | B | None:
        """The next thing to do, once there is one; None: the thread ends."""
        with self._news:
            self._busy_since_s = None
            while not (self._urgent or self._idle or self._batches or self._closing):
                self._news.wait()
            if self._closing and not self._urgent:
                return None
            self._busy_since_s = self._clock()
            if self._urgent:
                return self._urgent.popleft()
            if self._idle:
                return self._idle.popleft()
            batch = self._batches.popleft()
            self._num_waiting -= len(batch)
            return batch

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                if callable(job):
                    job()
                else:
                    self._store(job)
            except Exception as error:  # whatever it is, only prefixes are lost by it
                self.note_failure(error)
