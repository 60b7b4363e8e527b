"""What a hand-off moves, holds and shares, and who goes first when room is short; on `worker_bench`'s byte model."""

from __future__ import annotations

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import Abort, Generate, Release
from diptych.request import Tenancy
from engine.scheduling.prefill_adder import RemainingKv
from tests.engine.workers.role_steps import (
    ANYBODY,
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
from tests.engine.workers.worker_bench import VOCAB, WorkerBench, alone, sampling


def ask(
    bench: WorkerBench, name: str, prompt: list[int], origin: Tenancy = ANYBODY, tokens: int = TOKENS
) -> int:
    """A request from its beginning to its end; returns the chunks that were moved for it."""
    admit(bench, name, offered(bench, name, prompt, tokens, origin=origin), prompt, tokens, origin=origin)
    while bench.courier.under_way:
        bench.courier.land()
    bench.decode.work()
    assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, tokens)
    bench.prefill.tell(Release(name, 0))
    (pulled,) = bench.decode.pulled(name)
    return pulled.num_bytes // CHUNK_BYTES


def test_only_what_is_missing_is_moved() -> None:
    bench = WorkerBench()
    assert ask(bench, "cold", PROMPT) == 3
    assert ask(bench, "again", PROMPT) == 1  # the tail is nobody else's
    assert ask(bench, "branch", PROMPT[:64] + OTHER) == 3
    assert ask(bench, "full", PROMPT[:128]) == 0  # its last token has no KV yet, and all the others' is here
    assert ask(bench, "foreign", OTHER) == 3
    rest(bench)


def test_what_was_written_is_shared_with_who_goes_on_from_there() -> None:
    """The second turn of a conversation: the first one's answer is known where it was written."""
    bench = WorkerBench()
    ask(bench, "first", PROMPT, tokens=50)
    conversation = PROMPT + alone(PROMPT, 50)  # 199 of these 200 tokens have KV there
    assert ask(bench, "second", [*conversation, 3]) == 1
    rest(bench)


def test_scopes_share_nothing() -> None:
    bench = WorkerBench()
    one, two = Tenancy("t", "one"), Tenancy("t", "two")
    assert ask(bench, "a", PROMPT, one) == 3
    assert ask(bench, "b", PROMPT, two) == 3
    assert ask(bench, "c", PROMPT, one) == ask(bench, "d", PROMPT, two) == 1
    assert [half.holdings.cached for half in (bench.prefill, bench.decode)] == [4, 4]
    rest(bench)


def test_without_caching_everything_is_moved_and_nothing_stays() -> None:
    bench = WorkerBench(caching=False)
    assert [ask(bench, name, PROMPT) for name in "abc"] == [3, 3, 3]
    rest(bench)
    assert bench.decode.pool.used == bench.prefill.pool.used == 0


def test_chunks_that_are_on_their_way_are_moved_once() -> None:
    """The second of two equal prompts waits for the first one's chunks; a third one is not held up by that."""
    bench = WorkerBench()
    moving(bench)
    admit(bench, "b", offered(bench, "b"))
    admit(bench, "c", offered(bench, "c", OTHER), OTHER)
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a", "c"]
    assert bench.decode.holdings.used == 6
    bench.courier.land()
    bench.decode.shell.run_once()
    assert [(arrival.seq.id, arrival.num_bytes) for arrival in bench.courier.under_way] == [
        ("c", 3 * CHUNK_BYTES),
        ("b", 1 * CHUNK_BYTES),
    ]
    while bench.courier.under_way:
        bench.courier.land()
    bench.decode.work()
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", OTHER)):
        assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, TOKENS)
        bench.prefill.tell(Release(name, 0))
    rest(bench)


def test_who_waits_for_chunks_that_never_come_fetches_them() -> None:
    bench = WorkerBench()
    moving(bench)
    admit(bench, "b", offered(bench, "b"))
    bench.decode.tell(Abort("a", 0))
    bench.courier.land()
    bench.decode.shell.run_once()
    (arrival,) = bench.courier.under_way
    assert (arrival.seq.id, arrival.num_bytes) == ("b", 3 * CHUNK_BYTES)
    bench.courier.land()
    bench.decode.work()
    assert bench.prefill.tokens("b") + bench.decode.tokens("b") == alone(PROMPT, TOKENS)
    bench.prefill.tell(Abort("a", 0), Release("b", 0))
    rest(bench)


