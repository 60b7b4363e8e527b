"""Whose line runs next: tenants share evenly, and what expires first goes first."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.gateway.batches.fair_share import BatchClaim, ShareQueue, choose_batch


def claim(
    name: str, tenant: str = "t", expires_at: int = 100, running: int = 0, lines: bool = True
) -> BatchClaim:
    return BatchClaim(name, tenant, expires_at, int(name), running, lines)


def test_nothing_is_chosen_where_nothing_waits() -> None:
    assert choose_batch([], {}) is None
    assert choose_batch([claim("1", lines=False)], {}) is None


def test_the_nearest_expiry_goes_first_then_the_oldest() -> None:
    assert choose_batch([claim("1", expires_at=9), claim("2", expires_at=5)], {}) == "2"
    assert choose_batch([claim("2"), claim("1")], {}) == "1"


def test_a_tenant_with_fewer_lines_in_flight_goes_before_a_nearer_expiry() -> None:
    busy = [claim("1", "a", 1, running=2), claim("2", "a", 1)]
    assert choose_batch([*busy, claim("3", "b", 99, running=1)], {}) == "3"


def test_lines_of_batches_that_wait_for_nothing_count_too() -> None:
    done = claim("1", "a", running=3, lines=False)
    assert choose_batch([done, claim("2", "a"), claim("3", "b", 999, running=2)], {}) == "3"


def test_of_equal_tenants_the_one_that_was_served_less_goes_first() -> None:
    claims = [claim("1", "a"), claim("2", "b")]
    assert choose_batch(claims, {"a": 10}) == "2"
    assert choose_batch(claims, {"a": 10, "b": 11}) == "1"


def test_a_window_is_shared_evenly_whatever_the_number_of_batches() -> None:
    """A tenant with many batches gets no more than one with a single batch."""
    draw = random.Random(7)
    claims = {str(n): claim(str(n), "many", draw.randrange(100)) for n in range(20)}
    claims["20"] = claim("20", "one", 50)
    claims["21"] = claim("21", "two", 500)
    for _ in range(90):
        chosen = choose_batch(list(claims.values()), {})
        assert chosen is not None
        claims[chosen] = replace(claims[chosen], running=claims[chosen].running + 1)
    running: Counter[str] = Counter()
    for one in claims.values():
        running[one.tenant] += one.running
    assert running == {"many": 30, "one": 30, "two": 30}


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_chooses_what_the_rule_says(seed: int) -> None:
    """Over random histories: batches come and end, get and lose lines, and lines start and end."""
    draw = random.Random(seed)
    queue, claims, served = ShareQueue(), dict[str, BatchClaim](), Counter[str]()
    tenants = "abcd"[: draw.randrange(1, 5)]

    def change(one: BatchClaim, **values: int) -> None:
        claims[one.batch] = replace(one, **values)  # type: ignore[arg-type]
        queue.set_ready(one.tenant, one.batch, one.expires_at, one.order, claims[one.batch].has_lines)

    def run(one: BatchClaim, step: int) -> None:
        claims[one.batch] = replace(one, running=one.running + step)
        queue.count_running(one.tenant, step)

    for number in range(3000):
        event, one = draw.randrange(12), draw.choice([*claims.values()] or [None])
        if one is None or event == 0:
            claims[str(number)] = claim(str(number), draw.choice(tenants), draw.randrange(20), lines=False)
            queue.open_batch(claims[str(number)].tenant)
        elif event < 4:
            change(one, has_lines=draw.random() < 0.7)
        elif event < 8 and (chosen := queue.choose()) is not None:
            run(claims[chosen], 1)
        elif event < 10 and one.running:
            run(one, -1)
            served[one.tenant] += (tokens := draw.randrange(3))
            queue.count_tokens(one.tenant, tokens)
        elif event == 10 and not one.running and draw.random() < 0.5:
            del claims[one.batch]
            queue.close_batch(one.tenant, one.batch)
            if not any(other.tenant == one.tenant for other in claims.values()):
                served.pop(one.tenant, None)
        assert queue.choose() == choose_batch([*claims.values()], served), number


def test_the_queue_keeps_no_more_than_what_is_open() -> None:
    queue = ShareQueue()
    queue.open_batch("a")
    for number in range(2000):
        queue.set_ready("a", "1", 5, 1, has_lines=number % 2 == 0)
        queue.count_running("a", 1)
        queue.count_running("a", -1)
    assert len(queue._heap) + len(queue._tenants["a"].heap) < 300
    queue.close_batch("a", "1")
    assert not queue._tenants and queue.choose() is None
