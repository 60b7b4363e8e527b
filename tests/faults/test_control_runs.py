"""The proving ground sees: with the digests switched off, by a subclass, the very same runs end in wrong bytes.

Each test here does what one of `test_corruption_field` or `test_race` does, and demands what is forbidden there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvtransfer.layer_progress import COMPLETE_MARK
from kvtransfer.pipelined_pull import PipelinedPull
from tests.faults.corruption import (
    CHUNKS,
    LAYERS,
    SLABS,
    OfferedKv,
    PullTarget,
    UncheckedTarget,
    compute_layers,
    make_hint,
    make_ticket,
    offer_kv,
    opened_transport,
    spoil_source,
)
from tests.faults.slab_reuse import PULL_WAYS, run_race

TIMES = 20


@pytest.fixture(scope="module", params=["shm", "nixl"])
def blind(request: pytest.FixtureRequest) -> Iterator[PullTarget]:
    with opened_transport(request.param, UncheckedTarget) as target:
        yield target


@pytest.mark.parametrize("kind", CHUNKS)
def test_spoilt_chunks_are_decoded(kind: str, blind: PullTarget) -> None:
    rng = random.Random(kind)
    for number in range(1, TIMES + 1):
        offered = offer_kv(blind.source, number)
        spoil_source(blind.source, kind, rng, number - 1)
        assert blind.pull_late(offered) == "wrong", f"{kind} number {number}"


@pytest.mark.parametrize("kind", CHUNKS)
def test_copies_that_were_bad_when_they_were_made_are_decoded(kind: str, blind: PullTarget) -> None:
    source, rng = blind.source, random.Random(kind)
    for number in range(1, TIMES + 1):

        def script(early: PipelinedPull, number: int = number) -> OfferedKv:
            early.add_hint(make_hint(source, number))
            compute_layers(source, number, 0, LAYERS)
            spoil_source(source, kind, rng, number - 1)
            blind.advance(early)
            compute_layers(source, number, 0, LAYERS)
            return make_ticket(source, number)

        assert blind.pull_early(script) == ("wrong", 0), f"{kind} number {number}"


def test_hints_of_other_slabs_are_decoded(blind: PullTarget) -> None:
    source = blind.source

    def script(early: PipelinedPull) -> OfferedKv:
        offer_kv(source, 7)
        early.add_hint(make_hint(source, 1, (1, 3, 5), COMPLETE_MARK))
        blind.advance(early)
        compute_layers(source, 1, 0, LAYERS)
        return make_ticket(source, 1)

    assert blind.pull_early(script)[0] == "wrong"


@pytest.mark.parametrize("way", [way for way in PULL_WAYS if way != "staging"])
def test_races_are_lost(way: str, blind: PullTarget) -> None:
    rng, endings = random.Random(way), Counter[str]()
    for number in range(1, TIMES + 1):
        endings[run_race(blind, way, number, rng)[0]] += 1
    assert endings["wrong"] == TIMES, endings


def test_an_injury_that_misses_is_reported(blind: PullTarget) -> None:
    """Replaying what lies there already changes nothing: the injector itself says so, and the run stops."""
    offered = offer_kv(blind.source, 1)
    with pytest.raises(AssertionError, match="replay"):
        spoil_source(blind.source, "replay", random.Random(0), 1)
    assert blind.pull_late(offered) == "exact" and len(SLABS) == 3
