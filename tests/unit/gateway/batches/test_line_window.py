"""Lines give way while requests miss their SLOs, and come back step by step."""

from __future__ import annotations

import random

import pytest

from services.gateway.batches.line_window import (
    CUT_PAUSE_S,
    GROW_PER_S,
    HOLD_S,
    MAX_HOLD_S,
    RECENT_S,
    LineWindow,
)

ALL = 64


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def window(clock: SetClock) -> LineWindow:
    return LineWindow(0.9, clock)


def miss_until_none_is_left(window: LineWindow, clock: SetClock) -> None:
    while window.share:
        clock.now_s += CUT_PAUSE_S
        window.record_outcome(False)
        window.record_outcome(False)


def test_all_lines_may_run_while_requests_meet_their_slos(window: LineWindow, clock: SetClock) -> None:
    for _ in range(1000):
        clock.now_s += 0.1
        assert not window.record_outcome(True)
    assert window.num_lines(ALL) == ALL and window.cuts == 0


def test_lines_may_use_half_of_the_misses_that_are_allowed(window: LineWindow, clock: SetClock) -> None:
    """Of 100 requests with an attainment of 0.9 ten may miss, and five beside lines."""
    for number in range(100):
        clock.now_s += RECENT_S / 200
        assert not window.record_outcome(number % 20 != 19)
    assert window.num_lines(ALL) == ALL
    assert window.record_outcome(False) and window.num_lines(ALL) == ALL // 2


def test_one_miss_of_few_requests_is_no_reason(window: LineWindow, clock: SetClock) -> None:
    for _ in range(5):
        assert not window.record_outcome(False)
        clock.now_s += RECENT_S + 1
    assert window.cuts == 0


def test_each_cut_halves_until_none_is_left(window: LineWindow, clock: SetClock) -> None:
    found = [window.num_lines(ALL)]
    while window.share:
        clock.now_s += CUT_PAUSE_S
        assert not window.record_outcome(False), "the first miss after a cut is one miss"
        assert window.record_outcome(False)
        found.append(window.num_lines(ALL))
    assert found == [64, 32, 16, 8, 4, 2, 1, 0]


def test_requests_that_end_together_are_one_reason(window: LineWindow, clock: SetClock) -> None:
    """Say the fourteen answers of one request, or all those of a worker that was killed."""
    for _ in range(14):
        window.record_outcome(False)
        clock.now_s += CUT_PAUSE_S / 20
    assert window.cuts == 1 and window.num_lines(ALL) == ALL // 2


def test_a_cut_halves_what_is_used(window: LineWindow, clock: SetClock) -> None:
    """Four lines of a small batch must not go on until the share of all lines is below four."""
    window.record_outcome(False, 4 / ALL)
    assert window.record_outcome(False, 4 / ALL) and window.num_lines(ALL) == 2
    clock.now_s += HOLD_S + 1.0
    assert window.num_lines(ALL) > 4


def test_lines_come_back_after_a_while_and_step_by_step(window: LineWindow, clock: SetClock) -> None:
    miss_until_none_is_left(window, clock)
    # The last of the cuts holds for the longest time.
    clock.now_s += MAX_HOLD_S
    assert window.num_lines(ALL) == 0
    clock.now_s += 1.0
    assert window.num_lines(ALL) == ALL * GROW_PER_S
    clock.now_s += 1 / GROW_PER_S
    assert window.num_lines(ALL) == ALL
    window.record_outcome(False)
    window.record_outcome(False)
    clock.now_s += HOLD_S
    assert window.num_lines(ALL) == ALL // 2, "after all ran, the first cut holds for a short time again"
    clock.now_s += 1.0
    assert window.num_lines(ALL) > ALL // 2


def test_misses_while_no_line_runs_do_not_keep_lines_away(window: LineWindow, clock: SetClock) -> None:
    """Requests that never meet their SLOs must not starve batches for good."""
    miss_until_none_is_left(window, clock)
    tried = 0
    for _ in range(int(20 * MAX_HOLD_S)):
        clock.now_s += 0.5
        window.record_outcome(False)
        tried += window.num_lines(ALL) > 0
    assert tried >= 8


def test_the_share_keeps_its_bounds_whatever_happens(clock: SetClock) -> None:
    rng = random.Random(5)
    for attainment in (0.5, 0.9, 0.99, 1.0):
        window = LineWindow(attainment, clock)
        for _ in range(3000):
            clock.now_s += rng.choice((0.0, 0.01, 0.3, 2.0, 100.0))
            before, cut = window.share, window.record_outcome(rng.random() < rng.choice((0.5, 0.95, 1.0)))
            assert 0.0 <= window.share <= 1.0 and 0 <= window.num_lines(ALL) <= ALL
            assert window.share == (before / 2 if cut and before / 2 >= 1 / 64 else 0.0 if cut else before)
