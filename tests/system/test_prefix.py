"""Prefixes that requests have in common, over HTTP: what is not computed, not moved, not shared, and never wrong."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from transformers import AutoTokenizer

from tests.support.deployment import Served, serve_parts, wait_for
from tests.system import transformers_oracle

pytestmark = pytest.mark.timeout(600)

CHUNK = 64
SLAB_BYTES = 393_216  # of the embedded model
SMALL = (
    "--kv-cache-memory-bytes",
    "12MiB",
    "--max-model-len",
    "1472",
)  # 32 slabs; the longest prompt takes 21
# 24 slabs for 16 streams, of which each grows to 7: what is cached goes, and then some must wait again.
SMALLER = ("--kv-cache-memory-bytes", "9MiB", "--max-model-len", "512")
REST_S = 120.0
NEW_TOKENS, LONG_TOKENS = 12, 240
ANN, BEN = "ann of the tests", "ben of the tests"


def text_ids() -> list[int]:
    """The tokens of some real text, which is longer than any context."""
    tokens: list[int] = AutoTokenizer.from_pretrained(transformers_oracle.TINY).encode(
        inspect.getsource(argparse)
    )
    return tokens


def ids_of(served: Served, words: list[str]) -> list[int]:
    """The ids of these tokens, or none if they cannot be found from their text."""
    response = httpx.post(
        f"{served.url}/tokenize", json={"prompt": "".join(words), "add_special_tokens": False}, timeout=60
    )
    ids = list(response.raise_for_status().json()["tokens"])
    singly = [
        httpx.post(f"{served.url}/detokenize", json={"tokens": [one]}, timeout=60).json()["prompt"]
        for one in ids
    ]
    return ids if singly == words else []


class Prompts:
    """Pieces of real text, none of which begins as another does."""

    def __init__(self, ids: list[int], seed: int = 0) -> None:
        self._ids, self._random = ids, random.Random(seed)
        self._used: set[tuple[int, ...]] = set()

    def take(self, tokens: int) -> list[int]:
        while True:
            at = self._random.randrange(len(self._ids) - 2048)
            head = tuple(self._ids[at : at + 8])
            if head not in self._used:
                self._used.add(head)
                return self._ids[at : at + tokens]


@pytest.fixture(scope="module")
def split() -> Iterator[Served]:
    with serve_parts("--prefill", "1", "--decode", "1", "--transports", "shm", *SMALL) as served:
        yield served


@pytest.fixture(scope="module")
def together() -> Iterator[Served]:
    keys = ("--api-key", ANN, "--api-key", BEN)
    with serve_parts("--colocated", "1", *keys, *SMALL) as served:
        yield served


@pytest.fixture(scope="module")
def swapping() -> Iterator[Served]:
    with serve_parts("--colocated", "1", "--swap-space", "64MiB", *SMALLER) as served:
        yield served


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(text_ids())


def complete(served: Served, prompt: list[int], key: str = "none", **extra: Any) -> Completion:
    """A greedy completion of `NEW_TOKENS` tokens."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
        return client.completions.create(
            model="tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=0,
            n=extra.pop("n", 1), extra_body={"ignore_eos": True, **extra},
        )  # fmt: skip


def complete_counted(served: Served, prompt: list[int]) -> tuple[Completion, float]:
    """A greedy completion, and the chunks of KV that moved for it: canaries that pass meanwhile move one each."""
    bytes_before, before = served.moved_bytes()
    done = complete(served, prompt)
    bytes_after, after = served.moved_bytes()
    return done, (bytes_after - bytes_before) / SLAB_BYTES - (after - before - 1)


def cached(done: Completion) -> int:
    """`usage.prompt_tokens_details.cached_tokens`."""
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    tokens = done.usage.prompt_tokens_details.cached_tokens
    assert tokens is not None
    return tokens


def words(done: Completion) -> list[list[str]]:
    """The new tokens of each choice, as strings."""
    return [choice.logprobs.tokens or [] for choice in done.choices if choice.logprobs]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 700])
