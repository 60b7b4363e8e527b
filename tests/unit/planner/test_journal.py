"""The decision log: what is written is read, and what cannot be read is told in words; `diptych replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.errors import ConfigError
from planner.decide import Decision, Flip, Policy, Situation, Start, Stop, Worker
from planner.detect import Shift
from planner.journal import Failed, Head, Heard, Journal, Line, Look, lives, read
from planner.known import Fleet, Judged
from planner.replan import Replanner
from planner.terms import DECODE, PREFILL
from planner.windows import Bucket, Mix
from services.cli.main import app
from tests.unit.planner.judges import Rates

MIX = Mix((("", 40, 50, 2.0),), 0.25)
LOOK = Look(
    12.5,
    (Bucket(0.0, 10.0, (("chat", 40, 3),), (("chat", 40, 50, 2),), 2, 1, 300, 64),),
    (Worker("a", PREFILL, load=2.5), Worker("b", DECODE)),
    Shift("rate", "chat", 12.0, 2.0, 1.0, 3.0, 1.5),
    Situation(12.5, (Worker("a", PREFILL),), MIX, 3.0, 4.0, 1.5, ("b",), False),
    (Judged(Fleet(1, 2), 3.0, 0.97),),
    Decision(
        12.5, "shift", Fleet(1, 1), Fleet(1, 2), (Flip("a", DECODE), Start(PREFILL, 1), Stop("b")), "because"
    ),
)


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path)
    lines: list[Line] = [Head(Policy(budget=4), {"about": "x"}, 3.0), LOOK, Failed(13.0, "a", "no")]
    for line in lines:
        journal.write(line)
    assert path.read_bytes().count(b"\n") == 3, "a crash loses nothing"
    journal.close()
    journal.close()
    assert list(read(path)) == lines
    journal.write(LOOK)  # after its end it goes nowhere
    Journal().write(LOOK)


def test_a_log_that_is_there_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines: list[Line] = [Head(Policy(budget=4)), LOOK]
    for _ in range(2):
        journal = Journal(path)
        for line in lines:
            journal.write(line)
        journal.close()
        with path.open("ab") as file:
            file.write(b'{"type":"look","at_s":' + b"1" * 70_000)  # a crash: the next one takes it away
    Journal(path).close()
    assert list(read(path)) == lines * 2
    assert [list(life) for life in lives(read(path))] == [lines, lines]


def test_a_log_that_another_deployment_writes_is_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = Journal(path)
    first.write(Head(Policy(budget=4)))
    with pytest.raises(ConfigError) as refused:
        Journal(path)
    assert "another deployment" in refused.value.why
    first.write(LOOK)
    first.close()
    Journal(path).close()
    nowhere = [Journal("/dev/null"), Journal("/dev/null")]  # no file, no owner
    for one in nowhere:
        one.close()
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    "content", [b"precious\n", b"\xff\x00" * 2_000_000, b'{"type":"head","version":2}\n']
)
def test_what_is_no_log_is_not_appended_to(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be opened") as told:
        Journal(path)
    assert "not a decision log" in told.value.why and len(told.value.lines()) <= 6
    assert path.read_bytes() == content


def test_what_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decision log cannot be opened"):
        Journal(tmp_path / "no" / "log.jsonl")
    with pytest.raises(ConfigError, match="no such decision log"):
        list(read(tmp_path / "log.jsonl"))
    path = tmp_path / "cut.jsonl"
    journal = Journal(path)
    journal.write(Head(Policy(budget=4)))
    journal.write(LOOK)
    journal.close()
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError) as caught:
        list(read(path))
    assert "line 2" in "\n".join(caught.value.lines())
    assert len(caught.value.lines()) <= 6


def test_a_judge_that_heard_answers_only_what_was_asked() -> None:
    heard = Heard()
    heard.hear(LOOK.judged)
    assert heard.attainment(Fleet(1, 2), MIX, 3.0, 1.0) == 0.97
    with pytest.raises(KeyError):
        heard.attainment(Fleet(2, 2), MIX, 3.0, 1.0)


def written(path: Path) -> Path:
    """The log of a replanner that finds that its fleet is too small."""
    journal = Journal(path)
    replanner = Replanner(Policy(budget=4, window_s=20.0, bucket_s=1.0), Rates(write=100.0), journal)
    for second in range(1, 40):
        for _ in range(4):
            replanner.arrived(second, 100)
            replanner.ended(second, 100, 50)
        replanner.tick(float(second), [Worker("p", PREFILL), Worker("d", DECODE)])
    journal.close()
    return path


def test_replay_says_that_the_same_comes_out(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    told = CliRunner().invoke(app, ["replay", str(path)])
    assert told.exit_code == 0, told.output
    assert "start decode" in told.output
    assert "come out as they are written" in told.output
    row = json.loads(CliRunner().invoke(app, ["replay", str(path), "--json"]).output)
    assert row["decisions"] == row["same"] > 0
    assert row["different"] == []


def test_each_start_of_a_log_is_replayed_for_itself(tmp_path: Path) -> None:
    once = json.loads(
        CliRunner().invoke(app, ["replay", str(written(tmp_path / "once.jsonl")), "--json"]).output
    )
    twice = written(written(tmp_path / "log.jsonl"))
    told = CliRunner().invoke(app, ["replay", str(twice)])
    assert told.exit_code == 0 and "start 1 of 2" in told.output and "start 2 of 2" in told.output
    row = json.loads(CliRunner().invoke(app, ["replay", str(twice), "--json"]).output)
    assert (row["lives"], row["same"]) == (2, 2 * once["same"]) and not row["different"]


def test_replay_says_what_does_not(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    path.write_text(path.read_text().replace('"role":"decode","count":', '"role":"prefill","count":'))
    told = CliRunner().invoke(app, ["replay", str(path)])
    assert told.exit_code == 1
    assert "DIFFERENT now: start decode" in told.output
    row = json.loads(CliRunner().invoke(app, ["replay", str(path), "--json"]).output)
    assert row["different"][0]["now"] != row["different"][0]["written"]


def test_replay_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("")
    refused = CliRunner().invoke(app, ["replay", str(path)])
    assert isinstance(refused.exception, ConfigError)
    assert "it is empty" in str(refused.exception.lines())


@pytest.mark.parametrize(
    ("head", "said"),
    [(Head(Policy(budget=4), version=2), "version 2"), (Head(Policy(4, bucket_s=0.0)), "not above 0")],
)
def test_a_log_of_another_kind_is_not_replayed(head: Head, said: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path)
    journal.write(head)
    journal.close()
    with pytest.raises(ConfigError) as told:
        list(read(path))
    assert said in told.value.why and "line 1" in told.value.why
