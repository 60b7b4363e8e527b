"""Both roles of a worker, where the decode worker draws the first token: the prompt's last token is computed again."""

from __future__ import annotations

import pytest

from diptych.messages import Abort, Admit, Generate, Offer, Output, Prefill, Release, Step
from tests.engine.workers.role_steps import CHUNK_BYTES, TOKENS, rest
from tests.engine.workers.worker_bench import VOCAB, WorkerBench, alone, sampling

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 150]


def make_prompt(length: int) -> list[int]:
    return [(7 * place + length) % VOCAB for place in range(length)]


def offer_deferred(bench: WorkerBench, prompt: list[int], name: str = "a") -> Offer:
    """The prefill worker computes a prompt, and draws no token."""
    order = Prefill(name, 0, prompt, [], sampling(TOKENS), 60.0, defer_first=True)
    bench.prefill.tell(order)
    bench.prefill.work()
    assert bench.prefill.tokens(name) == [] and bench.prefill.ended(name) == []
    (offer,) = bench.prefill.offers(name)
    return offer


def admit_deferred(bench: WorkerBench, prompt: list[int], name: str = "a") -> None:
    ticket = offer_deferred(bench, prompt, name).ticket
    bench.decode.tell(Admit(name, 0, prompt, [], sampling(TOKENS), ticket, 60.0))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_decode_worker_writes_the_whole_answer(length: int, caching: bool) -> None:
    bench, prompt = WorkerBench(caching=caching), make_prompt(length)
    admit_deferred(bench, prompt)
    bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Release("a", 0))
    assert bench.decode.tokens("a") == alone(prompt, TOKENS)
    (pulled,) = bench.decode.pulled("a")
    assert pulled.num_bytes == -(-length // 64) * CHUNK_BYTES
    rest(bench)


def test_it_is_said_that_the_prompt_is_computed_before_its_kv_is_offered() -> None:
    bench = WorkerBench()
    offer = offer_deferred(bench, make_prompt(150))
    step, *others = bench.prefill.line.said
    assert isinstance(step, Step) and others == [offer] and offer.num_tokens == 150
    (output,) = step.outputs
    assert isinstance(output, Output) and output.tokens == [] and output.finish is None
    assert set(output.seconds) == {"queue", "prefill"}


@pytest.mark.parametrize(("length", "known"), [(127, 1), (128, 1), (129, 2)])
def test_a_chunk_of_which_a_token_is_computed_here_is_not_shared_with_others(length: int, known: int) -> None:
    """All full chunks of the prompt are cached, and one of them is pulled all the same: others may be reading it."""
    bench, prompt = WorkerBench(), make_prompt(length)
    bench.decode.tell(Generate("before", 0, prompt, [], sampling(TOKENS), 60.0))
    bench.decode.work()
    cached = bench.decode.holdings.cached
    assert cached == (length + TOKENS - 1) // 64
    admit_deferred(bench, prompt)
    (arrival,) = bench.courier.under_way
    assert arrival.num_bytes == (-(-length // 64) - known) * CHUNK_BYTES
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.tokens("a") == alone(prompt, TOKENS)
    assert bench.decode.holdings.cached == cached, "one slab for each chunk"
    bench.prefill.tell(Release("a", 0))
    rest(bench)


def test_its_last_chunk_is_shared_once_it_is_computed() -> None:
    bench, prompt = WorkerBench(), make_prompt(128)
    admit_deferred(bench, prompt)
    bench.courier.land()
    bench.decode.shell.run_once()
    bench.decode.work()
    bench.decode.tell(Generate("after", 0, [*prompt, 1], [], sampling(TOKENS), 60.0))
    bench.decode.work()
    assert bench.decode.stats.prefix_hits == 128
    bench.prefill.tell(Release("a", 0))
    rest(bench)


@pytest.mark.parametrize("phase", ["waits", "moves", "landed", "runs"])
def test_an_abort_frees_it_in_every_phase(phase: str) -> None:
    bench, prompt = WorkerBench(decode_slabs=5), make_prompt(150)
    if phase == "waits":
        # So many that there is no room beside them.
        bench.decode.tell(Generate("busy", 0, make_prompt(290), [], sampling(20), 60.0))
        bench.decode.shell.run_once()
    admit_deferred(bench, prompt)
    assert bool(bench.courier.under_way) == (phase != "waits")
    if phase in ("landed", "runs"):
        bench.courier.land()
    if phase == "runs":
        bench.decode.shell.run_once()
        assert bench.decode.tokens("a")
    bench.decode.tell(Abort("a", 0), Abort("busy", 0))
    if phase == "moves":
        bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Abort("a", 0))
    assert bench.decode.ended("a") == []
    rest(bench)


def test_a_ticket_of_an_ordinary_offer_is_not_taken_for_a_deferred_one() -> None:
    """It covers as many tokens, so the answer is the same: the first token is drawn again."""
    bench, prompt = WorkerBench(), make_prompt(70)
    bench.prefill.tell(Prefill("a", 0, prompt, [], sampling(TOKENS), 60.0))
    bench.prefill.work()
    (offer,) = bench.prefill.offers("a")
    bench.decode.tell(Admit("a", 0, prompt, [], sampling(TOKENS), offer.ticket, 60.0))
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.tokens("a") == alone(prompt, TOKENS)
    short = Admit("b", 0, prompt[:-1], [], sampling(TOKENS), offer_deferred(bench, prompt, "b").ticket, 60.0)
    bench.decode.tell(short)
    assert bench.decode.ended("b") == ["stale_ticket"], "its ticket is for another number of tokens"
    bench.prefill.tell(Release("a", 0), Release("b", 0))
    rest(bench)
