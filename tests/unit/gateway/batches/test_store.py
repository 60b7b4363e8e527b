"""What is kept survives: results are whole, each line has one, and files of others are not found."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from pathlib import Path

import pytest
from msgspec import structs

from diptych.errors import RequestError, StartError
from services.gateway.batches import data_dir, database_thread
from services.gateway.batches.data_dir import DATABASE_NAME, DataDir
from services.gateway.batches.database_thread import StorageError
from services.gateway.batches.records import (
    BatchRecord,
    InputLine,
    LineEnd,
    new_batch_id,
    new_file_id,
)
from services.gateway.batches.store import BatchStore
from services.gateway.batches.tables import KEPT_PLACE_S
from services.gateway.openai.schemas.batch_schema import BatchProblem
from tests.unit.gateway.batches.stored_batches import (
    Clock,
    add_batch,
    add_file,
    end,
    reopen,
    results,
)


def text_of(line: LineEnd) -> bytes:
    assert isinstance(line.text, bytes)
    return line.text


async def test_a_batch_runs_to_its_end(store: BatchStore) -> None:
    batch = await add_batch(store)
    assert batch.to_object().output_file_id is None
    await asyncio.gather(store.end_lines(batch.id, [end(1)]), store.end_lines(batch.id, [end(2, False)]))
    assert (await store.waiting_lines(batch.id, -1, 9)) == [InputLine(3, 162, 81)]
    await store.end_lines(batch.id, [end(3)])
    await store.finalize_batch(batch.id, "completed")
    done = (await store.end_batch(batch.id)).to_object()
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 1)
    assert results(store, done.output_file_id) == ["c1", "c3"]
    assert results(store, done.error_file_id) == ["c2"]
    assert done.completed_at == store.now and done.expired_at is None
    found = await store.find_file("", done.output_file_id or "")
    assert (found.purpose, found.expires_at) == ("batch_output", store.now + 3600)
    assert store.by_status == {"completed": 1}


async def test_a_line_has_one_result_however_often_it_ends(store: BatchStore) -> None:
    batch = await add_batch(store)
    await asyncio.gather(*(store.end_lines(batch.id, [end(1, size=n)]) for n in range(5)))
    found = await store.end_lines(batch.id, [end(1), end(2), end(2)])
    assert (found.completed, found.output_tokens) == (2, 6)
    await store.finalize_batch(batch.id, "expired")
    await store.end_lines(batch.id, [end(3, False)])
    done = await store.end_batch(batch.id)
    assert results(store, done.output_file) == ["c1", "c2"] and results(store, done.error_file) == ["c3"]


async def test_what_was_not_committed_is_cut_off(store: BatchStore, clock: Clock) -> None:
    """As if the machine had stopped between the file and the database."""
    batch = await add_batch(store)
    await store.end_lines(batch.id, [end(1)])
    with store.content_path(batch.output_file).open("ab") as file:
        file.write(text_of(end(2))[:-7])
    stray = store.data_dir.files / "file-stray"
    stray.write_bytes(b"an upload whose row was never committed")
    (store.data_dir.uploads / "half").write_bytes(b"half an upload")
    again = reopen(store, clock)
    try:
        (found,) = await again.recover()
        assert (found.id, found.status, found.completed) == (batch.id, "in_progress", 1)
        assert results(again, found.output_file) == ["c1"]
        assert not stray.exists() and not list(again.data_dir.uploads.iterdir())
        assert [one.number for one in await again.waiting_lines(batch.id, -1, 9)] == [2, 3]
        await again.end_lines(batch.id, [end(2, size=3), end(3)])
        await again.finalize_batch(batch.id, "completed")
        done = await again.end_batch(batch.id)
        assert results(again, done.output_file) == ["c1", "c2", "c3"]
    finally:
        again.close()


async def test_lost_results_are_made_again(store: BatchStore, clock: Clock) -> None:
    """As if a folder had been restored from a copy that was made while the gateway ran."""
    batch = await add_batch(store)
    await store.end_lines(batch.id, [end(1), end(2), end(3, False)])
    await store.finalize_batch(batch.id, "completed")
    with store.content_path(batch.output_file).open("r+b") as file:
        file.truncate(7)
    again = reopen(store, clock)
    try:
        (found,) = await again.recover()
        assert (found.status, found.outcome, found.completed, found.failed) == ("in_progress", "", 0, 0)
        assert found.output_tokens == 0 and await again.count_waiting(batch.id) == 3
        await again.end_lines(batch.id, [end(number) for number in (3, 2, 1)])
        await again.finalize_batch(batch.id, "completed")
        done = await again.end_batch(batch.id)
        assert results(again, done.output_file) == ["c3", "c2", "c1"]
        assert done.to_object().error_file_id is None
    finally:
        again.close()


async def test_a_folder_opens_while_its_disk_is_full(
    store: BatchStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await add_batch(store)
    upload = store.content_path(new_file_id())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    again = reopen(store, clock)
    try:
        upload.write_bytes(b"an upload that is in its place before the batches are looked at")
        assert [one.id for one in await again.recover()] == [batch.id]
        assert upload.exists()
    finally:
        again.close()


async def test_many_batches_need_few_open_files(
    store: BatchStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_thread, "MAX_OPEN_FILES", 2)
    batches = [await add_batch(store) for _ in range(5)]
    ended = await asyncio.gather(*(store.end_lines(one.id, [end(1), end(2, False)]) for one in batches))
    for one in ended:
        assert results(store, one.output_file) == ["c1"] and results(store, one.error_file) == ["c2"]


async def test_while_the_disk_is_full_nothing_is_lost(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await add_batch(store)
    await store.end_lines(batch.id, [end(1)])
    real, calls = data_dir.write_whole, [0]

    def half(descriptor: int, data: bytes, offset: int) -> None:
        calls[0] += 1
        real(descriptor, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(database_thread, "write_whole", half)
    written, read = await asyncio.gather(
        store.end_lines(batch.id, [end(2)]), store.find_batch("", batch.id), return_exceptions=True
    )
    assert isinstance(written, StorageError) and written.disk_full and calls[0]
    assert isinstance(read, BatchRecord), "what only reads goes on"
    assert store.trouble == "the disk is full"
    monkeypatch.setattr(database_thread, "write_whole", real)
    await store.probe()
    assert store.trouble == ""
    await store.end_lines(batch.id, [end(3, size=1)])
    await store.end_lines(batch.id, [end(2)])
    await store.finalize_batch(batch.id, "completed")
    done = await store.end_batch(batch.id)
    assert results(store, done.output_file) == ["c1", "c3", "c2"]


async def test_a_cancelled_batch_neither_fails_nor_begins(store: BatchStore) -> None:
    source = await add_file(store)
    batch = await add_batch(store)
    waiting = structs.replace(
        batch, id=new_batch_id(), status="validating", input_file=source.id, in_progress_at=None
    )
    await store.add_batch(waiting)
    assert (await store.cancel_batch("", waiting.id)).status == "cancelling"
    assert (await store.fail_batch(waiting.id, [BatchProblem("x", "y")])).status == "cancelling"
    assert (await store.begin_batch(waiting.id, [], "toy")).status == "cancelling"
    await store.finalize_batch(waiting.id, "cancelled")
    assert (await store.end_batch(waiting.id)).status == "cancelled"
    with pytest.raises(RequestError, match="'cancelled' cannot be cancelled"):
        await store.cancel_batch("", waiting.id)


async def test_others_find_nothing(store: BatchStore) -> None:
    mine = await add_file(store, "me")
    batch = await add_batch(store, tenant="me")
    for attempt in (
        store.find_file("you", mine.id),
        store.delete_file("you", mine.id),
        store.find_batch("you", batch.id),
        store.cancel_batch("you", batch.id),
        store.add_batch(structs.replace(batch, tenant="you", id=new_batch_id())),
    ):
        with pytest.raises(RequestError) as refused:
            await attempt
        assert refused.value.failure.status == 404
    assert await store.list_files("you", None, None, 9, "desc") == []
    assert await store.list_batches("you", None, 9) == []
    with pytest.raises(RequestError, match="'after'"):
        await store.list_files("you", None, mine.id, 9, "desc")


async def test_a_deleted_input_stays_until_its_batch_has_ended(store: BatchStore) -> None:
    batch = await add_batch(store)
    await store.delete_file("", batch.input_file)
    with pytest.raises(RequestError):
        await store.find_file("", batch.input_file)
    assert store.content_path(batch.input_file).exists()
    await store.finalize_batch(batch.id, "completed")
    await store.end_batch(batch.id)
    await store.remove_unused()
    assert not store.content_path(batch.input_file).exists()


async def test_files_expire(store: BatchStore, clock: Clock) -> None:
    early = await add_file(store, expires_at=1_010)
    late = await add_file(store, expires_at=1_020)
    assert await store.remove_unused() == 1_010
    clock.now = 1_010
    with pytest.raises(RequestError):
        await store.find_file("", early.id)
    assert await store.remove_unused() == 1_020
    assert not store.content_path(early.id).exists() and store.content_path(late.id).exists()
    assert store.held_bytes == late.bytes


async def test_pages_hold_what_is_asked_for(store: BatchStore) -> None:
    files = [(await add_file(store)).id for _ in range(5)]
    newest = await store.list_files("", None, None, 2, "desc")
    assert [one.id for one in newest] == [files[4], files[3]]
    assert [one.id for one in await store.list_files("", None, files[3], 9, "desc")] == files[2::-1]
    assert [one.id for one in await store.list_files("", "batch", files[1], 2, "asc")] == files[2:4]
    assert await store.list_files("", "batch_output", None, 9, "asc") == []
    await store.delete_file("", files[3])
    assert [one.id for one in await store.list_files("", None, files[3], 9, "desc")] == files[2::-1]


async def test_removed_files_are_forgotten_after_a_while(store: BatchStore, clock: Clock) -> None:
    file, other = await add_file(store, expires_at=1_010), await add_file(store)
    await store.delete_file("", file.id)
    assert [one.id for one in await store.list_files("", None, file.id, 9, "asc")] == [other.id]
    clock.now = 1_010 + KEPT_PLACE_S
    await store.remove_unused()
    with pytest.raises(RequestError, match="names no file"):
        await store.list_files("", None, file.id, 9, "asc")


async def test_a_bug_in_a_job_undoes_that_job_alone(store: BatchStore) -> None:
    batch = await add_batch(store)

    bad = store.end_lines("no batch", [end(1)])
    good = store.end_lines(batch.id, [end(1)])
    first, second = await asyncio.gather(bad, good, return_exceptions=True)
    assert isinstance(first, AssertionError) and isinstance(second, BatchRecord)
    assert await store.count_waiting(batch.id) == 2


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    folder = DataDir(str(tmp_path / "data"))
    try:
        with pytest.raises(StartError, match="in use") as refused:
            DataDir(str(tmp_path / "data"))
        assert len(refused.value.lines()) <= 6 and str(tmp_path) in "".join(refused.value.lines())
    finally:
        folder.close()
    DataDir(str(tmp_path / "data")).close()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702])
def test_a_folder_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data").chmod(mode)
    with pytest.raises(StartError, match="open to other users") as refused:
        DataDir(str(tmp_path / "data"))
    assert "chmod 700" in refused.value.fix and len(refused.value.lines()) <= 6


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    with pytest.raises(StartError, match="something else"):
        DataDir(str(tmp_path / "data"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot be used"):
        DataDir(str(tmp_path / "file"))


def test_a_database_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    folder = DataDir(str(tmp_path / "data"))
    BatchStore(folder).close()
    db = sqlite3.connect(folder.database)
    db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()
    folder = DataDir(str(tmp_path / "data"))
    with pytest.raises(StartError, match="another version") as refused:
        BatchStore(folder)
    assert "99" in refused.value.why and len(refused.value.lines()) <= 6
    (tmp_path / "data" / DATABASE_NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StartError, match="cannot be read"):
        BatchStore(folder)
    folder.close()


async def test_everything_is_for_the_owner_alone(store: BatchStore) -> None:
    batch = await add_batch(store)
    await store.end_lines(batch.id, [end(1)])
    assert {path.name for path in store.data_dir.path.iterdir()} >= {
        "lock",
        DATABASE_NAME,
        f"{DATABASE_NAME}-wal",
    }
    modes = {path: path.stat().st_mode & 0o777 for path in store.data_dir.path.rglob("*")}
    assert store.data_dir.path.stat().st_mode & 0o777 == 0o700
    ours = {path: mode for path, mode in modes.items() if path.name != batch.input_file}
    assert {path: mode for path, mode in ours.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
