"""A thread that does not come round: told when it is unusual, ended when it is hopeless, never after a mere pause."""

from __future__ import annotations

from diptych.errors import DiptychError
from diptych.messages import Stats
from worker.pulse import Pulse
from worker.shell import Books


class Time:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(**more: float) -> tuple[Time, Pulse, list[DiptychError]]:
    time, told = Time(), list[DiptychError]()
    return time, Pulse(told.append, "w-0", clock=time, **more), told


def look_for(time: Time, pulse: Pulse, seconds: float, every_s: float = 0.5) -> float:
    """Look again and again for so long; the last answer."""
    answer = pulse.look()
    for _ in range(round(seconds / every_s)):
        time.now_s += every_s
        answer = pulse.look()
    return answer


def test_a_thread_that_comes_round_is_not_stuck() -> None:
    time, pulse, told = make(stuck_s=3.0, limit_s=60.0)
    for _ in range(1000):
        pulse.turn()
        assert look_for(time, pulse, 1.0) == 0.0
    assert not told


def test_one_that_hangs_is_told_and_then_ended() -> None:
    time, pulse, told = make(stuck_s=3.0, limit_s=60.0)
    pulse.turn()
    assert look_for(time, pulse, 3.0) == 0.0
    assert look_for(time, pulse, 1.0) == 4.0
    assert look_for(time, pulse, 56.0) == 60.0 and not told
    look_for(time, pulse, 1.0)
    assert "w-0 hangs" in told[0].what and "60 s" in told[0].why


def test_what_has_taken_long_before_may_take_long_again() -> None:
    time, pulse, told = make(stuck_s=3.0, limit_s=60.0)
    pulse.turn()
    time.now_s += 10.0  # a long step
    pulse.turn()
    assert look_for(time, pulse, 40.0) == 0.0
    assert look_for(time, pulse, 1.0) == 41.0
    assert look_for(time, pulse, 159.0) == 200.0 and not told
    look_for(time, pulse, 1.0)
    assert told


def test_a_process_that_was_stopped_has_not_hung() -> None:
    time, pulse, told = make(stuck_s=3.0, limit_s=60.0)
    pulse.turn()
    pulse.look()
    time.now_s += 3600.0  # nobody looked meanwhile: all threads stood
    assert pulse.look() == 0.0 and not told
    pulse.turn()
    assert pulse.look() == 0.0


def test_the_books_tell_it() -> None:
    time, pulse, _ = make(stuck_s=3.0)
    books = Books(pulse)
    books.turn()
    books.stats = Stats(steps=7)
    assert books.read() is books.stats
    for _ in range(10):
        time.now_s += 1.0
        told = books.read()
    assert told == Stats(steps=7, stuck_s=10.0)
    assert Books().read() == Stats()
