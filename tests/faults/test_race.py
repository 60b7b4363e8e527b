"""Read-after-reassign, forced a thousand times and more: nothing is decoded that was not offered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.faults.corrupt import Target, opened
from tests.faults.race import WAYS, race

TIMES = {"shm": 250, "nixl": 130}  # by way
forced: Counter[str] = Counter()


@pytest.fixture(scope="module", params=sorted(TIMES))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Target]]:
    with opened(request.param) as target:
        yield request.param, target


@pytest.mark.parametrize("way", WAYS)
def test_slabs_are_given_to_another_request_while_they_are_pulled(way: str, pair: tuple[str, Target]) -> None:
    transport, target = pair
    rng, verdicts = random.Random(way), Counter[str]()
    for number in range(1, TIMES[transport] + 1):
        verdict, happened = race(target, way, number, rng)
        verdicts[verdict] += 1
        forced[way] += happened
    assert verdicts["wrong"] == 0, verdicts
    assert target.pool.used == 0
    if way == "staging":  # it was computed again, and that is what the ticket is for
        assert verdicts["exact"] == TIMES[transport]
    else:
        assert verdicts["caught"] == TIMES[transport], verdicts


def test_a_thousand_races_were_forced() -> None:
    print(f"races: {dict(forced)}")
    assert sum(forced.values()) >= 1_000, forced
