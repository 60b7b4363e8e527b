"""What a line costs does not depend on how many batches are open, and cancelling stops the lines in flight."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from services.gateway.batches import feeder as feeder_module
from services.gateway.batches.data_dir import RUNNING_NAME, DataDir
from services.gateway.batches.feeder import MAX_FETCHES, MAX_STARTS, BatchFeeder
from services.gateway.batches.line_attempts import MAX_LINE_CRASHES
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.open_batch import FETCHED_LINES, OpenBatches
from services.gateway.batches.records import BatchRecord, InputLine, LineEnd
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.idle_feeder import InlineChecker
from tests.unit.gateway.batches.scripted_runners import HeldRunner, add_batch, feeding, until


def record_of(number: int, tenant: str = "t", status: str = "in_progress") -> BatchRecord:
    return BatchRecord(
        id=f"batch_{number}", tenant=tenant, urgent=0, endpoint="/v1/completions", window="24h", status=status,
        input_file="i", output_file="o", error_file="e", created_at=1, expires_at=2**40 + number % 7,
        output_expiry_s=3600,
    )  # fmt: skip


def count_calls(work: Callable[[], Any]) -> int:
    """How many functions `work` calls, those of the interpreter included."""
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


class CountingStore:
    """Knows `FETCHED_LINES` lines of any batch. `fetches` counts how often it was asked."""

    def __init__(self) -> None:
        self.trouble, self.fetches, self.settled_s = "", 0, 1000.0

    async def waiting_lines(self, batch_id: str, behind: int, limit: int) -> list[InputLine]:
        self.fetches += 1
        await asyncio.sleep(0)
        return [InputLine(number, 0, 1) for number in range(FETCHED_LINES)]

    async def remove_unused(self) -> None:
        return None


async def start_many(num_batches: int, num_lines: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many calls it takes to start `num_lines` lines, and of how many batches lines were fetched."""
    monkeypatch.setattr(feeder_module, "LINES_PER_WORKER", num_lines)
    store = CountingStore()
    feeder = BatchFeeder(cast(BatchStore, store), cast(LineRunner, None), InlineChecker(), "tiny", 1 << 20)

    async def never_end(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(feeder.lines, "run_line", never_end)
    for number in range(num_batches):
        feeder.batches.feed(feeder.batches.add(record_of(number, f"t{number % 3}")), FETCHED_LINES)
    calls = 0

    def advance() -> None:
        before = feeder.num_running
        feeder._advance()
        assert feeder.num_running - before <= MAX_STARTS

    async with asyncio.TaskGroup() as feeder._tasks:
        while feeder.batches.any_touched:
            feeder._advance()
        while feeder.num_running < num_lines:
            calls += count_calls(advance)
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    return calls, store.fetches


async def test_lines_start_as_cheaply_beside_many_open_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    few, _ = await start_many(20, 256, monkeypatch)
    many, fetches = await start_many(3000, 256, monkeypatch)
    assert many < 3 * few
    # What is fetched is what runs next, not something of each batch.
    assert fetches <= 2 * MAX_FETCHES


async def test_cancelling_stops_lines_in_flight_and_keeps_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is answered and waits for the disk keeps its answer; one that runs has `batch_cancelled`."""
    store = BatchStore(DataDir(str(tmp_path / "data")))
    names = ["quick-0", "quick-1", "slow-0", "slow-1"]
    await add_batch(store, names)
    runner, written, disk = HeldRunner(), store.end_lines, asyncio.Event()

    async def end_later(batch_id: str, ends: Sequence[LineEnd]) -> BatchRecord:
        await disk.wait()
        return await written(batch_id, ends)

    monkeypatch.setattr(store, "end_lines", end_later)
    feeder = BatchFeeder(store, cast(LineRunner, runner), InlineChecker(), "tiny", 1 << 20)
    async with feeding(store, feeder):
        await until(lambda: runner.runs(names[2:]) and len(runner.calls) == 2)
        (batch,) = feeder.open.values()
        feeder.cancel_batch(await store.cancel_batch("", batch.record.id))
        await until(lambda: not runner.running)
        assert feeder.num_running == 2, "two wait for the disk"
        disk.set()
        await until(lambda: not feeder.open)
        assert Counter(runner.calls) == dict.fromkeys(names[:2], 1)
        assert feeder.ended == {"completed": 2, "failed": 2}
        assert (feeder.num_running, feeder.num_waiting) == (0, 0)
        assert store.by_status == {"cancelled": 1}


async def test_a_batch_that_expires_again_and_again_is_closed_once() -> None:
    batches = OpenBatches()
    batch = batches.add(record_of(1))
    batches.feed(batch, 3)
    assert batches.next_expiry() == batch.record.expires_at
    assert batches.take_expired(batch.record.expires_at - 1) is None
    assert batches.take_expired(batch.record.expires_at) is batch
    batches.close(batch, "expired")
    assert batches.take_expired(2**50) is None and batches.next_expiry() is None
    batches.feed(batch, 3)
    assert batches.take_expired(2**50) is batch


async def test_a_line_that_kills_the_gateway_runs_three_times_and_the_last_time_alone(tmp_path: Path) -> None:
    """Lines that ran beside it are not blamed: they run on when it has had its end."""
    names = [f"line-{number}" for number in range(6)]
    store = BatchStore(DataDir(str(tmp_path / "data")))
    await add_batch(store, names)
    seen = list[set[str]]()
    for _ in range(MAX_LINE_CRASHES):
        runner = HeldRunner()
        feeder = BatchFeeder(store, cast(LineRunner, runner), InlineChecker(), "tiny", 1 << 20)
        async with feeding(store, feeder):
            await until(partial(bool, runner.running))
            await asyncio.sleep(0.05)
            seen.append(set(runner.running))
            # What the process leaves if it is killed now.
            left = (tmp_path / "data" / RUNNING_NAME).read_bytes()
        (tmp_path / "data" / RUNNING_NAME).write_bytes(left)
        store = BatchStore(DataDir(str(tmp_path / "data")))
    assert seen == [set(names), set(names), {names[0]}]
    runner = HeldRunner()
    runner.released.set()
    feeder = BatchFeeder(store, cast(LineRunner, runner), InlineChecker(), "tiny", 1 << 20)
    async with feeding(store, feeder):
        await until(lambda: feeder.ended.total() == 6)
        assert feeder.ended == {"completed": 5, "failed": 1} and set(runner.calls) == set(names[1:])
