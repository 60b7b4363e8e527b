"""What is kept costs no more because much was kept before, and is removed after a time."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from diptych.errors import RequestError
from diptych.specs import StorageShares
from services.gateway.batches import store as store_module
from services.gateway.batches import tables
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.database_thread import ResultFiles
from services.gateway.batches.line_attempts import LineAttempts
from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.open_batch import OpenBatch, OpenBatches
from services.gateway.batches.records import (
    BatchRecord,
    InputLine,
    LineEnd,
    new_batch_id,
    new_file_id,
)
from services.gateway.batches.storage.schema import COUNT_TENANTS
from services.gateway.batches.store import BatchStore
from services.gateway.openai.schemas.batch_schema import BatchProblem, LineFailure
from services.gateway.preparation.file_checker import FileChecker
from services.gateway.preparation.file_job import FileJobResult, ReadLinesJob, run_file_job
from tests.unit.gateway.batches.stored_batches import Clock, add_batch, add_file, end, results

LATE = LineFailure("batch_expired", "too late")
# Steps of SQLite's virtual machine that one call of the counter stands for.
STEPS = 100


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[BatchStore]:
    opened = BatchStore(DataDir(str(tmp_path / "data")), clock, clock)
    yield opened
    opened.close()


async def in_database(store: BatchStore, sql: str) -> list[tuple[object, ...]]:
    def read(db: sqlite3.Connection, files: ResultFiles) -> list[tuple[object, ...]]:
        return db.execute(sql).fetchall()

    return await store._thread.run_job(read)


async def add_ended(store: BatchStore, batch: BatchRecord, count: int) -> None:
    """So many batches that ended long ago, straight into the table."""

    def fill(db: sqlite3.Connection, files: ResultFiles) -> None:
        for number in range(count):
            gone = structs.replace(
                batch, id=new_batch_id(), status="completed", tenant=f"t{number % 7}", completed_at=store.now
            )
            tables.add_batch(db, gone, 0)
            tables.update_batch(db, gone.id, ended_at=store.now)

    await store._thread.run_job(fill)


async def count_steps(store: BatchStore) -> dict[str, int]:
    """How many steps of SQLite's machine each kind of work takes."""
    steps: dict[str, int] = {}
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return 0

    db = store._thread._db
    db.set_progress_handler(count, STEPS)

    async def measure(name: str, work: object) -> object:
        nonlocal calls
        calls = 0
        found = await work  # type: ignore[misc]
        steps[name] = calls * STEPS
        return found

    source = await add_file(store)
    batch = structs.replace(
        await add_batch(store), id=new_batch_id(), status="validating", input_file=source.id
    )
    await measure("add", store.add_batch(batch))
    await measure("begin", store.begin_batch(batch.id, [InputLine(1, 0, 2)], "toy"))
    await measure("list", store.list_batches("", None, 20))
    await measure("waiting", store.waiting_lines(batch.id, -1, 9))
    await measure("end_lines", store.end_lines(batch.id, [end(1)]))
    await store.finalize_batch(batch.id, "completed")
    await measure("end", store.end_batch(batch.id))
    await measure("delete", store.delete_file("", source.id))
    await measure("remove", store.remove_unused())
    db.set_progress_handler(None, 0)
    return steps


async def test_work_does_not_grow_with_what_was_kept_before(store: BatchStore) -> None:
    batch = await add_batch(store)
    await add_ended(store, batch, 100)
    few = await count_steps(store)
    await add_ended(store, batch, 5_000)
    for _ in range(300):
        again = structs.replace(batch, id=new_batch_id(), status="validating", output_file="", error_file="")
        await store.add_batch(again)
    many = await count_steps(store)
    for name, steps in many.items():
        assert steps <= 3 * few[name] + 1000, (name, few, many)


async def books(store: BatchStore) -> None:
    """The totals are those that a count of all rows gives."""
    kept = await in_database(store, "SELECT * FROM tenants ORDER BY tenant")
    counted = await in_database(store, f"{COUNT_TENANTS} ORDER BY tenant")
    empty = [row for row in kept if any(row[1:])]
    assert empty == [row for row in counted if any(row[1:])]
    assert store.by_status == dict(
        await in_database(store, "SELECT status, count(*) FROM batches GROUP BY status")  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(5))
