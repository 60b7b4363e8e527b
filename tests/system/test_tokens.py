"""The tokens of a deployment are those of `transformers` on the same weights, however it is laid out.

Issue "Serve", point 2: 64 prompts of 1 to 1,900 tokens, alone and 16 at once, over shm, over NIXL, 2P2D and colocated.
Issue "Engine", point 1: with prefixes cached (as everywhere unless said otherwise) and not, for cold, partial and full
hits. Pools so small that prefixes are evicted and requests preempted are in tests/system/test_prefix.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.deployment import Served, serve, serve_parts, wait_for
from tests.system.transformers_oracle import Oracle, ask, complete, read_text

pytestmark = pytest.mark.timeout(600)  # the first test also asks the oracle, and starts a deployment

EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 511, 512, 513, 1023, 1024, 1025, 1900)
LAYOUTS = {
    "1P1D over shm": ("--prefill", "1", "--decode", "1", "--transports", "shm"),
    "1P1D over NIXL": ("--prefill", "1", "--decode", "1", "--transports", "nixl"),
    "1P1D without prefix cache": ("--prefill", "1", "--decode", "1", "--no-enable-prefix-caching"),
    "2P2D": ("--prefill", "2", "--decode", "2"),
    "colocated": ("--colocated", "2"),
}
LAUNCHED = ("colocated",)  # by `diptych serve` itself, whose Ray costs as much to start as the workers


def lengths() -> list[int]:
    """64 prompt lengths: all page edges, the rest spread evenly on a logarithmic scale."""
    rng = random.Random(0)
    return sorted([*EDGES, *(round(1900 ** rng.random()) for _ in range(64 - len(EDGES)))])


@pytest.fixture(scope="module")
def text() -> list[int]:
    return read_text()


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    """Each prompt is cut from another place."""
    rng = random.Random(1)
    starts = [rng.randrange(len(text) - n) for n in lengths()]
    return [text[start : start + n] for start, n in zip(starts, lengths(), strict=True)]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[list[int]]) -> list[list[str]]:
    return [oracle.go_on([prompt])[0] for prompt in prompts]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    start = serve if request.param in LAUNCHED else serve_parts
    with start(*LAYOUTS[request.param]) as served:
        yield request.param, served


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
    answers = asyncio.run(ask(served, [prompt for prompt, _, _ in hits], 1, temperature=0))
    assert [one.tokens for one in answers] == [answer for _, _, answer in hits]
    cached = [0 if "without" in name else cached for _, cached, _ in hits]
    assert [one.cached for one in answers] == cached
    again = asyncio.run(ask(served, [prompt for prompt, _, _ in hits], 16, temperature=0))
    assert [one.tokens for one in again] == [answer for _, _, answer in hits]


def test_nothing_is_left_behind(layout: tuple[str, Served]) -> None:
    """Invariant 1, after all of the above."""
    name, served = layout
    wait_for(lambda: served.held() == {})  # books lag by a beat, and canaries come and go
    found = served.metric("vllm:prefix_cache_hits_total"), served.metric("diptych:kv_slabs_cached")
    assert found == (0, 0) if "without" in name else min(found) > 0
