"""What belongs to a prompt is hashed once, however many sequences the prompt has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from diptych.request import token_bytes
from router.effects import ClientGone, RequestArrived
from router.requests import quarantine
from router.routing import prefix_index
from router.routing.prefix_index import name_chunks
from tests.unit.router.fake_deployment import PAIR, FakeDeployment, linked_deployment, make_request

PROMPT = range(64 * 500)


class HashCounter:
    """Counts what is hashed while chunks are named and questions are fingerprinted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        plain = hashlib.blake2b

        def blake2b(data: bytes, **options: Any) -> Any:
            self.bytes += len(data)
            return plain(data, **options)

        monkeypatch.setattr(prefix_index, "blake2b", blake2b)
        monkeypatch.setattr(hashlib, "blake2b", blake2b)

    def count_arrival(self, world: FakeDeployment, prompts: Sequence[Sequence[int]]) -> int:
        """The bytes that are hashed when one HTTP request with these prompts arrives."""
        before = self.bytes
        first, *others = requests = [make_request(f"r{before}.{i}") for i in range(len(prompts))]
        for request, prompt in zip(requests, prompts, strict=True):
            request.prompt = prompt
        world.do(RequestArrived(first, others=tuple(others)))
        hashed = self.bytes - before
        for request in requests:
            world.do(ClientGone(request.id))
        return hashed


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> HashCounter:
    return HashCounter(monkeypatch)


@pytest.mark.parametrize("has_bans", [False, True])
def test_64_sequences_of_a_prompt_cost_as_much_as_one(hashes: HashCounter, has_bans: bool) -> None:
    world, prompt = linked_deployment(*PAIR), list(PROMPT)
    if has_bans:
        world.relay.quarantine.ban_question(b"of another question", 0.0)
    once = hashes.count_arrival(world, [prompt])
    assert once >= 4 * len(prompt)
    assert hashes.count_arrival(world, [prompt] * 64) < 2 * once
    assert hashes.count_arrival(world, [list(prompt) for _ in range(3)]) >= 3 * 4 * len(prompt)


def test_a_prompt_that_comes_with_names_is_not_hashed(hashes: HashCounter) -> None:
    world, request = linked_deployment(*PAIR, slabs=1000), make_request("r")
    request.prompt = list(PROMPT)
    request.chunks = name_chunks(request.prompt, request.tenancy.scope)
    hashed = hashes.bytes
    world.do(RequestArrived(request))
    assert hashes.bytes == hashed
    assert world.relay.live["r"].chunks == request.chunks and len(request.chunks) == 500
    assert world.relay.index.count_shared("prefill-0", request.chunks) == 500


def test_an_answer_that_ends_costs_its_own_tokens(hashes: HashCounter) -> None:
    names = name_chunks(PROMPT, "s")
    index, before = prefix_index.PrefixIndex(), hashes.bytes
    longer = index.extend_names(names, PROMPT, range(128), "s")
    assert longer[:500] == names and len(longer) == 502
    assert hashes.bytes - before < 3 * 128 * 4


def test_the_same_question_has_the_same_fingerprint_in_every_form(hashes: HashCounter) -> None:
    docket = quarantine.CrashQuarantine(lambda worker: (), salt=b"salt")
    listed, packed, other = (make_request(name) for name in ("a", "b", "c"))
    packed.prompt = memoryview(token_bytes(listed.prompt)).cast("I")
    other.prompt = [*listed.prompt, 1]
    first, second, third = docket.fingerprint_questions([listed, packed, other])
    assert first == second == docket.fingerprint_question(packed) != third
