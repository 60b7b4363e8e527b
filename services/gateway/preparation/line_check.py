"""Checks an input file of a batch line by line before any of its lines runs, in slices. Runs in a helper process.

Checked here is what concerns the file as a whole: that it is lines of JSON, and that the lines belong to one batch. The
body of a line is checked when it runs, by what checks the same body over HTTP.

A client decides what lies in a file, so nothing here costs more than its length: values of a body are not decoded, but
for a short name of a model; texts are cut; a slice ends after some CPU time, and the next one goes on where it ended.
"""

from __future__ import annotations

import hashlib
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from diptych.logs.shown_text import quote_text, shorten_text
from services.gateway.openai.schemas.batch_schema import BatchProblem

MAX_LINES = 50_000
# Lines that are looked at, blank and wrong ones included.
MAX_FILE_LINES = 2 * MAX_LINES
MAX_CUSTOM_ID_CHARS = 512
MAX_MODEL_CHARS = 256
# Bytes of a line beside those of its body.
ENVELOPE_BYTES = 64 << 10
# Problems that are listed, their bytes as JSON, and the characters of one; other problems are counted.
MAX_PROBLEMS, MAX_PROBLEM_BYTES = 100, 64 << 10
MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 300, 100
# A slice ends after so many seconds of CPU time, or so many lines.
SLICE_CPU_S, SLICE_LINES = 0.2, 4_000
# What is remembered of a line's custom_id: a digest of it, and the number of the line.
SEEN_ID = struct.Struct("<12sI")
DIGEST_BYTES = 12
# Characters of a JSON string for each character that it stands for, at most: escapes of surrogate pairs.
ESCAPED_CHARS = 12


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of an input file. The body stays as it was written."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: str
    url: str
    body: msgspec.Raw


class _BodyHead(msgspec.Struct, frozen=True):
    """The fields of a body that decide whether its line belongs to the batch."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")


class FileRules(msgspec.Struct, frozen=True, array_like=True):
    """What the lines of a file are checked against.

    A body without a model asks for `default_model`. `key` is secret, so that nobody makes digests of names collide.
    """

    endpoint: str
    max_body_bytes: int
    default_model: str
    key: bytes


class CheckState(msgspec.Struct, frozen=True, array_like=True):
    """Where a check goes on.

    `num_lines` and `num_problems` are how many were found in the lines up to `number`, and `problem_bytes` what those
    take that are listed. `seen` has a `SEEN_ID` of each line that was found. `model` is that of the first line.
    """

    offset: int = 0
    number: int = 0
    num_lines: int = 0
    num_problems: int = 0
    num_listed: int = 0
    problem_bytes: int = 0
    model: str | None = None
    seen: bytes = b""


class CheckedSlice(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a slice has found.

    `lines` are the number, the offset and the length of each line, as 64-bit integers. Names of lines stay in the file:
    a client decides how long they are, and the event loop takes this from the helper process.
    `state` is that of the next slice, but that `seen` has what this one adds; it `is_complete` if there is none.
    """

    lines: bytes
    problems: list[BatchProblem]
    state: CheckState
    is_complete: bool


