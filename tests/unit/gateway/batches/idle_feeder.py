"""A feeder that has nothing to do, for what only reads its figures; and what reads files for one that works."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.store import BatchStore
from services.gateway.preparation.file_checker import FileChecker
from services.gateway.preparation.file_job import (
    CheckFileJob,
    FileUnreadable,
    ReadLines,
    ReadLinesJob,
    run_file_job,
)
from services.gateway.preparation.line_check import CheckedSlice
from services.gateway.preparation.preparer_pool import PreparerPool


class EmptyStore:
    """The figures of a store without files."""

    def __init__(self) -> None:
        self.by_status: dict[str, int] = {}
        self.held_bytes, self.trouble = 0, ""
        self.data_dir = SimpleNamespace(path="")


class InlineChecker(FileChecker):
    """Does in this process what a preparer would do."""

    def __init__(self) -> None:
        super().__init__(cast(PreparerPool, None))

    async def check_slice(self, job: CheckFileJob) -> CheckedSlice | FileUnreadable:
        result = run_file_job(job)
        assert isinstance(result, CheckedSlice | FileUnreadable)
        return result

    async def read_lines(self, job: ReadLinesJob) -> ReadLines | FileUnreadable:
        result = run_file_job(job)
        assert isinstance(result, ReadLines | FileUnreadable)
        return result


def idle_feeder() -> BatchFeeder:
    return BatchFeeder(
        cast(BatchStore, EmptyStore()), cast(LineRunner, None), InlineChecker(), "toy", 1 << 20
    )
