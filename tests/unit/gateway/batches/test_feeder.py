"""The feeder over a real store; what answers lines is scripted, since the fault itself is the subject."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches import feeder as feeder_module
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.feeder import MAX_LINE_ATTEMPTS, BatchFeeder
from services.gateway.batches.line_runner import LineAnswer, LineRunner
from services.gateway.batches.records import BatchRecord, new_batch_id, new_file_id
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.test_store import add_file

ENDPOINT = "/v1/completions"
LINES = 12


class ScriptedRunner:
    """Answers all lines but those named `lost`, whose worker is lost each time; counts the calls of each."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

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
        self.calls[custom_id] += 1
        if not custom_id.startswith("lost"):
            return LineAnswer(200, "r", b"{}")
        failure = RequestFailure(FailureReason.WORKER_LOST, "the worker was lost")
        return LineAnswer(failure.status, "r", json.dumps(failure.error_body()).encode(), failure)


async def test_a_line_is_given_up_after_its_own_failures_whatever_other_lines_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One line at a time, so that others end between two tries of the lost one.
    monkeypatch.setattr(feeder_module, "LINES_PER_WORKER", 1)
    monkeypatch.setattr(feeder_module, "MIN_PAUSE_S", 0.001)
    monkeypatch.setattr(feeder_module, "MAX_PAUSE_S", 0.001)
    store = BatchStore(DataDir(str(tmp_path / "data")))
    names = ["lost", *(f"good-{number}" for number in range(LINES))]
    rows = [{"custom_id": name, "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}} for name in names]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    source = await add_file(store, content=content)
    record = BatchRecord(
        id=new_batch_id(), tenant="", urgent=0, endpoint=ENDPOINT, window="24h", status="validating",
        input_file=source.id, output_file=new_file_id(), error_file=new_file_id(), created_at=store.now,
        expires_at=store.now + 3600, output_expiry_s=3600,
    )  # fmt: skip
    await store.add_batch(record)
    runner = ScriptedRunner()
    feeder = BatchFeeder(store, cast(LineRunner, runner), "tiny", 1 << 20)
    feeding = asyncio.create_task(feeder.run_forever())
    try:
        async with asyncio.timeout(60):
            while store.by_status != {"completed": 1}:
                await asyncio.sleep(0.01)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        store.close()
    assert runner.calls == dict.fromkeys(names, 1) | {"lost": MAX_LINE_ATTEMPTS}
    assert feeder.ended == {"completed": LINES, "failed": 1}
