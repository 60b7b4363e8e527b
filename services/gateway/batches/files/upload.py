"""Streams an upload to disk: a multipart form with a file, of which only a few parts are in memory.

receive ─▶ MultipartParser ─▶ fields, and the file's bytes ─▶ uploads/ID ─ complete ─▶ files/ID
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
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
from services.gateway.batches.records import BATCH_PURPOSE
from services.gateway.http.request_body import BODY_NOT_SENT
from services.gateway.openai.batch_schema import MAX_EXPIRY_S, MIN_EXPIRY_S
from services.gateway.openai.parse_body import missing_parameter_error
from services.gateway.openai.validate import invalid_value_error

FORM_TYPE = "multipart/form-data"
FIELD_NAMES = ("purpose", "file", "expires_after[anchor]", "expires_after[seconds]")
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
# Bytes of a form beside those of its file.
MAX_FORM_BYTES = 64 << 10
# Bytes that are gathered before they are written.
WRITE_BYTES = 512 << 10
# An upload that is slower than this, after the first `stall_s`, is given up.
MIN_BYTES_PER_S = 4 << 10

# The parser warns of what follows the last boundary, which strangers can send.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A complete upload. Its content is in its place. `expiry_s`: how long to keep it, if the form says that."""

    name: str
    num_bytes: int
    expiry_s: int | None


@dataclass(slots=True)
class _FormState:
    """What was parsed so far. `chunks` are bytes of the file that are not written yet."""

    header: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    value: bytes = b""
    part: str = ""
    fields: dict[str, bytes] = field(default_factory=dict)
    file_name: str | None = None
    chunks: list[bytes] = field(default_factory=list)
    chunk_bytes: int = 0
    complete: bool = False


class UploadForm:
    """Parses the form piece by piece. The methods `_on_...` are called by the parser."""

    def __init__(self, content_type: str) -> None:
        """Raises RequestError (415, 400) if it is no multipart form, or one without a boundary."""
        kind, options = parse_options_header(content_type.encode("latin-1"))
        if kind.decode("latin-1") != FORM_TYPE:
            problem = f"the content type must be {FORM_TYPE}"
            raise RequestError(RequestFailure(FailureReason.UNSUPPORTED_MEDIA_TYPE, problem, "content-type"))
        self.state = _FormState()
        try:
            self._parser = MultipartParser(
                options.get(b"boundary", b""),
                {
                    "on_part_begin": self._on_part_begin,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_end": self._on_end,
                },
            )
            if not options.get(b"boundary"):
                raise FormParserError("it has no boundary")
        except FormParserError as error:
            raise _form_error(f"the content type is not that of a form: {error}") from error

    def feed(self, part: bytes) -> None:
        """Parse the next bytes. Raises RequestError (400) if they are not a form, or not the form of an upload."""
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise _form_error(f"the body is not a form: {error}") from error

    def take_chunks(self) -> list[bytes]:
        """The bytes of the file that came since the last call."""
        chunks, self.state.chunks, self.state.chunk_bytes = self.state.chunks, [], 0
        return chunks

    def finish(self) -> tuple[str, int | None]:
        """The name of the file, and how many seconds to keep it, if the form says that.

        Raises:
            RequestError: 400, the form is not complete, or a field is missing or invalid.
        """
        if not self.state.complete:
            raise RequestError(RequestFailure(FailureReason.BODY_INCOMPLETE, "the form ends in the middle"))
        for name in ("purpose", "file"):
            if name not in self.state.fields:
                raise missing_parameter_error(name)
        return self.state.file_name or "upload.jsonl", self._expiry_s()

    def _expiry_s(self) -> int | None:
        anchor = self.state.fields.get("expires_after[anchor]")
        seconds = self.state.fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return None
        if anchor != b"created_at":
            raise invalid_value_error("expires_after[anchor]", "must be 'created_at'")
        if seconds is None or not seconds.isdigit() or not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
            bounds = f"must be a number from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
            raise invalid_value_error("expires_after[seconds]", bounds)
        return int(seconds)

    def _on_part_begin(self) -> None:
        self.state.headers, self.state.part = {}, ""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self.state.header += data[start:end].decode("latin-1").lower()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self.state.value += data[start:end]

    def _on_header_end(self) -> None:
        self.state.headers[self.state.header] = self.state.value.decode("utf-8", "replace")
        self.state.header, self.state.value = "", b""

    def _on_headers_finished(self) -> None:
        """Raises RequestError (400) for a part that an upload does not have, or has twice."""
        disposition = self.state.headers.get("content-disposition", "").encode()
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name not in FIELD_NAMES:
            problem = f"unrecognized request argument supplied: {name}"
            failure = RequestFailure(FailureReason.UNRECOGNIZED_REQUEST_ARGUMENT, problem, name or None)
            raise RequestError(failure)
        if name in self.state.fields:
            raise invalid_value_error(name, "is given twice")
        self.state.part, self.state.fields[name] = name, b""
        if name == "file":
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self.state.file_name = "".join(char for char in given if char.isprintable())[:MAX_NAME_CHARS]

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self.state.part == "file":
            self.state.chunks.append(data[start:end])
            self.state.chunk_bytes += end - start
            return
        value = self.state.fields[self.state.part] + data[start:end]
        if len(value) > MAX_FIELD_BYTES:
            raise invalid_value_error(self.state.part, f"has more than {MAX_FIELD_BYTES} bytes")
        self.state.fields[self.state.part] = value

    def _on_part_end(self) -> None:
        """Refuse another purpose at once, whatever follows. Raises RequestError (400)."""
        if self.state.part == "purpose" and self.state.fields["purpose"] != BATCH_PURPOSE.encode():
            raise invalid_value_error(
                "purpose", f"must be '{BATCH_PURPOSE}': files serve no other purpose here"
            )

    def _on_end(self) -> None:
        self.state.complete = True


