"""What a gateway that was killed leaves behind about the lines in flight."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from services.gateway.batches.storage import running_lines
from services.gateway.batches.storage.running_lines import MAX_RECORDS, RECORD, RunningLines

ID = "batch_0123456789abcdef01234567"


def opened(path: Path) -> RunningLines:
    lines = RunningLines()
    lines.open(path)
    return lines


def test_lines_that_ran_have_a_crash_more_until_they_end(tmp_path: Path) -> None:
    path = tmp_path / "running"
    first = opened(path)
    for number in (1, 2, 3):
        first.add_line(ID, number)
    first.end_line(ID, 2, waits=False)
    second = opened(path)
    assert [second.count_crashes(ID, number) for number in (1, 2, 3)] == [1, 0, 1]
    second.add_line(ID, 1)
    second.add_line(ID, 3)
    second.end_line(ID, 3, waits=True)
    third = opened(path)
    assert [third.count_crashes(ID, number) for number in (1, 3)] == [2, 1]
    third.end_line(ID, 1, waits=False)
    assert opened(path).count_crashes(ID, 1) == 0
    third.keep_batches({"another"})
    assert opened(path).count_crashes(ID, 3) == 0


def test_a_line_that_only_waits_again_leaves_nothing(tmp_path: Path) -> None:
    lines = opened(tmp_path / "running")
    lines.add_line(ID, 1)
    lines.end_line(ID, 1, waits=True)
    assert opened(tmp_path / "running").count_crashes(ID, 1) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_file_says_what_a_model_says(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random histories of starts, ends and kills."""
    monkeypatch.setattr(running_lines, "MAX_RECORDS", 64)
    draw, path = random.Random(seed), tmp_path / "running"
    lines, crashes, running = opened(path), Counter[int](), set[int]()
    for _ in range(2000):
        number, event = draw.randrange(30), draw.randrange(100)
        if event < 45:
            lines.add_line(ID, number)
            running.add(number)
        elif event < 95 and number in running:
            running.discard(number)
            waits = draw.random() < 0.5
            lines.end_line(ID, number, waits)
            if not waits:
                del crashes[number]
        elif event == 99:
            crashes.update(running)
            running.clear()
            lines = opened(path)
        assert [lines.count_crashes(ID, one) for one in range(30)] == [
            min(255, crashes[one]) for one in range(30)
        ]
    assert path.stat().st_size <= 64 * RECORD.size


def test_a_file_that_is_torn_or_cannot_be_opened_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "running").write_bytes(b"\xff" * (RECORD.size + 7))
    lines = opened(tmp_path / "running")
    lines.add_line(ID, 1)
    assert opened(tmp_path / "running").count_crashes(ID, 1) == 1
    nothing = opened(tmp_path / "missing" / "running")
    for number in range(MAX_RECORDS + 1):
        nothing.add_line(ID, number)
    nothing.end_line(ID, MAX_RECORDS, waits=False)
    nothing.close()
