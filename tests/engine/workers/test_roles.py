"""The workers' loop and roles, in one process on a byte model: every phase can be stopped at and looked into."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import TransferError
from diptych.messages import (
    Abort,
    Admit,
    Drain,
    Failed,
    Generate,
    Offer,
    Prefill,
    Pulled,
    Release,
    Renew,
    Step,
    Welcome,
)
from diptych.request import Tenancy
from tests.engine.workers.role_steps import (
    CHUNK_BYTES,
    LONG,
    OTHER,
    PROMPT,
    TOKENS,
    admit,
    moving,
    offered,
    rest,
)
from tests.engine.workers.worker_bench import LEASE_S, WorkerBench, alone, sampling


@pytest.mark.parametrize("caching", [True, False])
def test_a_hand_off_writes_what_one_worker_writes_alone(caching: bool) -> None:
    bench = WorkerBench(caching=caching)
    moving(bench)
    assert bench.decode.stats.staging_bytes == 3 * CHUNK_BYTES
    bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Release("a", 0))
    assert bench.prefill.tokens("a") + bench.decode.tokens("a") == alone(PROMPT, TOKENS)
    (pulled,) = bench.decode.pulled("a")
    assert (pulled.transport, pulled.num_bytes) == ("fake", 3 * CHUNK_BYTES)
    rest(bench)
    assert bench.decode.holdings.cached == 2 * caching


def test_the_token_is_said_before_the_offer_is_made() -> None:
    bench = WorkerBench()
    offered(bench, "a")
    assert [type(message) for message in bench.prefill.line.said] == [Step, Offer]


def test_one_step_speaks_for_all_that_progressed_in_it() -> None:
    bench = WorkerBench()
    for name in "abc":
        bench.decode.tell(Generate(name, 0, PROMPT[:5], [], sampling(4), 60.0))
    bench.decode.work()
    steps = [message for message in bench.decode.line.said if isinstance(message, Step)]
    assert max(len(step.outputs) for step in steps) == 3
    for name in "abc":
        assert bench.decode.tokens(name) == alone(PROMPT[:5], 4)


def test_slabs_of_an_aborted_pull_stay_reserved_until_nothing_writes_to_them() -> None:
    bench = WorkerBench(decode_slabs=5)
    moving(bench)
    used = bench.decode.pool.used
    bench.decode.tell(Abort("a", 0))
    assert bench.decode.pool.used == used == 3
    ticket = offered(bench, "b", OTHER)
    admit(bench, "b", ticket, OTHER)
    assert len(bench.courier.under_way) == 1  # no room yet: the first pull may still write
    bench.courier.land()
    bench.decode.work()
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["b"]
    bench.courier.land()
    bench.decode.work()
    assert bench.prefill.tokens("b") + bench.decode.tokens("b") == alone(OTHER, TOKENS)
    assert bench.decode.ended("a") == [] and bench.decode.pulled("a") == []
    bench.prefill.tell(Abort("a", 0), Release("b", 0))
    rest(bench)


def test_an_abort_stops_a_pull_half_way() -> None:
    bench = WorkerBench()
    moving(bench)
    copied = []

    def fault(source: int, target: int) -> None:
        copied.append(target)
        bench.decode.tell(Abort("a", 0))

    bench.links.fault = fault
    bench.courier.land()
    assert len(copied) == 1
    bench.prefill.tell(Abort("a", 0))
    rest(bench)


def test_an_abort_after_the_pull_and_before_its_news_commits_nothing() -> None:
    bench = WorkerBench()
    moving(bench)
    bench.courier.land()  # landed, but the loop has not looked yet
    bench.decode.line.inbox.append(Abort("a", 0))
    bench.decode.shell.run_once()
    bench.decode.work()
    assert bench.decode.line.said == []
    bench.prefill.tell(Abort("a", 0))
    rest(bench)


@pytest.mark.parametrize("welcome", [False, True])
def test_a_lost_gateway_frees_everything_in_every_phase(welcome: bool) -> None:
    bench = WorkerBench(decode_slabs=7)
    moving(bench)  # on its way
    waits = offered(bench, "b", OTHER, tokens=290)
    admit(bench, "b", waits, OTHER, tokens=290)  # waits for room
    bench.decode.tell(Generate("c", 0, PROMPT[:5], [], sampling(100), 60.0))  # runs
    bench.prefill.tell(Prefill("d", 0, LONG, [], sampling(5), 60.0))  # half read
    assert (bench.decode.stats.waiting, bench.decode.stats.running, bench.prefill.stats.running) == (2, 1, 1)
    for half in (bench.prefill, bench.decode):
        if welcome:
            half.tell(Welcome("another", 0.25, 10.0))
        else:
            half.line.gateway_lost = True
            half.shell.run_once()
    assert bench.decode.pool.used == 3  # those that a pull may still write to
    bench.courier.land()
    rest(bench)
    assert bench.decode.ended("a") == bench.decode.ended("b") == bench.decode.ended("c") == []


def test_a_request_that_needs_much_room_is_not_overtaken() -> None:
    bench = WorkerBench(decode_slabs=8)
    moving(bench)
    admit(bench, "large", offered(bench, "large", LONG, tokens=300), LONG, tokens=300)
    small = OTHER + OTHER[:50]  # 4 slabs: it would fit
    admit(bench, "small", offered(bench, "small", small), small)
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a"]
    bench.courier.land()
    bench.decode.work()
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["large"]
    bench.courier.land()
    bench.decode.work()
    bench.courier.land()
    bench.decode.work()
    for name, prompt, tokens in (("large", LONG, 300), ("small", small, TOKENS)):
        assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, tokens)
    bench.prefill.tell(*(Release(name, 0) for name in ("a", "large", "small")))
    rest(bench)


def test_time_that_is_up_ends_waiting_and_moving_requests() -> None:
    bench = WorkerBench(decode_slabs=5)
    moving(bench, remaining_s=2.0)
    admit(bench, "b", offered(bench, "b"), remaining_s=3.0)
    bench.decode.shell.run_once()
    assert bench.decode.shell.max_wait_s == pytest.approx(0.5)
    bench.now_s += 1.9
    assert bench.decode.shell.max_wait_s == pytest.approx(0.1)
    bench.now_s += 1.2
    bench.decode.shell.run_once()
    assert bench.decode.ended("b") == ["deadline_exceeded"]
    assert bench.decode.ended("a") == []  # said when its slabs are free
    bench.courier.land()
    bench.decode.shell.run_once()
    assert bench.decode.ended("a") == ["deadline_exceeded"]
    bench.prefill.tell(Abort("a", 0), Abort("b", 0))
    rest(bench)


def test_kv_that_is_not_what_was_offered_is_never_decoded() -> None:
    bench = WorkerBench()
    moving(bench)

    def fault(source: int, target: int) -> None:
        bench.decode.pool.slab_bytes(target)[100] ^= 1

    bench.links.fault = fault
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.ended("a") == ["kv_corrupt"]
    assert bench.decode.tokens("a") == [] and bench.decode.stats.integrity_failures == 1
    bench.prefill.tell(Abort("a", 0))
    rest(bench)


def test_a_failed_transfer_is_reported_and_leaves_nothing() -> None:
    bench = WorkerBench()
    moving(bench)

    def fault(source: int, target: int) -> None:
        raise TransferError("the cable", "was cut")

    bench.links.fault = fault
    bench.courier.land()
    bench.decode.work()
    (failed,) = [message for message in bench.decode.line.said if isinstance(message, Failed)]
    assert (failed.code, failed.message) == ("transfer_failed", "the cable: was cut")
    bench.prefill.tell(Abort("a", 0))
    rest(bench)


def test_a_newer_attempt_ends_the_older_one_wherever_it_is() -> None:
    bench = WorkerBench()
    moving(bench)  # epoch 0 is on its way at the decode worker and leased at the prefill worker
    ticket = offered(bench, "a", epoch=1)
    assert bench.prefill.stats.leases == 1
    admit(bench, "a", ticket, epoch=1)
    bench.courier.land()
    bench.courier.land()
    bench.decode.work()
    assert bench.prefill.tokens("a", 1) + bench.decode.tokens("a", 1) == alone(PROMPT, TOKENS)
    assert bench.decode.tokens("a", 0) == [] and bench.decode.ended("a") == ["length"]
    bench.prefill.tell(Release("a", 0))
    assert bench.prefill.stats.leases == 1 and bench.prefill.stats.late_messages == 1
    bench.prefill.tell(Release("a", 1))
    rest(bench)


def test_a_lease_lives_as_long_as_it_is_renewed() -> None:
    bench = WorkerBench()
    offered(bench, "a")
    for _ in range(5):
        bench.now_s += 0.9 * LEASE_S
        bench.prefill.tell(Renew([("a", 0)]))
    assert bench.prefill.stats.leases == 1
    bench.now_s += LEASE_S
    bench.prefill.shell.run_once()
    assert bench.prefill.stats.leases_expired == 1
    rest(bench)


def test_a_drained_worker_refuses_new_work_and_ends_when_the_old_is_done() -> None:
    bench = WorkerBench()
    moving(bench)
    half = bench.decode
    half.tell(Drain(), Generate("b", 0, PROMPT, [], sampling(3), 60.0))
    assert half.ended("b") == ["draining"] and not half.shell.is_over
    bench.courier.land()
    half.shell.run_until_drained()
    assert bench.prefill.tokens("a") + half.tokens("a") == alone(PROMPT, TOKENS)
    bench.prefill.tell(Release("a", 0))
    bench.prefill.tell(Drain())
    bench.prefill.shell.run_until_drained()
    rest(bench)


def test_a_drain_has_an_end() -> None:
    bench = WorkerBench()
    offered(bench, "a")
    bench.prefill.tell(Drain())
    assert not bench.prefill.shell.is_over
    bench.now_s += 11.0
    bench.prefill.shell.run_until_drained()
    assert bench.prefill.ended("a") == ["draining"]
    assert bench.prefill.holdings.used == 0


def test_a_slab_that_nobody_holds_any_more_is_fatal() -> None:
    bench = WorkerBench()
    bench.decode.pool.take_slabs(1, "nobody")
    with pytest.raises(RuntimeError, match="1 slabs are used although nothing is held: {'nobody': 1}"):
        bench.decode.shell.run_once()


def test_going_through_all_books_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is so large that it takes 50 ms: requests that come one by one do not each wait for that."""
    bench, proofs = WorkerBench(), []

    def check() -> None:
        proofs.append(bench.now_s)
        bench.now_s += 0.05

    monkeypatch.setattr(bench.decode.holdings, "check_books", check)

    def ask(name: str) -> None:
        bench.decode.tell(Generate(name, 0, PROMPT[:5], [], sampling(4), 60.0))
        bench.decode.work()
        bench.now_s += 0.5

    served = 0
    while len(proofs) < 5:
        ask(f"r{served}")
        served += 1
    assert all(later - sooner >= 5 for sooner, later in pairwise(proofs)) and served > 36
    bench.decode.pool.take_slabs(1, "nobody")
    with pytest.raises(RuntimeError, match="'nobody': 1"):  # seeing that takes no time
        ask("last")
    assert len(proofs) == 5