async def receive_upload(
    content_type: str,
    announced: str,
    receive: Receive,
    folder: DataDir,
    file_id: str,
    max_bytes: int,
    stall_s: float,
) -> UploadedFile:
    """Receive a form, and put its file into its place under `file_id`. Nothing is kept if that fails.

    `announced` is the `content-length` header, if there is one. A file may have `max_bytes`. An upload of which nothing
    comes for `stall_s`, or too little, is given up.

    Raises:
        RequestError: 4xx if the form is wrong, too large, incomplete or too slow; 507 or 500 if the disk fails.
    """
    if announced and (
        not announced.isdigit() or len(announced) > 18 or int(announced) > max_bytes + MAX_FORM_BYTES
    ):
        raise _too_large_error(max_bytes)
    form = UploadForm(content_type)
    path = folder.uploads / file_id
    try:
        folder.check_space(int(announced) if announced else 0)
        descriptor = os.open(path, NEW_FILE_FLAGS, 0o600)
        try:
            num_bytes = await _write_file(form, receive, descriptor, max_bytes, stall_s)
            name, expiry_s = form.finish()
            await asyncio.to_thread(os.fsync, descriptor)
        finally:
            os.close(descriptor)
        await asyncio.to_thread(_move_file, path, folder, file_id)
    except OSError as error:
        raise RequestError(storage_failure(error)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return UploadedFile(name, num_bytes, expiry_s)


async def _write_file(
    form: UploadForm, receive: Receive, descriptor: int, max_bytes: int, stall_s: float
) -> int:
    """Write the file's bytes as they come; returns how many there are."""
    begun_s, received, written, more = time.monotonic(), 0, 0, True
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
        if written + form.state.chunk_bytes > max_bytes or received > max_bytes + MAX_FORM_BYTES:
            raise _too_large_error(max_bytes)
        if form.state.chunk_bytes >= WRITE_BYTES or not more:
            chunks = form.take_chunks()
            written += await asyncio.to_thread(_write_chunks, descriptor, written, chunks)
    return written


def _write_chunks(descriptor: int, offset: int, chunks: Sequence[bytes]) -> int:
    """Write chunks at `offset`; returns how many bytes they have. Called in a thread. Raises OSError."""
    data = b"".join(chunks)
    write_whole(descriptor, data, offset)
    return len(data)


def _move_file(path: os.PathLike[str], folder: DataDir, file_id: str) -> None:
    """Put a complete upload into its place, for good. Called in a thread. Raises OSError."""
    os.replace(path, folder.content_path(file_id))
    sync_folder(folder.files)


def _form_error(problem: str) -> RequestError:
    return RequestError(RequestFailure(FailureReason.INVALID_VALUE, problem))


def _timeout_error(problem: str) -> RequestError:
    return RequestError(RequestFailure(FailureReason.BODY_TIMEOUT, problem))


def _too_large_error(max_bytes: int) -> RequestError:
    problem = f"the file is larger than {max_bytes} bytes (--max-file-bytes)"
    return RequestError(RequestFailure(FailureReason.REQUEST_TOO_LARGE, problem, "file"))
