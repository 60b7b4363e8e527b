"""Each batch ends once, as what it is, and leaves nothing behind: also where two things happen at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from diptych.specs import StorageShares
from services.gateway.batches import tables
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.open_batch import OpenBatch
from services.gateway.batches.storage import open_database
from services.gateway.batches.storage.schema import SCHEMA
from services.gateway.batches.storage.settled_clock import STAND_S
from services.gateway.batches.store import BatchStore
from services.gateway.preparation import line_check
from tests.unit.gateway.batches.idle_feeder import InlineChecker
from tests.unit.gateway.batches.scripted_checker import (
    ScriptedChecker,
    add_lines,
    feeder_of,
    open_store,
)
from tests.unit.gateway.batches.scripted_runners import feeding, until


async def test_a_batch_above_the_share_of_lines_has_failed_for_good(tmp_path: Path) -> None:
    store = BatchStore(DataDir(str(tmp_path / "data")), shares=StorageShares(max_lines=3))
    record = await add_lines(store, 4)
    feeder = feeder_of(store, InlineChecker())
    async with feeding(store, feeder):
        await until(lambda: store.by_status == {"failed": 1})
        await until(lambda: not feeder.open)
        found = await store.find_batch("", record.id)
        assert found.errors is not None and "line_share_full" in found.errors


async def test_a_disk_that_fails_while_lines_are_forgotten_ends_no_batch_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fails, drop_lines = open_store(tmp_path), [True], tables.drop_lines
    await add_lines(store, 3)
    feeder = feeder_of(store, InlineChecker())

    def fail_once(db: sqlite3.Connection, batch: int, limit: int) -> int:
        if store.by_status == {"completed": 1} and fails:
            fails.clear()
            raise sqlite3.OperationalError("database or disk is full")
        return drop_lines(db, batch, limit)

    monkeypatch.setattr(tables, "drop_lines", fail_once)
    async with feeding(store, feeder):
        await until(lambda: not feeder.open and not fails)
        assert len(await store.list_files("", "batch_output", None, 10, "asc")) == 1
        await until(lambda: not store.trouble)


async def test_a_check_that_is_cancelled_between_two_slices_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_check, "SLICE_LINES", 2)
    store, checker = open_store(tmp_path), ScriptedChecker()
    record = await add_lines(store, 6)
    feeder = feeder_of(store, checker)
    async with feeding(store, feeder):
        await until(lambda: len(checker.begun) == 1)
        feeder.cancel_batch(await store.cancel_batch("", record.id))
        checker.released.set()
        await until(lambda: store.by_status == {"cancelled": 1} and not feeder.open)
        assert not feeder._checks._progress


async def test_a_cancellation_during_the_last_step_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has failed and left lines behind; the batch is cancelled while these are counted."""
    store = open_store(tmp_path)
    record = await add_lines(store, 2)
    feeder = feeder_of(store, InlineChecker())
    count_waiting, counted = store.count_waiting, asyncio.Event()

    async def skip_lines(batch: OpenBatch) -> None:
        feeder._num_fetches -= 1
        batch.fetched_all = True

    async def count_slowly(batch_id: str) -> int:
        waiting = await count_waiting(batch_id)
        if not counted.is_set():
            counted.set()
            feeder.cancel_batch(await store.cancel_batch("", batch_id))
        return waiting

    monkeypatch.setattr(feeder, "_fetch_lines", skip_lines)
    monkeypatch.setattr(store, "count_waiting", count_slowly)
    async with feeding(store, feeder):
        await until(counted.is_set)
        await until(lambda: not feeder.open)
        assert (await store.find_batch("", record.id)).status == "cancelled"
        assert feeder.ended["failed"] == 2


async def test_a_batch_that_is_cancelled_while_the_gateway_starts_runs_no_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    record = await add_lines(store, 2)
    await store.begin_batch(record.id, [], "tiny")
    feeder = feeder_of(store, InlineChecker())
    recover = store.recover

    async def recover_slowly() -> list[object]:
        found = await recover()
        feeder.cancel_batch(await store.cancel_batch("", record.id))
        return list(found)

    monkeypatch.setattr(store, "recover", recover_slowly)
    async with feeding(store, feeder):
        await until(lambda: bool(store.by_status.keys() & {"cancelled", "completed"}))
        assert store.by_status == {"cancelled": 1}


async def test_files_are_removed_although_the_clock_went_back(tmp_path: Path) -> None:
    """A clock that was years ahead for long enough, and was set right."""
    wall, monotonic, purges = [4e9], [0.0], [0]
    store = BatchStore(DataDir(str(tmp_path / "data")), lambda: wall[0], lambda: monotonic[0])
    feeder, remove_unused = feeder_of(store, InlineChecker()), store.remove_unused

    async def count_purges() -> int | None:
        purges[0] += 1
        return await remove_unused()

    store.remove_unused = count_purges  # type: ignore[method-assign]
    async with feeding(store, feeder):
        await until(lambda: purges[0] > 0)
        wall[0] = 1.8e9
        assert store.settled_s == 4e9
        wall[0] += STAND_S
        monotonic[0] += STAND_S
        assert store.settled_s == wall[0]
        before = purges[0]
        feeder._news.set()
        await until(lambda: purges[0] > before)


async def test_a_database_that_gives_no_room_back_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of an older version, and the disk was too full to rewrite it."""
    folder = DataDir(str(tmp_path / "data"))
    with contextlib.closing(sqlite3.connect(folder.database, isolation_level=None)) as db:
        db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        db.execute("CREATE TABLE large (text TEXT)")
        db.executemany("INSERT INTO large VALUES (?)", [("x" * 4096,)] * 100)
        db.execute("DROP TABLE large")
    monkeypatch.setattr(open_database, "_rewrite", lambda db, folder: None)
    store = BatchStore(folder)
    async with asyncio.timeout(30):
        assert await store.remove_unused() is None
    store.close()