def test_a_prompt_is_known_the_second_time_but_for_its_last_token(
    split: Served, prompts: Prompts, length: int
) -> None:
    """Cold, then full: all full chunks that leave one token to compute. The tokens are the same."""
    prompt = prompts.take(length)
    cold, full = complete(split, prompt), complete(split, prompt)
    assert (cached(cold), cached(full)) == (0, (length - 1) // CHUNK * CHUNK)
    assert words(cold) == words(full)


def test_a_beginning_in_common_is_known_by_full_chunks(split: Served, prompts: Prompts) -> None:
    """Partial hits; the one in the middle ends within a chunk."""
    base = prompts.take(500)
    complete(split, base)
    for common in (64, 200, 448):
        asked = base[:common] + prompts.take(300)
        first = complete(split, asked)
        assert cached(first) == common // CHUNK * CHUNK
        again = complete(split, asked)
        assert cached(again) == (len(asked) - 1) // CHUNK * CHUNK
        assert words(again) == words(first)


def test_an_answer_is_known_where_it_was_written(split: Served, prompts: Prompts) -> None:
    """A conversation goes on: of question and answer the decode worker has all full chunks, and only the rest moves."""
    moved: list[float] = []
    for _ in range(30):
        prompt = prompts.take(250)
        written = ids_of(split, words(complete(split, prompt))[0])
        if not written:
            continue
        done, num_chunks = complete_counted(split, [*prompt, *written, *prompts.take(20)])
        assert cached(done) == 192  # the prefill worker never saw the answer
        moved.append(num_chunks)
        if len(moved) == 3:
            break
    # 282 tokens are five chunks, four of which are there.
    assert moved and set(moved) == {1}


def test_choices_of_one_request_share_their_prompt(split: Served, prompts: Prompts) -> None:
    prompt = prompts.take(400)
    done = complete(split, prompt, n=3)
    assert len(done.choices) == 3
    assert words(done)[0] == words(done)[1] == words(done)[2]
    assert cached(complete(split, prompt)) == 384


def test_a_salt_keeps_prefixes_to_those_who_know_it(split: Served, prompts: Prompts) -> None:
    prompt = prompts.take(300)
    assert cached(complete(split, prompt)) == 0
    assert cached(complete(split, prompt, cache_salt="red")) == 0
    assert cached(complete(split, prompt, cache_salt="blue")) == 0
    assert cached(complete(split, prompt, cache_salt="red")) == 256
    assert cached(complete(split, prompt)) == 256


def test_scoring_a_prompt_computes_all_of_it(split: Served, prompts: Prompts) -> None:
    prompt = prompts.take(200)
    complete(split, prompt)
    scored = complete(split, prompt, echo=True)
    assert cached(scored) == 0
    assert cached(complete(split, prompt)) == 192


def test_what_the_decode_worker_has_is_not_moved_again(split: Served, prompts: Prompts) -> None:
    """kv_papers §6.B 8: of a second request that shares 90 % at most 12 % of the first one's bytes move."""
    for _ in range(3):
        first = prompts.take(1280)
        _, whole = complete_counted(split, first)
        _, rest = complete_counted(split, first[:1152] + prompts.take(128))
        assert 0 < rest / whole <= 0.12


async def burst(served: Served, asked: list[list[int]], key: str) -> list[list[str]]:
    """All at once; the new tokens of each."""
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:

        async def one(prompt: list[int]) -> list[str]:
            done = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=40, temperature=0, logprobs=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return words(done)[0]

        return list(await asyncio.gather(*map(one, asked)))


def overload(served: Served, key: str = "none") -> None:
    """More chunks than the pool has slabs, prompts with and without a beginning in common; nothing may go astray."""
    prompts = Prompts(text_ids(), seed=1)
    common = prompts.take(300)
    asked = [common + prompts.take(20 + 40 * i) for i in range(8)]
    asked += [prompts.take(100 * i) for i in range(1, 7)]
    alone = [asyncio.run(burst(served, [prompt], key))[0] for prompt in asked]
    for seed in range(2):
        random.Random(seed).shuffle(order := list(range(len(asked))))
        assert asyncio.run(burst(served, [asked[i] for i in order], key)) == [alone[i] for i in order]
    wait_for(lambda: served.held() == {}, timeout_s=REST_S)
    for worker in served.status()["workers"]:
        stats = worker["stats"]
        assert 0 < stats["slabs_cached"] <= stats["slabs_total"] < len(chunks(asked))


def chunks(asked: list[list[int]]) -> set[tuple[int, ...]]:
    """All different full chunks, each with what is before it."""
    return {tuple(one[:end]) for one in asked for end in range(CHUNK, len(one) + 1, CHUNK)}


def test_a_pool_too_small_forgets_and_never_errs(split: Served) -> None:
    overload(split)


def test_a_pool_too_small_forgets_and_never_errs_where_prompts_and_answers_share_it(together: Served) -> None:
    overload(together, ANN)


def test_keys_do_not_share_and_a_salt_that_two_know_does(together: Served) -> None:
    prompt = Prompts(text_ids()).take(200)
    seen = [cached(complete(together, prompt, key)) for key in (ANN, BEN, ANN, BEN)]
    assert seen == [0, 0, 192, 192]
    salted = [cached(complete(together, prompt, key, cache_salt="ours")) for key in (ANN, BEN)]
    assert salted == [0, 192]


# ---- tokens of a pool that is too small


@pytest.fixture(scope="module")
def crowd() -> list[list[int]]:
    """16 prompts of 190 tokens; four at a time begin with the same 128."""
    text = transformers_oracle.read_text()
    return [
        text[group * 500 : group * 500 + 128] + text[3000 + 97 * one : 3062 + 97 * one]
        for group in range(4)
        for one in range(4 * group, 4 * group + 4)
    ]


@pytest.fixture(scope="module")
def long_answers(crowd: list[list[int]]) -> list[list[str]]:
    """What `transformers` says on the same weights."""
    return transformers_oracle.Oracle().go_on(crowd, LONG_TOKENS)


@pytest.mark.parametrize("name", ["split", "swapping"])
def test_a_pool_too_small_for_the_load_changes_no_token(
    name: str, request: pytest.FixtureRequest, crowd: list[list[int]], long_answers: list[list[str]]
) -> None:
    """16 streams in the room of three or four: prefixes are evicted and requests preempted, and nobody can tell."""
    served: Served = request.getfixturevalue(name)
    names = "vllm:num_preemptions_total", "diptych:queue_wait_seconds_count", "vllm:prefix_cache_hits_total"
    before = [served.metric(one) for one in names]
    # The gateway sends on as many as there is room for, if answers are as long as they lately were: so let it
    # believe that they are short.
    transformers_oracle.complete(served, crowd * 5, 16, num_tokens=1, temperature=0)
    got = transformers_oracle.complete(served, crowd, 16, num_tokens=LONG_TOKENS, temperature=0)
    wrong = [place for place, tokens in enumerate(got) if tokens != long_answers[place]]
    assert not wrong, f"these went astray: {wrong}"
    wait_for(lambda: served.metric(names[0]) > before[0])  # sent with the next heartbeat
    assert served.metric(names[1]) > before[1]
    wait_for(lambda: served.held() == {}, timeout_s=REST_S)
    ways = "diptych:preemptions_total"  # a beat may fall between two looks
    wait_for(lambda: served.metric(ways) == served.metric(names[0]))
    assert served.metric(names[2]) > before[2]


def test_nothing_is_left_behind(split: Served) -> None:
    """What remains is cached, and nobody's."""
    wait_for(lambda: split.held() == {}, timeout_s=REST_S)
    assert split.metric("diptych:kv_slabs_cached") > 0
    assert split.metric("vllm:prefix_cache_hits_total") > 0
