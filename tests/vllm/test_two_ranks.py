"""Two processes with vLLM on two ranks each: each rank copies its own part of the same slabs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from diptych.messages import Release
from kvtransfer.ticket import decode_ticket
from tests.support.vllm_worker_pair import GREEDY, LinkedPair, make_prompts, name_prompts, vllm_command
from tests.support.vllm_worker_serving import KEY

# Starting two engines takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def pair(
    vllm_python: str, embedded_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LinkedPair]:
    made = LinkedPair(vllm_command(vllm_python), embedded_model, 2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def test_the_tokens_are_those_of_one_engine(pair: LinkedPair) -> None:
    assert pair.prefill.ready["ranks"] == pair.decode.ready["ranks"] == 2
    prompts = make_prompts(random.Random(3), pair.prefill.ready["vocab"])
    references = pair.references(prompts, GREEDY)
    for defer in (False, True):
        answers = pair.answers(name_prompts(prompts, f"{defer}"), GREEDY, defer, scope=f"{defer}")
        assert answers == {f"{defer} {name}": tokens for name, tokens in references.items()}
    pair.check_rest()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_byte_in_the_part_of_either_rank_is_found(pair: LinkedPair, rank: int) -> None:
    size, prompt, name = pair.prefill.ready["slab_bytes"], list(range(5, 200)), f"flipped {rank}"
    offer = pair.offer(name, prompt, GREEDY)
    slab = decode_ticket(offer.ticket, KEY).chunks[1].slab
    part = pair.prefill.memory[slab * size + rank * size // 2 : slab * size + (rank + 1) * size // 2]
    assert any(part), "the rank has written its part"
    part[100] ^= 1
    pair.admit(name, prompt, GREEDY, offer.ticket)
    assert pair.decode.wait_end(name) == "kv_corrupt"
    pair.prefill.tell(Release(name, 0))
    pair.check_rest()
