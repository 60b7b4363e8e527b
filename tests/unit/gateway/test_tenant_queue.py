"""Each tenant has its share, its room, and never all workers."""

from __future__ import annotations

import random

import pytest

from services.gateway.preparation.tenant_queue import TenantQueue, TenantQueueFull


def test_tenants_alternate_whatever_they_have_waiting() -> None:
    queue: TenantQueue[str] = TenantQueue(max_items=100, max_bytes=1000, max_running=100)
    for i in range(50):
        queue.push("many", f"many {i}", 1)
    queue.push("few", "few 0", 1)
    first = [queue.pop() for _ in range(2)]
    assert ("few", "few 0") in first
    assert len(queue) == 49


def test_a_tenant_never_has_more_than_its_share_running() -> None:
    queue: TenantQueue[int] = TenantQueue(max_items=100, max_bytes=1000, max_running=2)
    for i in range(5):
        queue.push("a", i, 1)
    assert [queue.pop() for _ in range(3)] == [("a", 0), ("a", 1), None]
    queue.push("b", 9, 1)
    assert queue.pop() == ("b", 9)
    queue.mark_done("a")
    assert queue.pop() == ("a", 2)


def test_items_and_bytes_are_bounded_per_tenant() -> None:
    queue: TenantQueue[int] = TenantQueue(max_items=2, max_bytes=10, max_running=1)
    queue.push("a", 0, 50)  # the only one is taken however large
    with pytest.raises(TenantQueueFull):
        queue.push("a", 1, 1)
    queue.push("b", 2, 1)
    queue.push("b", 3, 1)
    with pytest.raises(TenantQueueFull):
        queue.push("b", 4, 1)
    assert queue.remove_item("a", 0)
    assert not queue.remove_item("a", 0)
    queue.push("a", 5, 10)


def test_nothing_is_lost_or_kept() -> None:
    draw, came, left = random.Random(0), 0, 0
    queue: TenantQueue[int] = TenantQueue(max_items=3, max_bytes=30, max_running=2)
    running: list[str] = []
    for number in range(2000):
        if draw.random() < 0.5:
            try:
                queue.push(draw.choice("abc"), number, draw.randint(1, 15))
                came += 1
            except TenantQueueFull:
                pass
        elif draw.random() < 0.5 and (found := queue.pop()) is not None:
            running.append(found[0])
            left += 1
        elif running:
            queue.mark_done(running.pop())
        assert len(queue) == came - left
        assert all(running.count(tenant) <= 2 for tenant in "abc")
