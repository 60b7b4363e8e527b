"""A tenant keeps its share at most, and uploads leave room for results, whatever they announce."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from starlette.types import Message, Receive

from diptych.errors import ConfigError, RequestError
from diptych.specs import StorageShares
from services.gateway.batches.data_dir import MIN_FREE_BYTES, MIN_FREE_INODES, DataDir
from services.gateway.batches.files.upload import receive_upload
from services.gateway.batches.records import InputLine, new_batch_id, new_file_id
from services.gateway.batches.storage.schema import FILE_BYTES
from services.gateway.batches.storage.tenant_shares import (
    TenantUse,
    check_disk,
    find_batch_refusal,
    find_line_refusal,
    find_refusal,
)
from services.gateway.batches.store import BatchStore
from tests.unit.gateway.batches.stored_batches import Clock, add_batch, add_file

HEAD = (
    b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n'
)
MIB = 1 << 20


class SmallDisk:
    """A file system of so many bytes and inodes, of which the files under `path` take theirs.

    `least` is what was free at the worst moment: it is looked at whenever something was written.
    """

    def __init__(self, path: Path, num_bytes: int, inodes: int = 10**6) -> None:
        self.path, self.num_bytes, self.inodes, self.least = path, num_bytes, inodes, num_bytes

    def free(self) -> int:
        used = 0
        for file in self.path.rglob("*"):
            if "files" in str(file) or "uploads" in str(file):
                with suppress(FileNotFoundError):  # another upload has just ended
                    used += file.stat().st_size
        self.least = min(self.least, self.num_bytes - used)
        return self.num_bytes - used

    def statvfs(self, path: object) -> Any:
        return SimpleNamespace(
            f_bavail=self.free(), f_frsize=1, f_blocks=self.num_bytes, f_files=10**6, f_favail=self.inodes
        )


@pytest.fixture
def folder(tmp_path: Path) -> DataDir:
    return DataDir(str(tmp_path / "data"))


def pieces(num_bytes: int) -> Receive:
    """A form of a file of so many bytes, in chunks of 1 MiB."""
    parts = [HEAD, *[b"x" * MIB] * (num_bytes // MIB), b"\r\n--B--\r\n"]

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    return receive


async def upload(folder: DataDir, num_bytes: int) -> int:
    """The status that an upload ends with which announces nothing."""
    try:
        await receive_upload(
            "multipart/form-data; boundary=B", "", pieces(num_bytes), folder, new_file_id(), 999 * MIB, 30.0
        )
    except RequestError as refused:
        return refused.failure.status
    return 200


async def test_uploads_leave_room_for_results_at_every_moment(
    folder: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(folder.path, MIN_FREE_BYTES + 20 * MIB)
    monkeypatch.setattr("os.statvfs", disk.statvfs)
    real = os.pwrite

    def watched(descriptor: int, data: bytes, offset: int) -> int:
        written = real(descriptor, data, offset)
        disk.free()
        return written

    monkeypatch.setattr("os.pwrite", watched)
    assert await upload(folder, 30 * MIB) == 507
    assert disk.least >= MIN_FREE_BYTES and not list(folder.uploads.iterdir())
    # Eight at once, each of which would fit alone.
    statuses = await asyncio.gather(*(upload(folder, 8 * MIB) for _ in range(8)))
    assert disk.least >= MIN_FREE_BYTES and set(statuses) == {200, 507}
    assert len(list(folder.files.iterdir())) == statuses.count(200) and not list(folder.uploads.iterdir())


async def test_uploads_leave_inodes(folder: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(folder.path, 10**9, MIN_FREE_INODES - 1)
    monkeypatch.setattr("os.statvfs", disk.statvfs)
    assert await upload(folder, 0) == 507
    disk.inodes += 1
    assert await upload(folder, 0) == 200


@pytest.fixture
async def store(folder: DataDir) -> AsyncIterator[BatchStore]:
    clock = Clock()
    opened = BatchStore(folder, clock, clock)
    yield opened
    opened.close()


async def refused(work: Any) -> str:
    with pytest.raises(RequestError) as caught:
        await work
    failure = caught.value.failure
    assert failure.status in (413, 429) and len(failure.message) < 400
    return f"{failure.status} {failure.code}: {failure.message}"


async def test_a_tenant_at_its_share_of_bytes_gets_one_clear_answer(store: BatchStore) -> None:
    store.shares = StorageShares(max_bytes=3 * FILE_BYTES)
    mine = await add_file(store, "me", b"x" * FILE_BYTES)
    text = await refused(add_file(store, "me", b"x" * FILE_BYTES))
    assert text.startswith("413 tenant_storage_full") and "--max-tenant-bytes 12288" in text
    assert "delete files" in text
    other = await add_file(store, "you", b"x" * FILE_BYTES)
    assert other.tenant == "you", "others have their own share"
    await store.delete_file("me", mine.id)
    await add_file(store, "me", b"x" * FILE_BYTES)


async def test_files_of_a_tenant_are_counted(store: BatchStore) -> None:
    store.shares = StorageShares(max_files=2)
    for _ in range(2):
        await add_file(store)
    assert "--max-tenant-files" in await refused(add_file(store))


async def test_an_open_batch_counts_its_results_before_there_are_any(store: BatchStore) -> None:
    batch = await add_batch(store, 100)
    before = await store.tenant_use("")
    again = structs.replace(
        batch, id=new_batch_id(), status="validating", in_progress_at=None, metadata="m" * 50
    )
    await store.add_batch(again)
    after = await store.tenant_use("")
    size = store.content_path(batch.input_file).stat().st_size
    assert after.bytes - before.bytes >= size + 50 and after.files - before.files == 2
    store.shares = StorageShares(max_bytes=after.bytes + size - 1)
    assert "tenant_storage_full" in await refused(store.add_batch(structs.replace(again, id=new_batch_id())))


async def test_open_batches_and_their_lines_have_a_share(store: BatchStore) -> None:
    batch = await add_batch(store, 4)
    again = structs.replace(batch, id=new_batch_id(), status="validating", in_progress_at=None, total=0)
    store.shares = StorageShares(max_batches=2, max_lines=7)
    await store.add_batch(again)
    text = await refused(store.add_batch(structs.replace(again, id=new_batch_id())))
    assert text.startswith("429 too_many_batches") and "--max-tenant-batches" in text and "cancel" in text
    failed = await store.begin_batch(again.id, [InputLine(n, 0, 1) for n in range(4)], "toy")
    assert failed.status == "failed" and "line_share_full" in (failed.errors or "")
    assert "--max-tenant-lines" in (failed.errors or "") and await store.waiting_lines(again.id, -1, 9) == []
    await store.add_batch(structs.replace(again, id=new_batch_id()))


async def test_after_a_start_a_tenant_above_its_share_gets_no_results(folder: DataDir) -> None:
    first = BatchStore(folder)
    await add_batch(first, 3, "a")
    await asyncio.to_thread(first.close)
    again = BatchStore(DataDir(str(folder.path)), shares=StorageShares(max_bytes=10))
    try:
        await again.recover()
        refusal = again.line_refusal("a")
        assert refusal is not None and refusal.code == "tenant_storage_full"
        assert again.line_refusal("b") is None
    finally:
        await asyncio.to_thread(again.close)


def test_without_a_number_a_tenant_may_keep_as_much_as_the_disk_has_left() -> None:
    shares = StorageShares()
    assert find_refusal(shares, TenantUse(bytes=0), 50, 0, 100) is None
    assert find_refusal(shares, TenantUse(bytes=0), 51, 0, 100) is not None
    assert find_refusal(shares, TenantUse(bytes=50), 1, 0, 50) is not None
    # Batches that were taken go on, until the disk is really short; on a full disk they wait.
    assert find_line_refusal(shares, TenantUse(bytes=75), 25) is None
    assert find_line_refusal(shares, TenantUse(bytes=76), 25) is not None
    assert find_line_refusal(shares, TenantUse(bytes=76), 0) is None
    assert find_batch_refusal(shares, TenantUse(open_batches=999)) is None


def test_a_share_above_the_disk_is_refused() -> None:
    check_disk(StorageShares(max_bytes=100), 100)
    with pytest.raises(ConfigError) as refusal:
        check_disk(StorageShares(max_bytes=101), 100)
    assert len(refusal.value.lines()) <= 6 and "--max-tenant-bytes" in refusal.value.what
