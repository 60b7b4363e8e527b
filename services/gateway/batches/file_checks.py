"""Has input files checked, slice by slice in a helper process: then a batch fails, or its lines may run.

    FileOrder ─▶ count_check, once ─▶ slice ─▶ ... ─▶ slice ─▶ fail_batch, or begin_batch
                     ▲                  └─ the process was killed ─┐
                     └─────────────────────────────────────────────┘

An attempt is counted on disk before it begins: a file whose check ends this gateway, or its helper, fails its batch.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from dataclasses import dataclass, field

from msgspec import structs

from services.gateway.batches.line_attempts import persist_change
from services.gateway.batches.open_batch import OpenBatch, OpenBatches
from services.gateway.batches.records import InputLine
from services.gateway.batches.store import BatchStore
from services.gateway.openai.schemas.batch_schema import BatchProblem
from services.gateway.preparation.file_checker import FileChecker, FileJobFailed, FileOrder
from services.gateway.preparation.file_job import CheckFileJob, FileUnreadable
from services.gateway.preparation.line_check import CheckedSlice, CheckState, FileRules

# How often the check of a file is begun.
MAX_CHECKS = 3
KEY_BYTES = 16

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """What the slices of a file have found so far."""

    rules: FileRules
    state: CheckState = CheckState()
    lines: list[InputLine] = field(default_factory=list)
    problems: list[BatchProblem] = field(default_factory=list)

    def add_slice(self, checked: CheckedSlice) -> None:
        """Take what a slice has found."""
        seen = self.state.seen + checked.state.seen
        self.state = structs.replace(checked.state, seen=seen)
        packed = array("q", checked.lines)
        self.lines += [
            InputLine(number, offset, num_bytes)
            for number, offset, num_bytes in zip(packed[::3], packed[1::3], packed[2::3], strict=True)
        ]
        self.problems += checked.problems


class FileChecks:
    """Checks one slice of one file at a time, of all batches that are `validating`."""

    def __init__(
        self,
        store: BatchStore,
        checker: FileChecker,
        batches: OpenBatches,
        default_model: str,
        max_body_bytes: int,
    ) -> None:
        """`default_model` is what lines ask for that name no model."""
        self._store, self._checker, self._batches = store, checker, batches
        self._default_model, self._max_body_bytes = default_model, max_body_bytes
        self._order = FileOrder()
        self._progress: dict[str, _Progress] = {}
        self._is_running = False

    def add_file(self, batch: OpenBatch) -> None:
        """The file of a batch waits to be checked, or to be checked on."""
        record = batch.record
        begun = record.id in self._progress
        self._order.push_file(record.tenant, record.id, record.expires_at, batch.order, begun)

    def begin_slice(self) -> OpenBatch | None:
        """The batch whose file is to be checked on by `check_slice`; None if another one is, or none waits."""
        while not self._is_running and (batch_id := self._order.pop_file()) is not None:
            batch = self._batches.by_id.get(batch_id)
            if batch is not None and batch.needs_check:
                self._is_running = True
                return batch
            self._progress.pop(batch_id, None)
        return None

    async def check_slice(self, batch: OpenBatch) -> None:
        """Check the next slice of a file, and do what follows from it."""
        batch_id = batch.record.id
        try:
            progress = self._progress.get(batch_id) or await self._begin_check(batch_id)
            if progress is None:
                why = f"the check was begun {MAX_CHECKS} times and did not end: it ended the process that did it"
                return await self._fail_batch(batch, [BatchProblem("check_failed", why)])
            path = str(self._store.content_path(batch.record.input_file))
            try:
                found = await self._checker.check_slice(CheckFileJob(path, progress.rules, progress.state))
            except FileJobFailed:
                # From the beginning, which counts.
                del self._progress[batch_id]
                return
            if isinstance(found, FileUnreadable):
                return await self._fail_batch(batch, [self._describe_failure(batch_id, found)])
            progress.add_slice(found)
            if found.is_complete:
                await self._end_check(batch, progress)
        finally:
            self._is_running = False

    def forget_file(self, batch_id: str) -> None:
        """A batch has ended, perhaps in the middle of the check of its file."""
        self._progress.pop(batch_id, None)

    async def _begin_check(self, batch_id: str) -> _Progress | None:
        """Count an attempt, before it begins. None if there were too many."""
        if await persist_change(lambda: self._store.count_check(batch_id)) > MAX_CHECKS:
            return None
        rules = FileRules(
            self._batches.by_id[batch_id].record.endpoint,
            self._max_body_bytes,
            self._default_model,
            secrets.token_bytes(KEY_BYTES),
        )
        progress = self._progress[batch_id] = _Progress(rules)
        return progress

    def _describe_failure(self, batch_id: str, unreadable: FileUnreadable) -> BatchProblem:
        log.error("the input of batch %s cannot be read: %s", batch_id, unreadable.error)
        if unreadable.no_memory:
            return BatchProblem("check_failed", "a line of the input file needs too much memory")
        return BatchProblem("file_unreadable", "the server cannot read the input file")

    async def _end_check(self, batch: OpenBatch, progress: _Progress) -> None:
        """The whole file is checked."""
        if progress.state.num_problems:
            return await self._fail_batch(batch, progress.problems)
        batch_id, lines = batch.record.id, progress.lines
        model = progress.state.model or self._default_model
        # A batch that was cancelled meanwhile keeps that status, and is ended.
        batch.record = await persist_change(lambda: self._store.begin_batch(batch_id, lines, model))
        self._progress.pop(batch_id, None)
        if batch.record.status == "failed":
            # Its tenant may not have so many lines.
            self._batches.remove(batch)
        elif batch.record.status == "in_progress" and not batch.outcome:
            self._batches.feed(batch, len(lines))

    async def _fail_batch(self, batch: OpenBatch, problems: list[BatchProblem]) -> None:
        """No line of the batch may run, unless it was cancelled meanwhile."""
        batch_id = batch.record.id
        batch.record = await persist_change(lambda: self._store.fail_batch(batch_id, problems))
        self._progress.pop(batch_id, None)
        if batch.record.status == "failed":
            self._batches.remove(batch)
