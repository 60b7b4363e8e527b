"""Read-after-reassign, forced a thousand times and more: nothing is decoded that was not offered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.engine.transport.transport_source import CODED_LAYOUT, LAYOUT
from tests.faults.corruption import PullTarget, opened_transport
from tests.faults.slab_reuse import PULL_WAYS, run_race

# By way. "coded" is coded KV over shared memory.
TIMES = {"shm": 220, "nixl": 110, "coded": 50}
forced: Counter[str] = Counter()


@pytest.fixture(scope="module", params=sorted(TIMES))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, PullTarget]]:
    coded = request.param == "coded"
    layout = CODED_LAYOUT if coded else LAYOUT
    with opened_transport("shm" if coded else request.param, layout=layout) as target:
        yield request.param, target


@pytest.mark.parametrize("way", PULL_WAYS)
def test_slabs_are_given_to_another_request_while_they_are_pulled(
    way: str, pair: tuple[str, PullTarget]
) -> None:
    transport, target = pair
    rng, endings = random.Random(way), Counter[str]()
    for number in range(1, TIMES[transport] + 1):
        ending, happened = run_race(target, way, number, rng)
        endings[ending] += 1
        forced[way] += happened
    assert endings["wrong"] == 0, endings
    assert target.pool.used == 0
    if way == "staging":  # it was computed again, and that is what the ticket is for
        assert endings["exact"] == TIMES[transport]
    else:
        assert endings["caught"] == TIMES[transport], endings


def test_a_thousand_races_were_forced() -> None:
    print(f"races: {dict(forced)}")
    assert sum(forced.values()) >= 1_000, forced
