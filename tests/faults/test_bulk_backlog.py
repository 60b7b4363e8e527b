"""Every scenario with batches beside its requests, and proofs that the laws of lines can see."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.faults.bulk_backlog import CHAT, COMPLETION, BatchLine, LineBook, bulk_held, check_results
from tests.faults.run import run_scenario
from tests.faults.scenario import Scenario, read_scenarios, with_bulk

BOOK = LineBook(1, "", 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", read_scenarios(), ids=lambda scenario: scenario.name)
def test_every_fault_with_batches_beside(scenario: Scenario) -> None:
    """The whole matrix; bounds on times are those of a machine that does nothing else, and are not checked here."""
    checks = msgspec.structs.replace(
        scenario.checks, recovery_p95_s=None, free_median_s=None, free_most_s=None
    )
    load = msgspec.structs.replace(scenario.load, each=min(20, scenario.load.each))
    result = run_scenario(with_bulk(msgspec.structs.replace(scenario, checks=checks, load=load), 40))
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.broken, "\n".join(result.broken)
    assert result.figures["bulk_lines"] > 0


# ---- the laws can see

Rows = dict[str, list[dict[str, Any]]]


def answer_to(line: BatchLine) -> tuple[int, dict[str, Any]]:
    """What a deployment would answer."""
    if line.ask is None:
        return 400, {"error": {"code": "invalid_value"}}
    expected = BOOK._book.expected(line.ask)
    text = {"text": expected.text} if "prompt" in line.body else {"message": {"content": expected.text}}
    usage = {"prompt_tokens": len(line.ask.prompt), "completion_tokens": expected.completion_tokens}
    return 200, {"choices": [text | {"finish_reason": expected.finish}], "usage": usage}


def right_rows(url: str) -> Rows:
    rows: Rows = {"output": [], "error": []}
    for number, line in enumerate(BOOK.lines[url].values()):
        status, body = answer_to(line)
        response = {"status_code": status, "body": body}
        rows["output" if line.ask else "error"].append(
            {"id": f"line-{number}", "custom_id": line.custom_id, "response": response}
        )
    return rows


def alter_text(rows: Rows) -> None:
    rows["output"][0]["response"]["body"]["choices"][0] |= {"text": "x", "message": {"content": "x"}}


def answer_malformed(rows: Rows) -> None:
    rows["error"][0]["response"]["status_code"] = 500


@pytest.mark.parametrize("url", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: None, []),
        (lambda rows: rows["output"].pop(), ["B1 lines without a result"]),
        (
            lambda rows: rows["output"].append(rows["output"][0] | {"id": "other"}),
            ["B1 lines with two results"],
        ),
        (
            lambda rows: rows["output"].append(rows["output"][0]),
            ["B1 lines with two results", "B1 two results have the same id"],
        ),
        (lambda rows: rows["error"].append(rows["output"].pop()), ["B1", "is in the error file"]),
        (lambda rows: rows["output"][0].update(custom_id="x"), ["B1 lines that were never asked"]),
        (alter_text, ["B2", "'x'"]),
        (answer_malformed, ["B2", "to a malformed line"]),
    ],
)
def test_results_that_must_not_be_are_seen(url: str, spoil: Callable[[Rows], None], words: list[str]) -> None:
    rows = right_rows(url)
    spoil(rows)
    files = {name: b"".join(json.dumps(row).encode() + b"\n" for row in part) for name, part in rows.items()}
    broken = check_results(BOOK, BOOK.lines[url], files)
    assert bool(broken) == bool(words)
    assert all(any(word in what for what in broken) for word in words), broken


def test_torn_files_are_seen() -> None:
    rows = right_rows(CHAT)
    files = {name: b"".join(json.dumps(row).encode() + b"\n" for row in part) for name, part in rows.items()}
    whole = files["output"]
    for torn in (whole[:-1], whole[:-20], whole[30:], whole.replace(b'"id"', b'id"', 1)):
        assert any("torn" in what for what in check_results(BOOK, BOOK.lines[CHAT], files | {"output": torn}))


@pytest.mark.parametrize("book", ["slabs_lent", "bulk_running", "lines", "sequences", "open"])
def test_what_is_held_for_bulk_work_is_seen(book: str) -> None:
    stats = {"slabs_lent": 0, "bulk_running": 0, "bulk_waiting": 0}
    state: dict[str, Any] = {
        "workers": [{"worker": "decode-0", "stats": stats}],
        "bulk": {"waiting": 0, "running": 0, "tokens": {"prompt": 5}},
        "batches": {"lines": {"waiting": 0, "running": 0, "completed": 9}, "open": []},
    }
    assert not bulk_held(state)
    match book:
        case "lines":
            state["batches"]["lines"]["running"] = 1
        case "sequences":
            state["bulk"]["running"] = 1
        case "open":
            state["batches"]["open"] = [{"id": "batch_1"}]
        case _:
            stats[book] = 1
    assert bulk_held(state)
