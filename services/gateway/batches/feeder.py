"""Takes batches from their creation to their end: checks their files, runs their lines, and completes their results.

    validating ─ check ─▶ failed
        └─▶ in_progress ─ lines, a window of them at a time ─▶ finalizing ─▶ completed or expired
    validating, in_progress ─ cancel ─▶ cancelling ─ lines in flight are stopped ─▶ cancelled

Nothing in memory is needed to go on after a crash: a line without a result waits again. While the disk takes no
results, the lines in flight hold theirs, and no others are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from diptych.slo import DEFAULT_ATTAINMENT
from services.gateway.batches.data_dir import RUNNING_NAME
from services.gateway.batches.file_checks import FileChecks
from services.gateway.batches.line_attempts import MAX_PAUSE_S, LineAttempts, persist_change
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.line_window import LineWindow
from services.gateway.batches.open_batch import FETCHED_LINES, OpenBatch, OpenBatches
from services.gateway.batches.records import BatchRecord
from services.gateway.batches.storage.lookups import num_waiting
from services.gateway.batches.store import BatchStore
from services.gateway.openai.schemas.batch_schema import LineFailure
from services.gateway.preparation.file_checker import FileChecker

# Lines in flight that each decode worker accounts for, and the most bytes of all their bodies.
LINES_PER_WORKER = 64
MAX_BYTES_IN_FLIGHT = 64 << 20
# Most batches that are looked at, and most lines that are started, before other tasks may run.
MAX_STEPS, MAX_STARTS = 32, 16
# Most batches whose lines are fetched at a time. More lines of a batch are fetched when it has fewer than the other.
MAX_FETCHES, MIN_READY = 16, FETCHED_LINES // 4
# Longest sleep of the feeder: clocks may be set. And while SLOs hold lines back, which changes with time.
MAX_SLEEP_S, HELD_SLEEP_S = 60.0, 0.5

EXPIRED = LineFailure(
    "batch_expired", "This request could not be executed before the completion window expired."
)
CANCELLED = LineFailure("batch_cancelled", "This request was not executed, since its batch was cancelled.")

log = logging.getLogger(__name__)


class BatchFeeder:
    """Runs all open batches."""

    def __init__(
        self,
        store: BatchStore,
        runner: LineRunner,
        checker: FileChecker,
        default_model: str,
        max_body_bytes: int,
        num_workers: Callable[[], int] = lambda: 1,
        is_draining: Callable[[], bool] = lambda: False,
        attainment: float = DEFAULT_ATTAINMENT,
    ) -> None:
        """`default_model` is what lines ask for that name no model, `max_body_bytes` the most bytes of a line's body.

        `num_workers` gives the number of decode workers, `is_draining` whether the gateway is shutting down.

        `attainment` is the share of requests over HTTP that are to meet their SLOs.
        """
        self.store, self._checker = store, checker
        self._num_workers, self._is_draining = num_workers, is_draining
        self.window = LineWindow(attainment)
        self.batches = OpenBatches()
        self.lines = LineAttempts(store, runner, checker, self.batches, self._wall_time)
        self._checks = FileChecks(store, checker, self.batches, default_model, max_body_bytes)
        # The window was cut, and no lines were taken back for it yet.
        self._is_cut = False
        self._news = asyncio.Event()
        # When files expire next (Unix seconds).
        self._next_purge: float = 0.0
        self._num_fetches = 0
        # Tries whether the disk takes anything again.
        self._probe: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def open(self) -> dict[str, OpenBatch]:
        """All batches that have not ended, by their ids."""
        return self.batches.by_id

    @property
    def ended(self) -> Counter[str]:
        """How many lines ended since the start, by how they did."""
        return self.lines.ended

    @property
    def tokens(self) -> Counter[str]:
        """The tokens of lines that were answered since the start, by kind."""
        return self.lines.tokens

    @property
    def recalled(self) -> int:
        """How often lines in flight were taken back, since requests over HTTP missed their SLOs."""
        return self.lines.recalled

    @property
    def num_running(self) -> int:
        """How many lines are in flight."""
        return self.batches.num_running

    @property
    def num_waiting(self) -> int:
        """How many lines have no result and are not in flight."""
        return self.batches.num_waiting

    async def run_forever(self) -> None:
        """Go on with the batches that have not ended, and run new ones, until cancelled: then lines are aborted."""
        found = await persist_change(self.store.recover)
        running = self.lines.running
        with contextlib.closing(self._checker), contextlib.closing(running):
            await asyncio.to_thread(running.open, self.store.data_dir.path / RUNNING_NAME)
            async with asyncio.TaskGroup() as self._tasks:
                # Those that were made meanwhile are known. All are known before a client can change another one.
                adopted = [self.batches.add(record) for record in found if record.id not in self.open]
                running.keep_batches(self.open)
                for batch in adopted:
                    await self._adopt(batch)
                while True:
                    self._news.clear()
                    if self._advance():
                        await asyncio.sleep(0)
                    else:
                        await self._sleep()

    def add_batch(self, record: BatchRecord) -> None:
        """Take a new batch."""
        self.batches.add(record)
        self._news.set()

    def cancel_batch(self, record: BatchRecord) -> None:
        """The batch is cancelling: start no more of its lines, and stop those in flight."""
        batch = self.open.get(record.id)
        if batch is not None:
            batch.record = record
            self.batches.close(batch, "cancelled")
            self._news.set()

    def record_request(self, met: bool) -> None:
        """A request over HTTP ended, and `met` its SLOs or did not. It counts if a line was being answered."""
        # A gateway that shuts down refuses requests, whatever lines do.
        running = 0 if self._is_draining() else self.lines.num_unanswered
        if running and self.window.record_outcome(met, running / self._num_lines()):
            self._is_cut = True
            self._news.set()

    def wake(self) -> None:
        """Look at once whether files expire."""
        self._next_purge = 0.0
        self._news.set()

    # ---- the loop

    def _wall_time(self) -> float:
        """Unix seconds, by which batches and files expire: a jump of the clock counts after an hour."""
        return self.store.settled_s

    async def _adopt(self, batch: OpenBatch) -> None:
        """Go on with a batch after a start."""
        batch_id = batch.record.id
        # It may have been cancelled before it was known here, or be cancelled now.
        record = await persist_change(lambda: self.store.find_batch(None, batch_id))
        if batch.outcome:
            return
        batch.record = record
        if record.status == "in_progress":
            self.batches.feed(batch, num_waiting(record))
        elif record.status in ("cancelling", "finalizing"):
            self.batches.close(batch, record.outcome)

    async def _sleep(self) -> None:
        """Wait for news, or until something is due."""
        now_s, now = time.monotonic(), self._wall_time()
        due_s = [MAX_SLEEP_S, self._next_purge - now]
        if (expires_at := self.batches.next_expiry()) is not None:
            due_s.append(expires_at - now)
        if self.lines.paused_s > now_s:
            due_s.append(self.lines.paused_s - now_s)
        if (held_s := self.batches.release_held(now_s)) is not None:
            due_s.append(held_s - now_s)
        if self.window.share < 1.0 and self.num_waiting:
            due_s.append(HELD_SLEEP_S)
        try:
            async with asyncio.timeout(max(0.01, min(due_s))):
                await self._news.wait()
        except TimeoutError:
            pass

    def _advance(self) -> bool:
        """Start what can be started now; returns whether there is more, for which other tasks need not wait."""
        now = self._wall_time()
        # The settled time may have gone back.
        if not now < self._next_purge <= now + MAX_SLEEP_S:
            self._next_purge = now + MAX_SLEEP_S
            self._spawn(self._purge_files())
        for _ in range(MAX_STEPS):
            if (expired := self.batches.take_expired(now)) is None:
                break
            self.batches.close(expired, "expired")
        self.batches.release_held(time.monotonic())
        for touched in self.batches.take_touched(MAX_STEPS):
            self._advance_batch(touched)
        if (batch := self._checks.begin_slice()) is not None:
            self._begin_work(batch, self._checks.check_slice(batch))
        if self.store.trouble and (self._probe is None or self._probe.done()):
            self._probe = self._spawn(persist_change(self.store.probe))
        is_full = self._start_lines()
        self._recall_lines()
        return not is_full or self.batches.any_touched

    def _advance_batch(self, batch: OpenBatch) -> None:
        """Begin the next step of a batch in which something has changed."""
        if batch.outcome:
            self.lines.abort_lines(batch)
        if batch.is_over:
            self._begin_work(batch, self._end_batch(batch))
        elif batch.needs_check:
            self._checks.add_file(batch)
        self.batches.update_claim(batch)

    def _num_lines(self) -> int:
        """How many lines may be in flight while requests meet their SLOs."""
        return LINES_PER_WORKER * max(1, self._num_workers())

    def _recall_lines(self) -> None:
        """After a cut, take back the lines that are too many."""
        if self._is_cut:
            self._is_cut = False
            self.lines.recall_lines(self.window.num_lines(self._num_lines()))

    def _start_lines(self) -> bool:
        """Start lines while the window has room, up to `MAX_STARTS`; returns whether no more can be started now."""
        if self._is_draining() or time.monotonic() < self.lines.paused_s or self.store.trouble:
            return True
        window = self.window.num_lines(self._num_lines())
        for _ in range(MAX_STARTS):
            if self.num_running >= window or self.lines.bytes_in_flight >= MAX_BYTES_IN_FLIGHT:
                return True
            batch = self.batches.choose()
            if batch is None or (not batch.ready and self._num_fetches >= MAX_FETCHES):
                return True
            if batch.ready:
                if not self.lines.may_begin(batch):
                    return True
                line = self.lines.begin_line(batch)
                batch.in_flight[line.number] = self._spawn(self.lines.run_line(batch, line), batch)
            if len(batch.ready) < MIN_READY and not batch.fetched_all and not batch.is_busy:
                self._num_fetches += 1
                self._begin_work(batch, self._fetch_lines(batch))
        return False

    def _begin_work(self, batch: OpenBatch, work: Awaitable[None]) -> None:
        """Begin a step of a batch. It can have lines again once the step has ended."""
        batch.work = self._spawn(work, batch)
        self.batches.update_claim(batch)

    def _spawn(self, work: Awaitable[None], batch: OpenBatch | None = None) -> asyncio.Task[None]:
        """Run `work`; when it has ended, the feeder looks at `batch`."""
        assert self._tasks is not None

        async def run() -> None:
            try:
                await work
            except Exception:
                # Requests over HTTP go on. What failed is not tried again at once.
                log.exception("a step of a batch failed")
                await asyncio.sleep(MAX_PAUSE_S)
            finally:
                if batch is not None:
                    self.batches.touch(batch)
                self._news.set()

        return self._tasks.create_task(run())

    # ---- the steps of a batch

    async def _fetch_lines(self, batch: OpenBatch) -> None:
        """Fetch the next waiting lines from the database."""
        try:
            lines = await persist_change(
                lambda: self.store.waiting_lines(batch.record.id, batch.cursor, FETCHED_LINES)
            )
            if batch.feeding:
                self.batches.add_fetched(batch, lines)
        finally:
            self._num_fetches -= 1

    async def _end_batch(self, batch: OpenBatch) -> None:
        """Complete the results of a batch, and end it."""
        batch_id = batch.record.id
        waiting = await persist_change(lambda: self.store.count_waiting(batch_id))
        # It may have been cancelled meanwhile.
        outcome = batch.outcome or "completed"
        if outcome == "completed" and waiting:
            # Never complete without all results: a step that failed has left lines behind.
            return self.batches.feed(batch, waiting)
        batch.outcome, batch.feeding = outcome, False
        batch.record = await persist_change(lambda: self.store.finalize_batch(batch_id, outcome))
        failure = CANCELLED if outcome == "cancelled" else EXPIRED
        self.batches.set_waiting(batch, waiting)
        left = waiting
        while remaining := await self.lines.fail_lines(batch, failure):
            self.ended["failed"] += max(0, left - remaining)
            left = remaining
            self.batches.set_waiting(batch, remaining)
        self.ended["failed"] += max(0, left)
        batch.record = await persist_change(lambda: self.store.end_batch(batch_id))
        self.batches.remove(batch)
        self._checks.forget_file(batch_id)
        self.lines.running.forget_batch(batch_id)
        log.info("batch %s is %s", batch_id, batch.record.status)
        # Its input may have been deleted meanwhile.
        self.wake()

    async def _purge_files(self) -> None:
        """Remove files that have expired or are deleted."""
        expiry = await persist_change(self.store.remove_unused)
        if expiry is not None:
            self._next_purge = max(self._wall_time() + 1.0, min(self._next_purge, float(expiry)))
