"""Each batch ends once, as what it is, and leaves nothing behind: also where two things happen at the same time."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from diptych.specs import TenantShares
from services.gateway.batches import store as store_module
from services.gateway.batches import tables
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.store import BatchStore
from services.gateway.preparation import line_check
from tests.unit.gateway.batches.idle_feeder import InlineChecker
from tests.unit.gateway.batches.test_file_checks import (
    ScriptedChecker,
    add_lines,
    feeder_of,
    feeding,
    open_store,
    until,
)


async def test_a_batch_above_the_share_of_lines_has_failed_for_good(tmp_path: Path) -> None:
    store = BatchStore(DataDir(str(tmp_path / "data")), shares=TenantShares(max_lines=3))
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

    monkeypatch.setattr(store_module.tables, "drop_lines", fail_once)
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
