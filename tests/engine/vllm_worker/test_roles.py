"""A request through both roles of vLLM workers: tokens, books, and what each end of it leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from diptych.errors import TransferError
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
from diptych.request import Tenancy
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
    assert bench.prefill.failures("a") == ["transfer_failed"] and not bench.prefill.offers("a")
    assert bench.answer("b", make_prompt(70)) == alone(make_prompt(70))
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
        if name == "c":
            # Its ticket is that of another worker.
            bench.prefill.role.issuer = replace(bench.prefill.role.issuer, worker="prefill-1")
        prompt = make_prompt(64 * size, seed)
        bench.admit(name, prompt, bench.prefill_it(name, prompt).ticket)
    assert [one.seq.id for one in bench.pulling] == ["a", "c"], "b would give its source more than half"
    bench.land_all()
    bench.work()
    bench.land_all()
    bench.work()
    assert all(len(bench.decode.tokens(name)) == TOKENS - 1 for name in sizes)
    for name in sizes:
        bench.prefill.tell(Release(name, 0))
    bench.check_rest()


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones_of_its_source() -> None:
    bench = VllmBench(decode_slabs=16)
    sizes = {"first": 1, "large": 10, "small": 1}
    for seed, (name, size) in enumerate(sizes.items()):
        prompt = make_prompt(64 * size, seed)
        bench.admit(name, prompt, bench.prefill_it(name, prompt).ticket)
    assert [one.seq.id for one in bench.pulling] == ["first"], "small waits behind large"
    bench.courier.land()
    bench.work()
    assert [one.seq.id for one in bench.pulling] == ["large"]
    bench.land_all()
    bench.work()
    bench.land_all()
    bench.work()
    for name in sizes:
        assert len(bench.decode.tokens(name)) == TOKENS - 1
        bench.prefill.tell(Release(name, 0))
    bench.check_rest()


def test_what_has_priority_is_pulled_first() -> None:
    bench = VllmBench(decode_slabs=16)
    prompts = {name: make_prompt(64 * 8, seed) for seed, name in enumerate(("now", "bulk", "urgent"))}
    tickets = {name: bench.prefill_it(name, prompt).ticket for name, prompt in prompts.items()}
    for name, priority in (("now", 0), ("bulk", 1000), ("urgent", -10)):
        bench.admit(name, prompts[name], tickets[name], origin=Tenancy(priority=priority))
    assert [one.seq.id for one in bench.pulling] == ["now"]
    bench.courier.land()
    bench.work()
    assert [one.seq.id for one in bench.pulling] == ["urgent"]
    for name in prompts:
        bench.decode.tell(Abort(name, 0))
        bench.prefill.tell(Release(name, 0))
    bench.land_all()
    bench.check_rest()


def test_a_role_ends_though_a_rank_has_never_copied() -> None:
    """A step died between its plan and the copies: nothing is marked, and nothing ever will be."""
    bench = VllmBench()
    bench.prefill.tell(Prefill("a", 0, make_prompt(70), [], greedy(), 60.0))
    while not bench.prefill.tokens("a"):
        bench.prefill.loop.run_once()
    bench.prefill.port._copies.begin_step = lambda plan: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        bench.prefill.loop.run_once()
    assert bench.tasks.tasks
    bench.prefill.role.close()
    assert not bench.tasks.tasks


def test_an_offer_that_cannot_be_sent_leaves_no_lease() -> None:
    bench = VllmBench()
    send = bench.prefill.line.send

    def refuse(message: object) -> None:
        if isinstance(message, Offer):
            raise TransferError("the frame is too long")
        send(message)  # type: ignore[arg-type]

    bench.prefill.line.send = refuse  # type: ignore[method-assign]
    bench.prefill.tell(Prefill("a", 0, make_prompt(70), [], greedy(), 60.0))
    bench.work()
    assert bench.prefill.failures("a") == ["internal_error"] and bench.prefill.stats.leases == 0
    bench.now_s += 2 * LEASE_S
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
