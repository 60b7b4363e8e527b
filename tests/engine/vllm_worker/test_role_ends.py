"""How requests end at vLLM workers before their answer is complete: aborts in each phase, and KV that is wrong."""

from __future__ import annotations

import pytest

from diptych.messages import (
    Abort,
    Admit,
    Prefill,
    Release,
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
from tests.engine.workers.worker_bench import KEY
from tests.support.toy_port import ToyPort

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


def test_a_failed_load_ends_the_attempt_so_that_another_one_can_begin() -> None:
    fails = iter([True])
    decode = ToyPort(max_model_len=MAX_MODEL_LEN, num_blocks=60, fails=lambda: next(fails, False))
    bench, prompt = VllmBench(decode=decode), make_prompt(300)
    bench.answer("a", prompt)
    assert bench.decode.failures("a") == ["transfer_failed"] and bench.decode.tokens("a") == []
    assert bench.answer("b", prompt) == alone(prompt), "nothing of it stays in the prefix cache"
    bench.check_rest()
