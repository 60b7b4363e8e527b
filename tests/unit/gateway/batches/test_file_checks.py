"""Checks of input files: how often one is begun, whose comes first, and batches that end before it has ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest

from services.gateway.batches.file_checks import MAX_CHECKS
from services.gateway.batches.records import BatchRecord
from services.gateway.preparation import line_check
from tests.unit.gateway.batches.scripted_checker import ScriptedChecker, add_lines, feeder_of, open_store
from tests.unit.gateway.batches.scripted_runners import feeding, until


async def test_a_check_that_ends_its_process_is_begun_three_times(tmp_path: Path) -> None:
    store, checker = open_store(tmp_path), ScriptedChecker(fails=True)
    record = await add_lines(store, 2)
    async with feeding(store, feeder_of(store, checker)):
        await until(lambda: store.by_status == {"failed": 1})
        found = await store.find_batch("", record.id)
        assert len(checker.begun) == MAX_CHECKS
        assert found.errors is not None and "check_failed" in found.errors


@pytest.mark.parametrize("stage", ["check", "begin"])
async def test_a_check_that_ends_the_gateway_is_begun_three_times(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way when the process ends has been counted; another batch is checked all the same."""
    store = open_store(tmp_path)
    record = await add_lines(store, 2)
    for _ in range(MAX_CHECKS):
        checker, reached = ScriptedChecker(), list[str]()

        async def hang(batch_id: str, *_: object, reached: list[str] = reached) -> BatchRecord:
            reached.append(batch_id)
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        if stage == "begin":
            checker.released.set()
            monkeypatch.setattr(store, "begin_batch", hang)
        async with feeding(store, feeder_of(store, checker)):
            await until(partial(bool, reached if stage == "begin" else checker.begun))
        store = open_store(tmp_path)
    checker = ScriptedChecker()
    checker.released.set()
    await add_lines(store, 2, "other")
    async with feeding(store, feeder_of(store, checker)):
        await until(lambda: store.by_status == {"failed": 1, "completed": 1})
        assert (await store.find_batch("", record.id)).status == "failed"
        assert len(checker.begun) == 1


async def test_tenants_files_are_checked_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of each; so a tenant with many files, or a long one, is not in front of another's only one."""
    monkeypatch.setattr(line_check, "SLICE_LINES", 2)
    store, checker = open_store(tmp_path), ScriptedChecker()
    many = [await add_lines(store, 5, "many") for _ in range(20)]
    one = await add_lines(store, 1, "one")
    checker.released.set()
    async with feeding(store, feeder_of(store, checker)):
        await until(lambda: store.by_status == {"completed": 21})
    assert one.input_file in checker.begun[:3]
    slices = Counter(checker.begun)
    assert slices == {record.input_file: 3 for record in many} | {one.input_file: 1}
    # One after the other of a tenant: no more than one is half read.
    order = [file for file in checker.begun if file != one.input_file]
    assert order == [record.input_file for record in many for _ in range(3)]


async def test_a_batch_that_expires_while_it_is_checked_has_its_lines_in_the_error_file(
    tmp_path: Path,
) -> None:
    store, checker = open_store(tmp_path), ScriptedChecker()
    feeder = feeder_of(store, checker)
    record = await add_lines(store, 3, window_s=0)
    async with feeding(store, feeder):
        await until(lambda: len(checker.begun) == 1)
        checker.released.set()
        await until(lambda: store.by_status == {"expired": 1})
        found = await store.find_batch("", record.id)
        assert (found.total, found.completed, found.failed) == (3, 0, 3)
        rows = store.content_path(record.error_file).read_bytes().splitlines()
        assert [msgspec.json.decode(row)["error"]["code"] for row in rows] == ["batch_expired"] * 3


async def test_a_batch_that_is_cancelled_before_its_check_has_ended_does_not_wait_for_it(
    tmp_path: Path,
) -> None:
    store, checker = open_store(tmp_path), ScriptedChecker()
    feeder = feeder_of(store, checker)
    first, second = await add_lines(store, 3), await add_lines(store, 3)
    async with feeding(store, feeder):
        await until(lambda: checker.begun == [first.input_file])
        feeder.cancel_batch(await store.cancel_batch("", second.id))
        await until(lambda: second.id not in feeder.open)
        feeder.cancel_batch(await store.cancel_batch("", first.id))
        checker.released.set()
        await until(lambda: not feeder.open)
        assert store.by_status == {"cancelled": 2} and checker.begun == [first.input_file]
