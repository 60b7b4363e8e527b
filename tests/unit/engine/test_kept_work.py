"""What a runner accepts of a sequence whose KV is evicted per head."""

from __future__ import annotations

import msgspec
import pytest

from diptych.eviction_spec import KeepSpec
from engine.step_work import KeptWork, RunnerBounds, StepWork
from kvcache.layout import KvLayout

BOUNDS = RunnerBounds(KvLayout(2, 2, 32, "float32"), 16, 1024, 300)
SPEC = KeepSpec(0.9, 64)


def work(start: int, count: int, slabs: int, *, evicted: bool, prompt: int = 100) -> StepWork:
    return StepWork([7] * count, start, list(range(slabs)), "last", 7, KeptWork("a", prompt, SPEC, evicted))


@pytest.mark.parametrize(
    ("start", "count", "slabs", "evicted"),
    [
        (0, 100, 2, False),
        (99, 1, 2, False),
        (100, 1, 3, True),
        (100, 64, 3, True),
        (227, 1, 9, True),
        (163, 1, 3, True),
    ],
)
def test_rows_of_one_block_fit_into_a_prefix_a_ring_and_a_bag(
    start: int, count: int, slabs: int, evicted: bool
) -> None:
    BOUNDS.check(work(start, count, slabs, evicted=evicted))


@pytest.mark.parametrize(
    ("start", "count", "slabs", "evicted", "error"),
    [
        (99, 2, 2, False, "comes after eviction"),
        (0, 100, 1, False, "do not fit into 1 slabs"),
        (99, 1, 3, True, "not within one block"),
        (100, 65, 3, True, "not within one block"),
        (163, 2, 3, True, "not within one block"),
        (100, 1, 2, True, "too few for 1 before a ring and a bag"),
        (1023, 2, 3, True, "are not within 0..1023"),
    ],
)
def test_what_does_not_fit_is_refused(start: int, count: int, slabs: int, evicted: bool, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        BOUNDS.check(work(start, count, slabs, evicted=evicted))


def test_a_boundary_behind_the_prompt_is_refused_and_a_coded_pool_may_evict() -> None:
    with pytest.raises(ValueError, match="first 64 tokens cannot be kept of a prompt of 63"):
        BOUNDS.check(work(0, 5, 1, evicted=False, prompt=63))
    coded = RunnerBounds(KvLayout(2, 2, 32, "float32", "int8"), 16, 1024, 300)
    coded.check(work(0, 5, 1, evicted=False))


def test_kept_works_travel_to_other_ranks() -> None:
    for one in (work(100, 3, 3, evicted=True), StepWork([1], 0, [0], "none")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=StepWork) == one
