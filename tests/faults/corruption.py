"""The decode side of a hand-off whose source is spoilt while it is pulled, late or early, between any two steps.

The source is another process (`tests.engine.transport.transport_source`), the transports are the real ones;
everything here runs on the caller's thread, so that a fault falls exactly where it is to fall. `_ending_of` says
what came of a hand-off:

    "exact"    it was decoded, and every byte is what was offered
    "caught"   it was refused, and nothing is held
    "wrong"    it was decoded, and is something else          never, unless the digests are switched off
    (`UncheckedTarget`)
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
from kvcache.layout import KvLayout, split_layout
from kvcache.slab_ledger import SlabLedger
from kvtransfer import ticket as tickets
from kvtransfer.cooperative import MAX_REST_S, CoopTask
from kvtransfer.digests import ChunkDigester
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffOutcome,
    PullAhead,
    PullChunks,
    ReserveSlabs,
    TicketArrived,
    hand_off,
    perform_effects,
)
from kvtransfer.pipelined_pull import PipelinedPull
from kvtransfer.resharding import ShardedPool
from kvtransfer.ticket import StagingHint, Ticket
from kvtransfer.transports import nixl
from kvtransfer.transports.links import TransportLinks
from kvtransfer.transports.nixl_agent import NixlAgent
from tests.engine.transport.transport_source import (
    KEY,
    LAYOUT,
    WHOLE,
    WORKER,
    RemoteSource,
    SpreadChunks,
    content,
)

NUM_SLABS = 16
TOKENS = 64 * 3 - 20
SLABS = (4, 9, 2)
LAYERS = LAYOUT.layers
CHUNKS = ("flip", "truncate", "swap", "replay", "layers", "heads")
TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}  # as between hosts

T = TypeVar("T")
BetweenSteps = Callable[[int], object]


def do_nothing(step: int) -> None:
    """What is done between two steps when no fault is to be."""


@dataclass(frozen=True, slots=True)
class OfferedKv:
    """A ticket, and the content that was promised by it."""

    ticket: Ticket
    seed: int
    layout: KvLayout

    def chunks(self) -> list[bytes]:
        return [content(self.seed, chunk.slab, self.layout) for chunk in self.ticket.chunks]


class PullTarget:
    """A decode worker's memory, links and hand-offs, with the worker's own check of every chunk."""

    def __init__(self, transport: str, source: RemoteSource) -> None:
        self.pool, self.source = SlabLedger(NUM_SLABS), source
        layout = source.layout
        parts = [
            (shard, memoryview(bytearray(NUM_SLABS * layout.chunk_bytes)))
            for shard in split_layout(layout, *WHOLE)
        ]
        self.links, self.spread = (
            TransportLinks([transport], ShardedPool(layout, parts)),
            SpreadChunks(layout, parts),
        )
        for puller in self.links._pullers.values():
            if isinstance(puller, nixl.NixlPuller):
                puller._stall_s = 60.0  # a machine that is busy with other things does not stall a read
        self.links.link_worker(WORKER, source.incarnation, source.endpoints)
        self.seal: ChunkDigester | None = None
        self._posts = transport == "nixl"  # a step is a read that is posted; else it is a round of its task
        self._between: BetweenSteps = do_nothing
        self._steps = 0

    def matches(self, index: int, payload: bytes, promised: bytes) -> bool:
        assert self.seal is not None, "there is no ticket yet"
        return self.seal.matches_chunk(index, payload, promised)

    def pull_late(self, offered: OfferedKv, between: BetweenSteps = do_nothing) -> str:
        """Pull what a ticket offers; how it ended."""
        outcome, decoded = self._converse(
            offered.ticket, len(offered.ticket.chunks), lambda effect: None, between
        )
        return self._ending_of(outcome, decoded, offered)

    def pull_early(
        self, script: Callable[[PipelinedPull], OfferedKv], between: BetweenSteps = do_nothing
    ) -> tuple[str, int]:
        """Pull ahead as `script` says until it gives the ticket, then the rest; how it ended, and the copies wasted."""
        offered: list[OfferedKv] = []

        def ahead(effect: PullAhead) -> TicketArrived:
            early = PipelinedPull(effect.slabs, self.links.hasher)
            offered.append(script(early))
            ticket = offered[0].ticket
            self.seal = ChunkDigester(KEY, ticket.context)
            lane = self.links.connection_to(ticket.worker, ticket.incarnation)
            return TicketArrived(
                ticket, self.run_task(early.finish_with_ticket(lane, ticket, lambda: False), between)
            )

        outcome, decoded = self._converse(None, len(SLABS), ahead, between)
        return self._ending_of(outcome, decoded, offered[0]), outcome.num_wasted

    def advance(self, early: PipelinedPull, between: BetweenSteps = do_nothing) -> float:
        """One look at the board, and the copies that it allows."""
        return self.run_task(
            early.copy_ready(self.links.connection_to(WORKER, self.source.incarnation), lambda: False),
            between,
        )

    def run_task(self, task: CoopTask[T], between: BetweenSteps) -> T:
        """Do all of it here, with something between any two steps: what is copied after it is not copied yet."""
        self._between, self._steps = between, 0
        try:
            while True:
                pause_s = next(task)
                if not self._posts:
                    self.run_step()
                elif pause_s:
                    time.sleep(min(pause_s, MAX_REST_S))
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            self._between = do_nothing

    def run_step(self) -> None:
        """A step has ended, or (NIXL) the next one is about to begin."""
        number, self._steps = self._steps - self._posts, self._steps + 1
        if number >= 0:
            self._between(number)

    def _converse(
        self, ticket: Ticket | None, num_slabs: int, ahead: Callable[[PullAhead], Any], between: BetweenSteps
    ) -> tuple[HandoffOutcome, list[int]]:
        self.seal = ChunkDigester(KEY, ticket.context) if ticket else None
        decoded: list[int] = []
        table: dict[type[Any], Callable[[Any], Any]] = {
            ReserveSlabs: lambda effect: self.pool.take_slabs(effect.num_slabs, "request"),
            PullAhead: ahead,
            PullChunks: lambda effect: self.run_task(
                self.links.pull_task(effect.ticket, effect.pairs), between
            ),
            CommitSlabs: lambda effect: decoded.extend(effect.slabs),
            FreeSlabs: lambda effect: self.pool.give_back(list(effect.slabs), "request"),
        }
        outcome = perform_effects(hand_off(ticket, num_slabs, self.matches), table)
        assert isinstance(outcome, HandoffOutcome) and bool(decoded) == (outcome.error is None)
        return outcome, decoded

    def _ending_of(self, outcome: HandoffOutcome, decoded: Sequence[int], offered: OfferedKv) -> str:
        if outcome.error is not None:
            assert isinstance(outcome.error, CorruptChunk), outcome.error
            assert self.pool.used == 0
            return "caught"
        held = [self.spread.read(slab) for slab in decoded]
        self.pool.give_back(list(decoded), "request")
        return "exact" if held == offered.chunks() else "wrong"

    def close(self) -> None:
        self.links.close()


@contextmanager
def opened_transport(
    transport: str, kind: type[PullTarget] | None = None, layout: KvLayout = LAYOUT
) -> Iterator[PullTarget]:
    """A source process and a target that is linked to it. NIXL goes over TCP, in pieces so small that much can happen
    between two of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TCP.items():
            patch.setenv(name, value)
        patch.setattr(nixl, "BATCH_BYTES", layout.chunk_bytes // 2)
        patch.setattr(nixl, "MAX_BATCHES_IN_FLIGHT", 1)
        with (
            closing(RemoteSource(transport, layout=layout)) as source,
            closing((kind or PullTarget)(transport, source)) as target,
        ):
            post = NixlAgent.post_read

            def after_the_first(agent: NixlAgent, *what: Any) -> int:
                target.run_step()
                return post(agent, *what)

            patch.setattr(NixlAgent, "post_read", after_the_first)
            yield target


class UncheckedTarget(PullTarget):
    """The control: one that believes every chunk."""

    def matches(self, index: int, payload: bytes, promised: bytes) -> bool:
        return True


def offer_kv(source: RemoteSource, number: int, request: str = "") -> OfferedKv:
    """KV that was read at once, as an attempt of its own."""
    ticket = source.offer(request or f"r{number}", number, TOKENS, list(SLABS), number)
    return OfferedKv(ticket, number, source.layout)


def spoil_source(source: RemoteSource, kind: str, rng: random.Random, earlier: int) -> None:
    """Do one injury to what lies in `SLABS`; `earlier` is the number of an offer that lay there before.

    Raises:
        AssertionError: it did not change what a decode worker reads.
    """
    victim = rng.choice(SLABS)
    match kind:
        case "swap":
            one, two = rng.sample(SLABS, 2)
            reply = source("swap", one=one, two=two)
        case "replay":
            reply = source("replay", slab=victim, seed=earlier)
        case _:
            reply = source(kind, slab=victim)
    assert reply == {"changed": True}, (kind, reply)


def restore_source(source: RemoteSource, number: int) -> None:
    """Put back what was offered."""
    for slab in SLABS:
        source("replay", slab=slab, seed=number)


def make_hint(
    source: RemoteSource, number: int, slabs: Sequence[int] = SLABS, mark: int | None = None
) -> StagingHint:
    """The announcement of chunks that are about to be computed."""
    mark = source("stage", slabs=list(slabs))["mark"] if mark is None else mark
    hint = StagingHint(f"r{number}", number, WORKER, source.incarnation, 0, tuple(slabs), mark)
    return tickets.decode_hint(tickets.encode_hint(hint, KEY), KEY)


def make_ticket(source: RemoteSource, number: int) -> OfferedKv:
    """The ticket for what has been computed by now."""
    raw = source("promise", request=f"r{number}", epoch=number, tokens=TOKENS, slabs=list(SLABS))["ticket"]
    return OfferedKv(tickets.decode_ticket(bytes.fromhex(raw), KEY), number, source.layout)


def compute_layers(source: RemoteSource, number: int, first: int, end: int) -> None:
    """Some layers are computed, and the board says so."""
    source("compute", slabs=list(SLABS), seed=number, first=first, end=end)


def injure_signed(raw: bytes, kind: str, rng: random.Random, older: bytes) -> bytes:
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
    return out if out != raw else injure_signed(raw, kind, rng, older)


def is_refused(read: Callable[[bytes, bytes], object], raw: bytes) -> bool:
    """Whether these signed bytes are refused when they are read."""
    try:
        read(raw, KEY)
    except TransferError:
        return True
    return False
