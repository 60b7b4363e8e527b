"""The tokens of a deployment are those of `transformers` on the same weights, however it is laid out.

Issue "Serve", point 2: 64 prompts of 1 to 1,900 tokens, alone and 16 at once, over shm, over NIXL, 2P2D and colocated.
Issue "Engine", point 1: with prefixes cached (as everywhere unless said otherwise) and not, for cold, partial and full
hits, and in pools so small that prefixes are evicted and requests preempted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.system.served import Served, serve, wait_for

pytestmark = pytest.mark.timeout(600)  # the first test also asks the oracle, and starts a deployment

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
NEW_TOKENS = 12
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 511, 512, 513, 1023, 1024, 1025, 1900)
LAYOUTS = {
    "1P1D over shm": ("--prefill", "1", "--decode", "1", "--transports", "shm"),
    "1P1D over NIXL": ("--prefill", "1", "--decode", "1", "--transports", "nixl"),
    "1P1D without prefix cache": ("--prefill", "1", "--decode", "1", "--no-enable-prefix-caching"),
    "2P2D": ("--prefill", "2", "--decode", "2"),
    "colocated": ("--colocated", "2"),
}
# 24 slabs of 64 tokens for 16 streams, of which each grows to 7: what is cached goes, and then some must wait again.
SMALL = ("--kv-cache-memory-bytes", "9MiB", "--max-model-len", "512")
SMALL_LAYOUTS = {
    "1P1D": ("--prefill", "1", "--decode", "1", *SMALL),
    "colocated with swap space": ("--colocated", "1", "--swap-space", "64MiB", *SMALL),
}
LONG_TOKENS = 240


class Told(NamedTuple):
    """One answer: its tokens as strings, and how many of the prompt's tokens were cached."""

    tokens: list[str]
    cached: int


def lengths() -> list[int]:
    """64 prompt lengths: all page edges, the rest spread evenly on a logarithmic scale."""
    rng = random.Random(0)
    return sorted([*EDGES, *(round(1900 ** rng.random()) for _ in range(64 - len(EDGES)))])


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Real text, as token ids."""
    tokens: list[int] = AutoTokenizer.from_pretrained(TINY).encode(Path(random.__file__).read_text() * 2)
    return tokens


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    """Each prompt is cut from another place."""
    rng = random.Random(1)
    starts = [rng.randrange(len(text) - n) for n in lengths()]
    return [text[start : start + n] for start, n in zip(starts, lengths(), strict=True)]


class Oracle:
    """`transformers` on the same weights, on one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._tokenizer: Any = AutoTokenizer.from_pretrained(TINY)

    def go_on(self, prompts: list[list[int]], num_tokens: int = NEW_TOKENS) -> list[list[str]]:
        """What it continues prompts of one length with, as the strings of the tokens."""
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return [[self._tokenizer.decode([token]) for token in row] for row in out[:, ids.shape[1] :].tolist()]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[list[int]]) -> list[list[str]]:
    return [oracle.go_on([prompt])[0] for prompt in prompts]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with serve(*LAYOUTS[request.param]) as served:
        yield request.param, served


async def ask(
    served: Served, prompts: list[list[int]], at_once: int, num_tokens: int = NEW_TOKENS, **sampling: Any
) -> list[Told]:
    """The answers to all prompts; at most `at_once` requests are open at a time."""
    gate = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        async def one(prompt: list[int]) -> Told:
            async with gate:
                done = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=num_tokens, logprobs=0,
                    extra_body={"ignore_eos": True, "skip_special_tokens": False}, **sampling,
                )  # fmt: skip
            choice = done.choices[0]
            assert choice.logprobs is not None and choice.logprobs.tokens is not None
            assert done.usage is not None and done.usage.completion_tokens == num_tokens
            assert done.usage.prompt_tokens_details is not None
            return Told(list(choice.logprobs.tokens), done.usage.prompt_tokens_details.cached_tokens or 0)

        return list(await asyncio.gather(*map(one, prompts)))


def complete(served: Served, prompts: list[list[int]], at_once: int, **more: Any) -> list[list[str]]:
    """The new tokens of each prompt, as strings."""
    return [told.tokens for told in asyncio.run(ask(served, prompts, at_once, **more))]


@pytest.mark.parametrize("at_once", [1, 16])
def test_greedy_tokens_are_those_of_transformers(
    layout: tuple[str, Served], prompts: list[list[int]], expected: list[list[str]], at_once: int
) -> None:
    name, served = layout
    moved = served.metric("diptych:transfer_bytes_total")
    got = complete(served, prompts, at_once, temperature=0)
    wrong = [len(p) for p, have, want in zip(prompts, got, expected, strict=True) if have != want]
    assert not wrong, f"prompts of these lengths went astray: {wrong}"
    # The KV did move, and by the road that the layout names.
    assert (served.metric("diptych:transfer_bytes_total") > moved) == (name != "colocated")
    if name == "1P1D over NIXL":
        assert served.metric("diptych:transfer_bytes_total", transport="nixl") > moved


