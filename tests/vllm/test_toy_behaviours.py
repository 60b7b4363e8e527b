"""The suite of behaviours on the toy port: what is above the port, and the copies, keep it without vLLM too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.toy_port import ToyPort, answer_alone
from tests.vllm.behaviours import BEHAVIOURS, run_behaviour
from tests.vllm.rig import Rig, greedy
from vllm_worker.buffer import open_buffer
from vllm_worker.port import SavedKv

NUM_SLABS = 64
TRAITS = ("seed",)


def open_rig(port: ToyPort) -> Rig:
    buffer = open_buffer(port.facts, NUM_SLABS * port.facts.slab_bytes)
    port.attach_buffer(buffer)
    return Rig(port, buffer, TRAITS)


@pytest.fixture
def rig() -> Iterator[Rig]:
    opened = open_rig(ToyPort())
    yield opened
    opened.port.close()
    opened.buffer.close()


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_the_toy_behaves(rig: Rig, name: str) -> None:
    run_behaviour(name, rig)


@pytest.mark.parametrize("step_tokens", [1, 7, 64, 100, 4096])
def test_chunks_of_any_size_give_the_same_tokens(step_tokens: int) -> None:
    rig = open_rig(ToyPort(step_tokens=step_tokens))
    for length in (1, 64, 130):
        sampling = greedy(9, temperature=0.5, seed=length)
        prompt = rig.prompt(length, seed=length)
        assert rig.hand_over(prompt, sampling).tokens == answer_alone(prompt, sampling, 2048)
    rig.check_rest()


def handed_over(rig: Rig, spoil: int | None) -> list[int]:
    """What follows a hand-over, with a byte altered in the buffer."""
    prompt = rig.prompt(150, seed=5)
    first = rig.sequence(prompt, greedy(9), hold_kv=True)
    begun = rig.add(first)
    rig.drive()
    _, saved = rig.saved.pop(first.key)
    if spoil is not None:
        slab = saved.slabs[spoil // rig.port.facts.slab_bytes]
        rig.buffer.memory.view[slab * rig.port.facts.slab_bytes + spoil % rig.port.facts.slab_bytes] ^= 1
    rest = rig.adopt(rig.sequence(prompt, greedy(9), output=begun.tokens), saved)
    rig.drive()
    return begun.tokens + rest.tokens


def test_one_wrong_bit_of_any_kv_gives_other_tokens(rig: Rig) -> None:
    right = answer_alone(rig.prompt(150, seed=5), greedy(9), 2048)
    assert handed_over(rig, None) == right
    block = rig.port.facts.slab_bytes
    for spoil in (0, 300, block + 100, 2 * block + 21 * 4):
        assert handed_over(rig, spoil)[1:] != right[1:], spoil


def test_swapped_slabs_and_those_of_another_request_give_other_tokens(rig: Rig) -> None:
    prompt = rig.prompt(150, seed=5)
    right = answer_alone(prompt, greedy(9), 2048)
    first = rig.sequence(prompt, greedy(9), hold_kv=True)
    begun = rig.add(first)
    rig.drive()
    _, saved = rig.saved.pop(first.key)
    swapped = SavedKv(saved.key, (saved.slabs[1], saved.slabs[0], saved.slabs[2]), saved.num_tokens)
    rest = rig.adopt(rig.sequence(prompt, greedy(9), output=begun.tokens), swapped)
    rig.drive()
    assert begun.tokens + rest.tokens != right


def test_loads_that_fail_by_chance_end_their_requests_and_give_no_other_tokens() -> None:
    chance = random.Random(3)
    rig = open_rig(ToyPort(fails=lambda: chance.random() < 0.5))
    failed = 0
    for length in range(1, 400, 13):
        prompt = rig.prompt(length, seed=length)
        right, moved = answer_alone(prompt, greedy(6), 2048), rig.hand_over(prompt, greedy(6))
        assert moved.tokens == (right[:1] if moved.failed else right)
        failed += moved.failed is not None
    assert 5 < failed == len(rig.failed_loads) < 30
    rig.check_rest()


def test_the_behaviours_are_the_same_on_vllm() -> None:
    """`program.py` runs the whole table, so a behaviour cannot be on one engine only."""
    text = Path(__file__).with_name("program.py").read_text(encoding="utf-8")
    assert "names or list(BEHAVIOURS)" in text
