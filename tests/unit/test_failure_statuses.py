"""Every reason for a refusal has one rule, and docs/api.md lists all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from diptych.failure_statuses import (
    MAX_MESSAGE_CHARS,
    MAX_PARAM_CHARS,
    RULES,
    FailureReason,
    RequestFailure,
)

API_DOC = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_reason_has_a_rule() -> None:
    assert set(RULES) == set(FailureReason)


@pytest.mark.parametrize("reason", FailureReason)
def test_a_failure_can_be_sent_by_a_preparer(reason: FailureReason) -> None:
    failure = RequestFailure(reason, "why", "field", 3.0, "a worker's words")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=RequestFailure) == failure


def test_texts_are_cut_and_cleaned_wherever_a_failure_is_made() -> None:
    for char in ("k", "\n", "\u202e", "\ud800"):
        made = RequestFailure(
            FailureReason.INVALID_VALUE, char * (8 << 20), char * (8 << 20), None, char * (8 << 20)
        )
        for failure in (made, replace(made, message=char * 10_000)):
            assert len(failure.message) == len(failure.cause) == MAX_MESSAGE_CHARS
            assert failure.param is not None
            assert len(failure.param) == MAX_PARAM_CHARS
            assert (failure.message + failure.param + failure.cause).isprintable()
        assert len(msgspec.json.encode(made.error_body())) < 4 << 10


def test_texts_that_come_over_the_wire_are_cut_and_cleaned() -> None:
    sent = msgspec.msgpack.encode(
        {"reason": "invalid_value", "message": "k\n" * 10_000, "param": "\n" * 10_000}
    )
    for failure in (
        msgspec.msgpack.decode(sent, type=RequestFailure),
        msgspec.convert(msgspec.msgpack.decode(sent), RequestFailure),
    ):
        assert len(failure.message) == MAX_MESSAGE_CHARS
        assert failure.message.startswith(r"k\nk\n")
        assert len(failure.param or "") == MAX_PARAM_CHARS


def test_the_documents_table_lists_every_status_and_code() -> None:
    """Codes by statuses and by whether the client may repeat the request."""
    documented: defaultdict[tuple[str, bool], set[str]] = defaultdict(set)
    for line in API_DOC.read_text().splitlines():
        if found := re.match(r"\| ((?:[45]\d\d(?:, )?)+) \| (`.*) \| (yes|no)", line):
            documented[found[1], found[3] == "yes"] |= set(re.findall(r"`(\w+)`", found[2]))
    expected: defaultdict[tuple[str, bool], set[str]] = defaultdict(set)
    for reason in FailureReason:
        failure = RequestFailure(reason, "")
        row = next(row for row, _ in documented if str(failure.status) in row)
        expected[row, failure.client_may_retry].add(failure.code)
    assert documented == expected


def test_what_is_known_about_the_wait_goes_before_the_rule() -> None:
    assert RequestFailure(FailureReason.QUEUE_FULL, "").retry_after_s == 2.0
    assert RequestFailure(FailureReason.QUEUE_FULL, "", wait_s=9.0).retry_after_s == 9.0
    assert not RequestFailure(FailureReason.ANSWER_MEMORY_FULL, "").client_may_retry


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (FailureReason.INVALID_VALUE, "invalid_request_error"),
        (FailureReason.HOST_NOT_ALLOWED, "permission_error"),
        (FailureReason.BODY_TIMEOUT, "timeout_error"),
        (FailureReason.DISPLACED, "rate_limit_error"),
        (FailureReason.NO_WORKERS, "server_error"),
        (FailureReason.DEADLINE_EXCEEDED, "timeout_error"),
    ],
)
def test_the_type_follows_from_the_status(reason: FailureReason, kind: str) -> None:
    assert RequestFailure(reason, "why").error_body() == {
        "error": {"message": "why", "type": kind, "param": None, "code": reason.value}
    }
