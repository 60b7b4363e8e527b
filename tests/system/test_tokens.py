"""The tokens of a deployment are those of `transformers` on the same weights, however it is laid out.

Issue "Serve", point 2: 64 prompts of 1 to 1,900 tokens, alone and 16 at once, over shm, over NIXL, 2P2D and colocated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    "2P2D": ("--prefill", "2", "--decode", "2"),
    "colocated": ("--colocated", "2"),
}


def lengths() -> list[int]:
    """64 prompt lengths: all page edges, the rest spread evenly on a logarithmic scale."""
    rng = random.Random(0)
    return sorted([*EDGES, *(round(1900 ** rng.random()) for _ in range(64 - len(EDGES)))])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Real text, each prompt cut from another place."""
    tokens = AutoTokenizer.from_pretrained(TINY).encode(Path(random.__file__).read_text() * 2)
    rng = random.Random(1)
    starts = [rng.randrange(len(tokens) - n) for n in lengths()]
    return [tokens[start : start + n] for start, n in zip(starts, lengths(), strict=True)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[str]]:
    """What `transformers.generate` continues each prompt with, as the strings of its tokens."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)

    def run(prompt: list[int]) -> list[str]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        return [tokenizer.decode([token]) for token in out[0, len(prompt) :].tolist()]

    return [run(prompt) for prompt in prompts]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with serve(*LAYOUTS[request.param]) as served:
        yield request.param, served


async def complete(
    served: Served, prompts: list[list[int]], at_once: int, **sampling: Any
) -> list[list[str]]:
    """The new tokens of each prompt, as strings; at most `at_once` requests are open at a time."""
    gate = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        async def one(prompt: list[int]) -> list[str]:
            async with gate:
                done = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=NEW_TOKENS, logprobs=0,
                    extra_body={"ignore_eos": True, "skip_special_tokens": False}, **sampling,
                )  # fmt: skip
            choice = done.choices[0]
            assert choice.logprobs is not None and choice.logprobs.tokens is not None
            assert done.usage is not None and done.usage.completion_tokens == NEW_TOKENS
            return list(choice.logprobs.tokens)

        return list(await asyncio.gather(*map(one, prompts)))


@pytest.mark.parametrize("at_once", [1, 16])
def test_greedy_tokens_are_those_of_transformers(
    layout: tuple[str, Served], prompts: list[list[int]], expected: list[list[str]], at_once: int
) -> None:
    name, served = layout
    moved = served.metric("diptych:transfer_bytes_total")
    got = asyncio.run(complete(served, prompts, at_once, temperature=0))
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
    _SEEDED[name] = asyncio.run(complete(served, some, 16, **sampling))
    first = next(iter(_SEEDED))
    assert _SEEDED[name] == _SEEDED[first], f"{name} differs from {first}"
    assert asyncio.run(complete(served, some[::4], 1, **sampling)) == _SEEDED[name][::4]


def test_nothing_is_left_behind(layout: tuple[str, Served]) -> None:
    """Invariant 1, after all of the above."""
    _, served = layout
    wait_for(lambda: served.held() == {}, timeout_s=30)  # books lag by a beat, and canaries come and go
