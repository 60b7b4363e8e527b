"""Corrupted, truncated, swapped, misplaced and replayed chunks, made under the real transport in another process.

A thousand of each between whole workers, fewer between split ones. Every injector proves that it changed the bytes;
every hand-off must end without decoding and with nothing held; a control run, and an injector that misses, must pass.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from diptych.errors import CorruptChunk
from tests.engine.test_transport import Decoder
from tests.engine.transport_source import KEY, WORKER, Remote, content

# Transport, the split of the source and of the target, and how often each injury is done.
LINES = [
    ("shm", (1, 1), (1, 1), 1000),
    ("nixl", (1, 1), (1, 1), 1000),
    ("shm", (2, 1), (1, 2), 200),
    ("shm", (1, 1), (2, 2), 200),
    ("nixl", (1, 2), (2, 1), 100),
]
TOKENS = 64 * 3 - 20
SLABS = [4, 9, 2]


@pytest.fixture(scope="module", params=LINES, ids=lambda line: "-".join(map(str, line)).replace(" ", ""))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[int, Remote, Decoder]]:
    """How often, the source, and the target."""
    transport, here, there, times = request.param
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}.items():
            patch.setenv(name, value)
        source, decoder = Remote(transport, split=here), Decoder(transport, split=there)
        decoder.links.link(WORKER, source.incarnation, source.endpoints)
        yield times, source, decoder
    decoder.links.close()
    source.close()


def spoil(kind: str, source: Remote, rng: random.Random, earlier: int) -> dict[str, Any]:
    """Let the source do one injury to the offer that lies in `SLABS`."""
    victim = rng.choice(SLABS)
    if kind == "swap":
        one, two = rng.sample(SLABS, 2)
        return source("swap", one=one, two=two)
    if kind == "replay":
        return source("replay", slab=victim, seed=earlier)
    return source(kind, slab=victim)


@pytest.mark.parametrize("kind", ["flip", "truncate", "swap", "layers", "heads", "replay"])
def test_every_injury_is_caught_and_none_is_decoded(kind: str, pair: tuple[int, Remote, Decoder]) -> None:
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


def test_control_without_injury_everything_is_decoded(pair: tuple[int, Remote, Decoder]) -> None:
    """The detector does not cry for nothing: an honest source, and an injector that misses, are let through."""
    times, source, decoder = pair
    for number in range(times // 4):
        ticket = source.offer("honest", number, TOKENS, SLABS, seed=number)
        assert source("nothing", slab=SLABS[0]) == {"changed": False}
        outcome = decoder.fetch(ticket)
        assert outcome.error is None
        for slab, own in zip(SLABS, outcome.slabs, strict=False):
            assert decoder.spread.read(own) == content(number, slab)
        decoder.finish(ticket)
    assert decoder.pool.used == 0


def test_slabs_that_are_given_to_another_request_while_they_are_pulled(
    pair: tuple[int, Remote, Decoder],
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
        for _ in range(times // 2):
            outcome = decoder.fetch(old)
            if outcome.error is None:
                decoded += 1
                for slab, own in zip(SLABS, outcome.slabs, strict=False):
                    assert decoder.spread.read(own) == content(1, slab)
                decoder.finish(old)
            else:
                assert isinstance(outcome.error, CorruptChunk)
                refused += 1
    finally:
        over.set()
        thread.join()
    assert refused > 0, "the race never happened"
    assert decoder.pool.used == 0


def test_a_replayed_ticket_of_an_earlier_offer_fails_on_its_chunks(pair: tuple[int, Remote, Decoder]) -> None:
    """Not the chunk but the whole ticket is old; the slabs hold a later epoch's KV by now."""
    _, source, decoder = pair
    old = source.offer("again", 1, TOKENS, SLABS, seed=5)
    new = source.offer("again", 2, TOKENS, SLABS, seed=6)
    assert isinstance(decoder.fetch(old).error, CorruptChunk)
    assert decoder.fetch(new).error is None
    decoder.finish(new)
    assert KEY and decoder.pool.used == 0