def test_what_a_request_will_share_is_not_evicted_while_the_rest_is_on_its_way() -> None:
    """All other room is taken and given back meanwhile; the chunks that it holds stay what they are."""
    bench = WorkerBench(decode_slabs=9)
    ask(bench, "a", PROMPT)
    admit(bench, "b", offered(bench, "b"))
    assert [arrival.num_bytes for arrival in bench.courier.under_way] == [CHUNK_BYTES]
    for number in range(3):  # runs here, over all slabs that can be had
        prompt = [(place * place + number) % VOCAB for place in range(6 * CHUNK_TOKENS - 20)]
        bench.decode.tell(Generate(f"g{number}", 0, prompt, [], sampling(TOKENS), 60.0))
        bench.decode.work()
        assert bench.decode.tokens(f"g{number}") == alone(prompt, TOKENS)
    bench.courier.land()
    bench.decode.work()
    assert bench.prefill.tokens("b") + bench.decode.tokens("b") == alone(PROMPT, TOKENS)
    bench.prefill.tell(Release("b", 0))
    rest(bench)


@pytest.mark.parametrize("abort", [True, False])
def test_a_pull_that_fails_leaves_what_was_known_and_adds_nothing(abort: bool) -> None:
    bench = WorkerBench()
    ask(bench, "a", PROMPT[:70])
    admit(bench, "b", offered(bench, "b"))

    def fault(source: int, target: int) -> None:
        if abort:
            bench.decode.tell(Abort("b", 0))
        bench.decode.pool.slab_bytes(target)[3] ^= 1

    bench.links.fault = fault
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.ended("b") == ([] if abort else ["kv_corrupt"])
    assert bench.decode.holdings.cached == 1
    bench.links.fault = None
    bench.prefill.tell(Release("b", 0))
    assert ask(bench, "c", PROMPT) == 2
    rest(bench)


def test_who_waits_for_room_holds_nothing() -> None:
    bench = WorkerBench(decode_slabs=6)
    ask(bench, "a", PROMPT)
    moving_prompt = [(13 * place + 5) % VOCAB for place in range(250)]
    admit(bench, "b", offered(bench, "b", moving_prompt), moving_prompt)  # takes four of six
    admit(bench, "c", offered(bench, "c"))
    assert bench.decode.holdings.num_held("c#0") == 0 and bench.decode.stats.waiting == 2
    bench.courier.land()
    bench.decode.work()
    bench.courier.land()
    bench.decode.work()
    assert bench.prefill.tokens("c") + bench.decode.tokens("c") == alone(PROMPT, TOKENS)
    bench.prefill.tell(Release("b", 0), Release("c", 0))
    rest(bench)


def test_room_of_one_who_waits_for_a_chunk_is_not_given_away() -> None:
    bench = WorkerBench(decode_slabs=7)
    moving(bench)  # three of seven
    branch = PROMPT[:64] + LONG[:136]  # all other four, as long as its first chunk is not here
    admit(bench, "b", offered(bench, "b", branch), branch)
    admit(bench, "c", offered(bench, "c", OTHER), OTHER)
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a"]
    bench.courier.land()
    bench.decode.shell.run_once()
    assert [(one.seq.id, one.num_bytes) for one in bench.courier.under_way] == [("b", 3 * CHUNK_BYTES)]
    while bench.courier.under_way:
        bench.courier.land()
        bench.decode.work()
    for name, prompt in (("a", PROMPT), ("b", branch), ("c", OTHER)):
        assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, TOKENS)
        bench.prefill.tell(Release(name, 0))
    rest(bench)


