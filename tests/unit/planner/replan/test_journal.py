"""The decision log: what is written is read, and what cannot be read is explained in words; `diptych replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.errors import ConfigError
from planner.replan.attainment_cache import EvaluatedFleet, FleetSize
from planner.replan.change_detection import TrafficShift
from planner.replan.decide import (
    FleetDecision,
    FleetSituation,
    FleetWorker,
    Flip,
    ReplanPolicy,
    Start,
    Stop,
)
from planner.replan.journal import (
    FailedAction,
    Journal,
    JournalHead,
    JournalLine,
    RecordedEvaluator,
    TrafficReview,
    read_journal,
    split_runs,
)
from planner.replan.replanner import Replanner
from planner.replan.traffic_windows import LengthMix, TrafficBucket
from planner.types import DECODE, PREFILL
from services.cli.main import app
from tests.unit.planner.replan.closed_form import Rates

MIX = LengthMix((("", 40, 50, 2.0),), 0.25)
LOOK = TrafficReview(
    12.5,
    (TrafficBucket(0.0, 10.0, (("chat", 40, 3),), (("chat", 40, 50, 2),), 2, 1, 300, 64),),
    (FleetWorker("a", PREFILL, load=2.5), FleetWorker("b", DECODE)),
    TrafficShift("rate", "chat", 12.0, 2.0, 1.0, 3.0, 1.5),
    FleetSituation(12.5, (FleetWorker("a", PREFILL),), MIX, 3.0, 4.0, 1.5, ("b",), False),
    (EvaluatedFleet(FleetSize(1, 2), 3.0, 0.97),),
    FleetDecision(
        12.5,
        "shift",
        FleetSize(1, 1),
        FleetSize(1, 2),
        (Flip("a", DECODE), Start(PREFILL, 1), Stop("b")),
        "because",
    ),
)


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path)
    lines: list[JournalLine] = [
        JournalHead(ReplanPolicy(budget=4), {"about": "x"}, 3.0),
        LOOK,
        FailedAction(13.0, "a", "no"),
    ]
    for line in lines:
        journal.write(line)
    assert path.read_bytes().count(b"\n") == 3, "a crash loses nothing"
    journal.close()
    journal.close()
    assert list(read_journal(path)) == lines
    journal.write(LOOK)  # after its end it goes nowhere
    Journal().write(LOOK)


def test_a_log_that_is_there_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines: list[JournalLine] = [JournalHead(ReplanPolicy(budget=4)), LOOK]
    for _ in range(2):
        journal = Journal(path)
        for line in lines:
            journal.write(line)
        journal.close()
        with path.open("ab") as file:
            file.write(b'{"type":"look","at_s":' + b"1" * 70_000)  # a crash: the next one takes it away
    Journal(path).close()
    assert list(read_journal(path)) == lines * 2
    assert [list(life) for life in split_runs(read_journal(path))] == [lines, lines]


def test_a_log_that_another_deployment_writes_is_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = Journal(path)
    first.write(JournalHead(ReplanPolicy(budget=4)))
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
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        Journal(path)
    assert "not a decision log" in caught.value.why and len(caught.value.lines()) <= 6
    assert path.read_bytes() == content


def test_what_cannot_be_written_or_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decision log cannot be opened"):
        Journal(tmp_path / "no" / "log.jsonl")
    with pytest.raises(ConfigError, match="no such decision log"):
        list(read_journal(tmp_path / "log.jsonl"))
    path = tmp_path / "cut.jsonl"
    journal = Journal(path)
    journal.write(JournalHead(ReplanPolicy(budget=4)))
    journal.write(LOOK)
    journal.close()
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError) as caught:
        list(read_journal(path))
    assert "line 2" in "\n".join(caught.value.lines())
    assert len(caught.value.lines()) <= 6


def test_a_recorded_evaluator_answers_only_what_was_asked() -> None:
    recorded = RecordedEvaluator()
    recorded.load_answers(LOOK.checked)
    assert recorded.attainment(FleetSize(1, 2), MIX, 3.0, 1.0) == 0.97
    with pytest.raises(KeyError):
        recorded.attainment(FleetSize(2, 2), MIX, 3.0, 1.0)


def written(path: Path) -> Path:
    """The log of a replanner that finds that its fleet is too small."""
    journal = Journal(path)
    replanner = Replanner(ReplanPolicy(budget=4, window_s=20.0, bucket_s=1.0), Rates(write=100.0), journal)
    for second in range(1, 40):
        for _ in range(4):
            replanner.arrived(second, 100)
            replanner.ended(second, 100, 50)
        replanner.tick(float(second), [FleetWorker("p", PREFILL), FleetWorker("d", DECODE)])
    journal.close()
    return path


def test_replay_says_that_the_same_comes_out(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 0, result.output
    assert "start decode" in result.output
    assert "come out as they are written" in result.output
    row = json.loads(CliRunner().invoke(app, ["replay", str(path), "--json"]).output)
    assert row["decisions"] == row["same"] > 0
    assert row["different"] == []


def test_each_start_of_a_log_is_replayed_for_itself(tmp_path: Path) -> None:
    once = json.loads(
        CliRunner().invoke(app, ["replay", str(written(tmp_path / "once.jsonl")), "--json"]).output
    )
    twice = written(written(tmp_path / "log.jsonl"))
    result = CliRunner().invoke(app, ["replay", str(twice)])
    assert result.exit_code == 0 and "start 1 of 2" in result.output and "start 2 of 2" in result.output
    row = json.loads(CliRunner().invoke(app, ["replay", str(twice), "--json"]).output)
    assert (row["lives"], row["same"]) == (2, 2 * once["same"]) and not row["different"]


def test_replay_says_what_does_not(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    path.write_text(path.read_text().replace('"role":"decode","count":', '"role":"prefill","count":'))
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 1
    assert "DIFFERENT now: start decode" in result.output
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
    [
        (JournalHead(ReplanPolicy(budget=4), version=2), "version 2"),
        (JournalHead(ReplanPolicy(4, bucket_s=0.0)), "not above 0"),
    ],
)
def test_a_log_of_another_kind_is_not_replayed(head: JournalHead, said: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path)
    journal.write(head)
    journal.close()
    with pytest.raises(ConfigError) as caught:
        list(read_journal(path))
    assert said in caught.value.why and "line 1" in caught.value.why
