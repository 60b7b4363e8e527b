"""A request through both roles of vLLM workers: tokens, books, and what each end of it leaves."""

from __future__ import annotations

import math

import pytest

from diptych.messages import (
    Abort,
    Admit,
    Drain,
    Fetch,
    Generate,
    Offer,
    Prefill,
    Release,
    Renew,
    Staging,
    Step,
    SwitchRole,
)
from kvtransfer.ticket import decode_ticket
from tests.engine.vllm_worker.vllm_bench import (
    MAX_MODEL_LEN,
    TOKENS,
    VllmBench,
    alone,
    greedy,
    make_prompt,
)
from tests.engine.workers.worker_bench import KEY, LEASE_S
from tests.support.toy_port import ToyPort

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 300]


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_answer_is_that_of_one_engine_cold_and_warm(length: int, defer: bool) -> None:
    bench, prompt = VllmBench(), make_prompt(length)
    for name in ("cold", "warm"):
        assert bench.answer(name, prompt, defer) == alone(prompt)
        assert bench.prefill.tokens(name) == ([] if defer else alone(prompt)[:1])
        (pulled,) = bench.decode.pulled(name)
        assert pulled.num_bytes == -(-length // 64) * bench.decode.buffer.layout.chunk_bytes
    bench.check_rest()


def test_a_deferred_prompt_is_reported_without_a_token_before_its_offer() -> None:
    bench = VllmBench()
    offer = bench.prefill_it("a", make_prompt(100), defer=True)
    step, last = bench.prefill.line.said
    assert isinstance(step, Step) and last is offer
    (output,) = step.outputs
    assert (output.tokens, output.finish) == ([], None) and output.seconds
    assert offer.num_tokens == 100


def test_vllm_has_its_blocks_back_while_the_offer_is_under_lease() -> None:
    bench = VllmBench()
    offer = bench.prefill_it("a", make_prompt(130))
    assert bench.prefill.port.held_blocks == 0
    stats = bench.prefill.stats
    assert (stats.leases, stats.buffer_leased, stats.copies_in_flight) == (1, 3, 0)
    ticket = decode_ticket(offer.ticket, KEY)
    assert (ticket.worker, ticket.incarnation, len(ticket.chunks)) == ("prefill-0", "life", 3)
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_kv_is_offered_while_the_next_step_still_runs() -> None:
    """The thread offers as soon as the ranks have copied: the step that copies has not ended by then."""
    bench, seen = VllmBench(), list[int]()
    copies = bench.prefill.port._copies
    load = copies.load

    def load_later() -> None:
        bench.tasks.creep()
        seen.append(len(bench.prefill.offers("a")))
        load()

    copies.load = load_later  # type: ignore[method-assign]
    bench.prefill_it("a", make_prompt(130))
    assert seen[-1] == 1 and 0 in seen
    bench.prefill.tell(Abort("a", 0))
    bench.check_rest()


def test_the_rows_behind_the_prompt_travel_as_zeros() -> None:
    bench = VllmBench()
    offer = bench.prefill_it("a", make_prompt(70))
    (_, last) = decode_ticket(offer.ticket, KEY).chunks
    size = bench.prefill.port.facts.slab_bytes
    slab = bytes(bench.prefill.buffer.memory.view[last.slab * size : (last.slab + 1) * size])
    layers = [slab[: size // 2], slab[size // 2 :]]
    for layer in layers:
        assert any(layer[: 6 * 4]) and not any(layer[6 * 4 :])
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_leases_are_renewed_and_end_by_themselves() -> None:
    bench = VllmBench()
    bench.prefill_it("a", make_prompt(70))
    bench.now_s += LEASE_S - 1
    bench.prefill.tell(Renew([("a", 0)]))
    bench.now_s += LEASE_S - 1
    bench.prefill.loop.run_once()
    assert bench.prefill.stats.leases == 1
    bench.now_s += 2
    bench.prefill.loop.run_once()
    assert (bench.prefill.stats.leases, bench.prefill.stats.leases_expired) == (0, 1)
    bench.check_rest()


def test_a_full_buffer_holds_prompts_back_in_order_and_blocks_until_there_is_room() -> None:
    bench = VllmBench(prefill_slabs=16)
    prompts = {
        name: make_prompt(64 * size, seed) for seed, (name, size) in enumerate([("a", 9), ("b", 9), ("c", 2)])
    }
    for name, prompt in prompts.items():
        bench.prefill.tell(Prefill(name, 0, prompt, [], greedy(), 60.0))
    bench.work()
    assert [len(bench.prefill.offers(name)) for name in "abc"] == [1, 0, 0], "none overtakes another"
    assert bench.prefill.port.held_blocks == 11 and bench.prefill.stats.offers_waiting == 2
    bench.prefill.tell(Release("a", 0))
    bench.work()
    assert [len(bench.prefill.offers(name)) for name in "abc"] == [1, 1, 1]
    assert bench.prefill.port.held_blocks == 0
    for name in "bc":
        bench.prefill.tell(Release(name, 0))
    bench.check_rest()


def test_a_waiting_offer_whose_time_is_up_fails_and_makes_room() -> None:
    bench = VllmBench(prefill_slabs=16)
    bench.prefill_it("a", make_prompt(64 * 9))
    bench.prefill.tell(Prefill("b", 0, make_prompt(64 * 9, 1), [], greedy(), 5.0))
    bench.work()
    bench.now_s += 5.0
    bench.work()
    assert bench.prefill.failures("b") == ["deadline_exceeded"] and bench.prefill.port.held_blocks == 0
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_a_request_that_can_never_be_in_the_buffer_is_refused_by_either_role() -> None:
    bench = VllmBench(prefill_slabs=16, decode_slabs=16)
    bench.prefill.role.buffer.num_slabs = bench.decode.role.buffer.num_slabs = 2
    bench.prefill.tell(Prefill("a", 0, make_prompt(129), [], greedy(), 60.0))
    bench.decode.tell(Admit("b", 0, make_prompt(129), [5], greedy(), b"", 60.0))
    assert bench.prefill.failures("a") == bench.decode.failures("b") == ["out_of_memory"]
    bench.prefill.role.buffer.num_slabs = bench.decode.role.buffer.num_slabs = 16
    bench.check_rest()


def test_an_answer_of_one_token_is_not_offered() -> None:
    bench = VllmBench()
    bench.prefill.tell(Prefill("a", 0, make_prompt(70), [], greedy(1), 60.0))
    bench.work()
    assert bench.prefill.tokens("a") == alone(make_prompt(70), 1) and not bench.prefill.offers("a")
    bench.check_rest()


def test_a_rank_that_cannot_copy_fails_only_that_request() -> None:
    bench = VllmBench()
    save = bench.prefill.port._copies._save

    def fail(copies: object) -> None:
        bench.prefill.port._copies._blocks, blocks = None, bench.prefill.port._copies._blocks  # type: ignore[assignment]
        save(copies)  # type: ignore[arg-type]
        bench.prefill.port._copies._blocks = blocks
        bench.prefill.port._copies._save = save  # type: ignore[method-assign]

    bench.prefill.port._copies._save = fail  # type: ignore[method-assign]
    bench.prefill.tell(Prefill("a", 0, make_prompt(70), [], greedy(), 60.0))
    bench.work()
    assert bench.prefill.failures("a") == ["internal_error"] and not bench.prefill.offers("a")
    assert bench.answer("b", make_prompt(70)) == alone(make_prompt(70))
    bench.check_rest()


# ---- aborts


def test_a_prompt_is_aborted_while_it_is_computed_copied_hashed_or_under_lease() -> None:
    """Rounds of the loop and of the thread until each phase; then the abort."""
    for rounds in range(8):
        bench = VllmBench(prefill=ToyPort(max_model_len=MAX_MODEL_LEN, step_tokens=64, num_blocks=60))
        bench.prefill.tell(Prefill("a", 0, make_prompt(130), [], greedy(), 60.0))
        for _ in range(rounds // 2):
            bench.prefill.loop.run_once()
        if rounds % 2:
            bench.tasks.creep()
        bench.prefill.tell(Abort("a", 0))
        assert bench.prefill.failures("a") == []
        bench.check_rest()
        offers = len(bench.prefill.offers("a"))
        assert offers <= 1
        if rounds < 6:
            assert offers == 0


def test_an_abort_while_the_buffer_is_full_lets_the_next_one_pass() -> None:
    bench = VllmBench(prefill_slabs=16)
    bench.prefill_it("a", make_prompt(64 * 9))
    for name in "bc":
        bench.prefill.tell(
            Prefill(name, 0, make_prompt(64 * 7 if name == "c" else 64 * 9, 1), [], greedy(), 60.0)
        )
    bench.work()
    assert not bench.prefill.offers("c")
    bench.prefill.tell(Abort("b", 0))
    bench.work()
    assert len(bench.prefill.offers("c")) == 1
    for name in "ac":
        bench.prefill.tell(Abort(name, 0))
    bench.check_rest()


@pytest.mark.parametrize("phase", ["expecting", "waiting", "moving", "landed", "adopted", "decoding"])
def test_a_request_is_aborted_in_each_phase_of_the_decode_worker(phase: str) -> None:
    bench, prompt = VllmBench(decode_slabs=16), make_prompt(130)
    ticket = bench.prefill_it("a", prompt).ticket
    blocker = make_prompt(64 * 15, 3)
    if phase == "waiting":
        bench.admit("x", blocker, bench.prefill_it("x", blocker).ticket)
        assert len(bench.pulling) == 1
    if phase == "expecting":
        bench.decode.tell(Admit("a", 0, prompt, [], greedy(), b"", 60.0))
    else:
        bench.admit("a", prompt, ticket)
    if phase in ("landed", "adopted", "decoding"):
        bench.courier.land()
    if phase == "adopted":
        bench.decode.line.is_congested = True
        bench.decode.loop.run_once()
        bench.decode.line.is_congested = False
        assert bench.decode.pulled("a") and bench.decode.stats.buffer_used == 3
    if phase == "decoding":
        bench.decode.loop.run_once()
        assert 0 < len(bench.decode.tokens("a")) < TOKENS - 1
    bench.decode.tell(Abort("a", 0))
    bench.land_all()
    bench.work()
    assert bench.decode.failures("a") == []
    assert len(bench.decode.tokens("a")) == (1 if phase == "decoding" else 0)
    for name in "ax":
        bench.decode.tell(Abort(name, 0))
        bench.prefill.tell(Abort(name, 0))
    bench.check_rest()


@pytest.mark.parametrize("phase", ["expecting", "waiting", "moving"])
def test_a_request_whose_time_is_up_fails_when_nothing_is_held_for_it(phase: str) -> None:
    bench, prompt, blocker = VllmBench(decode_slabs=16), make_prompt(130), make_prompt(64 * 15, 3)
    ticket = bench.prefill_it("a", prompt).ticket
    if phase == "waiting":
        bench.admit("x", blocker, bench.prefill_it("x", blocker).ticket)
    order = Admit("a", 0, prompt, bench.prefill.tokens("a"), greedy(), ticket, 5.0)
    if phase == "expecting":
        order = Admit("a", 0, prompt, [], greedy(), b"", 5.0)
    bench.decode.tell(order)
    bench.now_s += 6.0
    bench.decode.loop.run_once()
    if phase == "moving":
        assert bench.decode.failures("a") == [] and bench.decode.buffer.used == 3
        bench.courier.land()
        bench.decode.loop.run_once()
    assert bench.decode.failures("a") == ["deadline_exceeded"]
    for name in "ax":
        bench.decode.tell(Abort(name, 0))
        bench.prefill.tell(Abort(name, 0))
    bench.land_all()
    bench.check_rest()


def test_a_newer_attempt_ends_the_older_one() -> None:
    bench, prompt = VllmBench(), make_prompt(130)
    bench.prefill_it("a", prompt)
    offer = bench.prefill_it("a", prompt, epoch=1)
    assert bench.prefill.stats.leases == 1
    bench.prefill.tell(Release("a", 0))
    assert bench.prefill.stats.leases == 1, "a late release"
    bench.admit("a", prompt, offer.ticket, epoch=1)
    bench.land_all()
    bench.work()
    assert bench.prefill.tokens("a", 1) + bench.decode.tokens("a", 1) == alone(prompt)
    bench.prefill.tell(Release("a", 1))
    bench.check_rest()


def test_a_lost_gateway_leaves_nothing() -> None:
    bench, prompt = VllmBench(), make_prompt(130)
    bench.admit("a", prompt, bench.prefill_it("a", prompt).ticket)
    bench.prefill_it("b", make_prompt(100, 1))
    for half in (bench.prefill, bench.decode):
        half.line.gateway_lost = True
        half.loop.run_once()
        half.line.gateway_lost = False
    bench.land_all()
    bench.check_rest()


# ---- wrong KV


@pytest.mark.parametrize("where", ["source", "on the way"])
def test_a_flipped_byte_is_found_before_vllm_hears_of_the_request(where: str) -> None:
    bench, prompt = VllmBench(), make_prompt(130)
    offer = bench.prefill_it("a", prompt)
    size = bench.prefill.port.facts.slab_bytes
    if where == "source":
        bench.prefill.buffer.memory.view[decode_ticket(offer.ticket, KEY).chunks[2].slab * size + 100] ^= 4
    else:
        bench.links.fault = lambda source, target: bench.links.target.slab_bytes(target).__setitem__(7, 255)
    bench.admit("a", prompt, offer.ticket)
    bench.land_all()
    assert bench.decode.failures("a") == ["kv_corrupt"] and bench.decode.tokens("a") == []
    assert bench.decode.stats.integrity_failures == 1 and not bench.decode.port.has_work
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_tickets_of_others_and_altered_ones_are_refused() -> None:
    bench, prompt = VllmBench(), make_prompt(130)
    offer = bench.prefill_it("a", prompt)
    altered = bytes([offer.ticket[0] ^ 1]) + offer.ticket[1:]
    first = bench.prefill.tokens("a")
    cases = [
        (Admit("b", 0, prompt, first, greedy(), offer.ticket, 60.0), "stale_ticket"),
        (Admit("a", 1, prompt, first, greedy(), offer.ticket, 60.0), "stale_ticket"),
        (Admit("c", 0, [*prompt, 7], first, greedy(), altered, 60.0), "transfer_failed"),
        (Admit("a", 2, prompt, [], greedy(), offer.ticket, 60.0), "stale_ticket"),
    ]
    for order, code in cases:
        bench.decode.tell(order)
        assert bench.decode.failures(order.request)[-1] == code
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_a_failed_load_is_computed_again_and_its_slabs_are_free() -> None:
    fails = iter([True])
    decode = ToyPort(max_model_len=MAX_MODEL_LEN, num_blocks=60, fails=lambda: next(fails, False))
    bench, prompt = VllmBench(decode=decode), make_prompt(300)
    assert bench.answer("a", prompt) == alone(prompt)
    bench.check_rest()


# ---- what waits for what


def test_the_ticket_may_come_after_the_order() -> None:
    bench, prompt = VllmBench(), make_prompt(130)
    bench.decode.tell(Admit("a", 0, prompt, [], greedy(), b"", 60.0))
    offer = bench.prefill_it("a", prompt)
    bench.decode.tell(Staging("a", 0, b"hint"))
    assert bench.decode.stats.late_messages == 1 and not bench.pulling
    bench.decode.tell(Fetch("a", 0, bench.prefill.tokens("a"), offer.ticket, 60.0))
    bench.land_all()
    bench.work()
    assert bench.prefill.tokens("a") + bench.decode.tokens("a") == alone(prompt)
    bench.prefill.tell(Release("a", 0))
    bench.check_rest()


def test_pulls_take_the_buffer_in_order_but_none_waits_for_a_source_that_has_its_half() -> None:
    bench = VllmBench(decode_slabs=16)
    sizes = {"a": 6, "b": 6, "c": 2}
    for seed, (name, size) in enumerate(sizes.items()):
        prompt = make_prompt(64 * size, seed)
        bench.admit(name, prompt, bench.prefill_it(name, prompt).ticket)
    assert [one.seq.id for one in bench.pulling] == ["a", "c"], "b would give its source more than half"
    bench.land_all()
    bench.work()
    assert all(len(bench.decode.tokens(name)) == TOKENS - 1 for name in sizes)
    for name in sizes:
        bench.prefill.tell(Release(name, 0))
    bench.check_rest()


def test_a_decode_worker_prefills_whole_requests() -> None:
    bench, prompt = VllmBench(), make_prompt(130)
    bench.decode.tell(Generate("a", 0, prompt, [], greedy(), 60.0))
    bench.work()
    assert bench.decode.tokens("a") == alone(prompt)
    bench.check_rest()


def test_orders_of_the_other_role_are_refused() -> None:
    bench = VllmBench()
    bench.prefill.tell(Generate("a", 0, [5], [], greedy(), 60.0))
    bench.decode.tell(Prefill("a", 0, [5], [], greedy(), 60.0))
    assert bench.prefill.failures("a") == bench.decode.failures("a") == ["internal_error"]


def test_a_draining_worker_waits_for_its_lease_and_then_is_settled() -> None:
    bench = VllmBench()
    bench.prefill_it("a", make_prompt(130))
    bench.prefill.tell(Drain())
    waits = not bench.prefill.loop.is_over
    bench.prefill.tell(Release("a", 0))
    bench.work()
    assert waits and bench.prefill.loop.is_over
    bench.prefill.loop.check_settled()


def test_a_role_that_ends_in_the_middle_leaves_nothing_to_the_next_one() -> None:
    """The drain takes too long: a prompt waits for the full buffer, others are computed, pulled and decoded."""
    bench = VllmBench(prefill_slabs=16)
    offer = bench.prefill_it("a", make_prompt(64 * 9))
    bench.admit("a", make_prompt(64 * 9), offer.ticket)
    for name in "bc":
        bench.prefill.tell(Prefill(name, 0, make_prompt(64 * 9, 1), [], greedy(), 60.0))
        bench.decode.tell(Generate(name, 0, make_prompt(200, 2), [], greedy(900), 60.0))
    bench.prefill.loop.run_once()
    assert bench.prefill.port.held_blocks and bench.decode.port.held_blocks and len(bench.pulling) == 1
    for half, role in ((bench.prefill, "decode"), (bench.decode, "prefill")):
        half.tell(SwitchRole(role))
        bench.now_s += 11.0
        half.loop.run_until_drained()
        assert "draining" in half.failures("b") + half.failures("c")
        half.role.close()
        half.loop.check_settled()
        assert half.books.used == 0 and half.loop.next_role == role


def test_many_requests_through_small_pools_end_with_the_right_tokens() -> None:
    """Preemption, full buffers and shared prefixes at once."""
    small = [ToyPort(max_model_len=MAX_MODEL_LEN, num_blocks=18, step_tokens=100) for _ in range(2)]
    bench, admitted = VllmBench(small[0], small[1], 16, 16), set[str]()
    prompts = {f"r{index}": make_prompt(40 + 37 * (index % 11), index % 4) for index in range(24)}
    for name, prompt in prompts.items():
        bench.prefill.tell(Prefill(name, 0, prompt, [], greedy(30), math.inf))
    for _ in range(3000):
        bench.work()
        for name, prompt in prompts.items():
            if name not in admitted and (offers := bench.prefill.offers(name)):
                admitted.add(name)
                first = bench.prefill.tokens(name)
                bench.decode.tell(Admit(name, 0, prompt, first, greedy(30), offers[0].ticket, math.inf))
            if name in admitted and bench.decode.pulled(name):
                bench.prefill.tell(Release(name, 0))
        bench.land_all()
        if all(len(bench.decode.tokens(name)) == 29 for name in prompts):
            break
    for name, prompt in prompts.items():
        assert bench.prefill.tokens(name) + bench.decode.tokens(name) == alone(prompt, 30)
    assert isinstance(bench.prefill.offers("r0")[0], Offer)
    bench.check_rest()
