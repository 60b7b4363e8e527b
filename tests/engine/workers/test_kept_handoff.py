"""The hand-off of sequences whose heads drop tokens: decoding goes on exactly where the prefill worker decided.

Every phase can be stopped at and looked into, as in `test_roles`; the model of `kept_bench` notices every wrong byte.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from diptych.errors import TransferError
from diptych.eviction_spec import KEEP_ALL, KeepSpec, decision_tokens
from diptych.messages import Abort, Admit, Fetch, Generate, Prefill, Release, Staging
from kvtransfer import ticket as tickets
from kvtransfer.digests import DIGEST_BYTES
from tests.engine.workers.kept_bench import KeptBench, count_bag_slabs, kept_alone
from tests.engine.workers.kept_steps import BAG, PROMPT, TOKENS, WHOLE, admit, failures, moving, prefill
from tests.engine.workers.worker_bench import (
    KEY,
    LAYOUT,
    LEASE_S,
    VOCAB,
    WorkerBench,
    sampling,
)

OTHER = [(11 * place + 1) % VOCAB for place in range(300)]
KEEPS = [WHOLE, KeepSpec(0.75)]


@pytest.mark.parametrize("keep", KEEPS, ids=str)
@pytest.mark.parametrize("delivered", [0, 1, 63, 64, 65, 130])
def test_a_hand_off_writes_what_one_worker_writes_alone(delivered: int, keep: KeepSpec) -> None:
    """Whatever was delivered before: the decode worker computes the tokens since the last decision again."""
    bench, answer = KeptBench(), kept_alone(PROMPT, TOKENS, keep)
    assert answer != kept_alone(PROMPT, TOKENS), "what is dropped matters"
    known = answer[:delivered]
    admit(bench, "a", prefill(bench, "a", known, keep=keep), known, keep=keep)
    decided = decision_tokens(len(PROMPT), len(PROMPT) + delivered)
    bag = count_bag_slabs(decided, keep)
    [arrival] = bench.courier.under_way
    assert (arrival.num_tokens, arrival.num_bytes) == (
        decided,
        (keep.boundary_chunks + bag) * LAYOUT.chunk_bytes,
    )
    assert bench.decode.holdings.used == keep.boundary_chunks + bag + 1, "and the ring"
    bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Release("a", 0))
    assert known + bench.prefill.tokens("a") + bench.decode.tokens("a") == answer
    [pulled] = bench.decode.pulled("a")
    assert pulled.num_bytes == arrival.num_bytes
    bench.decode.tell(Generate("local", 0, PROMPT, known, sampling(TOKENS), 60.0, keep=keep))
    bench.decode.work()
    assert known + bench.decode.tokens("local") == answer
    bench.check_rest()


def test_whole_chunks_that_are_cached_are_attached_and_nothing_of_the_bag_is() -> None:
    bench = KeptBench()
    for name in ("a", "b"):
        moving(bench, name)
        bench.courier.land()
        bench.decode.work()
        bench.prefill.tell(Release(name, 0))
    sizes = [bench.decode.pulled(name)[0].num_bytes // LAYOUT.chunk_bytes for name in ("a", "b")]
    assert sizes == [2 + BAG, BAG]
    assert bench.decode.holdings.cached == 2, "KV that was computed behind a decision is shared with nobody"
    assert bench.decode.tokens("a") == bench.decode.tokens("b")
    bench.check_rest()


def test_requests_with_and_without_eviction_share_what_both_have_whole() -> None:
    bench = KeptBench()
    admit(bench, "raw", prefill(bench, "raw", [], keep=KEEP_ALL), [], keep=KEEP_ALL)
    bench.courier.land()
    bench.decode.work()
    moving(bench)
    assert bench.courier.under_way[0].num_bytes == BAG * LAYOUT.chunk_bytes
    bench.courier.land()
    bench.decode.work()
    for name in ("raw", "a"):
        bench.prefill.tell(Release(name, 0))
    answers = [bench.prefill.tokens(name) + bench.decode.tokens(name) for name in ("raw", "a")]
    assert answers == [kept_alone(PROMPT, TOKENS), kept_alone(PROMPT, TOKENS, WHOLE)]
    bench.check_rest()


@pytest.mark.parametrize("place", range(2 + BAG))
def test_a_corrupted_slab_of_prefix_or_bag_is_found_and_the_next_attempt_goes_on(place: int) -> None:
    bench, copied = KeptBench(), list[int]()

    def corrupt(_source: int, target: int) -> None:
        copied.append(target)
        if len(copied) == place + 1:
            bench.decode.pool.slab_bytes(target)[LAYOUT.chunk_bytes - 1] ^= 1

    bench.links.fault = corrupt
    moving(bench)
    bench.courier.land()
    bench.decode.work()
    assert [one.code for one in failures(bench.decode, "a")] == ["kv_corrupt"]
    assert bench.decode.stats.integrity_failures == 1 and bench.decode.holdings.used == 0
    bench.prefill.tell(Abort("a", 0))
    bench.links.fault = None
    first = kept_alone(PROMPT, 1, WHOLE)
    admit(bench, "a", prefill(bench, "a", first, epoch=1), first, epoch=1)
    bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Release("a", 1))
    assert first + bench.prefill.tokens("a", 1) + bench.decode.tokens("a", 1) == kept_alone(
        PROMPT, TOKENS, WHOLE
    )
    bench.check_rest()


def test_a_bag_with_a_bad_map_is_corrupt_though_its_digests_are_right() -> None:
    bench = KeptBench()
    bench.prefiller.spoil = lambda head: b"gag!" + head[4:]
    moving(bench)
    bench.courier.land()
    bench.decode.work()
    [failed] = failures(bench.decode, "a")
    assert failed.code == "kv_corrupt"
    assert failed.message == (
        "KV of request a does not say what its heads kept: the slabs do not begin with a map"
    )
    assert bench.decode.stats.integrity_failures == 1
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_a_bag_of_an_earlier_decision_is_corrupt() -> None:
    """Its map is valid by itself; a decode worker would go on 64 tokens too early."""
    bench = KeptBench()
    bench.prefiller.spoil = lambda head: head[:4] + (len(PROMPT) - 64).to_bytes(4, "little") + head[8:]
    moving(bench)
    bench.courier.land()
    bench.decode.work()
    [failed] = failures(bench.decode, "a")
    assert failed.code == "kv_corrupt" and f"{len(PROMPT) - 64} tokens" in failed.message
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_another_failure_behind_a_right_map_is_internal() -> None:
    bench = KeptBench()
    moving(bench)
    bench.courier.land()

    def refuse(seq: object, now_s: float) -> None:
        raise ValueError("it is already here")

    bench.decode.engine.scheduler.adopt = refuse  # type: ignore[method-assign]
    bench.decode.work()
    [failed] = failures(bench.decode, "a")
    assert (failed.code, failed.message) == ("internal_error", "it is already here")
    assert bench.decode.stats.integrity_failures == 0
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


@pytest.mark.parametrize("phase", ["waiting", "early", "moving", "landed", "decoding"])
def test_an_abort_in_any_phase_frees_chunks_ring_and_bag(phase: str) -> None:
    bench = KeptBench(decode_slabs=10)
    if phase == "waiting":
        moving(bench, "b")
    ticket = prefill(bench, "a", [])
    admit(bench, "a", b"" if phase == "early" else ticket, [])
    match phase:
        case "waiting" | "early":
            assert (len(bench.courier.under_way), bench.decode.stats.deferred) == (
                phase == "waiting",
                1 + (phase == "waiting"),
            )
        case "moving":
            next(bench.courier._hauls["a#0"])
        case "landed":
            bench.courier.land()
        case "decoding":
            bench.courier.land()
            for _ in range(70):
                bench.decode.shell.run_once()
            assert 1 < len(bench.decode.tokens("a")) < TOKENS - 1
    for half in (bench.decode, bench.prefill):
        half.tell(Abort("a", 0), Abort("b", 0))
    for _ in list(bench.courier.under_way):
        bench.courier.land()
    assert not failures(bench.decode, "a")
    bench.check_rest()


def test_a_bag_that_was_overwritten_after_its_lease_is_not_taken() -> None:
    bench = KeptBench(prefill_slabs=2 + BAG + 5)
    moving(bench)
    bench.now_s += LEASE_S + 1
    prefill(bench, "b", [], prompt=OTHER)
    bench.courier.land()
    bench.decode.work()
    assert [one.code for one in failures(bench.decode, "a")] == ["kv_corrupt"]
    bench.prefill.tell(Release("b", 0))
    bench.check_rest()


def test_without_a_ticket_it_waits_and_holds_nothing() -> None:
    """What is kept is decided last, so hints are of no use."""
    bench = KeptBench()
    bench.decode.tell(Admit("a", 0, PROMPT, [], sampling(TOKENS), b"", 60.0, keep=WHOLE))
    hint = tickets.StagingHint("a", 0, "prefill-0", "life", 0, (0, 1), 1)
    bench.decode.tell(Staging("a", 0, tickets.encode_hint(hint, KEY)))
    assert (bench.decode.holdings.used, bench.courier.under_way, bench.decode.stats.deferred) == (0, [], 1)
    ticket = prefill(bench, "a", [])
    bench.decode.tell(Fetch("a", 0, bench.prefill.tokens("a"), ticket, 60.0))
    assert bench.decode.holdings.used == 2 + BAG + 1
    bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Release("a", 0))
    assert bench.prefill.tokens("a") + bench.decode.tokens("a") == kept_alone(PROMPT, TOKENS, WHOLE)
    bench.check_rest()


@pytest.mark.parametrize(
    ("here", "why"),
    [
        (KEEP_ALL, "the ticket is for another eviction threshold; offered: 0.95 here: 1.0"),
        (KeepSpec(0.9, 128), "the ticket is for another eviction threshold; offered: 0.95 here: 0.9"),
        (KeepSpec(0.95, 64), "the ticket is for another eviction boundary; offered: 128 here: 64"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_ticket_of_another_keep_spec_is_refused_with_both_sides(
    here: KeepSpec, why: str, late: bool
) -> None:
    bench = KeptBench()
    ticket = prefill(bench, "a", [])
    if late:
        bench.decode.tell(Admit("a", 0, PROMPT, [], sampling(TOKENS), b"", 60.0, keep=here))
        bench.decode.tell(Fetch("a", 0, bench.prefill.tokens("a"), ticket, 60.0))
    else:
        admit(bench, "a", ticket, [], keep=here)
    for _ in list(bench.courier.under_way):
        bench.courier.land()
    bench.decode.work()
    [failed] = failures(bench.decode, "a")
    assert (failed.code, " ".join(failed.message.replace(":", ": ").split())) == (
        "stale_ticket",
        " ".join(why.replace(";", ";" if not late else ":").replace(":", ": ").split()),
    )
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_a_worker_that_cannot_evict_refuses_before_it_pulls() -> None:
    bench, able = WorkerBench(), KeptBench()
    ticket = prefill(able, "a", [])
    able.prefill.tell(Release("a", 0))
    for half, order in (
        (bench.decode, Admit("a", 0, PROMPT, [1], sampling(9), ticket, 60.0, keep=WHOLE)),
        (bench.decode, Generate("b", 0, PROMPT, [], sampling(9), 60.0, keep=WHOLE)),
        (bench.prefill, Prefill("c", 0, PROMPT, [], sampling(9), 60.0, keep=WHOLE)),
    ):
        half.tell(order)
        [failed] = failures(half, order.request)
        assert (failed.code, failed.message) == (
            "internal_error",
            "the runner of this worker cannot evict KV",
        )
        assert (half.holdings.used, bench.courier.under_way) == (0, [])
    able.check_rest()


@pytest.mark.parametrize("late", [False, True])
def test_a_bag_that_can_never_fit_is_refused(late: bool) -> None:
    """A hostile ticket may offer more slabs than heads that keep everything need."""
    bench = KeptBench(decode_slabs=9)
    offered = tickets.decode_ticket(prefill(bench, "a", [], tokens=2), KEY)
    terms = msgspec.structs.replace(offered.context, num_bag_slabs=7)
    large = tickets.issue_ticket(
        KEY, terms, "prefill-0", "life", range(9), lambda slab, algorithm: bytes(DIGEST_BYTES)
    )
    raw = tickets.encode_ticket(large, KEY)
    if late:
        bench.decode.tell(Admit("a", 0, PROMPT, [], sampling(2), b"", 60.0, keep=WHOLE))
        bench.decode.tell(Fetch("a", 0, bench.prefill.tokens("a"), raw, 60.0))
    else:
        admit(bench, "a", raw, [], tokens=2)
    [failed] = failures(bench.decode, "a")
    assert failed.code == "out_of_memory" and "10 KV slabs" in failed.message and "has 9" in failed.message
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


@pytest.mark.parametrize("seed", range(4))
def test_many_requests_in_any_order_end_with_their_tokens(seed: int) -> None:
    """Aborts, corruption, broken links and lost leases, in an order drawn by a seed; in the end nothing is held."""
    storm = Storm(random.Random(seed))
    storm.run()
    storm.bench.check_rest()


class Storm:
    """Requests with and without eviction side by side, in pools that are too small for all of them."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.bench = dice, KeptBench(prefill_slabs=20, decode_slabs=20)
        self.bench.links.fault = self.fault
        self.keep_of = {
            f"r{number}": dice.choice([KEEP_ALL, *KEEPS, KeepSpec(0.5, 256)]) for number in range(6)
        }
        self.prompt_of = {
            name: dice.choice([PROMPT, OTHER])[: dice.choice([257, 300])] for name in self.keep_of
        }
        self.answers = {
            name: kept_alone(self.prompt_of[name], 150, keep) for name, keep in self.keep_of.items()
        }
        # What was delivered before the running attempt, its number, and whether its ticket was passed on.
        self.delivered = {name: list[int]() for name in self.keep_of}
        self.epochs = dict.fromkeys(self.keep_of, -1)
        self.admitted: set[str] = set()

    def fault(self, _source: int, target: int) -> None:
        if self.dice.random() < 0.02:
            content = self.bench.decode.pool.slab_bytes(target)
            content[self.dice.randrange(LAYOUT.chunk_bytes)] ^= 1 << self.dice.randrange(8)
        elif self.dice.random() < 0.02:
            raise TransferError("the link broke")

    def run(self) -> None:
        left = sorted(self.keep_of)
        for name in left:
            self.begin(name)
        for _ in range(3000):
            for name in list(left):
                if self.advance(name):
                    left.remove(name)
            if not left:
                return
            if self.dice.random() < 0.02:
                self.begin(self.dice.choice(left))
            if self.dice.random() < 0.01:
                self.bench.now_s += LEASE_S + 1
            if self.bench.courier.under_way and self.dice.random() < 0.3:
                self.bench.courier.land()
            for half in (self.bench.prefill, self.bench.decode):
                half.shell.run_once()
        raise AssertionError(f"{left} did not end")

    def so_far(self, name: str) -> list[int]:
        epoch = self.epochs[name]
        new = self.bench.prefill.tokens(name, epoch) + self.bench.decode.tokens(name, epoch)
        tokens = self.delivered[name] + new
        assert tokens == self.answers[name][: len(tokens)]
        return tokens

    def begin(self, name: str) -> None:
        """Another attempt; the one before it, if any, is given up."""
        self.delivered[name] = self.so_far(name)
        for half in (self.bench.prefill, self.bench.decode):
            half.tell(Abort(name, self.epochs[name]))
        self.epochs[name] += 1
        self.admitted.discard(name)
        self.bench.prefill.tell(
            Prefill(
                name,
                self.epochs[name],
                self.prompt_of[name],
                self.delivered[name],
                sampling(150),
                1e6,
                keep=self.keep_of[name],
            )
        )

    def advance(self, name: str) -> bool:
        """Pass on what workers said of the attempt; returns whether the answer is complete."""
        bench, epoch = self.bench, self.epochs[name]
        tokens = self.so_far(name)
        if len(tokens) == 150:
            bench.prefill.tell(Release(name, epoch))
            return True
        if any(one.epoch == epoch for half in (bench.prefill, bench.decode) for one in failures(half, name)):
            self.begin(name)
            return False
        offers = [one for one in bench.prefill.offers(name) if one.epoch == epoch]
        if offers and name not in self.admitted:
            self.admitted.add(name)
            order = sampling(150), offers[0].ticket, 1e6
            bench.decode.tell(
                Admit(name, epoch, self.prompt_of[name], tokens, *order, keep=self.keep_of[name])
            )
        if any(one.epoch == epoch for one in bench.decode.pulled(name)):
            bench.prefill.tell(Release(name, epoch))
        return False
