"""The feeder over a real store; what answers lines is scripted, since the fault itself is the subject."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from services.gateway.batches import feeder as feeder_module
from services.gateway.batches import line_attempts, line_window
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.line_attempts import MAX_LINE_ATTEMPTS
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.line_window import LineWindow
from services.gateway.batches.records import BatchRecord, LineEnd
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.idle_feeder import InlineChecker
from tests.unit.gateway.batches.scripted_runners import HeldRunner, ScriptedRunner, add_batch, feeding, until

LINES = 12


@pytest.fixture(autouse=True)
def cuts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait between two cuts."""
    monkeypatch.setattr(line_window, "CUT_PAUSE_S", 0.0)


async def test_lines_are_taken_back_while_requests_miss_their_slos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last that were started, half of them for each cut; they run again, and each line has one result."""
    monkeypatch.setattr(feeder_module, "LINES_PER_WORKER", 8)
    store = BatchStore(DataDir(str(tmp_path / "data")))
    names = [f"good-{number}" for number in range(LINES)]
    await add_batch(store, names)
    runner = HeldRunner()
    feeder = BatchFeeder(store, cast(LineRunner, runner), InlineChecker(), "tiny", 1 << 20)
    async with feeding(store, feeder):
        await until(partial(runner.runs, names[:8]))
        for left in (4, 2, 1, 0):
            while feeder.window.num_lines(8) > left:
                feeder.record_request(False)
            await until(partial(runner.runs, names[:left]))
        assert (feeder.num_running, feeder.num_waiting, feeder.recalled) == (0, LINES, 8)
        assert not runner.calls, "none was answered"
        # Its time has come.
        feeder.window = LineWindow(0.9)
        feeder.wake()
        await until(partial(runner.runs, names[:8]))
        runner.released.set()
        await until(lambda: store.by_status == {"completed": 1})
    assert runner.calls == dict.fromkeys(names, 1)
    assert feeder.ended == {"completed": LINES, "failed": 0} and feeder.recalled == 8


async def test_lines_that_wait_for_the_disk_take_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are answered. So no misses are laid to them, and only half of the others are taken back."""
    monkeypatch.setattr(feeder_module, "LINES_PER_WORKER", 8)
    store = BatchStore(DataDir(str(tmp_path / "data")))
    names = [f"{kind}-{number}" for kind in ("quick", "slow") for number in range(4)]
    await add_batch(store, names)
    runner, written, disk = HeldRunner(), store.end_lines, asyncio.Event()

    async def end_later(batch_id: str, ends: Sequence[LineEnd]) -> BatchRecord:
        await disk.wait()
        return await written(batch_id, ends)

    monkeypatch.setattr(store, "end_lines", end_later)
    feeder = BatchFeeder(store, cast(LineRunner, runner), InlineChecker(), "tiny", 1 << 20)
    async with feeding(store, feeder):
        await until(lambda: runner.runs(names[4:]) and len(runner.calls) == 4)
        for _ in range(2):
            feeder.record_request(False)
        await until(partial(runner.runs, names[4:6]))
        runner.released.set()
        await until(lambda: len(runner.calls) == 6)
        cuts = feeder.window.cuts
        for _ in range(4):
            feeder.record_request(False)
        assert (feeder.num_running, feeder.window.cuts) == (6, cuts)
        disk.set()
        await until(lambda: store.by_status == {"completed": 1})


async def test_half_of_few_lines_are_taken_back_too(tmp_path: Path) -> None:
    store = BatchStore(DataDir(str(tmp_path / "data")))
    names = [f"good-{number}" for number in range(4)]
    await add_batch(store, names)
    runner = HeldRunner()
    feeder = BatchFeeder(store, cast(LineRunner, runner), InlineChecker(), "tiny", 1 << 20)
    async with feeding(store, feeder):
        await until(partial(runner.runs, names))
        for left in (2, 1, 0):
            for _ in range(2):
                feeder.record_request(False)
            await until(partial(runner.runs, names[:left]))


async def test_lines_are_taken_back_for_misses_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a worker that is lost, whose own lines fail; nor for requests that a gateway's shutdown refuses."""
    monkeypatch.setattr(feeder_module, "LINES_PER_WORKER", 8)
    store = BatchStore(DataDir(str(tmp_path / "data")))
    names = [f"good-{number}" for number in range(16)]
    await add_batch(store, names)
    runner, workers, draining = HeldRunner(), ["a", "b"], asyncio.Event()
    feeder = BatchFeeder(
        store,
        cast(LineRunner, runner),
        InlineChecker(),
        "tiny",
        1 << 20,
        lambda: len(workers),
        draining.is_set,
    )
    async with feeding(store, feeder):
        await until(partial(runner.runs, names))
        while feeder.window.num_lines(16) > 8:
            feeder.record_request(False)
        await until(partial(runner.runs, names[:8]))
        workers.pop()
        draining.set()
        cuts = feeder.window.cuts
        for _ in range(4):
            feeder.record_request(False)
        feeder.wake()
        await asyncio.sleep(0.05)
        assert runner.runs(names[:8]) and (feeder.recalled, feeder.window.cuts) == (8, cuts)


async def test_a_line_is_given_up_after_its_own_failures_whatever_other_lines_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One line at a time, so that others end between two tries of the lost one.
    monkeypatch.setattr(feeder_module, "LINES_PER_WORKER", 1)
    monkeypatch.setattr(line_attempts, "MIN_PAUSE_S", 0.001)
    monkeypatch.setattr(line_attempts, "MAX_PAUSE_S", 0.001)
    store = BatchStore(DataDir(str(tmp_path / "data")))
    names = ["lost", *(f"good-{number}" for number in range(LINES))]
    await add_batch(store, names)
    runner = ScriptedRunner()
    feeder = BatchFeeder(store, cast(LineRunner, runner), InlineChecker(), "tiny", 1 << 20)
    async with feeding(store, feeder):
        await until(lambda: store.by_status == {"completed": 1})
    assert runner.calls == dict.fromkeys(names, 1) | {"lost": MAX_LINE_ATTEMPTS}
    assert feeder.ended == {"completed": LINES, "failed": 1}
