"""Checks an input file line by line before any of its lines runs. Pure, but for the time it takes off.

Checked here is what concerns the file as a whole: that it is lines of JSON, and that the lines belong to one batch. The
body of a line is checked when it runs, by what checks the same body over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from services.gateway.batches.records import InputLine
from services.gateway.openai.batch_schema import BatchProblem

MAX_LINES = 50_000
# Lines that are looked at, blank and wrong ones included.
MAX_FILE_LINES = 2 * MAX_LINES
MAX_CUSTOM_ID_CHARS = 512
# Bytes of a line beside those of its body.
ENVELOPE_BYTES = 64 << 10
# Problems that are listed; the others are counted.
MAX_PROBLEMS = 100
# After so many bytes other threads may run.
PAUSE_BYTES = 64 << 10


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of an input file. The body stays as it was written."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: str
    url: str
    body: msgspec.Raw


class _BodyHead(msgspec.Struct, frozen=True):
    """The fields of a body that decide whether its line belongs to the batch."""

    model: Any = None
    stream: Any = None


@dataclass(slots=True)
class FileCheck:
    """What was found in a file: its lines, or what is wrong with it."""

    lines: list[InputLine] = field(default_factory=list)
    problems: list[BatchProblem] = field(default_factory=list)
    num_problems: int = 0
    # The model of the first line.
    model: str | None = None

    def add_problem(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        """Note what is wrong; only the first `MAX_PROBLEMS` are listed."""
        self.num_problems += 1
        if self.num_problems <= MAX_PROBLEMS:
            self.problems.append(BatchProblem(code, message, param, line))


def check_file(
    content: BinaryIO,
    endpoint: str,
    max_body_bytes: int,
    default_model: str,
    pause: Callable[[], None] = lambda: None,
) -> FileCheck:
    """Check a whole input file of a batch for `endpoint`.

    A body without a model asks for `default_model`. `pause` is called now and then, so that other threads can run.
    """
    check, custom_ids, since_pause = FileCheck(), dict[str, int](), 0
    for number, offset, text in _split_lines(content, max_body_bytes + ENVELOPE_BYTES):
        since_pause += len(text)
        if since_pause > PAUSE_BYTES:
            pause()
            since_pause = 0
        if number > MAX_FILE_LINES or (len(check.lines) == MAX_LINES and not text.isspace()):
            check.add_problem("too_many_tasks", f"a batch has at most {MAX_LINES} lines", number)
            break
        if text.isspace():
            continue
        if len(text) > max_body_bytes + ENVELOPE_BYTES:
            problem = f"the line is longer than {max_body_bytes + ENVELOPE_BYTES} bytes"
            check.add_problem("line_too_long", problem, number)
            continue
        line = _parse_line(check, number, text)
        if line is None:
            continue
        _check_line(check, number, line, endpoint, default_model)
        first = custom_ids.setdefault(line.custom_id, number)
        if first != number:
            problem = f"the custom_id {line.custom_id[:64]!r} is that of line {first}"
            check.add_problem("duplicate_custom_id", problem, number, "custom_id")
        check.lines.append(InputLine(number, line.custom_id, offset, len(text)))
    if not check.lines and not check.num_problems:
        check.add_problem("empty_file", "the input file has no lines")
    if check.num_problems > MAX_PROBLEMS:
        more = check.num_problems - MAX_PROBLEMS
        check.problems.append(BatchProblem("more_errors", f"{more} more problems are not listed"))
    return check


def parse_line(text: bytes) -> BatchLine:
    """A line that was checked before. Raises msgspec.DecodeError if the file has changed since."""
    return msgspec.json.decode(text, type=BatchLine)


def _split_lines(content: BinaryIO, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """The number, the offset and the bytes of each line. Of a longer line only `max_bytes` + 1 bytes are given."""
    number = offset = 0
    while text := content.readline(max_bytes + 1):
        number += 1
        begin, offset = offset, offset + len(text)
        yield number, begin, text
        # The rest of a line that is too long is skipped in pieces.
        while len(text) > max_bytes and not text.endswith(b"\n"):
            text = content.readline(max_bytes + 1)
            offset += len(text)
            if not text:
                return
            if len(text) <= max_bytes or text.endswith(b"\n"):
                break


def _parse_line(check: FileCheck, number: int, text: bytes) -> BatchLine | None:
    """The line, or None after its problem was noted."""
    try:
        text.decode()
        return parse_line(text)
    except UnicodeDecodeError as error:
        check.add_problem("invalid_json_line", f"the line is not UTF-8: byte {error.start} of it", number)
    except msgspec.ValidationError as error:
        field_name = str(error).partition("`$.")[2].rstrip("`") or None
        problem = str(error).replace("`", "'")
        code = (
            "missing_custom_id" if "missing required field `custom_id`" in str(error) else "invalid_request"
        )
        check.add_problem(code, problem[0].lower() + problem[1:], number, field_name)
    except (msgspec.DecodeError, RecursionError) as error:
        why = str(error) if isinstance(error, msgspec.DecodeError) else "it is nested too deeply"
        check.add_problem("invalid_json_line", f"the line is not valid JSON: {why}", number)
    return None


def _check_line(check: FileCheck, number: int, line: BatchLine, endpoint: str, default_model: str) -> None:
    """Note what does not fit the batch in a line."""
    if line.method != "POST":
        problem = f"the method must be 'POST', not {line.method[:32]!r}"
        check.add_problem("invalid_method", problem, number, "method")
    if line.url != endpoint:
        problem = f"the url must be the endpoint of the batch, {endpoint!r}, not {line.url[:64]!r}"
        check.add_problem("url_mismatch", problem, number, "url")
    try:
        head = msgspec.json.decode(line.body, type=_BodyHead)
    except (msgspec.DecodeError, RecursionError):
        # Its own check says what is wrong with it.
        return
    if head.stream is True:
        check.add_problem("invalid_request", "a line cannot be streamed", number, "body.stream")
    model = default_model if head.model is None else head.model
    if check.model is None and isinstance(model, str):
        check.model = model
    if isinstance(model, str) and model != check.model:
        problem = f"the model {model[:64]!r} is not that of the lines before, {str(check.model)[:64]!r}"
        check.add_problem("model_mismatch", problem, number, "body.model")
