"""The programs beside what is measured: they compute at their level, and end with the benchmark."""

from __future__ import annotations

import time

import psutil

from benchmarks.load.busy import busy_processes


def computing_children(others: list[psutil.Process]) -> list[psutil.Process]:
    """Children of this process, without `others`, that have used a core for a moment."""
    children = psutil.Process().children()
    return [child for child in children if child not in others and child.cpu_times().user > 0.1]


def test_busy_processes_compute_until_the_context_is_left() -> None:
    others = psutil.Process().children()
    with busy_processes(2, 19):
        deadline_s = time.monotonic() + 60
        while len(found := computing_children(others)) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert [child.nice() for child in found] == [19, 19]
    assert not any(child.is_running() for child in found)
