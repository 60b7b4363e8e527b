"""Requests run out of time in their order of arrival, and nobody else is looked at."""

from __future__ import annotations

import math

from router.effects import ClockTick, FailRequest
from router.requests.request_state import RequestState
from router.requests.timers import MAX_STALE_ENTRIES, DeadlineHeap
from tests.unit.router.fake_deployment import linked_deployment, make_request


def test_expired_requests_are_returned_once_in_order_of_arrival() -> None:
    moments = (5.0, 3.0, math.inf, 4.0, 9.0)
    states = {
        f"r{i}": RequestState(make_request(f"r{i}", deadline_s=moment_s), i)
        for i, moment_s in enumerate(moments)
    }
    deadlines = DeadlineHeap(states)
    for state in states.values():
        deadlines.add_request(state)
    assert deadlines.pop_expired(2.9) == []
    del states["r3"]  # it has ended
    assert [state.request.id for state in deadlines.pop_expired(5.0)] == ["r0", "r1"]
    assert deadlines.pop_expired(5.0) == []
    assert [state.request.id for state in deadlines.pop_expired(100.0)] == ["r4"]
    assert len(deadlines) == 0


def test_ended_requests_are_forgotten_long_before_their_time() -> None:
    states: dict[str, RequestState] = {}
    deadlines = DeadlineHeap(states)
    for number in range(10 * MAX_STALE_ENTRIES):
        state = states[f"r{number}"] = RequestState(make_request(f"r{number}", deadline_s=600.0), number)
        deadlines.add_request(state)
        if number >= 10:
            del states[f"r{number - 10}"]
    assert len(deadlines) <= 2 * MAX_STALE_ENTRIES
    assert len(deadlines.pop_expired(600.0)) == 10


def test_a_tick_fails_what_is_overdue_and_nothing_else() -> None:
    world = linked_deployment("prefill-0", "decode-0", slabs=2)
    for name, deadline_s in (("a", 50.0), ("b", 20.0), ("c", 10.0), ("d", 60.0)):
        world.arrive(name, prompt=100, deadline_s=deadline_s)
    world.now_s = 20.0
    for name in world.workers:  # they send messages, so that nobody is lost
        world.relay.fleet.mark_seen(name, world.now_s)
    failed = [effect.request for effect in world.do(ClockTick()) if isinstance(effect, FailRequest)]
    assert failed == ["b", "c"] and set(world.relay.live) == {"a", "d"}