@dataclass(slots=True)
class _Slice:
    """The check of a slice while it runs. The fields are those of `CheckState` and `CheckedSlice`."""

    rules: FileRules
    model: str | None
    num_lines: int
    num_problems: int
    num_listed: int
    problem_bytes: int
    numbers: dict[bytes, int]
    lines: array[int] = field(default_factory=lambda: array("q"))
    problems: list[BatchProblem] = field(default_factory=list)
    seen: bytearray = field(default_factory=bytearray)

    def add_problem(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        """Note what is wrong, with texts that are cut; it is listed while there is room for it."""
        self.num_problems += 1
        if self.num_listed == MAX_PROBLEMS:
            return
        shown = None if param is None else shorten_text(param, MAX_PARAM_CHARS)
        problem = BatchProblem(code, shorten_text(message, MAX_MESSAGE_CHARS), shown, line)
        size = len(msgspec.json.encode(problem)) + 1
        if self.problem_bytes + size <= MAX_PROBLEM_BYTES:
            self.problems.append(problem)
            self.num_listed += 1
            self.problem_bytes += size

    def add_line(self, number: int, offset: int, num_bytes: int, custom_id: str) -> None:
        """Note a line, and whether another one has its name."""
        name = hashlib.blake2b(custom_id.encode(), digest_size=DIGEST_BYTES, key=self.rules.key).digest()
        first = self.numbers.setdefault(name, number)
        if first != number:
            problem = f"the custom_id {quote_text(custom_id, 64)} is that of line {first}"
            self.add_problem("duplicate_custom_id", problem, number, "custom_id")
        else:
            self.seen += SEEN_ID.pack(name, number)
        self.num_lines += 1
        self.lines.extend((number, offset, num_bytes))

    def finish(self) -> None:
        """The file has no more lines."""
        if not self.num_lines and not self.num_problems:
            self.add_problem("empty_file", "the input file has no lines")
        if self.num_problems > self.num_listed:
            more = self.num_problems - self.num_listed
            self.problems.append(BatchProblem("more_errors", f"{more} more problems are not listed"))


def check_slice(
    content: BinaryIO,
    rules: FileRules,
    state: CheckState,
    cpu_s: Callable[[], float] = time.process_time,
) -> CheckedSlice:
    """Check the lines of a file from `state` on, for some CPU time, which `cpu_s` measures."""
    end_s = cpu_s() + SLICE_CPU_S
    numbers = dict(SEEN_ID.iter_unpack(state.seen))
    part = _Slice(
        rules,
        state.model,
        state.num_lines,
        state.num_problems,
        state.num_listed,
        state.problem_bytes,
        numbers,
    )
    content.seek(state.offset)
    number, is_complete = state.number, True
    for number, offset, text in _split_lines(content, state.number, rules.max_body_bytes + ENVELOPE_BYTES):
        if number > MAX_FILE_LINES or (part.num_lines == MAX_LINES and not text.isspace()):
            part.add_problem("too_many_tasks", f"a batch has at most {MAX_LINES} lines", number)
            break
        _check_text(part, number, offset, text)
        if part.num_lines - state.num_lines >= SLICE_LINES or cpu_s() >= end_s:
            is_complete = False
            break
    if is_complete:
        part.finish()
    following = CheckState(
        content.tell(), number, part.num_lines, part.num_problems, part.num_listed, part.problem_bytes,
        part.model, bytes(part.seen),
    )  # fmt: skip
    return CheckedSlice(part.lines.tobytes(), part.problems, following, is_complete)


def parse_line(text: bytes) -> BatchLine:
    """A line that was checked before. Raises msgspec.DecodeError if the file has changed since."""
    return msgspec.json.decode(text, type=BatchLine)


def _split_lines(content: BinaryIO, number: int, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """The number, the offset and the bytes of each line behind line `number`, at which `content` stands.

    Of a longer line only `max_bytes` + 1 bytes are given. When a line is given, `content` stands behind it.
    """
    offset = content.tell()
    while text := content.readline(max_bytes + 1):
        number += 1
        begin, offset, piece = offset, offset + len(text), text
        # The rest of a line that is too long is skipped in pieces.
        while len(piece) > max_bytes and not piece.endswith(b"\n"):
            piece = content.readline(max_bytes + 1)
            offset += len(piece)
        yield number, begin, text


def _check_text(file_slice: _Slice, number: int, offset: int, text: bytes) -> None:
    """Check one line of the file; blank ones are skipped."""
    if text.isspace():
        return
    max_bytes = file_slice.rules.max_body_bytes + ENVELOPE_BYTES
    if len(text) > max_bytes:
        file_slice.add_problem("line_too_long", f"the line is longer than {max_bytes} bytes", number)
        return
    line = _parse_text(file_slice, number, text)
    if line is not None:
        _check_line(file_slice, number, line)
        file_slice.add_line(number, offset, len(text), line.custom_id)


def _parse_text(file_slice: _Slice, number: int, text: bytes) -> BatchLine | None:
    """The line, or None after its problem was noted."""
    try:
        text.decode()
        return parse_line(text)
    except UnicodeDecodeError as error:
        file_slice.add_problem(
            "invalid_json_line", f"the line is not UTF-8: byte {error.start} of it", number
        )
    except msgspec.ValidationError as error:
        field_name = str(error).partition("`$.")[2].rstrip("`") or None
        problem = shorten_text(str(error), MAX_MESSAGE_CHARS).replace("`", "'")
        code = "missing_custom_id" if "missing required field 'custom_id'" in problem else "invalid_request"
        file_slice.add_problem(code, problem[0].lower() + problem[1:], number, field_name)
    except (msgspec.DecodeError, RecursionError) as error:
        why = str(error) if isinstance(error, msgspec.DecodeError) else "it is nested too deeply"
        file_slice.add_problem("invalid_json_line", f"the line is not valid JSON: {why}", number)
    return None


def _check_line(file_slice: _Slice, number: int, line: BatchLine) -> None:
    """Note what does not fit the batch in a line."""
    endpoint = file_slice.rules.endpoint
    if line.method != "POST":
        problem = f"the method must be 'POST', not {quote_text(line.method, 32)}"
        file_slice.add_problem("invalid_method", problem, number, "method")
    if line.url != endpoint:
        problem = f"the url must be the endpoint of the batch, {endpoint!r}, not {quote_text(line.url, 64)}"
        file_slice.add_problem("url_mismatch", problem, number, "url")
    try:
        head = msgspec.json.decode(line.body, type=_BodyHead)
    except (msgspec.DecodeError, RecursionError):
        # Its own check says what is wrong with it.
        return
    if bytes(head.stream) == b"true":
        file_slice.add_problem("invalid_request", "a line cannot be streamed", number, "body.stream")
    model = _find_model(head.model, file_slice.rules.default_model)
    if model is None:
        return
    if len(model) > MAX_MODEL_CHARS:
        problem = f"the name of the model has more than {MAX_MODEL_CHARS} characters"
        return file_slice.add_problem("invalid_request", problem, number, "body.model")
    if file_slice.model is None:
        file_slice.model = model
    if model != file_slice.model:
        before = quote_text(file_slice.model, 64)
        problem = f"the model {quote_text(model, 64)} is not that of the lines before, {before}"
        file_slice.add_problem("model_mismatch", problem, number, "body.model")


def _find_model(raw: msgspec.Raw, default_model: str) -> str | None:
    """The name of the model in a body; None if there is no name, which is the line's own error.

    Of a name that is too long a part is returned that is too long as well.
    """
    text = bytes(raw)
    if text == b"null":
        return default_model
    if not text.startswith(b'"'):
        return None
    if len(text) > ESCAPED_CHARS * MAX_MODEL_CHARS + 2:
        return "?" * (MAX_MODEL_CHARS + 1)
    return msgspec.json.decode(text, type=str)
