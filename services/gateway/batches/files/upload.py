"""Streams an upload to disk: a multipart form with a file, of which only a few parts are in memory.

receive ─▶ UploadForm ─▶ fields, and the file's bytes ─▶ uploads/ID ─ complete ─▶ files/ID
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches.data_dir import (
    NEW_FILE_FLAGS,
    DataDir,
    storage_failure,
    sync_folder,
    write_whole,
)
from services.gateway.batches.files.upload_form import UploadForm
from services.gateway.http.request_body import BODY_NOT_SENT

# Bytes of a form beside those of its file.
MAX_FORM_BYTES = 64 << 10
# Bytes that are gathered before they are written.
WRITE_BYTES = 512 << 10
# An upload that is slower than this, after the first `stall_s`, is given up.
MIN_BYTES_PER_S = 4 << 10


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A complete upload. Its content is in its place. `expiry_s`: how long to keep it, if the form says that."""

    name: str
    num_bytes: int
    expiry_s: int | None


class _UploadFile:
    """The descriptor of an upload, closed with the last reference: a thread may still be writing."""

    def __init__(self, path: os.PathLike[str]) -> None:
        self.descriptor = os.open(path, NEW_FILE_FLAGS, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


async def receive_upload(
    content_type: str,
    announced: str,
    receive: Receive,
    data_dir: DataDir,
    file_id: str,
    max_bytes: int,
    stall_s: float,
    check_share: Callable[[int], None] = lambda _: None,
) -> UploadedFile:
    """Receive a form, and put its file into its place under `file_id`. Nothing is kept if that fails.

    `announced` is the `content-length` header, if there is one. A file may have `max_bytes`. An upload of which nothing
    comes for `stall_s`, or too little, is given up. `check_share` is called with the file's bytes before they
    are written, and raises RequestError if its tenant may not keep them.

    Raises:
        RequestError: 4xx if the form is wrong, too large, incomplete or too slow; 507 or 500 if the disk fails.
    """
    if announced and (
        not announced.isdigit() or len(announced) > 18 or int(announced) > max_bytes + MAX_FORM_BYTES
    ):
        raise _too_large_error(max_bytes)
    form = UploadForm(content_type)
    path = data_dir.uploads / file_id
    try:
        data_dir.check_space(int(announced) if announced else 0)
        check_share(0)
        file, num_bytes = _UploadFile(path), 0
        async for chunks in _file_chunks(form, receive, max_bytes, stall_s):
            more = sum(map(len, chunks))
            check_share(num_bytes + more)
            with data_dir.claim_space(more):
                num_bytes += await asyncio.to_thread(_write_chunks, file, num_bytes, chunks)
        name, expiry_s = form.finish()
        await asyncio.to_thread(_sync_file, file)
        del file
        await asyncio.to_thread(_move_file, path, data_dir, file_id)
    except OSError as error:
        raise RequestError(storage_failure(error)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return UploadedFile(name, num_bytes, expiry_s)


async def _file_chunks(
    form: UploadForm, receive: Receive, max_bytes: int, stall_s: float
) -> AsyncIterator[Sequence[bytes]]:
    """The file's bytes as they come, about `WRITE_BYTES` at a time."""
    begun_s, received, taken, more = time.monotonic(), 0, 0, True
    while more:
        try:
            async with asyncio.timeout(stall_s):
                message = await receive()
        except TimeoutError as error:
            raise _timeout_error(f"nothing of the body arrived for {stall_s:g} s") from error
        if message["type"] != "http.request":
            raise RequestError(RequestFailure(FailureReason.BODY_INCOMPLETE, BODY_NOT_SENT))
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(part)
        if received > MIN_BYTES_PER_S * (time.monotonic() - begun_s - stall_s) or not more:
            form.feed(part)
        else:
            raise _timeout_error(f"the body arrives with less than {MIN_BYTES_PER_S} bytes a second")
        if taken + form.state.chunk_bytes > max_bytes or received > max_bytes + MAX_FORM_BYTES:
            raise _too_large_error(max_bytes)
        if form.state.chunk_bytes >= WRITE_BYTES or not more:
            taken += form.state.chunk_bytes
            yield form.take_chunks()


def _write_chunks(file: _UploadFile, offset: int, chunks: Sequence[bytes]) -> int:
    """Write chunks at `offset`; returns how many bytes they have. Called in a thread. Raises OSError."""
    data = b"".join(chunks)
    write_whole(file.descriptor, data, offset)
    return len(data)


def _sync_file(file: _UploadFile) -> None:
    """Make what was written last. Called in a thread. Raises OSError."""
    os.fsync(file.descriptor)


def _move_file(path: os.PathLike[str], data_dir: DataDir, file_id: str) -> None:
    """Put a complete upload into its place, for good. Called in a thread. Raises OSError."""
    os.replace(path, data_dir.content_path(file_id))
    sync_folder(data_dir.files)


def _timeout_error(problem: str) -> RequestError:
    return RequestError(RequestFailure(FailureReason.BODY_TIMEOUT, problem))


def _too_large_error(max_bytes: int) -> RequestError:
    problem = f"the file is larger than {max_bytes} bytes (--max-file-bytes)"
    return RequestError(RequestFailure(FailureReason.REQUEST_TOO_LARGE, problem, "file"))