def test_a_thread_of_the_courier_that_dies_is_fatal() -> None:
    bench = WorkerBench()
    bench.courier.error = MemoryError("out of it")
    with pytest.raises(MemoryError):
        bench.decode.shell.run_once()


NAMES = st.sampled_from("abcde")
EPOCHS = st.integers(0, 2)
ORDERS = st.one_of(
    st.tuples(st.just("prefill"), NAMES, EPOCHS),
    st.tuples(st.just("admit"), NAMES, EPOCHS),
    st.tuples(st.just("generate"), NAMES, EPOCHS),
    st.tuples(st.sampled_from(["abort", "release", "renew"]), NAMES, EPOCHS),
    st.tuples(st.sampled_from(["land", "turn", "wait", "lose"]), NAMES, EPOCHS),
)


# Those that begin alike share chunks; "d" and "e" are alike, but for their scope.
PROMPTS = {
    "a": PROMPT,
    "b": PROMPT[:128] + OTHER[:20],
    "c": PROMPT[:64] + OTHER[:80],
    "d": OTHER[:128],
    "e": OTHER[:128],
}
ORIGINS = {name: Tenancy("t", "own" if name == "e" else "", int(name == "b")) for name in PROMPTS}


class Chaos:
    """Plays any orders, also senseless ones, and checks what was said."""

    def __init__(self, caching: bool) -> None:
        self.bench = WorkerBench(prefill_slabs=8, decode_slabs=7, caching=caching)
        self.tickets: dict[tuple[str, int], bytes] = {}

    def play(self, kind: str, name: str, epoch: int) -> None:
        bench = self.bench
        prefill, decode = bench.prefill, bench.decode
        prompt, origin = PROMPTS[name], ORIGINS[name]
        if kind == "prefill":
            prefill.tell(Prefill(name, epoch, prompt, [], sampling(TOKENS), 60.0, origin))
        elif kind == "generate":
            decode.tell(Generate(f"local-{name}", epoch, prompt, [], sampling(TOKENS), 60.0, origin))
        elif kind == "admit" and (ticket := self.tickets.get((name, epoch))) is not None:
            first = prefill.tokens(name, epoch)
            decode.tell(Admit(name, epoch, prompt, first, sampling(TOKENS), ticket, 60.0, origin))
        elif kind == "abort":
            prefill.tell(Abort(name, epoch))
            decode.tell(Abort(name, epoch), Abort(f"local-{name}", epoch))
        elif kind == "release":
            prefill.tell(Release(name, epoch))
        elif kind == "renew":
            prefill.tell(Renew([(name, epoch)]))
        elif kind == "land" and bench.courier.under_way:
            bench.courier.land()
        elif kind == "wait":
            bench.now_s += 7.0
        elif kind == "lose":
            decode.tell(Welcome("again", 0.25, 10.0))
        for half in (prefill, decode):
            half.shell.run_once()
            half.holdings.check_books()
        for offer in (message for message in prefill.line.said if isinstance(message, Offer)):
            self.tickets[offer.request, offer.epoch] = offer.ticket

    def end(self) -> None:
        bench = self.bench
        bench.now_s += 61.0
        while bench.courier.under_way:
            bench.courier.land()
            bench.decode.work()
        bench.prefill.work()
        rest(bench)
        for name in "abcde":
            truth = alone(PROMPTS[name], TOKENS)
            for epoch in range(3):
                written = bench.prefill.tokens(name, epoch) + bench.decode.tokens(name, epoch)
                assert written == truth[: len(written)]
                local = bench.decode.tokens(f"local-{name}", epoch)
                assert local == truth[: len(local)]


@settings(max_examples=250, deadline=None)
@given(st.lists(ORDERS, max_size=40), st.booleans())
def test_any_orders_end_at_rest_and_no_wrong_token_is_ever_said(
    orders: list[tuple[str, str, int]], caching: bool
) -> None:
    chaos = Chaos(caching)
    for kind, name, epoch in orders:
        chaos.play(kind, name, epoch)
    chaos.end()


def test_pulled_comes_before_the_first_token_of_the_decode_worker() -> None:
    bench = WorkerBench()
    moving(bench)
    bench.courier.land()
    bench.decode.work()
    kinds = [type(message) for message in bench.decode.line.said]
    assert kinds[0] is Pulled and set(kinds[1:]) == {Step}
