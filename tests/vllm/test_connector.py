"""Two processes with vLLM or a toy, one rank each: the tokens of one engine, and what faults and aborts leave."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from diptych.messages import Abort, Admit, Prefill, Pulled, Release
from diptych.request import SamplingParams
from kvtransfer.ticket import decode_ticket
from tests.support.vllm_worker_pair import (
    GREEDY,
    TOKENS,
    LinkedPair,
    make_prompts,
    name_prompts,
    toy_command,
    vllm_command,
)
from tests.support.vllm_worker_serving import KEY

# Starting two engines takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module", params=["toy", "vllm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedPair]:
    folder = tmp_path_factory.mktemp("pair")
    if request.param == "toy":
        made = LinkedPair(toy_command(), "", 1, folder)
    else:
        command = vllm_command(request.getfixturevalue("vllm_python"))
        made = LinkedPair(command, request.getfixturevalue("embedded_model"), 1, folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(pair: LinkedPair) -> dict[str, list[int]]:
    return make_prompts(random.Random(3), pair.prefill.ready["vocab"])


@pytest.fixture(scope="module")
def references(pair: LinkedPair, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return pair.references(prompts, GREEDY)


@pytest.mark.parametrize("roles", ["first", "exchanged"])
@pytest.mark.parametrize("defer", [False, True])
def test_the_tokens_are_those_of_one_engine_cold_and_warm(
    pair: LinkedPair, prompts: dict[str, list[int]], references: dict[str, list[int]], roles: str, defer: bool
) -> None:
    if roles == "exchanged" and not defer:
        pair.exchange_roles()
    for state in ("cold", "warm"):
        tag = f"{roles} {defer} {state}"
        answers = pair.answers(name_prompts(prompts, tag), GREEDY, defer, scope=f"{roles} {defer}")
        assert answers == {f"{tag} {name}": tokens for name, tokens in references.items()}
    pair.check_rest()


def test_a_seed_gives_the_tokens_of_one_engine_if_the_first_is_deferred(pair: LinkedPair) -> None:
    vocab = pair.prefill.ready["vocab"]
    chance = random.Random(4)
    prompts = {
        f"seeded{size}": [chance.randrange(5, vocab) for _ in range(size)] for size in (1, 70, 128, 300)
    }
    sampling = SamplingParams(max_tokens=TOKENS, seed=11, temperature=0.9, top_p=0.95, presence_penalty=0.5)
    assert pair.answers(prompts, sampling, defer=True) == pair.references(prompts, sampling)
    pair.check_rest()


def test_a_flipped_byte_is_found_by_its_digest(pair: LinkedPair, prompts: dict[str, list[int]]) -> None:
    chance, prompt = random.Random(5), prompts["p300"]
    size = pair.prefill.ready["slab_bytes"]
    for number in range(12):
        name = f"flipped {number}"
        offer = pair.offer(name, prompt, GREEDY)
        chunk = chance.choice(decode_ticket(offer.ticket, KEY).chunks)
        pair.prefill.memory[chunk.slab * size + chance.randrange(size)] ^= 1 << chance.randrange(8)
        pair.admit(name, prompt, GREEDY, offer.ticket)
        assert pair.decode.wait_end(name) == "kv_corrupt"
        assert pair.decode.tokens(name) == []
        pair.prefill.tell(Release(name, 0))
    pair.check_rest()


def test_altered_and_foreign_tickets_are_refused(pair: LinkedPair, prompts: dict[str, list[int]]) -> None:
    prompt = prompts["p129"]
    offer = pair.offer("mine", prompt, GREEDY)
    altered = bytearray(offer.ticket)
    altered[len(altered) // 2] ^= 1
    cases = [("mine", bytes(altered), "transfer_failed"), ("another", offer.ticket, "stale_ticket")]
    for epoch, (name, ticket, code) in enumerate(cases):
        pair.decode.tell(Admit(name, epoch, prompt, [5], GREEDY, ticket, 60.0))
        assert pair.decode.wait_end(name) == code
    pair.prefill.tell(Abort("mine", 0))
    pair.check_rest()


def test_a_hundred_aborts_in_every_phase_leave_nothing(
    pair: LinkedPair, prompts: dict[str, list[int]]
) -> None:
    chance = random.Random(6)
    for number in range(100):
        name, prompt = f"aborted {number}", chance.choice([prompts["p300"], prompts["p1000"], prompts["p65"]])
        phase = number % 5
        order = Prefill(name, 0, prompt, [], GREEDY, 60.0)
        if phase == 0:
            pair.prefill.tell(order, Abort(name, 0))
            continue
        if phase == 1:
            pair.prefill.tell(order)
            pair.prefill.wait_outputs(name)
            pair.prefill.tell(Abort(name, 0))
            continue
        offer = pair.offer(name, prompt, GREEDY)
        pair.admit(name, prompt, GREEDY, offer.ticket)
        if phase == 3:
            pair.decode.wait_first(Pulled, name)
        if phase == 4:
            pair.decode.wait_outputs(name)
        pair.decode.tell(Abort(name, 0))
        pair.prefill.tell(Abort(name, 0))
    pair.check_rest()
    assert pair.prefill.report()["stats"]["steps"] > 100


def test_a_full_buffer_holds_prompts_back_and_none_is_lost(
    pair: LinkedPair, prompts: dict[str, list[int]]
) -> None:
    """Six prompts of 17 to 24 chunks in a buffer of 40: none is released before its turn."""
    sizes = ("p1024", "p1400", "p1500", "p1000", "p1400", "p1500")
    wanted = {f"full {number}": prompts[size] for number, size in enumerate(sizes)}
    answers = pair.answers(wanted, GREEDY)
    assert answers["full 1"] == answers["full 4"] and answers["full 2"] == answers["full 5"]
    pair.check_rest()
