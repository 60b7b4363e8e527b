"""The decode side of a hand-off whose source is spoilt while it is pulled, late or early, between any two turns.

The source is another process (`tests.engine.transport_source`), the transports are the real ones; everything here runs
on the caller's thread, so that a fault falls exactly where it is to fall. `verdict` says what came of a hand-off:

    "exact"    it was decoded, and every byte is what was offered
    "caught"   it was refused, and nothing is held
    "wrong"    it was decoded, and is something else          never, unless the digests are switched off (`Blind`)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from diptych.errors import CorruptChunk, TransferError
from kvcache.layout import shards
from kvcache.slabs import Slabs
from kvtransfer import ticket as tickets
from kvtransfer.digests import Seal
from kvtransfer.early import Early
from kvtransfer.handoff import Ahead, Arrived, Commit, Free, Outcome, Pull, Reserve, hand_off, perform
from kvtransfer.links import Links
from kvtransfer.parts import Parts
from kvtransfer.ticket import Hint, Ticket
from kvtransfer.transports import nixl
from kvtransfer.turns import LONGEST_S, Turns
from tests.engine.transport_source import KEY, LAYOUT, SLAB_BYTES, WHOLE, WORKER, Remote, Spread, content

NUM_SLABS = 16
TOKENS = 64 * 3 - 20
SLABS = (4, 9, 2)
LAYERS = LAYOUT.layers
CHUNKS = ("flip", "truncate", "swap", "replay", "layers", "heads")
TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}  # as between hosts

T = TypeVar("T")
Between = Callable[[int], object]


def nothing(turn: int) -> None:
    """What is done between two turns when no fault is to be."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A ticket, and the content that was promised by it."""

    ticket: Ticket
    seed: int

    def chunks(self) -> list[bytes]:
        return [content(self.seed, chunk.slab) for chunk in self.ticket.chunks]


class Target:
    """A decode worker's memory, links and hand-offs, with the worker's own check of every chunk."""

    def __init__(self, transport: str, source: Remote) -> None:
        self.pool, self.source = Slabs(NUM_SLABS), source
        parts = [
            (shard, memoryview(bytearray(NUM_SLABS * LAYOUT.chunk_bytes))) for shard in shards(LAYOUT, *WHOLE)
        ]
        self.links, self.spread = Links([transport], Parts(LAYOUT, parts)), Spread(LAYOUT, parts)
        for puller in self.links._pullers.values():
            if isinstance(puller, nixl.Puller):
                puller._stall_s = 60.0  # a machine that is busy with other things does not stall a read
        self.links.link(WORKER, source.incarnation, source.endpoints)
        self.seal: Seal | None = None
        self._posts = transport == "nixl"  # a step is a read that is posted; else it is a turn
        self._between: Between = nothing
        self._steps = 0

    def matches(self, index: int, payload: bytes, promised: bytes) -> bool:
        assert self.seal is not None, "there is no ticket yet"
        return self.seal.matches(index, payload, promised)

    def late(self, offered: Offered, between: Between = nothing) -> str:
        """Pull what a ticket offers; its verdict."""
        outcome, decoded = self._converse(
            offered.ticket, len(offered.ticket.chunks), lambda effect: None, between
        )
        return self._verdict(outcome, decoded, offered)

    def early(self, script: Callable[[Early], Offered], between: Between = nothing) -> tuple[str, int]:
        """Pull ahead as `script` says until it gives the ticket, then the rest; the verdict, and the copies wasted."""
        offered: list[Offered] = []

        def ahead(effect: Ahead) -> Arrived:
            early = Early(effect.slabs, self.links.hasher)
            offered.append(script(early))
            ticket = offered[0].ticket
            self.seal = Seal(KEY, ticket.terms)
            lane = self.links.lane(ticket.worker, ticket.incarnation)
            return Arrived(ticket, self.drive(early.finish(lane, ticket, lambda: False), between))

        outcome, decoded = self._converse(None, len(SLABS), ahead, between)
        return self._verdict(outcome, decoded, offered[0]), outcome.wasted

    def advance(self, early: Early, between: Between = nothing) -> float:
        """One look at the board, and the copies that it allows."""
        return self.drive(
            early.advance(self.links.lane(WORKER, self.source.incarnation), lambda: False), between
        )

    def drive(self, turns: Turns[T], between: Between) -> T:
        """Do all of it here, with something between any two steps: what is copied after it is not copied yet."""
        self._between, self._steps = between, 0
        try:
            while True:
                pause_s = next(turns)
                if not self._posts:
                    self.step()
                elif pause_s:
                    time.sleep(min(pause_s, LONGEST_S))
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            self._between = nothing

    def step(self) -> None:
        """A step has ended, or (NIXL) the next one is about to begin."""
        number, self._steps = self._steps - self._posts, self._steps + 1
        if number >= 0:
            self._between(number)

    def _converse(
        self, ticket: Ticket | None, num_slabs: int, ahead: Callable[[Ahead], Any], between: Between
    ) -> tuple[Outcome, list[int]]:
        self.seal = Seal(KEY, ticket.terms) if ticket else None
        decoded: list[int] = []
        table: dict[type[Any], Callable[[Any], Any]] = {
            Reserve: lambda effect: self.pool.take(effect.num_slabs, "request"),
            Ahead: ahead,
            Pull: lambda effect: self.drive(self.links.pulling(effect.ticket, effect.pairs), between),
            Commit: lambda effect: decoded.extend(effect.slabs),
            Free: lambda effect: self.pool.give(list(effect.slabs), "request"),
        }
        outcome = perform(hand_off(ticket, num_slabs, self.matches), table)
        assert isinstance(outcome, Outcome) and bool(decoded) == (outcome.error is None)
        return outcome, decoded

    def _verdict(self, outcome: Outcome, decoded: Sequence[int], offered: Offered) -> str:
        if outcome.error is not None:
            assert isinstance(outcome.error, CorruptChunk), outcome.error
            assert self.pool.used == 0
            return "caught"
        held = [self.spread.read(slab) for slab in decoded]
        self.pool.give(list(decoded), "request")
        return "exact" if held == offered.chunks() else "wrong"

    def close(self) -> None:
        self.links.close()


