"""Takes batches from their creation to their end: checks their files, runs their lines, and completes their results.

    validating ─ check_file ─▶ failed
        └─▶ in_progress ─ lines, a window of them at a time ─▶ finalizing ─▶ completed or expired
    validating, in_progress ─ cancel ─▶ cancelling ─ lines in flight end ─▶ cancelled

Nothing in memory is needed to go on after a crash: a line without a result waits again. While the disk takes no
results, the lines in flight hold theirs, and no others are started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.slo import DEFAULT_ATTAINMENT
from services.gateway.batches.database_thread import StorageError
from services.gateway.batches.fair_share import choose_batch
from services.gateway.batches.line_check import FileCheck, check_file, parse_line
from services.gateway.batches.line_runner import LineAnswer, LineRunner
from services.gateway.batches.line_window import LineWindow
from services.gateway.batches.open_batch import FETCHED_LINES, OpenBatch
from services.gateway.batches.records import BatchRecord, InputLine, LineEnd, new_line_id, result_text
from services.gateway.batches.store import BatchStore
from services.gateway.openai.batch_schema import BatchProblem, LineFailure, LineResult

# Lines in flight that each decode worker accounts for, and the most bytes of all their bodies.
LINES_PER_WORKER = 64
MAX_BYTES_IN_FLIGHT = 64 << 20
# Seconds for which lines in flight may go on after their batch was cancelled.
CANCEL_GRACE_S = 600.0
# Lines in flight are aborted when their batch expires, and so much before their own deadline.
DEADLINE_SLACK_S = 60.0
# A line is given up after so many failures that a client would have been told to try again after.
MAX_LINE_ATTEMPTS = 8
# Failures that say that there is no room or no worker at the moment; they are not counted.
UNCOUNTED = frozenset(
    {
        FailureReason.NO_WORKERS,
        FailureReason.SERVER_SHUTTING_DOWN,
        FailureReason.TOO_MANY_REQUESTS,
        FailureReason.QUEUE_FULL,
        FailureReason.QUEUE_TOO_LONG,
        FailureReason.DISPLACED,
        FailureReason.TENANT_PREPARATION_FULL,
        FailureReason.PREPARATION_FULL,
        FailureReason.OVERLOADED,
    }
)
# Seconds before another line is tried after one found no room, and before the disk is tried again.
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
# Longest sleep of the feeder: clocks may be set. And while SLOs hold lines back, which changes with time.
MAX_SLEEP_S, HELD_SLEEP_S = 60.0, 0.5
# What the thread that checks a file waits now and then, so that the event loop is not held up.
CHECK_PAUSE_S = 0.0005

EXPIRED = LineFailure(
    "batch_expired", "This request could not be executed before the completion window expired."
)
CANCELLED = LineFailure("batch_cancelled", "This request was not executed, since its batch was cancelled.")

T = TypeVar("T")

log = logging.getLogger(__name__)


class BatchFeeder:
    """Runs all open batches. `ended` counts lines by how they ended, and `tokens` tokens by kind, since the start.

    `recalled` counts how often lines in flight were taken back, since requests over HTTP missed their SLOs.
    """

    def __init__(
        self,
        store: BatchStore,
        runner: LineRunner,
        default_model: str,
        max_body_bytes: int,
        num_workers: Callable[[], int] = lambda: 1,
        is_draining: Callable[[], bool] = lambda: False,
        attainment: float = DEFAULT_ATTAINMENT,
    ) -> None:
        """`num_workers` gives the number of decode workers, `is_draining` whether the gateway is shutting down.

        `attainment` is the share of requests over HTTP that are to meet their SLOs.
        """
        self.store, self._runner = store, runner
        self._default_model, self._max_body_bytes = default_model, max_body_bytes
        self._num_workers, self._is_draining = num_workers, is_draining
        self.window = LineWindow(attainment)
        self.open: dict[str, OpenBatch] = {}
        self.ended: Counter[str] = Counter({"completed": 0, "failed": 0})
        self.tokens: Counter[str] = Counter({"prompt": 0, "completion": 0})
        self._served_tokens: Counter[str] = Counter()
        self._num_adopted = 0
        self._bytes_in_flight = 0
        # Tasks of the lines that have no answer yet, in the order of their starts, and of those that are taken back.
        self._unanswered: dict[asyncio.Task[None], None] = {}
        self._taken_back: set[asyncio.Task[None]] = set()
        self.recalled = 0
        # The window was cut, and no lines were taken back for it yet.
        self._is_cut = False
        self._news = asyncio.Event()
        # No line is started before this time (monotonic seconds), since the last one found no room.
        self._paused_s, self._pause_s = 0.0, MIN_PAUSE_S
        # When files expire next (Unix seconds).
        self._next_purge: float = 0.0
        self._checking = asyncio.Semaphore(1)
        # Tries whether the disk takes anything again.
        self._probe: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_running(self) -> int:
        """How many lines are in flight."""
        return sum(len(batch.in_flight) for batch in self.open.values())

    @property
    def num_waiting(self) -> int:
        """How many lines have no result and are not in flight."""
        waiting = sum(batch.num_waiting for batch in self.open.values())
        return max(0, waiting - self.num_running)

    async def run_forever(self) -> None:
        """Go on with the batches that have not ended, and run new ones, until cancelled: then lines are aborted."""
        found = await self._persist(self.store.recover)
        async with asyncio.TaskGroup() as self._tasks:
            # Those that were made meanwhile are known. All are known before a client can change another one.
            adopted = [self._add_open(record) for record in found if record.id not in self.open]
            for batch in adopted:
                await self._adopt(batch)
            while True:
                self._news.clear()
                self._advance()
                await self._sleep()

    def add_batch(self, record: BatchRecord) -> None:
        """Take a new batch."""
        self._add_open(record)
        self._news.set()

    def cancel_batch(self, record: BatchRecord) -> None:
        """The batch is cancelling: start no more of its lines."""
        batch = self.open.get(record.id)
        if batch is not None:
            batch.record = record
            batch.close("cancelled", time.monotonic() + CANCEL_GRACE_S)
            self._news.set()

    def record_request(self, met: bool) -> None:
        """A request over HTTP ended, and `met` its SLOs or did not. It counts if a line was being answered."""
        # A gateway that shuts down refuses requests, whatever lines do.
        running = 0 if self._is_draining() else len(self._unanswered)
        if running and self.window.record_outcome(met, running / self._num_lines()):
            self._is_cut = True
            self._news.set()

    def wake(self) -> None:
        """Look at once whether files expire."""
        self._next_purge = 0.0
        self._news.set()

    # ---- the loop

    async def _adopt(self, batch: OpenBatch) -> None:
        """Go on with a batch after a start."""
        record = batch.record
        if record.status == "in_progress":
            batch.num_waiting = await self._persist(lambda: self.store.count_waiting(record.id))
            # It may have been cancelled meanwhile.
            batch.feeding = not batch.outcome
        elif record.status in ("cancelling", "finalizing"):
            batch.close(record.outcome, 0.0)

    def _add_open(self, record: BatchRecord) -> OpenBatch:
        self._num_adopted += 1
        batch = self.open[record.id] = OpenBatch(record, self._num_adopted)
        return batch

    async def _sleep(self) -> None:
        """Wait for news, or until something is due."""
        now_s, now = time.monotonic(), time.time()
        due_s = [MAX_SLEEP_S, self._next_purge - now]
        due_s += [batch.record.expires_at - now for batch in self.open.values() if not batch.outcome]
        due_s += [batch.give_up_s - now_s for batch in self.open.values() if batch.in_flight]
        if self._paused_s > now_s:
            due_s.append(self._paused_s - now_s)
        if self.window.share < 1.0 and self.num_waiting:
            due_s.append(HELD_SLEEP_S)
        try:
            async with asyncio.timeout(max(0.01, min(due_s))):
                await self._news.wait()
        except TimeoutError:
            pass

    def _advance(self) -> None:
        """Start everything that can be started now."""
        now_s, now = time.monotonic(), time.time()
        if now >= self._next_purge:
            self._next_purge = now + MAX_SLEEP_S
            self._spawn(self._purge_files())
        for batch in list(self.open.values()):
            if now >= batch.record.expires_at and batch.outcome != "expired" and batch.give_up_s:
                batch.close("expired", 0.0)
            if now_s >= batch.give_up_s:
                for task in batch.in_flight.values():
                    task.cancel()
            if batch.is_over:
                batch.work = self._spawn(self._end_batch(batch))
            elif batch.record.status == "validating" and not batch.is_busy:
                batch.work = self._spawn(self._check_batch(batch))
            elif batch.needs_lines:
                batch.work = self._spawn(self._fetch_lines(batch))
        if self.store.trouble and (self._probe is None or self._probe.done()):
            self._probe = self._spawn(self._persist(self.store.probe))
        self._start_lines(now_s)
        self._recall_lines()

    def _num_lines(self) -> int:
        """How many lines may be in flight while requests meet their SLOs."""
        return LINES_PER_WORKER * max(1, self._num_workers())

    def _recall_lines(self) -> None:
        """After a cut, take back the lines that are too many: those that were started last, which lose least."""
        left = self.window.num_lines(self._num_lines()) if self._is_cut else len(self._unanswered)
        self._is_cut = False
        for task in reversed(list(self._unanswered)[left:]):
            del self._unanswered[task]
            self._taken_back.add(task)
            self.recalled += 1
            task.cancel()

    def _start_lines(self, now_s: float) -> None:
        """Start lines while the window has room."""
        if self._is_draining() or now_s < self._paused_s or self.store.trouble:
            return
        window = self.window.num_lines(self._num_lines())
        while self.num_running < window and self._bytes_in_flight < MAX_BYTES_IN_FLIGHT:
            claims = [batch.claim() for batch in self.open.values()]
            chosen = choose_batch(claims, self._served_tokens)
            if chosen is None:
                return
            batch = self.open[chosen]
            line = batch.ready.popleft()
            self._bytes_in_flight += line.num_bytes
            batch.in_flight[line.number] = self._spawn(self._run_line(batch, line))
            if batch.needs_lines:
                batch.work = self._spawn(self._fetch_lines(batch))

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        assert self._tasks is not None

        async def run() -> None:
            try:
                await work
            except Exception:
                # Requests over HTTP go on. What failed is not tried again at once.
                log.exception("a step of a batch failed")
                await asyncio.sleep(MAX_PAUSE_S)
            finally:
                self._news.set()

        return self._tasks.create_task(run())

    # ---- the steps of a batch

    async def _check_batch(self, batch: OpenBatch) -> None:
        """Check the input file: the batch fails, or its lines may run."""
        record = batch.record
        async with self._checking:
            check = await asyncio.to_thread(self._read_input, record)
        if batch.outcome:
            check.lines = []
        if check.num_problems and not batch.outcome:
            record = await self._persist(lambda: self.store.fail_batch(record.id, check.problems))
        else:
            model = check.model or self._default_model
            record = await self._persist(lambda: self.store.begin_batch(record.id, check.lines, model))
        # A batch that was cancelled meanwhile keeps that status, and is ended.
        batch.record = record
        if record.status == "failed":
            del self.open[record.id]
        elif record.status == "in_progress" and not batch.outcome:
            batch.num_waiting, batch.feeding = len(check.lines), True

    def _read_input(self, record: BatchRecord) -> FileCheck:
        """Check the file of a batch; called in a thread."""
        try:
            with self.store.content_path(record.input_file).open("rb") as content:
                return check_file(
                    content,
                    record.endpoint,
                    self._max_body_bytes,
                    self._default_model,
                    lambda: time.sleep(CHECK_PAUSE_S),
                )
        except OSError as error:
            log.error("the input of batch %s cannot be read: %s", record.id, error)
            problem = BatchProblem("file_unreadable", "the server cannot read the input file")
            return FileCheck(problems=[problem], num_problems=1)

    async def _fetch_lines(self, batch: OpenBatch) -> None:
        """Fetch the next waiting lines from the database."""
        lines = await self._persist(
            lambda: self.store.waiting_lines(batch.record.id, batch.cursor, FETCHED_LINES)
        )
        if batch.feeding:
            batch.add_fetched(lines)

    async def _run_line(self, batch: OpenBatch, line: InputLine) -> None:
        """Run a line and write its result; or have it wait again, if it is taken back or there was no room for it."""
        try:
            answer = await self._run_until_recalled(batch, line)
            if answer is None:
                if batch.feeding:
                    batch.ready.appendleft(line)
                return
            if self._shall_retry(batch, line, answer):
                if batch.feeding:
                    batch.ready.append(line)
                return
            self._pause_s = MIN_PAUSE_S
            result = LineResult(new_line_id(), line.custom_id, answer.to_response())
            end = LineEnd(
                number=line.number,
                succeeded=answer.succeeded,
                text=result_text(result),
                input_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                output_tokens=answer.new_tokens,
            )
            record = await self._persist(lambda: self.store.end_lines(batch.record.id, [end]))
            self._count_line(batch, record, line.number, answer)
        finally:
            self._bytes_in_flight -= line.num_bytes
            batch.in_flight.pop(line.number, None)

    async def _run_until_recalled(self, batch: OpenBatch, line: InputLine) -> LineAnswer | None:
        """The answer to a line; None if it was taken back."""
        task = asyncio.current_task()
        assert task is not None
        self._unanswered[task] = None
        try:
            return await self._answer_line(batch, line)
        except asyncio.CancelledError:
            if task not in self._taken_back:
                raise
            return None
        finally:
            self._unanswered.pop(task, None)
            self._taken_back.discard(task)

    async def _answer_line(self, batch: OpenBatch, line: InputLine) -> LineAnswer:
        """The answer to a line, by what answers the same request over HTTP."""
        record = batch.record
        try:
            text = await asyncio.to_thread(self._read_line, record.input_file, line)
            body = bytes(parse_line(text).body)
        except (OSError, msgspec.DecodeError) as error:
            log.error("line %d of batch %s cannot be read: %s", line.number, record.id, error)
            failure = RequestFailure(
                FailureReason.STORAGE_FAILED, "the server cannot read this line any more"
            )
            return LineAnswer(failure.status, "", msgspec.json.encode(failure.error_body()), failure)
        timeout_s = max(0.0, record.expires_at - time.time()) + DEADLINE_SLACK_S
        return await self._runner.run_line(
            record.endpoint, body, record.tenant, bool(record.urgent), record.id, line.custom_id, timeout_s
        )

    def _read_line(self, file_id: str, line: InputLine) -> bytes:
        """The bytes of a line of an input file; called in a thread."""
        with self.store.content_path(file_id).open("rb") as content:
            return os.pread(content.fileno(), line.num_bytes, line.offset)

    def _shall_retry(self, batch: OpenBatch, line: InputLine, answer: LineAnswer) -> bool:
        """Whether a line waits again, since there was no room or no worker for it. If so, all lines pause a moment."""
        failure = answer.failure
        if failure is None or not failure.client_may_retry:
            return False
        if failure.reason not in UNCOUNTED:
            batch.attempts[line.number] = batch.attempts.get(line.number, 0) + 1
            if batch.attempts[line.number] >= MAX_LINE_ATTEMPTS:
                return False
        if time.monotonic() >= self._paused_s:
            self._paused_s = time.monotonic() + self._pause_s
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        return True

    def _count_line(self, batch: OpenBatch, record: BatchRecord, number: int, answer: LineAnswer) -> None:
        """Count a line whose result is written."""
        # A cancellation may have been committed after the result, and be known here before it.
        if batch.record.status != "cancelling":
            batch.record = record
        batch.num_waiting -= 1
        batch.attempts.pop(number, None)
        self.ended["completed" if answer.succeeded else "failed"] += 1
        self.tokens["prompt"] += answer.prompt_tokens
        self.tokens["completion"] += answer.new_tokens
        self._served_tokens[record.tenant] += answer.prompt_tokens + answer.new_tokens

    async def _end_batch(self, batch: OpenBatch) -> None:
        """Complete the results of a batch, and end it."""
        batch_id, outcome = batch.record.id, batch.outcome or "completed"
        waiting = await self._persist(lambda: self.store.count_waiting(batch_id))
        if outcome == "completed" and waiting:
            # Never complete without all results: a step that failed has left lines behind.
            batch.outcome, batch.give_up_s = "", float("inf")
            batch.cursor, batch.fetched_all, batch.feeding, batch.num_waiting = -1, False, True, waiting
            return
        batch.outcome, batch.feeding = outcome, False
        batch.record = await self._persist(lambda: self.store.finalize_batch(batch_id, outcome))
        failure = CANCELLED if outcome == "cancelled" else EXPIRED
        left = batch.num_waiting
        while remaining := await self._persist(
            lambda: self.store.fail_waiting(batch_id, failure, new_line_id)
        ):
            self.ended["failed"] += max(0, left - remaining)
            left = batch.num_waiting = remaining
        self.ended["failed"] += max(0, left)
        batch.record = await self._persist(lambda: self.store.end_batch(batch_id))
        del self.open[batch_id]
        if not any(one.record.tenant == batch.record.tenant for one in self.open.values()):
            self._served_tokens.pop(batch.record.tenant, None)
        log.info("batch %s is %s", batch_id, batch.record.status)
        # Its input may have been deleted meanwhile.
        self.wake()

    async def _purge_files(self) -> None:
        """Remove files that have expired or are deleted."""
        expiry = await self._persist(self.store.remove_unused)
        if expiry is not None:
            self._next_purge = max(time.time() + 1.0, min(self._next_purge, float(expiry)))

    async def _persist(self, change: Callable[[], Awaitable[T]]) -> T:
        """The result of `change`, which is tried until the disk takes it."""
        pause_s = MIN_PAUSE_S
        while True:
            try:
                return await change()
            except StorageError:
                await asyncio.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
