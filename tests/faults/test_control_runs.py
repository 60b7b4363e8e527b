"""The proving ground sees: with the digests switched off, by a subclass, the very same runs end in wrong bytes.

Each test here does what one of `test_corruption_field` or `test_race` does, and demands what is forbidden there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvtransfer.board import DONE
from kvtransfer.early import Early
from tests.faults.corrupt import (
    CHUNKS,
    LAYERS,
    SLABS,
    Blind,
    Offered,
    Target,
    compute,
    hinted,
    offer,
    opened,
    promised,
    spoil,
)
from tests.faults.race import WAYS, race

TIMES = 20


@pytest.fixture(scope="module", params=["shm", "nixl"])
def blind(request: pytest.FixtureRequest) -> Iterator[Target]:
    with opened(request.param, Blind) as target:
        yield target


@pytest.mark.parametrize("kind", CHUNKS)
def test_spoilt_chunks_are_decoded(kind: str, blind: Target) -> None:
    rng = random.Random(kind)
    for number in range(1, TIMES + 1):
        offered = offer(blind.source, number)
        spoil(blind.source, kind, rng, number - 1)
        assert blind.late(offered) == "wrong", f"{kind} number {number}"


@pytest.mark.parametrize("kind", CHUNKS)
def test_copies_that_were_bad_when_they_were_made_are_decoded(kind: str, blind: Target) -> None:
    source, rng = blind.source, random.Random(kind)
    for number in range(1, TIMES + 1):

        def script(early: Early, number: int = number) -> Offered:
            early.hint(hinted(source, number))
            compute(source, number, 0, LAYERS)
            spoil(source, kind, rng, number - 1)
            blind.advance(early)
            compute(source, number, 0, LAYERS)
            return promised(source, number)

        assert blind.early(script) == ("wrong", 0), f"{kind} number {number}"


def test_hints_of_other_slabs_are_decoded(blind: Target) -> None:
    source = blind.source

    def script(early: Early) -> Offered:
        offer(source, 7)
        early.hint(hinted(source, 1, (1, 3, 5), DONE))
        blind.advance(early)
        compute(source, 1, 0, LAYERS)
        return promised(source, 1)

    assert blind.early(script)[0] == "wrong"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "staging"])
def test_races_are_lost(way: str, blind: Target) -> None:
    rng, verdicts = random.Random(way), Counter[str]()
    for number in range(1, TIMES + 1):
        verdicts[race(blind, way, number, rng)[0]] += 1
    assert verdicts["wrong"] == TIMES, verdicts


def test_an_injury_that_misses_is_told(blind: Target) -> None:
    """Replaying what lies there already changes nothing: the injector itself says so, and the run stops."""
    offered = offer(blind.source, 1)
    with pytest.raises(AssertionError, match="replay"):
        spoil(blind.source, "replay", random.Random(0), 1)
    assert blind.late(offered) == "exact" and len(SLABS) == 3