@contextmanager
def opened(transport: str, kind: type[Target] | None = None) -> Iterator[Target]:
    """A source process and a target that is linked to it. NIXL goes over TCP, in pieces so small that much can happen
    between two of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TCP.items():
            patch.setenv(name, value)
        patch.setattr(nixl, "BATCH_BYTES", SLAB_BYTES // 2)
        patch.setattr(nixl, "IN_FLIGHT", 1)
        with closing(Remote(transport)) as source, closing((kind or Target)(transport, source)) as target:
            post = nixl.Agent.post

            def after_the_first(agent: nixl.Agent, *what: Any) -> int:
                target.step()
                return post(agent, *what)

            patch.setattr(nixl.Agent, "post", after_the_first)
            yield target


class Blind(Target):
    """The control: one that believes every chunk."""

    def matches(self, index: int, payload: bytes, promised: bytes) -> bool:
        return True


def offer(source: Remote, number: int, request: str = "") -> Offered:
    """KV that was read at once, as an attempt of its own."""
    ticket = source.offer(request or f"r{number}", number, TOKENS, list(SLABS), number)
    return Offered(ticket, number)


def spoil(source: Remote, kind: str, rng: random.Random, earlier: int) -> None:
    """Do one injury to what lies in `SLABS`; `earlier` is the number of an offer that lay there before.

    Raises:
        AssertionError: it did not change what a decode worker reads.
    """
    victim = rng.choice(SLABS)
    match kind:
        case "swap":
            one, two = rng.sample(SLABS, 2)
            told = source("swap", one=one, two=two)
        case "replay":
            told = source("replay", slab=victim, seed=earlier)
        case _:
            told = source(kind, slab=victim)
    assert told == {"changed": True}, (kind, told)


def mend(source: Remote, number: int) -> None:
    """Put back what was offered."""
    for slab in SLABS:
        source("replay", slab=slab, seed=number)


def hinted(source: Remote, number: int, slabs: Sequence[int] = SLABS, mark: int | None = None) -> Hint:
    """The announcement of chunks that are about to be computed."""
    mark = source("stage", slabs=list(slabs))["mark"] if mark is None else mark
    hint = Hint(f"r{number}", number, WORKER, source.incarnation, 0, tuple(slabs), mark)
    return tickets.decode_hint(tickets.encode_hint(hint, KEY), KEY)


def promised(source: Remote, number: int) -> Offered:
    """The ticket for what has been computed by now."""
    raw = source("promise", request=f"r{number}", epoch=number, tokens=TOKENS, slabs=list(SLABS))["ticket"]
    return Offered(tickets.decode(bytes.fromhex(raw), KEY), number)


def compute(source: Remote, number: int, first: int, end: int) -> None:
    """Some layers are computed, and the board says so."""
    source("compute", slabs=list(SLABS), seed=number, first=first, end=end)


def injured(raw: bytes, kind: str, rng: random.Random, older: bytes) -> bytes:
    """Signed bytes as somebody on the way may leave them; "replay": the body of one, the signature of another.

    Never the same as `raw`.
    """
    at = rng.randrange(len(raw))
    match kind:
        case "flip":
            out = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
        case "truncate":
            out = raw[:at]
        case "swap":
            other = rng.randrange(len(raw))
            one, two = sorted((at, other))
            out = raw[:one] + raw[two:] + raw[one:two]
        case _:
            out = raw[: -tickets.MAC_BYTES] + older[-tickets.MAC_BYTES :]
    return out if out != raw else injured(raw, kind, rng, older)


def refused(read: Callable[[bytes, bytes], object], raw: bytes) -> bool:
    """Whether these signed bytes are refused when they are read."""
    try:
        read(raw, KEY)
    except TransferError:
        return True
    return False
