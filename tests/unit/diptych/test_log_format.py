"""Each log line is one record with the ids of its request, as text or as JSON, whoever wrote it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from diptych.logs.log_format import (
    MAX_LINE_CHARS,
    MAX_REST_CHARS,
    MAX_TRACEBACK_CHARS,
    TRACEBACK_INDENT,
    JsonFormatter,
    LogWriter,
    TextFormatter,
    about_request,
)
from diptych.logs.request_ids import RequestIds, answer_id, ids_of_sequence, new_request_id

SCRIPT = """
import logging, sys, threading, warnings
from diptych.logs.log_format import configure_logging, about_request
from diptych.logs.request_ids import RequestIds
configure_logging("info", FORMAT, "decode-0")
log = logging.getLogger("x")
log.info("two\\nlines \\ud800 %s", {"a": 1}, extra=about_request(RequestIds("req_1", "mine", "cmpl-1"), "worker_lost"))
print("printed")
print("in parts", end=" "); print("to stderr", file=sys.stderr); print("joined")
warnings.warn("deprecated", stacklevel=1)
thread = threading.Thread(target=lambda: 1 / 0, name="t-1"); thread.start(); thread.join()
log.debug("below the level")
sys.stdout.buffer, sys.stderr.fileno()
raise RuntimeError("the end")
"""


def written(log_format: str) -> str:
    script = SCRIPT.replace("FORMAT", repr(log_format))
    ended = subprocess.run(
        [sys.executable, "-W", "default", "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and (log_format == "text" or ended.stdout == "")
    return ended.stderr


def test_as_json_every_line_is_one_record() -> None:
    lines = [json.loads(line) for line in written("json").splitlines()]
    first, printed, to_stderr, joined, warned, thread, end = lines
    assert first == first | {
        "level": "info", "part": "decode-0", "logger": "x", "request_id": "req_1", "client_request_id": "mine",
        "sequence": "cmpl-1", "code": "worker_lost", "message": r"two\nlines \ud800 {'a': 1}",
    }  # fmt: skip
    assert first["time"].endswith("Z") and all(line["part"] == "decode-0" for line in lines)
    assert [printed["message"], to_stderr["message"], joined["message"]] == [
        "printed",
        "to stderr",
        "in parts joined",
    ]
    assert "deprecated" in warned["message"] and "t-1" in thread["message"]
    assert "ZeroDivisionError" in thread["exception"] and "the end" in end["exception"]
    assert not any("request_id" in line for line in lines[1:])


def test_a_progress_bar_is_lines_too_and_none_grows_without_end() -> None:
    named = logging.getLogger("test-writer")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    named.addHandler(handler)
    try:
        writer = LogWriter("test-writer", sys.__stderr__ or sys.stderr)
        for percent in (10, 20, 30):
            writer.write(f"\r{percent} %")
        assert records == ["10 %", "20 %"]
        writer.write("\n")
        for _ in range(1000):
            writer.write("x" * 1000)
    finally:
        named.removeHandler(handler)
    assert records[2] == "30 %" and sum(map(len, records[3:])) > 900_000
    assert max(map(len, records)) < 2 * MAX_REST_CHARS


def test_as_text_a_line_has_the_ids_in_brackets() -> None:
    text = written("text")
    assert "INFO decode-0 x: [req_1 client=mine cmpl-1] two\\nlines \\ud800" in text
    assert "RuntimeError: the end" in text


FORGED = "2026-01-31 12:00:00,000 ERROR gateway x: worker prefill-0 is lost"


def formatted(formatter: logging.Formatter, text: str, error: BaseException | None = None) -> str:
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord("x", logging.WARNING, "file.py", 1, "fails: %s", (text,), exc_info)
    return formatter.format(record)


@pytest.mark.parametrize("formatter", [TextFormatter("gateway"), JsonFormatter("gateway")])
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x85", "\u2028", "\x1b[2K\x1b[1G"])
def test_a_message_cannot_look_like_a_record(formatter: logging.Formatter, end: str) -> None:
    line = formatted(formatter, f"name{end}{FORGED}")
    assert line.isprintable()
    assert ascii(end)[1:-1] in (json.loads(line)["message"] if line.startswith("{") else line)


@pytest.mark.parametrize("formatter", [TextFormatter("gateway"), JsonFormatter("gateway")])
def test_a_record_has_a_bounded_length(formatter: logging.Formatter) -> None:
    for text in ("k", "\n", "\ud800", "語"):
        assert len(formatted(formatter, text * (8 << 20))) < 2 * MAX_LINE_CHARS + 300
        error = ValueError(text * (8 << 20))
        assert len(formatted(formatter, "", error)) < (len(TRACEBACK_INDENT) + 8) * 2 * MAX_TRACEBACK_CHARS


def raise_forged() -> ValueError:
    try:
        raise ValueError(f"name\n{FORGED}\r\x1b[2K{FORGED}")
    except ValueError as error:
        return error


def test_a_traceback_is_readable_and_cannot_look_like_a_record() -> None:
    line, *trace = formatted(TextFormatter("gateway"), "it", raise_forged()).splitlines()
    assert line.endswith("fails: it")
    assert trace[0].strip() == "Traceback (most recent call last):"
    assert any("in raise_forged" in line for line in trace)
    assert any("ValueError: name" in line for line in trace)
    assert all(line.startswith(TRACEBACK_INDENT) and line.isprintable() for line in trace)
    assert sum(FORGED in line for line in trace) >= 2
    found = json.loads(formatted(JsonFormatter("gateway"), "it", raise_forged()))
    assert found["exception"].startswith("Traceback (most recent call last):\n")
    assert all(line.isprintable() for line in found["exception"].split("\n"))


def test_what_is_not_known_is_left_out() -> None:
    record = logging.LogRecord("x", logging.WARNING, "file.py", 1, "text", (), None)
    assert TextFormatter("gateway").format(record).endswith("WARNING gateway x: text")
    vars(record).update(about_request(RequestIds("req_1")))
    assert TextFormatter("gateway").format(record).endswith("gateway x: [req_1] text")
    assert set(json.loads(JsonFormatter("gateway").format(record))) == {
        "time", "level", "part", "logger", "request_id", "message",
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["", ".3"])
@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_a_sequence_leads_to_its_request(prefix: str, suffix: str) -> None:
    request_id = new_request_id()
    sequence = answer_id(prefix, request_id) + suffix
    assert ids_of_sequence(sequence, "mine") == RequestIds(request_id, "mine", sequence)
    assert ids_of_sequence("canary-ab-1") == RequestIds(sequence="canary-ab-1")