def test_what_is_on_its_way_has_room_to_grow() -> None:
    """Of two that could depart in one round the second waits: what the first is expected to write would not fit."""
    bench = WorkerBench(decode_slabs=7)
    admit(bench, "z", offered(bench, "z", LONG), LONG)  # four of seven
    admit(bench, "a", offered(bench, "a", tokens=280), tokens=280)  # three, and two more later
    admit(bench, "b", offered(bench, "b", OTHER), OTHER)  # three
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["z"]
    bench.courier.land()
    bench.decode.work()
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a"]
    while bench.courier.under_way:
        bench.courier.land()
        bench.decode.work()
    for name, prompt, tokens in (("z", LONG, TOKENS), ("a", PROMPT, 280), ("b", OTHER, TOKENS)):
        assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, tokens)
        bench.prefill.tell(Release(name, 0))
    rest(bench)


def test_slabs_that_are_not_to_be_had_after_all_fail_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = WorkerBench(decode_slabs=6)
    ask(bench, "a", PROMPT)
    monkeypatch.setattr(bench.decode.engine.scheduler, "admits", lambda *args: True)
    monkeypatch.setattr(RemainingKv, "free", 6)
    admit(bench, "b", offered(bench, "b", LONG), LONG)
    branch = PROMPT + OTHER[:50]  # two of its four slabs are here, and not enough for the others
    admit(bench, "c", offered(bench, "c", branch), branch)
    assert bench.decode.ended("c") == ["out_of_memory"]
    assert bench.decode.holdings.num_held("c#0") == 0 and bench.decode.holdings.num_held("b#0") == 4
    bench.courier.land()
    bench.decode.work()
    assert bench.prefill.tokens("b") + bench.decode.tokens("b") == alone(LONG, TOKENS)
    bench.prefill.tell(Release("b", 0), Abort("c", 0))
    rest(bench)


def test_a_pool_too_small_for_all_writes_what_one_worker_writes_alone() -> None:
    """Fetched ones give up their memory, are read again here, and go on with the very token."""
    bench = WorkerBench(decode_slabs=9)
    prompts = {"a": PROMPT, "b": OTHER, "c": LONG, "d": PROMPT[:128] + OTHER[:30]}
    for name, prompt in prompts.items():
        admit(bench, name, offered(bench, name, prompt, tokens=300), prompt, tokens=300)
    while bench.courier.under_way:
        bench.courier.land()
        bench.decode.work()
    for name, prompt in prompts.items():
        assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, 300)
        bench.prefill.tell(Release(name, 0))
    assert bench.decode.stats.preemptions["recompute"] > 0
    rest(bench)


def test_the_more_urgent_is_fetched_first() -> None:
    bench = WorkerBench(decode_slabs=4)
    moving(bench)
    for name, priority in (("late", 1), ("soon", 0), ("urgent", -1)):
        origin = Tenancy(priority=priority)
        admit(bench, name, offered(bench, name, OTHER, origin=origin), OTHER, origin=origin)
    order = []
    while bench.courier.under_way:
        order.append(bench.courier.under_way[0].seq.id)
        bench.courier.land()
        bench.decode.work()
    assert order == ["a", "urgent", "soon", "late"]
    bench.prefill.tell(*(Release(name, 0) for name in ("a", "late", "soon", "urgent")))
    rest(bench)


def test_a_tenant_that_sends_much_does_not_keep_others_waiting() -> None:
    """Room for one at a time: the other tenant's only request is second, though it came last."""
    bench = WorkerBench(decode_slabs=4)
    names = ["much-0", "much-1", "much-2", "gone", "little"]
    for name in names:
        origin = Tenancy(name.split("-")[0], scope=name)
        admit(bench, name, offered(bench, name, OTHER, origin=origin), OTHER, origin=origin)
    bench.decode.tell(Abort("gone", 0))
    order = []
    while bench.courier.under_way:
        order.append(bench.courier.under_way[0].seq.id)
        bench.courier.land()
        bench.decode.work()
    assert order == ["much-0", "little", "much-1", "much-2"]
    service = bench.decode.engine.scheduler.token_counter
    service.enter_tenant("gone")  # everybody has left: nothing is remembered of anyone
    service.enter_tenant("much")
    service.enter_tenant("new")
    assert service.served_tokens("gone") == 0 and service.served_tokens("much") == service.served_tokens(
        "new"
    )
    bench.prefill.tell(*(Release(name, 0) for name in names))
    rest(bench)
