"""A pool's books are those of its workers added up."""

from __future__ import annotations

from diptych.messages import WorkerStats
from services.gateway.status import sum_stats


def test_books_are_added_number_by_number_and_name_by_name() -> None:
    one = WorkerStats(
        slabs_used=2, step_seconds=0.5, preemptions={"park": 1}, step_parts={"run": 0.5}, step_sizes=[1, 2]
    )
    other = WorkerStats(slabs_used=3, step_seconds=1.5, preemptions={"recompute": 2}, step_parts={"run": 1.0})
    both = sum_stats([one, other])
    assert (both.slabs_used, both.step_seconds) == (5, 2.0)
    assert (both.preemptions, both.step_parts) == ({"park": 1, "recompute": 2}, {"run": 1.5})
    assert both.step_sizes == [1, 2]
    assert sum_stats([]) == WorkerStats() and one.preemptions == {"park": 1}
