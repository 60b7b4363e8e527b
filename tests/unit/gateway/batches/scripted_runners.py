"""Runners of lines that do what a test says, and a feeder over them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable

from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.line_runner import LineAnswer
from services.gateway.batches.records import BatchRecord, new_batch_id, new_file_id
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.stored_batches import add_file

ENDPOINT = "/v1/completions"


class ScriptedRunner:
    """Answers all lines but those named `lost`, whose worker is lost each time; counts the calls of each."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    async def hold(self, custom_id: str) -> None:
        """Wait before the line is answered."""

    async def run_line(
        self,
        endpoint: str,
        body: bytes,
        tenant: str,
        urgent: bool,
        batch: str,
        custom_id: str,
        timeout_s: float,
    ) -> LineAnswer:
        await self.hold(custom_id)
        self.calls[custom_id] += 1
        if not custom_id.startswith("lost"):
            return LineAnswer(200, "r", b"{}")
        failure = RequestFailure(FailureReason.WORKER_LOST, "the worker was lost")
        return LineAnswer(failure.status, "r", json.dumps(failure.error_body()).encode(), failure)


class HeldRunner(ScriptedRunner):
    """Answers lines once `released` is set, `quick` ones at once. `running` are those that have no answer yet."""

    def __init__(self) -> None:
        super().__init__()
        self.running: set[str] = set()
        self.released = asyncio.Event()

    def runs(self, names: list[str]) -> bool:
        return self.running == set(names)

    async def hold(self, custom_id: str) -> None:
        self.running.add(custom_id)
        try:
            if not custom_id.startswith("quick"):
                await self.released.wait()
        finally:
            self.running.discard(custom_id)


async def add_batch(store: BatchStore, names: list[str]) -> None:
    """A batch with a line of each name."""
    rows = [{"custom_id": name, "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}} for name in names]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    source = await add_file(store, content=content)
    record = BatchRecord(
        id=new_batch_id(), tenant="", urgent=0, endpoint=ENDPOINT, window="24h", status="validating",
        input_file=source.id, output_file=new_file_id(), error_file=new_file_id(), created_at=store.now,
        expires_at=store.now + 3600, output_expiry_s=3600,
    )  # fmt: skip
    await store.add_batch(record)


@contextlib.asynccontextmanager
async def feeding(store: BatchStore, feeder: BatchFeeder) -> AsyncIterator[None]:
    """The feeder runs until the block ends, which has a minute."""
    task = asyncio.create_task(feeder.run_forever())
    try:
        async with asyncio.timeout(60):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        store.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
