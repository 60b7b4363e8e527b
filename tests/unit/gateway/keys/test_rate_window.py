"""A limit per minute: no minute holds more, a client that waits long enough succeeds, and rates are what they say."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from services.gateway.keys.rate_window import MAX_ENTRIES, SLOT_S, WINDOW_S, RateWindow


def offer(window: RateWindow, interval_s: float, until_s: float, start_s: float = 0.0) -> list[float]:
    """The times at which a client is admitted that asks every `interval_s`."""
    admitted = []
    for number in range(int((until_s - start_s) / interval_s)):
        now_s = start_s + number * interval_s
        if not window.wait_s(1, now_s):
            window.take(1, now_s)
            admitted.append(now_s)
    return admitted


@pytest.mark.parametrize("limit", [1, 10, 60, 977, 6000])
def test_at_twice_the_rate_a_key_gets_its_rate(limit: int) -> None:
    for start_s in (0.0, 1234.567):
        admitted = offer(RateWindow(limit), 30.0 / limit, start_s + 10 * WINDOW_S, start_s)
        in_two_minutes = sum(at_s < start_s + 2 * WINDOW_S for at_s in admitted)
        assert in_two_minutes == 2 * limit or (limit > 240 and in_two_minutes >= 1.99 * limit)
        assert 0.99 * 10 * limit - 1 <= len(admitted) <= 10 * limit


def test_no_minute_holds_more_than_the_limit() -> None:
    draw = random.Random(7)
    window, taken, now_s = RateWindow(40), list[tuple[float, int]](), 0.0
    for _ in range(3000):
        now_s += draw.expovariate(3.0)
        amount = draw.randint(1, 9)
        if not window.wait_s(amount, now_s):
            window.take(amount, now_s)
            taken.append((now_s, amount))
    assert len(taken) > 200
    for end_s, _ in taken:
        assert sum(amount for at_s, amount in taken if end_s - WINDOW_S < at_s <= end_s) <= 40


def test_who_waits_long_enough_fits_and_a_moment_before_does_not() -> None:
    draw = random.Random(3)
    for _ in range(200):
        window, now_s = RateWindow(20), draw.uniform(0, 1e6)
        for _ in range(draw.randint(1, 12)):
            now_s += draw.uniform(0, 8)
            window.take(draw.randint(1, 9), now_s)
        amount = draw.randint(1, 20)
        wait_s = window.wait_s(amount, now_s)
        if wait_s:
            assert window.wait_s(amount, now_s + wait_s - 1e-3)
        assert not window.wait_s(amount, now_s + wait_s)


def test_several_clients_of_a_key_that_wait_all_succeed() -> None:
    """They get different times, or all would come at the same moment, for which there is room for one."""
    window = RateWindow(4)
    for number in range(4):
        window.take(1, float(number))
    times_s = sorted(3.5 + window.expect(1, 3.5) for _ in range(4))
    assert all(later - sooner >= 0.9 for sooner, later in pairwise(times_s))
    for at_s in times_s:
        assert not window.wait_s(1, at_s)
        window.take(1, at_s)


def test_who_comes_without_waiting_does_not_move_the_others_away_for_ever() -> None:
    window = RateWindow(4)
    window.take(4, 0.0)
    waits = [window.expect(1, 1.0) for _ in range(1000)]
    assert max(waits) <= WINDOW_S and len(window._expected) <= 4
    assert not window.wait_s(1, 1.0 + max(waits))


def test_a_crowd_that_is_refused_costs_no_more_than_a_few() -> None:
    window = RateWindow(10**6)
    window.take(10**6, 0.0)
    waits = [window.expect(1, 1.0) for _ in range(20_000)]
    assert len(window._expected) == MAX_ENTRIES == window._num_expected and max(waits) <= WINDOW_S
    window.expect(1, 100.0)
    assert (len(window._expected), window._num_expected) == (1, 1)


def test_tokens_may_take_it_beyond_its_limit_and_come_back() -> None:
    window = RateWindow(100)
    window.take(90, 0.0)
    window.take(50, 10.0)
    assert (window.used(10.0), window.remaining(10.0)) == (140, 0)
    assert window.wait_s(1, 10.0) == pytest.approx(50.0)
    assert window.wait_s(60, 10.0) == pytest.approx(60.0)
    assert window.wait_s(500, 10.0) == pytest.approx(60.0), "when nothing is taken"
    assert window.reset_s(10.0) == pytest.approx(60.0)
    assert (window.used(100.0), window.reset_s(100.0)) == (0, 0.0)


def test_a_lower_limit_counts_what_was_taken_before() -> None:
    window = RateWindow(100)
    window.take(90, 0.0)
    window.limit = 50
    assert window.wait_s(1, 1.0) == 59.0 and window.remaining(1.0) == 0
    window.limit = 200
    assert not window.wait_s(110, 1.0)


def test_it_holds_a_bounded_number_of_entries() -> None:
    window = RateWindow(10**9)
    for number in range(20_000):
        window.take(1, number * 0.01)
    assert len(window._taken) <= WINDOW_S / SLOT_S + 2
