"""The thread of a tier: what somebody waits for goes first, and what fails or stands still costs nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.support.waiting import wait_for
from worker.tiers.tier_thread import PAUSE_S, STUCK_S, TierThread


class Bench:
    def __init__(self, store: Callable[[list[int]], None] | None = None, max_chunks: int = 8) -> None:
        self.now_s, self.done = 0.0, list[object]()
        self.gate = threading.Event()
        self.thread = TierThread[list[int]]("host", store or self.done.append, max_chunks, lambda: self.now_s)
        self.thread.open()

    def is_stuck(self) -> bool:
        return self.thread.is_stuck

    def block(self) -> None:
        """Let the thread stand still until `gate` is set."""
        begun = threading.Event()

        def job() -> None:
            begun.set()
            self.gate.wait()

        self.thread.ask(job)
        begun.wait()


def test_what_somebody_waits_for_goes_first_and_the_oldest_of_too_many_is_dropped() -> None:
    bench = Bench()
    bench.block()
    for start in range(0, 12, 3):
        bench.thread.add_batch([start, start + 1, start + 2])
    bench.thread.ask(lambda: bench.done.append("asked"))
    assert bench.thread.num_waiting == 6 and bench.thread.num_dropped == 6
    bench.gate.set()
    wait_for(lambda: len(bench.done) == 3, 10)
    assert bench.done == ["asked", [6, 7, 8], [9, 10, 11]] and bench.thread.num_waiting == 0
    bench.thread.close()
    bench.thread.add_batch([1])
    assert bench.thread.num_dropped == 7 and not bench.thread.is_alive


def test_a_tier_that_stands_still_is_known_as_such_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.tiers.tier_thread.CLOSE_S", 0.05)
    bench = Bench()
    bench.block()
    assert not bench.is_stuck()
    bench.now_s += 2 * STUCK_S
    assert bench.is_stuck()
    bench.thread.close()
    assert bench.thread.is_alive, "it is a daemon, which ends with the process"
    bench.gate.set()
    wait_for(lambda: not bench.thread.is_alive, 10)


def test_failures_pause_storing_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[list[int]] = []

    def fail(batch: list[int]) -> None:
        tries.append(batch)
        raise OSError(28, "No space left on device")

    bench = Bench(fail)
    bench.thread.add_batch([1, 2])
    wait_for(lambda: bench.thread.num_failed == 1, 10)
    bench.thread.add_batch([3])
    assert bench.thread.is_paused and bench.thread.num_dropped == 1
    answers = list[int]()
    bench.thread.ask(lambda: answers.append(1))
    wait_for(lambda: answers == [1], 10)
    bench.now_s += PAUSE_S
    bench.thread.add_batch([4])
    wait_for(lambda: bench.thread.num_failed == 2, 10)
    assert tries == [[1, 2], [4]] and caplog.text.count("No space left") == 1
    bench.thread.close()
