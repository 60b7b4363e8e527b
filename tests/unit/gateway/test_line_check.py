"""Input files: what is not lines of one batch is refused, with the number of each line."""

from __future__ import annotations

import io
import tracemalloc
from array import array
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from msgspec import json, msgpack, structs

from services.gateway.openai.schemas.batch_schema import BatchProblem
from services.gateway.preparation import line_check
from services.gateway.preparation.line_check import (
    MAX_LINES,
    MAX_MESSAGE_CHARS,
    MAX_MODEL_CHARS,
    MAX_PARAM_CHARS,
    MAX_PROBLEMS,
    SLICE_LINES,
    CheckState,
    FileRules,
    check_slice,
    parse_line,
)

CHAT = "/v1/chat/completions"
MAX_BODY = 10_000


def line(name: str = "a", /, **changed: Any) -> bytes:
    """A line of a batch for chats; `changed` replaces its fields, and None removes one."""
    fields = {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "toy"}} | changed
    return json.encode({key: value for key, value in fields.items() if value is not None}) + b"\n"


@dataclass
class FileCheck:
    """What all slices of a file have found."""

    model: str | None = None
    num_problems: int = 0
    num_slices: int = 0
    problems: list[BatchProblem] = field(default_factory=list)
    # Number, offset and length of each line.
    lines: list[tuple[int, int, int]] = field(default_factory=list)


def check_content(content: bytes, max_body: int = MAX_BODY, slice_s: float = 0.0) -> FileCheck:
    """Check a file, a slice of it at a time; each reading of the clock is `slice_s` later than the one before."""
    rules, state, found = FileRules(CHAT, max_body, "toy", b"key"), CheckState(), FileCheck()
    clock = count()
    while True:
        part = check_slice(io.BytesIO(content), rules, state, lambda: slice_s * next(clock))
        packed = array("q", part.lines)
        found.lines += zip(packed[::3], packed[1::3], packed[2::3], strict=True)
        found.problems += part.problems
        found.num_slices += 1
        state = structs.replace(part.state, seen=state.seen + part.state.seen)
        if part.is_complete:
            found.model, found.num_problems = state.model, state.num_problems
            return found


def checked(*lines: bytes) -> FileCheck:
    return check_content(b"".join(lines))


def problems(*lines: bytes) -> list[tuple[str, int | None]]:
    return [(problem.code, problem.line) for problem in checked(*lines).problems]


def test_every_line_is_found_where_it_lies() -> None:
    content = b"\n" + line("a") + b"  \r\n" + line("é") + line("c").rstrip()
    check = check_content(content)
    assert (check.problems, check.model) == ([], "toy")
    assert [number for number, _, _ in check.lines] == [2, 4, 5]
    for (_, offset, num_bytes), custom_id in zip(check.lines, ["a", "é", "c"], strict=True):
        assert parse_line(content[offset : offset + num_bytes]).custom_id == custom_id


def test_a_slice_tells_little_of_lines_with_long_names() -> None:
    """The event loop decodes what it tells."""
    content = b"".join(line(chr(0x1F600) * 500 + f"{number:05}") for number in range(SLICE_LINES + 1))
    rules = FileRules(CHAT, MAX_BODY, "toy", b"key")
    part = check_slice(io.BytesIO(content), rules, CheckState(), lambda: 0.0)
    assert (part.state.num_lines, part.is_complete) == (SLICE_LINES, False)
    assert len(msgpack.encode(part)) < 64 * SLICE_LINES


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


def test_slices_find_what_one_pass_finds() -> None:
    """Wherever a slice ends: duplicates, the model of the first line and the problems go on in the next one."""
    lines = [line("a"), b"\n", b"{\n", line("b", body={"model": "other"}), b"x" * 100_000 + b"\n"]
    content = b"".join([*lines, line("a"), *(line(str(number)) for number in range(20)), line("3")])
    whole = check_content(content)
    sliced = check_content(content, slice_s=1.0)
    assert (whole.num_slices, sliced.num_slices) == (1, 28)
    assert whole.num_problems == 5
    sliced.num_slices = 1
    assert sliced == whole


def test_what_a_client_wrote_is_cut_in_problems() -> None:
    """Each text, and all problems of a file together: they are stored with the batch, and listed with others."""
    huge = "k\n\u202e'\"" * 500_000
    lines = [
        line("a", body={"model": huge}),
        line("b", **{huge: 1}),
        line("c", method=huge),
        line("d", url=huge),
        line(huge),
        *(line(str(number), **{f"{number}" + "\u4e16\\" * 9000: 1}) for number in range(200)),
    ]
    check = check_content(b"".join(lines), 8 << 20)
    assert check.num_problems == len(lines)
    assert [one.line for one in check.problems[:5]] == [1, 2, 3, 4, 5]
    for problem in check.problems:
        assert len(problem.message) <= MAX_MESSAGE_CHARS and problem.message.isprintable()
        assert len(problem.param or "") <= MAX_PARAM_CHARS
    assert len(json.encode(check.problems)) < 100 << 10
    assert check.problems[-1].code == "more_errors"


def test_a_model_name_is_bounded() -> None:
    """It is kept with the batch."""
    longest = "\U0001f600" * MAX_MODEL_CHARS
    assert checked(line("a", body={"model": longest})).model == longest
    assert problems(line("a", body={"model": longest + "x"})) == [("invalid_request", 1)]


def test_values_of_a_body_are_not_decoded() -> None:
    """A nested value costs its length, not objects: the memory of a check is a few times that of a line."""
    nested = b"[" + b"[[]]," * 400_000 + b"[]]"
    text = b'{"custom_id":"a","method":"POST","url":"%s","body":{"model":%s,"stream":%s}}\n' % (
        CHAT.encode(),
        nested,
        nested,
    )
    tracemalloc.start()
    try:
        assert checked_large(text).problems == []
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text)
    finally:
        tracemalloc.stop()


def checked_large(*lines: bytes) -> FileCheck:
    return check_content(b"".join(lines), 8 << 20)
