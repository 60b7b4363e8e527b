"""Input files: what is not lines of one batch is refused, with the number of each line."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from services.gateway.batches import line_check
from services.gateway.batches.line_check import MAX_LINES, MAX_PROBLEMS, FileCheck, check_file, parse_line

CHAT = "/v1/chat/completions"
MAX_BODY = 10_000


def line(name: str = "a", /, **changed: Any) -> bytes:
    """A line of a batch for chats; `changed` replaces its fields, and None removes one."""
    fields = {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "toy"}} | changed
    return json.dumps({key: value for key, value in fields.items() if value is not None}).encode() + b"\n"


def checked(*lines: bytes) -> FileCheck:
    return check_file(io.BytesIO(b"".join(lines)), CHAT, MAX_BODY, "toy")


def problems(*lines: bytes) -> list[tuple[str, int | None]]:
    return [(problem.code, problem.line) for problem in checked(*lines).problems]


def test_every_line_is_found_where_it_lies() -> None:
    content = b"\n" + line("a") + b"  \r\n" + line("é") + line("c").rstrip()
    check = check_file(io.BytesIO(content), CHAT, MAX_BODY, "toy")
    assert (check.problems, check.model) == ([], "toy")
    assert [one.custom_id for one in check.lines] == ["a", "é", "c"]
    assert [one.number for one in check.lines] == [2, 4, 5]
    for one in check.lines:
        text = content[one.offset : one.offset + one.num_bytes]
        assert parse_line(text).custom_id == one.custom_id


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (b"{\n", "invalid_json_line"),
        (b'{"custom_id": "\xff"}\n', "invalid_json_line"),
        (b"[" * 100_000 + b"\n", "line_too_long"),
        (b"[" * 9_000 + b"\n", "invalid_request"),
        (b"[]\n", "invalid_request"),
        (line("b", custom_id=None), "missing_custom_id"),
        (line("b", custom_id=""), "invalid_request"),
        (line("b", custom_id=7), "invalid_request"),
        (line("b", body=None), "invalid_request"),
        (line("b", colour="red"), "invalid_request"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", url="/v1/completions"), "url_mismatch"),
        (line("b", body={"model": "other"}), "model_mismatch"),
        (line("b", body={"stream": True}), "invalid_request"),
        (line("a"), "duplicate_custom_id"),
        (line("b", body={"x": "y" * 80_000}), "line_too_long"),
    ],
)
def test_a_wrong_line_is_named(wrong: bytes, code: str) -> None:
    assert problems(line("a"), wrong, line("z")) == [(code, 2)]


def test_a_line_that_is_too_long_does_not_hide_those_behind_it() -> None:
    check = checked(line("a"), b'"' + b"x" * 500_000 + b'"\n', line("b"), line("b"))
    assert [(problem.code, problem.line) for problem in check.problems] == [
        ("line_too_long", 2),
        ("duplicate_custom_id", 4),
    ]
    assert checked(line("a"), b"x" * 500_000).num_problems == 1


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_refused(content: bytes) -> None:
    assert problems(content) == [("empty_file", None)]


def test_what_a_body_asks_for_is_not_checked_here() -> None:
    """Whatever is wrong with a body is its line's own error."""
    bodies: list[Any] = [{"model": 7}, {"stream": "yes"}, [], "text", {"max_tokens": -1}, {"model": None}]
    check = checked(*(line(str(number), body=body) for number, body in enumerate(bodies)))
    assert (check.problems, len(check.lines)) == ([], len(bodies))


def test_a_missing_model_is_the_default_one() -> None:
    other = line("b", body={"model": "other"})
    assert problems(line("a", body={}), other) == [("model_mismatch", 2)]
    assert checked(other, line("c", body={"model": "other"})).model == "other"


def test_too_many_lines_and_too_many_problems_are_named_once() -> None:
    many = [line(str(number)) for number in range(MAX_LINES + 5)]
    assert problems(*many) == [("too_many_tasks", MAX_LINES + 1)]
    check = checked(*[b"{\n"] * (MAX_PROBLEMS + 7))
    assert len(check.problems) == MAX_PROBLEMS + 1
    assert check.problems[-1].code == "more_errors" and check.problems[-1].message.startswith("7 ")


def test_blank_lines_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_check, "MAX_FILE_LINES", 10)
    assert problems(b"\n" * 9, line()) == []
    assert problems(b"\n" * 10, line()) == [("too_many_tasks", 11)]


def test_other_threads_may_run_meanwhile() -> None:
    pauses: list[int] = []
    content = io.BytesIO(b"".join(line(str(number)) for number in range(3000)))
    check_file(content, CHAT, MAX_BODY, "toy", lambda: pauses.append(1))
    assert len(pauses) >= 2