_SEEDED: dict[str, list[list[str]]] = {}


def test_seeded_sampling_is_the_same_everywhere(layout: tuple[str, Served], prompts: list[list[int]]) -> None:
    """With a seed the same tokens come from every layout, alone or in company."""
    name, served = layout
    some = prompts[::4]
    sampling: dict[str, Any] = {
        "temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    }  # fmt: skip
    _SEEDED[name] = complete(served, some, 16, **sampling)
    first = next(iter(_SEEDED))
    assert _SEEDED[name] == _SEEDED[first], f"{name} differs from {first}"
    assert complete(served, some[::4], 1, **sampling) == _SEEDED[name][::4]


@pytest.fixture(scope="module")
def hits(text: list[int], oracle: Oracle) -> list[tuple[list[int], int, list[str]]]:
    """Prompts, each with the tokens that are cached when it is read after those before it, and its answer."""
    first, second = text[-700:], [*text[-700:-300], *text[100:350]]  # alike for 400 tokens: 6 chunks
    asked = [
        (first, 0), (first, 640), (first[:641], 640), (first[:640], 576), (second, 384),
        (first + text[50:200], 640), (first[:63], 0), (first[:64], 0), (first[:65], 64), (second, 640),
        ([*first[1:], 5], 0),
    ]  # fmt: skip
    return [(prompt, cached, oracle.go_on([prompt])[0]) for prompt, cached in asked]


def test_cold_partial_and_full_hits_give_the_same_tokens(
    layout: tuple[str, Served], hits: list[tuple[list[int], int, list[str]]]
) -> None:
    name, served = layout
    told = asyncio.run(ask(served, [prompt for prompt, _, _ in hits], 1, temperature=0))
    assert [one.tokens for one in told] == [answer for _, _, answer in hits]
    cached = [0 if "without" in name else cached for _, cached, _ in hits]
    assert [one.cached for one in told] == cached
    again = asyncio.run(ask(served, [prompt for prompt, _, _ in hits], 16, temperature=0))
    assert [one.tokens for one in again] == [answer for _, _, answer in hits]


def test_nothing_is_left_behind(layout: tuple[str, Served]) -> None:
    """Invariant 1, after all of the above."""
    name, served = layout
    wait_for(lambda: served.held() == {})  # books lag by a beat, and canaries come and go
    found = served.metric("vllm:prefix_cache_hits_total"), served.metric("diptych:kv_slabs_cached")
    assert found == (0, 0) if "without" in name else min(found) > 0


@pytest.fixture(scope="module")
def crowd(text: list[int]) -> list[list[int]]:
    """16 prompts of 190 tokens; four at a time begin with the same 128."""
    return [
        text[group * 500 : group * 500 + 128] + text[3000 + 97 * one : 3062 + 97 * one]
        for group in range(4)
        for one in range(4 * group, 4 * group + 4)
    ]


@pytest.fixture(scope="module")
def long_answers(oracle: Oracle, crowd: list[list[int]]) -> list[list[str]]:
    return oracle.go_on(crowd, LONG_TOKENS)


@pytest.mark.parametrize("name", SMALL_LAYOUTS)
def test_a_pool_too_small_for_the_load_changes_no_token(
    name: str, crowd: list[list[int]], long_answers: list[list[str]]
) -> None:
    """16 streams in the room of three: prefixes are evicted and requests preempted, and nobody can tell."""
    with serve(*SMALL_LAYOUTS[name]) as served:
        # The gateway sends on as many as there is room for, if answers are as long as they lately were: so let it
        # believe that they are short.
        complete(served, crowd * 5, 16, num_tokens=1, temperature=0)
        got = complete(served, crowd, 16, num_tokens=LONG_TOKENS, temperature=0)
        wrong = [place for place, tokens in enumerate(got) if tokens != long_answers[place]]
        assert not wrong, f"these went astray: {wrong}"
        wait_for(lambda: served.metric("vllm:num_preemptions_total") > 0)  # told with the next beat
        assert served.metric("diptych:queue_wait_seconds_count") > 0
        wait_for(lambda: served.held() == {})
        ways = "diptych:preemptions_total"  # a beat may fall between two looks
        wait_for(lambda: served.metric(ways) == served.metric("vllm:num_preemptions_total"))
        assert served.metric("vllm:prefix_cache_hits_total") > 0
