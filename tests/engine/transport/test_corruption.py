"""Corrupted, truncated, swapped, misplaced and replayed chunks, made under the real transport in another process.

`make soak` does a thousand of each between whole workers, fewer between split ones and of coded KV; `make test` does a
tenth of them. Every injector proves that it changed the bytes; every hand-off must end without decoding and with
nothing held; a control run, and an injector that misses, must pass.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from diptych.errors import CorruptChunk
from tests.engine.transport.decode_side import DecodeSide
from tests.engine.transport.transport_source import (
    CODED_LAYOUT,
    KEY,
    LAYOUT,
    WORKER,
    RemoteSource,
    content,
)

# Transport, the split of the source and of the target, how often each injury is done, and the codec.
LINES = [
    ("shm", (1, 1), (1, 1), 1000, LAYOUT),
    ("nixl", (1, 1), (1, 1), 1000, LAYOUT),
    ("shm", (2, 1), (1, 2), 200, LAYOUT),
    ("shm", (1, 1), (2, 2), 200, LAYOUT),
    ("nixl", (1, 2), (2, 1), 100, LAYOUT),
    ("shm", (1, 1), (1, 1), 300, CODED_LAYOUT),
    ("nixl", (2, 1), (1, 2), 100, CODED_LAYOUT),
]
FEWER = [(*line[:3], line[3] // 10, line[4]) for line in LINES]
MAX_RACES = 500
TOKENS = 64 * 3 - 20
SLABS = [4, 9, 2]


def name_line(line: tuple[Any, ...]) -> str:
    return "-".join([*map(str, line[:4]), line[4].kv_class.partition(".")[0]]).replace(" ", "")


@pytest.fixture(
    scope="module",
    params=[*FEWER, *(pytest.param(line, marks=pytest.mark.slow) for line in LINES)],
    ids=name_line,
)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[int, RemoteSource, DecodeSide]]:
    """How often, the source, and the target."""
    transport, here, there, times, layout = request.param
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}.items():
            patch.setenv(name, value)
        source = RemoteSource(transport, split=here, layout=layout)
        decoder = DecodeSide(transport, split=there, layout=layout)
        decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
        yield times, source, decoder
    decoder.links.close()
    source.close()


def spoil(kind: str, source: RemoteSource, rng: random.Random, earlier: int) -> dict[str, Any]:
    """Let the source do one injury to the offer that lies in `SLABS`."""
    victim = rng.choice(SLABS)
    if kind == "swap":
        one, two = rng.sample(SLABS, 2)
        return source("swap", one=one, two=two)
    if kind == "replay":
        return source("replay", slab=victim, seed=earlier)
    return source(kind, slab=victim)


@pytest.mark.parametrize("kind", ["flip", "truncate", "swap", "layers", "heads", "replay"])
def test_every_injury_is_caught_and_none_is_decoded(
    kind: str, pair: tuple[int, RemoteSource, DecodeSide]
) -> None:
    times, source, decoder = pair
    rng, caught = random.Random(kind), 0
    for number in range(times):
        # Half of the replays come from an earlier epoch of the same request, half from another request.
        request = "same" if number % 2 else f"{kind}-{number}"
        ticket = source.offer(request, number, TOKENS, SLABS, seed=number + 1)
        assert spoil(kind, source, rng, earlier=number) == {"changed": True}
        outcome = decoder.fetch(ticket)
        assert isinstance(outcome.error, CorruptChunk), f"{kind} number {number} was decoded"
        assert decoder.pool.used == 0
        caught += 1
    assert caught == times


def test_control_without_injury_everything_is_decoded(pair: tuple[int, RemoteSource, DecodeSide]) -> None:
    """The detector does not cry for nothing: an honest source, and an injector that misses, are let through."""
    times, source, decoder = pair
    for number in range(times // 4):
        ticket = source.offer("honest", number, TOKENS, SLABS, seed=number)
        assert source("nothing", slab=SLABS[0]) == {"changed": False}
        outcome = decoder.fetch(ticket)
        assert outcome.error is None
        for slab, own in zip(SLABS, outcome.slabs, strict=False):
            assert decoder.spread.read(own) == content(number, slab, source.layout)
        decoder.finish(ticket)
    assert decoder.pool.used == 0


def test_slabs_that_are_given_to_another_request_while_they_are_pulled(
    pair: tuple[int, RemoteSource, DecodeSide],
) -> None:
    """The lease ran out under a slow pull: whatever is decoded is exactly what was offered, never a mixture."""
    times, source, decoder = pair
    old = source.offer("slow", 1, TOKENS, SLABS, seed=1)
    over, decoded, refused = threading.Event(), 0, 0

    def churn() -> None:
        seed = 2
        while not over.is_set():
            source.offer(
                "fast", seed, TOKENS, SLABS, seed=seed % 3
            )  # every third time the same bytes come back
            seed += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(MAX_RACES):
            if refused and number >= times // 2:
                break
            outcome = decoder.fetch(old)
            if outcome.error is None:
                decoded += 1
                for slab, own in zip(SLABS, outcome.slabs, strict=False):
                    assert decoder.spread.read(own) == content(1, slab, source.layout)
                decoder.finish(old)
            else:
                assert isinstance(outcome.error, CorruptChunk)
                refused += 1
    finally:
        over.set()
        thread.join()
    assert refused > 0, "the race never happened"
    assert decoder.pool.used == 0


def test_a_replayed_ticket_of_an_earlier_offer_fails_on_its_chunks(
    pair: tuple[int, RemoteSource, DecodeSide],
) -> None:
    """Not the chunk but the whole ticket is old; the slabs hold a later epoch's KV by now."""
    _, source, decoder = pair
    old = source.offer("again", 1, TOKENS, SLABS, seed=5)
    new = source.offer("again", 2, TOKENS, SLABS, seed=6)
    assert isinstance(decoder.fetch(old).error, CorruptChunk)
    assert decoder.fetch(new).error is None
    decoder.finish(new)
    assert KEY and decoder.pool.used == 0
