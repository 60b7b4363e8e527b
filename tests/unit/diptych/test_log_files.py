"""Logs are bounded, whoever writes to them, and keep their last lines."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych.logs.log_files import open_log, rotate_record
from planner.replan.decide import ReplanPolicy
from planner.replan.journal import Journal, JournalHead
from services.gateway.metrics.request_log import RequestLogFile
from services.host.supervision.supervisor import Supervisor
from services.worker.step_log import MAX_LOGS_KEPT, StepLog
from tests.support.waiting import wait_for

MAX_BYTES = 10_000
PRINTS = """
import os, signal, time
for i in range(5000):  # as a library does that knows nothing of our logging
    os.write(2, b"line %%d of what a library prints\\n" %% i)
while os.fstat(2).st_size > %d:
    time.sleep(0.01)
os.write(2, b"the last line\\n")
signal.pause()
"""


def lines(first: bytes, count: int = MAX_BYTES // 10) -> bytes:
    return b"".join(b"%s %07d\n" % (first, number) for number in range(count + 1))


def test_a_log_that_others_print_to_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor bounds it, without a word of the child's own logging."""
    monkeypatch.setattr("services.host.supervision.supervisor.CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr("services.host.supervision.supervisor.MAX_LOG_BYTES", MAX_BYTES)
    path = tmp_path / "logs" / "worker.log"
    older = path.with_name("worker.log.old")
    one = Supervisor("worker", [sys.executable, "-c", PRINTS % MAX_BYTES], b"{}", path)
    one.start()
    try:
        wait_for(lambda: path.exists() and path.read_bytes().endswith(b"the last line\n"), 60.0)
    finally:
        one.stop()
    assert path.stat().st_size <= 2 * MAX_BYTES and 0 < older.stat().st_size <= MAX_BYTES
    assert older.read_bytes().startswith(b"line ") and older.read_bytes().endswith(b" prints\n")
    assert sorted(tmp_path.rglob("*")) == [path.parent, path, older]


def test_a_log_that_was_left_large_is_put_aside_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.with_name("worker.log.1").write_bytes(b"another program's")
    for number in range(3):
        with open_log(path, MAX_BYTES) as log:
            log.write(lines(b"%d" % number))
    older = path.with_name("worker.log.old").read_bytes()
    assert path.read_bytes() == lines(b"2")
    assert lines(b"1").endswith(older) and MAX_BYTES // 2 < len(older) <= MAX_BYTES
    assert path.with_name("worker.log.1").read_bytes() == b"another program's"


def test_of_a_huge_log_no_more_is_kept_than_of_another(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    with path.open("wb") as log:
        log.truncate(8 << 30)
        log.seek(0, os.SEEK_END)
        log.write(lines(b"0"))
    began_s = time.process_time()
    open_log(path, MAX_BYTES).close()
    assert time.process_time() - began_s < 1.0
    assert path.stat().st_size == 0 and path.with_name("worker.log.old").stat().st_size <= MAX_BYTES


def test_a_log_is_not_moved_through_a_link(tmp_path: Path) -> None:
    path, mine = tmp_path / "worker.log", tmp_path / "mine"
    mine.write_text("precious")
    path.with_name("worker.log.old").symlink_to(mine)
    path.write_bytes(lines(b"0"))
    open_log(path, MAX_BYTES).close()
    assert mine.read_text() == "precious" and path.stat().st_size == 0


def test_the_request_log_is_bounded(tmp_path: Path) -> None:
    path, older = tmp_path / "requests", tmp_path / "requests.old"
    file = RequestLogFile(str(path), MAX_BYTES)

    def written(count: int) -> bool:
        return file.outcomes["written"] == count

    for number in range(3):
        file.write(b"%d" % number * (MAX_BYTES + 1) + b"\n")
        wait_for(functools.partial(written, number + 1), 60.0)
    file.write(b"the last line\n")
    file.close()
    assert file.outcomes == {"written": 4, "dropped": 0, "failed": 0}
    assert path.read_bytes() == b"the last line\n" and older.read_bytes()[:1] == b"2"


def test_the_log_of_steps_is_bounded(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path), "decode-0", MAX_BYTES)
    for number in range(3):
        log.write_line("step", "x" * MAX_BYTES, number)
        log.flush()
    log.write_line("the last line")
    log.close()
    (path,) = tmp_path.glob("*.steps")
    assert path.read_bytes() == b'["the last line"]\n'
    assert path.with_name(f"{path.name}.old").read_bytes().endswith(b",2]\n")


def test_the_logs_of_steps_that_a_crash_loop_leaves_are_few(tmp_path: Path) -> None:
    other = tmp_path / "decode-1.7.steps"
    for number, path in enumerate(
        [other, *(tmp_path / f"decode-0.{pid}.steps" for pid in range(100001, 100031))]
    ):
        path.write_text("[]\n")
        os.utime(path, (number, number))
    path.with_name(f"{path.name}.old").write_text("[]\n")
    StepLog(str(tmp_path), "decode-0").close()
    left = {path.name for path in tmp_path.glob("decode-0.*.steps")}
    newest = {f"decode-0.{pid}.steps" for pid in range(100031 - MAX_LOGS_KEPT + 1, 100031)}
    assert left == newest | {f"decode-0.{os.getpid()}.steps"}
    assert other.exists() and path.with_name(f"{path.name}.old").exists()


def test_the_decision_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.replan.journal.MAX_RECORD_BYTES", 100)
    path = tmp_path / "decisions"
    for number in range(2):
        journal = Journal(path)
        journal.write(JournalHead(ReplanPolicy(budget=4), {"model": f"{number}" * 100}, 0.0))
        journal.close()
    assert b"000" in path.with_name("decisions.old").read_bytes() and b"111" in path.read_bytes()
    assert b"000" not in path.read_bytes()


def test_what_is_no_file_is_not_renamed() -> None:
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert not rotate_record("nowhere", process.stdout.fileno(), -1)
