"""A thread that does not come round: reported when that is unusual, ended when hopeless, never after a mere pause."""

from __future__ import annotations

from typing import Any

from diptych.errors import DiptychError
from diptych.messages import WorkerStats
from worker.loop import LatestStats
from worker.watchdog import EngineWatchdog


class ManualClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(**more: Any) -> tuple[ManualClock, EngineWatchdog, list[DiptychError]]:
    time, errors = ManualClock(), list[DiptychError]()
    return time, EngineWatchdog(errors.append, "w-0", clock=time, **more), errors


def look_for(time: ManualClock, pulse: EngineWatchdog, seconds: float, every_s: float = 0.5) -> float:
    """Look again and again for so long; the last answer."""
    answer = pulse.check_stuck()
    for _ in range(round(seconds / every_s)):
        time.now_s += every_s
        answer = pulse.check_stuck()
    return answer


def test_a_thread_that_comes_round_is_not_stuck() -> None:
    time, pulse, errors = make(stuck_s=3.0, limit_s=60.0)
    for _ in range(1000):
        pulse.begin_round()
        assert look_for(time, pulse, 1.0) == 0.0
    assert not errors


def test_one_that_hangs_is_reported_and_then_ended() -> None:
    time, pulse, errors = make(stuck_s=3.0, limit_s=60.0)
    pulse.begin_round()
    assert look_for(time, pulse, 3.0) == 0.0
    assert look_for(time, pulse, 1.0) == 4.0
    assert look_for(time, pulse, 56.0) == 60.0 and not errors
    look_for(time, pulse, 1.0)
    assert "w-0 hangs" in errors[0].what and "60 s" in errors[0].why


def test_what_has_taken_long_before_may_take_long_again() -> None:
    time, pulse, errors = make(stuck_s=3.0, limit_s=60.0)
    pulse.begin_round()
    time.now_s += 10.0  # a long step
    pulse.begin_round()
    assert look_for(time, pulse, 40.0) == 0.0
    assert look_for(time, pulse, 1.0) == 41.0
    assert look_for(time, pulse, 159.0) == 200.0 and not errors
    look_for(time, pulse, 1.0)
    assert errors


def test_a_process_that_was_stopped_has_not_hung() -> None:
    time, pulse, errors = make(stuck_s=3.0, limit_s=60.0)
    pulse.begin_round()
    pulse.check_stuck()
    time.now_s += 3600.0  # nobody looked meanwhile: all threads stood
    assert pulse.check_stuck() == 0.0 and not errors
    pulse.begin_round()
    assert pulse.check_stuck() == 0.0


def test_the_books_tell_it() -> None:
    time, pulse, _ = make(stuck_s=3.0)
    books = LatestStats(pulse)
    books.begin_round()
    books.stats = WorkerStats(steps=7)
    assert books.read_stats() is books.stats
    for _ in range(10):
        time.now_s += 1.0
        stats = books.read_stats()
    assert stats == WorkerStats(steps=7, stuck_s=10.0)
    assert LatestStats().read_stats() == WorkerStats()


def test_a_round_that_waits_for_a_slow_disk_is_not_stuck_while_it_reads() -> None:
    reads = [0]
    time, pulse, errors = make(stuck_s=3.0, limit_s=60.0, progress=lambda: reads[0])
    pulse.begin_round()
    for _ in range(100):
        reads[0] += 1
        assert look_for(time, pulse, 2.5) == 0.0
    assert look_for(time, pulse, 57.0) > 3.0 and not errors
    look_for(time, pulse, 2.0)
    assert "w-0 hangs" in errors[0].what
