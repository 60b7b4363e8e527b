"""A line's life: it is read and run, and its result is written; or it waits again, since there was no room for it.

read ─ run ─▶ answer ─ end_lines ─▶ its one result
         ├─ taken back, or no room, or a failure that may pass ─▶ waits again
         └─ aborted: its batch is cancelled or has expired ─▶ `fail_waiting` gives it its result
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches.database_thread import StorageError
from services.gateway.batches.line_runner import LineAnswer, LineRunner, refuse_line
from services.gateway.batches.open_batch import OpenBatch, OpenBatches
from services.gateway.batches.records import BatchRecord, InputLine, LineEnd, new_line_id, result_text
from services.gateway.batches.storage.running_lines import RunningLines
from services.gateway.batches.store import BatchStore
from services.gateway.openai.schemas.batch_schema import LineFailure, LineResult
from services.gateway.preparation.file_checker import FileChecker, FileJobFailed
from services.gateway.preparation.file_job import FileUnreadable, ReadLinesJob
from services.gateway.preparation.line_check import parse_line

# Lines of at most this many bytes are parsed on the event loop. They take a fraction of a millisecond.
MAX_INLINE_BYTES = 64 << 10
# Lines in flight are aborted when their batch expires, and so much before their own deadline.
DEADLINE_SLACK_S = 60.0
# A line is given up after so many failures that a client would have been told to try again after.
MAX_LINE_ATTEMPTS = 8
# A line that was in flight at so many crashes of the gateway is given up; before the last time it runs alone.
MAX_LINE_CRASHES = 3
# Failures that say that there is no room or no worker at the moment; they are not counted.
UNCOUNTED = frozenset(
    {
        FailureReason.NO_WORKERS,
        FailureReason.SERVER_SHUTTING_DOWN,
        FailureReason.TOO_MANY_REQUESTS,
        FailureReason.TENANT_REQUESTS_FULL,
        FailureReason.QUEUE_FULL,
        FailureReason.TENANT_QUEUE_FULL,
        FailureReason.QUEUE_TOO_LONG,
        FailureReason.DISPLACED,
        FailureReason.RATE_LIMIT_EXCEEDED,
        FailureReason.TENANT_PREPARATION_FULL,
        FailureReason.PREPARATION_FULL,
        FailureReason.OVERLOADED,
    }
)
# Seconds before another line is tried after one found no room, and before the disk is tried again.
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
# How many lines are failed at a time when a batch ends early.
FAILED_LINES = 500

T = TypeVar("T")

log = logging.getLogger(__name__)


class LineAttempts:
    """Runs the lines that the feeder starts.

    `ended` counts lines by how they ended, and `tokens` tokens by kind, since the start. `recalled` counts how often
    lines in flight were taken back. No line is to be started before `paused_s` (monotonic seconds), since the last one
    found no room. `running` has the lines in flight, for the next process.
    """

    def __init__(
        self,
        store: BatchStore,
        runner: LineRunner,
        checker: FileChecker,
        batches: OpenBatches,
        wall_time: Callable[[], float],
    ) -> None:
        """`wall_time` gives Unix seconds, by which batches expire."""
        self._store, self._runner, self._checker = store, runner, checker
        self._batches, self._wall_time = batches, wall_time
        self.ended: Counter[str] = Counter({"completed": 0, "failed": 0})
        self.tokens: Counter[str] = Counter({"prompt": 0, "completion": 0})
        self.recalled = 0
        self.bytes_in_flight = 0
        self.running = RunningLines()
        # Whether the line in flight has to be the only one.
        self._runs_alone = False
        self.paused_s, self._pause_s = 0.0, MIN_PAUSE_S
        # Tasks of the lines that have no answer yet, in the order of their starts, and of those that are taken back.
        self._unanswered: dict[asyncio.Task[None], None] = {}
        self._taken_back: set[asyncio.Task[None]] = set()

    @property
    def num_unanswered(self) -> int:
        """How many lines in flight have no answer; the others wait for the disk."""
        return len(self._unanswered)

    def may_begin(self, batch: OpenBatch) -> bool:
        """Whether the next line of a batch may be started beside those in flight.

        One that was in flight at all crashes but the last runs alone, so that no other line is blamed for it.
        """
        if self._runs_alone:
            return False
        return not self._has_to_be_alone(batch, batch.ready[0]) or not self._batches.num_running

    def begin_line(self, batch: OpenBatch) -> InputLine:
        """Take the next line of a batch, for `run_line`."""
        line = self._batches.take_line(batch)
        self.bytes_in_flight += line.num_bytes
        self._runs_alone = self._has_to_be_alone(batch, line)
        self.running.add_line(batch.record.id, line.number)
        return line

    def _has_to_be_alone(self, batch: OpenBatch, line: InputLine) -> bool:
        return self.running.count_crashes(batch.record.id, line.number) >= MAX_LINE_CRASHES - 1

    def recall_lines(self, left: int) -> None:
        """Take back all lines without an answer but `left`: those that were started last, which lose least."""
        for task in reversed(list(self._unanswered)[left:]):
            del self._unanswered[task]
            self._taken_back.add(task)
            self.recalled += 1
            task.cancel()

    def abort_lines(self, batch: OpenBatch) -> None:
        """Stop the lines of a batch that have no answer; those that have one keep it, and write it."""
        for task in batch.in_flight.values():
            if task in self._unanswered:
                del self._unanswered[task]
                task.cancel()

    async def run_line(self, batch: OpenBatch, line: InputLine) -> None:
        """Run a line and write its result; or have it wait again, if it is taken back or there was no room for it."""
        waits = True
        try:
            found = await self._run_until_recalled(batch, line)
            if found is None:
                return self._batches.return_line(batch, line, first=True)
            custom_id, answer = found
            if self._shall_retry(batch, line, answer):
                return self._batches.return_line(batch, line, first=False)
            self._pause_s = MIN_PAUSE_S
            end = LineEnd(
                number=line.number,
                succeeded=answer.succeeded,
                text=answer.to_text(custom_id),
                input_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                output_tokens=answer.new_tokens,
            )
            record = await persist_change(lambda: self._store.end_lines(batch.record.id, [end]))
            self._count_line(batch, record, line.number, answer)
            waits = False
        finally:
            self.bytes_in_flight -= line.num_bytes
            self._runs_alone = False
            self.running.end_line(batch.record.id, line.number, waits)
            self._batches.end_line(batch, line.number)

    async def _run_until_recalled(self, batch: OpenBatch, line: InputLine) -> tuple[str, LineAnswer] | None:
        """The id of a line and the answer to it; None if it was taken back."""
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

    async def _answer_line(self, batch: OpenBatch, line: InputLine) -> tuple[str, LineAnswer]:
        """The id of a line and the answer to it, by what answers the same request over HTTP.

        The id is empty if the line cannot be read any more.
        """
        record = batch.record
        if self.running.count_crashes(record.id, line.number) >= MAX_LINE_CRASHES:
            problem = f"the server was killed {MAX_LINE_CRASHES} times while it ran this line"
            (name,) = await self._read_ids(record.input_file, [line])
            return name or "", refuse_line(
                RequestFailure(FailureReason.INTERNAL_ERROR, problem), record.endpoint
            )
        try:
            custom_id, body = await self._read_line(record.input_file, line)
        except (OSError, msgspec.DecodeError, RecursionError, FileJobFailed) as error:
            log.error("line %d of batch %s cannot be read: %s", line.number, record.id, error)
            problem = "the server cannot read this line any more"
            return "", refuse_line(RequestFailure(FailureReason.STORAGE_FAILED, problem), record.endpoint)
        refusal = self._store.line_refusal(record.tenant)
        if refusal is not None:
            return custom_id, refuse_line(refusal, record.endpoint)
        timeout_s = max(0.0, record.expires_at - self._wall_time()) + DEADLINE_SLACK_S
        answer = await self._runner.run_line(
            record.endpoint,
            body,
            record.tenant,
            bool(record.urgent),
            record.id,
            custom_id,
            timeout_s,
        )
        return custom_id, answer

    async def _read_line(self, file_id: str, line: InputLine) -> tuple[str, bytes]:
        """The id and the body of a line of an input file. Long lines are parsed in a helper process.

        Raises:
            OSError, msgspec.DecodeError, RecursionError, FileJobFailed: it cannot be read any more.
        """
        path = self._store.content_path(file_id)
        if line.num_bytes <= MAX_INLINE_BYTES:
            parsed = parse_line(await asyncio.to_thread(_read_span, path, line.offset, line.num_bytes))
            return parsed.custom_id, bytes(parsed.body)
        found = await self._checker.read_lines(ReadLinesJob(str(path), _pack_spans([line]), with_bodies=True))
        if isinstance(found, FileUnreadable):
            raise OSError(found.error)
        (custom_id,), (body,) = found.custom_ids, found.bodies
        if custom_id is None:
            raise msgspec.DecodeError("the file has changed")
        return custom_id, body

    async def fail_lines(self, batch: OpenBatch, failure: LineFailure) -> int:
        """Give lines of a batch without a result `failure` as theirs, some at a time; returns how many are left.

        The id of a line whose file cannot be read any more is empty.
        """
        record = batch.record
        lines = await persist_change(lambda: self._store.waiting_lines(record.id, -1, FAILED_LINES))
        ends = [
            LineEnd(
                number=line.number,
                succeeded=False,
                text=result_text(LineResult(new_line_id(), custom_id or "", error=failure)),
            )
            for line, custom_id in zip(
                lines, await self._read_ids(record.input_file, lines) if lines else [], strict=False
            )
        ]
        await persist_change(lambda: self._store.end_lines(record.id, ends))
        return await persist_change(lambda: self._store.count_waiting(record.id))

    async def _read_ids(self, file_id: str, lines: Sequence[InputLine]) -> Sequence[str | None]:
        """The ids of the first of these lines, as many as there was time for."""
        job = ReadLinesJob(str(self._store.content_path(file_id)), _pack_spans(lines), with_bodies=False)
        why = "its helper process was killed"
        with contextlib.suppress(FileJobFailed):
            found = await self._checker.read_lines(job)
            if not isinstance(found, FileUnreadable):
                return found.custom_ids
            why = found.error
        log.error("the ids of lines in %s are lost: %s", file_id, why)
        return [None] * len(lines)

    def _shall_retry(self, batch: OpenBatch, line: InputLine, answer: LineAnswer) -> bool:
        """Whether a line waits again, since there was no room or no worker for it. If so, all lines pause a moment.

        If its key has used its rate, only the lines of its batch pause, until there is room.
        """
        failure = answer.failure
        if failure is None or not failure.client_may_retry:
            return False
        if failure.reason is FailureReason.RATE_LIMIT_EXCEEDED:
            # Lines of other keys go on.
            self._batches.hold(batch, time.monotonic() + (failure.retry_after_s or MIN_PAUSE_S))
            return True
        if failure.reason not in UNCOUNTED:
            batch.attempts[line.number] = batch.attempts.get(line.number, 0) + 1
            if batch.attempts[line.number] >= MAX_LINE_ATTEMPTS:
                return False
        if time.monotonic() >= self.paused_s:
            self.paused_s = time.monotonic() + self._pause_s
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        return True

    def _count_line(self, batch: OpenBatch, record: BatchRecord, number: int, answer: LineAnswer) -> None:
        """Count a line whose result is written."""
        # A cancellation may have been committed after the result, and be known here before it.
        if batch.record.status != "cancelling":
            batch.record = record
        self._batches.set_waiting(batch, batch.num_waiting - 1)
        batch.attempts.pop(number, None)
        self.ended["completed" if answer.succeeded else "failed"] += 1
        self.tokens["prompt"] += answer.prompt_tokens
        self.tokens["completion"] += answer.new_tokens
        self._batches.count_tokens(batch, answer.prompt_tokens + answer.new_tokens)


def _read_span(path: Path, offset: int, num_bytes: int) -> bytes:
    """A part of a file; called in a thread."""
    with path.open("rb") as content:
        return os.pread(content.fileno(), num_bytes, offset)


def _pack_spans(lines: Sequence[InputLine]) -> bytes:
    """Where lines lie, as `ReadLinesJob` takes it."""
    return array("q", [number for line in lines for number in (line.offset, line.num_bytes)]).tobytes()


async def persist_change(change: Callable[[], Awaitable[T]]) -> T:
    """The result of `change`, which is tried until the disk takes it."""
    pause_s = MIN_PAUSE_S
    while True:
        try:
            return await change()
        except StorageError:
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)