async def test_totals_are_true_whatever_happens(store: BatchStore, clock: Clock, seed: int) -> None:
    chance = random.Random(seed)
    open_ones: list[str] = []
    for _ in range(60):
        clock.now += chance.choice([1, 60, 4000])
        what = chance.choice(["batch", "file", "lines", "end", "fail", "delete", "purge", "cancel"])
        tenant = chance.choice(["a", "b"])
        if what == "batch":
            open_ones.append((await add_batch(store, chance.randint(0, 4), tenant)).id)
        elif what == "file":
            await add_file(store, tenant, b"x" * chance.randint(0, 99), expires_at=store.now + 5000)
        elif what == "delete" and (found := await store.list_files(tenant, None, None, 99, "asc")):
            await store.delete_file(tenant, chance.choice(found).id)
        elif what == "purge":
            await store.remove_unused()
        elif what == "fail":
            batch = await add_batch(store, 0, tenant)
            fresh = structs.replace(batch, id=new_batch_id(), status="validating", metadata='{"é": "é"}')
            await store.add_batch(fresh)
            await store.fail_batch(fresh.id, [BatchProblem("x", "ü")])
        elif open_ones:
            chosen = chance.choice(open_ones)
            if what == "lines":
                await store.end_lines(chosen, [end(chance.randint(1, 4), chance.random() < 0.5)])
            elif what == "end":
                open_ones.remove(chosen)
                await store.finalize_batch(chosen, "expired")
                left = await store.waiting_lines(chosen, -1, 99)
                await store.end_lines(chosen, [end(line.number, False) for line in left])
                await store.end_batch(chosen)
        await books(store)
    clock.now += 99 * 86400
    await store.remove_unused()
    await books(store)


async def test_batches_are_forgotten_30_days_after_their_end(store: BatchStore, clock: Clock) -> None:
    ended, failed, running = [await add_batch(store) for _ in range(3)]
    await store.finalize_batch(ended.id, "cancelled")
    await store.end_batch(ended.id)
    fresh = structs.replace(failed, id=new_batch_id(), status="validating")
    await store.add_batch(fresh)
    await store.fail_batch(fresh.id, [BatchProblem("x", "y")])
    clock.now += tables.KEPT_BATCH_S - 1
    await store.remove_unused()
    assert (await store.find_batch("", ended.id)).status == "cancelled"
    clock.now += 1
    await store.remove_unused()
    for gone in (ended, fresh):
        with pytest.raises(RequestError):
            await store.find_batch("", gone.id)
    assert (await store.find_batch("", running.id)).status == "in_progress"


async def test_the_database_gives_room_back(store: BatchStore, clock: Clock) -> None:
    batch = await add_batch(store)
    await add_ended(store, structs.replace(batch, metadata='{"a": "' + "x" * 4000 + '"}'), 1500)
    pages = (await in_database(store, "PRAGMA page_count"))[0][0]
    clock.now += tables.KEPT_BATCH_S
    await store.remove_unused()
    left = (await in_database(store, "PRAGMA page_count"))[0][0]
    assert isinstance(pages, int) and isinstance(left, int) and left < pages / 4


