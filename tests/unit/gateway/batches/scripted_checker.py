"""A checker of files that does what a test says, and a feeder with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec

from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.records import BatchRecord, new_batch_id, new_file_id
from services.gateway.batches.store import BatchStore
from services.gateway.preparation.file_checker import FileChecker, FileJobFailed
from services.gateway.preparation.file_job import CheckFileJob, FileUnreadable
from services.gateway.preparation.line_check import CheckedSlice
from tests.unit.gateway.batches.idle_feeder import InlineChecker
from tests.unit.gateway.batches.scripted_runners import ENDPOINT, ScriptedRunner
from tests.unit.gateway.batches.stored_batches import add_file


class ScriptedChecker(InlineChecker):
    """Checks files once `released` is set. `begun` are the files of all slices, in the order of their beginnings."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.begun, self.released = fails, list[str](), asyncio.Event()

    async def check_slice(self, job: CheckFileJob) -> CheckedSlice | FileUnreadable:
        self.begun.append(job.path.rpartition("/")[2])
        if self.fails:
            raise FileJobFailed
        await self.released.wait()
        return await super().check_slice(job)


def open_store(tmp_path: Path) -> BatchStore:
    return BatchStore(DataDir(str(tmp_path / "data")))


async def add_lines(store: BatchStore, num_lines: int, tenant: str = "", window_s: int = 3600) -> BatchRecord:
    """A batch of so many lines."""
    rows = [
        {"custom_id": f"{number}", "method": "POST", "url": ENDPOINT, "body": {}}
        for number in range(num_lines)
    ]
    content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    source = await add_file(store, tenant=tenant, content=content)
    record = BatchRecord(
        id=new_batch_id(), tenant=tenant, urgent=0, endpoint=ENDPOINT, window="24h", status="validating",
        input_file=source.id, output_file=new_file_id(), error_file=new_file_id(), created_at=store.now,
        expires_at=store.now + window_s, output_expiry_s=3600,
    )  # fmt: skip
    await store.add_batch(record)
    return record


def feeder_of(store: BatchStore, checker: FileChecker) -> BatchFeeder:
    return BatchFeeder(store, cast(LineRunner, ScriptedRunner()), checker, "tiny", 1 << 20)
