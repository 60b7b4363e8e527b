"""The thread that computes units of bulk work: its priority, and whose else it is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest

from tests.unit.worker.thread_priority import niceness
from worker.unit_thread import MAX_NICE, UNIT_NICE, UnitThread


def test_units_run_below_the_thread_that_waits_for_them() -> None:
    before, thread = niceness(), UnitThread()
    assert thread.run(niceness) == min(MAX_NICE, before + UNIT_NICE)
    assert niceness() == before, "an online step has its priority at once"
    assert (
        thread.run(threading.get_native_id)
        == thread.run(threading.get_native_id)
        != threading.get_native_id()
    )


def test_what_a_unit_raises_is_raised() -> None:
    thread = UnitThread()
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)
    assert thread.run(lambda: 1) == 1


def test_a_priority_that_is_refused_is_said_once_and_units_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    before, thread = niceness(), UnitThread()
    with caplog.at_level(logging.WARNING):
        assert [thread.run(niceness) for _ in range(3)] == [before] * 3
    assert len(caplog.messages) == 1 and "Operation not permitted" in caplog.messages[0]


def test_no_privilege_is_needed() -> None:
    """A process that may not raise its priority has the same two threads as one that may."""
    if os.geteuid():
        pytest.skip("the test process has no privileges to give up")
    program = """
import os, sys
from tests.unit.worker.thread_priority import niceness
from worker.unit_thread import UnitThread
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
thread = UnitThread()
print(niceness(), thread.run(niceness), niceness())
try:
    os.setpriority(os.PRIO_PROCESS, 0, -1)
except PermissionError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    before = niceness()
    expected = [before, min(MAX_NICE, before + UNIT_NICE), before, "refused"]
    assert done.stdout.split() == [str(one) for one in expected], done.stderr
