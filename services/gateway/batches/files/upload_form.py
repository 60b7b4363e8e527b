"""Parses the form of an upload piece by piece. How long that takes does not depend on what is in the file.

The library parses the heads of parts alone, which are bounded. The end of a part is found with `bytes.find`: the bytes
of a file never come near the library's parser, whose speed depends on how much they look like the boundary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches.records import BATCH_PURPOSE
from services.gateway.openai.parse_body import missing_parameter_error
from services.gateway.openai.schemas.batch_schema import MAX_EXPIRY_S, MIN_EXPIRY_S
from services.gateway.openai.validate import invalid_value_error

FORM_TYPE = "multipart/form-data"
FIELD_NAMES = ("purpose", "file", "expires_after[anchor]", "expires_after[seconds]")
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
# Of the head of a part: its bytes, and its headers.
MAX_HEAD_BYTES, MAX_HEADERS = 8 << 10, 16
MAX_BOUNDARY_CHARS = 70  # RFC 2046, section 5.1.1

# The parser warns of what follows the last boundary, which strangers can send.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(slots=True)
class _FormState:
    """What was parsed so far. `chunks` are bytes of the file that are not written yet.

    `in_data` says that the next bytes are those of a part, behind its head.
    """

    header: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    value: bytes = b""
    part: str = ""
    fields: dict[str, bytes] = field(default_factory=dict)
    file_name: str | None = None
    chunks: list[bytes] = field(default_factory=list)
    chunk_bytes: int = 0
    in_data: bool = False
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
        boundary = options.get(b"boundary", b"")
        # How a part ends: another one follows, or none. A part may hold the beginning of either.
        self._ends = (b"\r\n--" + boundary + b"\r\n", b"\r\n--" + boundary + b"--")
        # What came and was not parsed yet: a head that is not complete, or what may be the beginning of an end.
        self._rest = b""
        # Bytes that the library's parser was given.
        self.parsed_bytes = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_part_end": self._on_part_end,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_end": self._on_end,
                },
                max_header_count=MAX_HEADERS,
                max_header_size=MAX_HEAD_BYTES,
            )
            if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS:
                raise FormParserError(f"its boundary must have 1 to {MAX_BOUNDARY_CHARS} characters")
        except FormParserError as error:
            raise _form_error(f"the content type is not that of a form: {error}") from error

    def feed(self, part: bytes) -> None:
        """Parse the next bytes. Raises RequestError (400) if they are not a form, or not the form of an upload."""
        data, self._rest = (self._rest + part if self._rest else part), b""
        while data and not self.state.complete:
            data = self._take_data(data) if self.state.in_data else self._take_head(data)

    def _take_head(self, data: bytes) -> bytes:
        """Parse the head of a part; returns what is behind it. Raises RequestError (400) if it is wrong."""
        # Behind the last part's end, an empty line alone is a head without headers.
        end = 2 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n") + 4
        if end == 3 or len(data) < 2:
            if len(data) > MAX_HEAD_BYTES:
                raise _form_error(f"the head of a part is longer than {MAX_HEAD_BYTES} bytes")
            self._rest = data
            return b""
        if end > MAX_HEAD_BYTES:
            raise _form_error(f"the head of a part is longer than {MAX_HEAD_BYTES} bytes")
        self._parse(data[:end])
        return data[end:]

    def _take_data(self, data: bytes) -> bytes:
        """Take the bytes of a part up to its end; returns what is behind it. Raises RequestError (400)."""
        found = [(at, end) for end in self._ends if (at := data.find(end)) >= 0]
        if not found:
            self._rest = _begun_end(data, self._ends)
            self._take_bytes(data[: len(data) - len(self._rest)])
            return b""
        at, end = min(found)
        self._take_bytes(data[:at])
        self.state.in_data = False
        self._parse(end)
        return data[at + len(end) :]

    def _parse(self, text: bytes) -> None:
        """Have the library parse the head of a part, or its end. Raises RequestError (400)."""
        self.parsed_bytes += len(text)
        try:
            self._parser.write(text)
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
            if not self.state.in_data and self._rest:
                # What is no form at all has a better error.
                self._parse(self._rest)
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
        self.state.part, self.state.fields[name], self.state.in_data = name, b"", True
        if name == "file":
            given = options.get(b"filename", b"").decode("utf-8", "replace")
            self.state.file_name = "".join(char for char in given[:MAX_NAME_CHARS] if char.isprintable())

    def _take_bytes(self, data: bytes) -> None:
        """Take bytes of the part. Raises RequestError (400) if a field has too many."""
        if self.state.part == "file":
            if data:
                self.state.chunks.append(data)
                self.state.chunk_bytes += len(data)
            return
        value = self.state.fields[self.state.part] + data
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


def _form_error(problem: str) -> RequestError:
    return RequestError(RequestFailure(FailureReason.INVALID_VALUE, problem))


def _begun_end(data: bytes, ends: Sequence[bytes]) -> bytes:
    """The longest end of `data` that is the beginning of one of `ends`."""
    longest = min(len(data), max(map(len, ends)) - 1)
    for length in range(longest, 0, -1):
        if any(data.endswith(end[:length]) for end in ends):
            return data[-length:]
    return b""
