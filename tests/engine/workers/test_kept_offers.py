"""What a prefill worker offers of a sequence whose heads dropped tokens: whole chunks and bag, and nothing else."""

from __future__ import annotations

import os

import pytest

from diptych.eviction_spec import KeepSpec
from diptych.messages import Abort, Failed, Release, Renew, Staged
from engine.sequence import Sequence
from kvcache.prefix_tree import root_key
from kvtransfer import ticket as tickets
from kvtransfer.digests import HASH_FUNCTIONS, ChunkDigester
from prefill_worker.worker import PrefillWorker
from tests.engine.workers.worker_bench import KEY, LAYOUT, LEASE_S, VOCAB, WorkerBench, sampling

PROMPT = [(7 * place) % VOCAB for place in range(300)]
KEEP = KeepSpec(0.95, 128)  # 2 whole chunks


class OfferBench(WorkerBench):
    """A prefill worker whose engine hands over sequences as a test makes them."""

    @property
    def role(self) -> PrefillWorker:
        role = self.prefill.role
        assert isinstance(role, PrefillWorker)
        return role

    def evicted(self, name: str, delivered: int = 0, keep: KeepSpec = KEEP, bag: int = 2) -> Sequence:
        """A sequence at the end of its prefill: chunks in the prefix tree, a ring, a bag; then its next token."""
        root = root_key("model", "", "")
        output = [5] * delivered
        seq = Sequence(name, 0, PROMPT, sampling(500), 1e9, output=output, hold_kv=True, root=root, keep=keep)
        whole = keep.boundary_chunks
        holdings = self.prefill.holdings
        seq.slabs = holdings.attach_prefix(seq.key, seq.update_keys()[:whole])
        seq.slabs += holdings.allocate(seq.key, whole - len(seq.slabs))
        holdings.publish(seq.key, seq.keys[:whole], seq.slabs)
        seq.slabs += holdings.allocate(seq.key, 1 + bag)
        for slab in seq.slabs:
            self.prefill.pool.slab_bytes(slab)[:] = os.urandom(LAYOUT.chunk_bytes)
        seq.computed, seq.shared = seq.total, whole
        seq.output.append(7)
        return seq

    def take_over(self, seq: Sequence) -> tickets.Ticket:
        """It leaves the engine; the ticket that its KV is offered with."""
        self.role.take_over(seq, self.now_s)
        return tickets.decode_ticket(self.prefill.offers(seq.id)[-1].ticket, KEY)

    def check_rest(self) -> None:
        self.prefill.shell.run_once()
        self.prefill.holdings.check_books()
        assert (self.prefill.holdings.used, self.prefill.stats.leases) == (0, 0)


@pytest.mark.parametrize("delivered", [0, 1, 63, 64, 100])
def test_whole_chunks_and_bag_are_offered_as_of_the_last_decision(delivered: int) -> None:
    bench = OfferBench()
    seq = bench.evicted("a", delivered)
    ring = seq.slabs[2]
    ticket, [offer] = bench.take_over(seq), bench.prefill.offers("a")
    slabs = [chunk.slab for chunk in ticket.chunks]
    assert slabs == seq.slabs[:2] + seq.slabs[3:] and ring not in slabs
    decided = 300 + 64 * (delivered // 64)
    assert (ticket.context.keep, ticket.context.num_bag_slabs, ticket.context.num_tokens) == (
        KEEP,
        2,
        decided,
    )
    assert (offer.num_tokens, offer.num_slabs, offer.num_bytes) == (decided, 4, 4 * LAYOUT.chunk_bytes)
    seal = ChunkDigester(KEY, ticket.context)
    for index, chunk in enumerate(ticket.chunks):
        payload = HASH_FUNCTIONS["xxh3"](bench.prefill.pool.slab_bytes(chunk.slab))
        assert seal.matches_chunk(index, payload, chunk.digest)
    held = "the ring is free again, and only what is offered is leased"
    assert (bench.prefill.holdings.used, bench.role.ledger.slabs) == (4, 4), held


@pytest.mark.parametrize("end", ["release", "abort", "expiry", "abandon"])
def test_every_end_of_a_lease_frees_chunks_and_bag(end: str) -> None:
    bench = OfferBench()
    bench.take_over(bench.evicted("a"))
    bench.now_s += LEASE_S - 1
    bench.prefill.tell(Renew([("a", 0)]))
    bench.now_s += LEASE_S - 1
    bench.prefill.shell.run_once()
    assert bench.prefill.holdings.used == 4
    match end:
        case "release":
            bench.prefill.tell(Release("a", 0))
        case "abort":
            bench.prefill.shell.epoch_fence.begin_attempt("a", 0)
            bench.prefill.tell(Abort("a", 0))
        case "expiry":
            bench.now_s += 2
        case "abandon":
            assert bench.role.abandon_all() == [("a", 0)]
    bench.check_rest()
    assert bench.prefill.holdings.cached == 2, "whole chunks stay cached"


def test_a_bag_in_a_slab_that_held_a_hashed_chunk_is_hashed_anew() -> None:
    """Chunks are hashed as soon as they are full, so the hash of what lay at the same place before is known."""
    bench = OfferBench()
    keep = KeepSpec(0.95, 0)
    seq = bench.evicted("a", keep=keep)
    payloads, before = bench.role.announcer._hashes, bench.prefill.pool.slab_bytes
    seq.keep, seq.computed = KeepSpec(), 3 * 64  # as if it kept everything
    payloads.hash_full(seq)
    assert payloads.num_hashed == 3
    for slab in seq.slabs:
        before(slab)[:] = os.urandom(LAYOUT.chunk_bytes)
    seq.keep, seq.computed = keep, 300
    ticket = bench.take_over(seq)
    seal = ChunkDigester(KEY, ticket.context)
    for index, chunk in enumerate(ticket.chunks):
        assert seal.matches_chunk(index, HASH_FUNCTIONS["xxh3"](before(chunk.slab)), chunk.digest)


@pytest.mark.parametrize("delivered", [0, 100])
def test_only_chunks_below_the_boundary_are_announced_and_hashed_ahead(delivered: int) -> None:
    bench = OfferBench()
    seq = bench.evicted("a", delivered)
    seq.stage = True
    bench.role.announcer.on_step_begin([(seq, seq.computed)])
    bench.role.announcer.hash_full()
    [hint] = [
        tickets.decode_hint(message.hint, KEY)
        for message in bench.prefill.line.said
        if isinstance(message, Staged)
    ]
    assert (hint.start, list(hint.slabs)) == (0, seq.slabs[:2])
    assert bench.role.announcer._hashes.num_hashed == 2
    bench.take_over(seq)
    assert bench.role.announcer._hashes.num_hashed == 4, "no whole chunk is hashed twice, and the ring never"


def test_whole_chunks_of_two_requests_are_hashed_once() -> None:
    bench = OfferBench()
    bench.take_over(bench.evicted("a"))
    bench.take_over(bench.evicted("b"))
    assert bench.role.announcer._hashes.num_hashed == 2 + 2 + 2
    assert bench.prefill.holdings.used == 2 + 2 + 2


def test_a_sequence_without_a_bag_fails_and_frees_everything() -> None:
    bench = OfferBench()
    seq = bench.evicted("a", bag=0)
    bench.role.take_over(seq, bench.now_s)
    [failed] = [message for message in bench.prefill.line.said if isinstance(message, Failed)]
    assert (failed.code, failed.message) == ("internal_error", "3 slabs do not hold a bag behind 2 others")
    bench.check_rest()
