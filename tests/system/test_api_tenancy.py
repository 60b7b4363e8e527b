"""Tenants, scopes, priorities and cached tokens as official clients see them. Tokens come from a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai

from tests.system.scripted_gateway import Running, scripted

HI: list[Any] = [{"role": "user", "content": "hi"}]


def test_cached_tokens_are_of_the_first_sequence_of_each_prompt(client: openai.OpenAI) -> None:
    """Whoever asks twice finds the full chunks of what is read but the last token; a salt finds only its own."""

    def cached(prompts: list[list[int]], n: int = 1, **extra: Any) -> int:
        answer = client.completions.create(model="toy", prompt=prompts, max_tokens=2, n=n, extra_body=extra)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    short, long = [70] * 64, [71] * 200
    assert cached([short, long], n=2) == 0  # the second of each finds it, and is not who read it
    assert cached([short, long], n=2) == 0 + 192
    assert cached([long], cache_salt="a") == 0
    assert cached([long], cache_salt="a") == 192
    assert cached([long], cache_salt="b", priority=-10) == 0


def test_origin_reaches_the_backend_from_both_routes(http: httpx.Client, gateway: Running) -> None:
    gateway.script.seen.clear()
    extra = {"model": "toy", "max_tokens": 1, "cache_salt": "s", "priority": 4, "n": 2}
    http.post("/v1/chat/completions", json={"messages": HI, **extra}).raise_for_status()
    http.post("/v1/completions", json={"prompt": "hi", **extra}).raise_for_status()
    origins = {request.tenancy for request in gateway.script.seen}
    assert len(gateway.script.seen) == 4 and len(origins) == 1
    (origin,) = origins
    assert (origin.tenant, origin.priority) == ("", 4) and origin.scope


def test_keys_are_tenants_and_their_scopes_are_apart(folder: Path) -> None:
    keys = ("sk-one", "sk-two")
    with (
        scripted(folder, keys=keys) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        for key in (*keys, keys[0]):
            body = {"model": "toy", "prompt": [70] * 100, "max_tokens": 1}
            answer = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            details = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == (64 if len(running.script.seen) == 3 else 0)
        one, two, again = (request.tenancy for request in running.script.seen)
        assert one == again and one.tenant != two.tenant and one.scope != two.scope