async def test_a_batch_begins_in_pieces_and_others_come_between(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_ROWS", 10)
    lines = [InputLine(number, 0, 2) for number in range(1, 1001)]
    batch = structs.replace(
        await add_batch(store), id=new_batch_id(), status="validating", in_progress_at=None
    )
    await store.add_batch(batch)
    beginning = asyncio.create_task(store.begin_batch(batch.id, lines, "toy"))
    for _ in range(20):
        between = await store.find_batch("", batch.id)
        assert not beginning.done() and between.status == "validating"
    assert (await beginning).status == "in_progress" and await store.count_waiting(batch.id) == 1000


async def test_a_batch_that_had_half_begun_begins_again(
    store: BatchStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_ROWS", 10)
    batch = structs.replace(
        await add_batch(store, 2), id=new_batch_id(), status="validating", in_progress_at=None
    )
    await store.add_batch(batch)
    real, calls = tables.add_lines, 0

    def fail_later(db: sqlite3.Connection, batch_id: str, lines: list[InputLine]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError
        real(db, batch_id, lines)

    monkeypatch.setattr(tables, "add_lines", fail_later)
    lines = [InputLine(number, 0, 2) for number in range(1, 41)]
    with pytest.raises(ZeroDivisionError):
        await store.begin_batch(batch.id, lines, "toy")
    assert await in_database(store, "SELECT count(*) FROM lines") == [(22,)]
    store.close()
    again = BatchStore(DataDir(str(store.data_dir.path)), clock, clock)
    try:
        found = {one.id: one for one in await again.recover()}
        assert (found[batch.id].status, found[batch.id].total) == ("validating", 0)
        assert await in_database(again, "SELECT count(*) FROM lines") == [(2,)]
        assert (await again.begin_batch(batch.id, lines, "toy")).total == 40
        assert await in_database(again, "SELECT count(*) FROM lines") == [(42,)]
        await books(again)
    finally:
        again.close()


async def test_a_large_batch_is_few_bytes_of_rows(store: BatchStore) -> None:
    """The ids of lines, which a client chooses, are in the file alone."""
    batch = structs.replace(
        await add_batch(store), id=new_batch_id(), status="validating", in_progress_at=None
    )
    await store.add_batch(batch)
    before = (await in_database(store, "PRAGMA page_count"))[0][0]
    await store.begin_batch(batch.id, [InputLine(n, 2000 * n, 2000) for n in range(50_000)], "toy")
    after = (await in_database(store, "PRAGMA page_count"))[0][0]
    assert isinstance(before, int) and isinstance(after, int) and 4096 * (after - before) < 50_000 * 32


class DirectChecker:
    """Does the work of the helper process here, `at_once` lines at a time."""

    def __init__(self, at_once: int = 99) -> None:
        self.at_once = at_once

    async def read_lines(self, job: ReadLinesJob) -> FileJobResult:
        return run_file_job(structs.replace(job, lines=job.lines[: 16 * self.at_once]))


async def expire(store: BatchStore, batch: BatchRecord, at_once: int = 99) -> BatchRecord:
    await store.finalize_batch(batch.id, "expired")
    checker = cast(FileChecker, DirectChecker(at_once))
    attempts = LineAttempts(store, cast(LineRunner, None), checker, OpenBatches(), store._clock)
    while await attempts.fail_lines(OpenBatch(batch, 1), LATE):
        pass
    return await store.end_batch(batch.id)


async def test_ids_of_failed_lines_come_from_the_file(store: BatchStore) -> None:
    batch = await add_batch(store, 5)
    await store.end_lines(batch.id, [end(2)])
    done = await expire(store, batch, at_once=3)
    assert (done.failed, results(store, done.error_file)) == (4, ["c1", "c3", "c4", "c5"])


async def test_lines_have_results_though_the_file_was_lost(store: BatchStore) -> None:
    batch = await add_batch(store, 3)
    store.content_path(batch.input_file).unlink()
    done = await expire(store, batch)
    assert (done.failed, results(store, done.error_file)) == (3, ["", "", ""])


async def test_lines_of_a_tenant_above_its_share_are_not_run(store: BatchStore) -> None:
    batch = await add_batch(store, 3)
    await store.tenant_use("")
    assert store.line_refusal("") is None
    store.shares = StorageShares(max_bytes=100)
    attempts = LineAttempts(
        store, cast(LineRunner, None), cast(FileChecker, DirectChecker()), OpenBatches(), store._clock
    )
    (line, *_) = await store.waiting_lines(batch.id, -1, 1)
    custom_id, answer = await attempts._answer_line(OpenBatch(batch, 1), line)
    assert (custom_id, answer.status) == ("c1", 413)
    assert isinstance(answer.body, bytes)
    assert b"tenant_storage_full" in answer.body and b"--max-tenant-bytes 100" in answer.body


async def test_batches_of_keys_that_are_not_accepted_are_cancelled(store: BatchStore, clock: Clock) -> None:
    mine, theirs = await add_batch(store, tenant="me"), await add_batch(store, tenant="them")
    waiting = structs.replace(theirs, id=new_batch_id(), status="validating", in_progress_at=None)
    await store.add_batch(waiting)
    await store.end_lines(theirs.id, [LineEnd(number=1, succeeded=True, text=b'{"custom_id": "c1"}\n')])
    store.close()
    for tenants, expected in (
        ({"me"}, {"in_progress": 1, "cancelling": 2}),
        ({""}, {"cancelling": 3}),
    ):
        again = BatchStore(DataDir(str(store.data_dir.path)), clock, clock, tenants=tenants)
        found = await again.recover()
        assert len(found) == 3 and again.by_status == expected
        assert all((one.status == "cancelling") == (one.outcome == "cancelled") for one in found)
        again.close()
    assert mine.status == "in_progress"


async def test_a_new_file_id_is_no_file(store: BatchStore) -> None:
    with pytest.raises(RequestError):
        await store.delete_file(None, new_file_id())
