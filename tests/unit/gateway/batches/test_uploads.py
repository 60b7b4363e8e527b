"""Uploads of several clients at a time: nobody takes all places, and no byte counts twice."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from diptych.errors import RequestError
from diptych.specs import StorageShares
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.files import upload
from services.gateway.batches.files.file_routes import MAX_TENANT_UPLOADS, MAX_UPLOADS, FileRoutes
from services.gateway.batches.records import FileRecord
from services.gateway.batches.storage.schema import FILE_BYTES
from services.gateway.batches.store import BatchStore

CONTENT = b"x" * 1000
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + CONTENT + b"\r\n--b--\r\n"
)


async def send_form() -> Message:
    return {"type": "http.request", "body": FORM, "more_body": False}


async def test_a_file_that_is_being_kept_counts_once_for_other_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files fit exactly into the share; the second is checked while the first is written into the database."""
    shares = StorageShares(max_bytes=2 * (len(CONTENT) + FILE_BYTES))
    store = BatchStore(DataDir(str(tmp_path / "data")), shares=shares)
    routes, add_file, refusals = FileRoutes(store, 1 << 20, 10.0), store.add_file, list[object]()
    # The other upload has come whole.
    routes._uploaded["a"] = len(CONTENT)

    async def add_and_check(record: FileRecord) -> None:
        await add_file(record)
        refusals.append(store.upload_refusal("a", routes._uploaded["a"]))

    monkeypatch.setattr(store, "add_file", add_and_check)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    state = SimpleNamespace(tenant="a")
    request = cast(Request, SimpleNamespace(headers=headers, receive=send_form, state=state))
    assert (await routes.upload_file(request)).status_code == 200
    assert refusals == [None]
    store.close()


def test_two_tenants_leave_places_for_uploads_of_others() -> None:
    routes = FileRoutes(cast(BatchStore, None), 1 << 20, 10.0)

    def take_places(tenant: str) -> int:
        """How many uploads a tenant can begin."""
        begun = 0
        try:
            while True:
                routes._check_room(tenant)
                routes._uploads[tenant] += 1
                begun += 1
        except RequestError:
            return begun

    taken = [take_places(tenant) for tenant in "abcde"]
    assert taken[0] == MAX_TENANT_UPLOADS and all(taken[:4]) and sum(taken) == MAX_UPLOADS


async def test_a_thread_that_writes_late_writes_into_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops has given up an upload, whose thread had to wait."""
    gate, ended, write_chunks = threading.Event(), threading.Event(), upload._write_chunks

    def write_late(*arguments: Any) -> int:
        gate.wait(30)
        written = write_chunks(*arguments)
        ended.set()
        return written

    monkeypatch.setattr(upload, "_write_chunks", write_late)
    folder = DataDir(str(tmp_path / "data"))
    kind = "multipart/form-data; boundary=b"
    task = asyncio.create_task(upload.receive_upload(kind, "", send_form, folder, "file-1", 1 << 20, 10.0))
    while not list(folder.uploads.iterdir()):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with (tmp_path / "other").open("wb") as other:
        gate.set()
        await asyncio.to_thread(ended.wait, 30)
        assert os.fstat(other.fileno()).st_size == 0
    folder.close()
