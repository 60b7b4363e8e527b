"""Clients that leave at any moment free everything, and nobody else notices (issue "Serve", point 4)."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.system.served import Served, serve, wait_for

pytestmark = pytest.mark.timeout(600)

CLIENTS = 500
AT_ONCE = 24
SOURCE = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as deployment:
        yield deployment


@dataclass(frozen=True, slots=True)
class Leaver:
    """Leaves `after_s` seconds after it has seen `events` events; 0 events is before any answer."""

    events: int
    after_s: float
    body: dict[str, Any]


def leavers(rng: random.Random) -> list[Leaver]:
    """A quarter leaves before the answer (queue, prefill), a half about the hand-off, a quarter while decoding."""
    chosen = []
    for _ in range(CLIENTS):
        events = rng.choice([0, 1, 1, rng.randrange(2, 20)])
        wait_s = rng.uniform(0, 0.4) if events == 0 else rng.uniform(0, 0.02)
        prompt = SOURCE * rng.randrange(1, 60)
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 60, "stream": True,
            "temperature": 1.0, "ignore_eos": True, "n": rng.choice([1, 1, 1, 2]),
        }  # fmt: skip
        chosen.append(Leaver(events, wait_s, body))
    return chosen


async def leave(client: httpx.AsyncClient, one: Leaver, seen: Counter[str]) -> None:
    """Send the request, read so many events, wait, and drop the connection."""

    async def talk() -> None:
        async with client.stream("POST", "/v1/completions", json=one.body) as answer:
            assert answer.status_code == 200, await answer.aread()
            left = one.events
            async for line in answer.aiter_lines():
                left -= line.startswith("data: ")
                if one.events and left <= 0:
                    await asyncio.sleep(one.after_s)
                    return

    try:
        await asyncio.wait_for(talk(), None if one.events else one.after_s)
        seen[
            "after the first token" if one.events == 1 else "while decoding" if one.events else "finished"
        ] += 1
    except TimeoutError:
        seen["before any token"] += 1


async def stay(client: httpx.AsyncClient, prompt: str) -> str:
    """A client that reads its greedy answer to the end."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    text, ended = "", False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            ended = ended or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"] if event["choices"] else ""
    assert ended
    return text


async def storm(url: str) -> tuple[Counter[str], set[tuple[str, str]], dict[str, str]]:
    """All leavers, among clients that stay; and what those get when they are alone."""
    seen: Counter[str] = Counter()
    asked = [SOURCE * n + f"class Reader{n}:\n" for n in (1, 7, 20)]
    told: set[tuple[str, str]] = set()
    limits = httpx.Limits(max_connections=AT_ONCE + 8, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        alone = {prompt: await stay(client, prompt) for prompt in asked}
        gate = asyncio.Semaphore(AT_ONCE)
        over = asyncio.Event()

        async def go(one: Leaver) -> None:
            async with gate:
                await leave(client, one, seen)

        async def bystander(prompt: str) -> None:
            while not over.is_set():
                told.add((prompt, await stay(client, prompt)))

        staying = [asyncio.create_task(bystander(prompt)) for prompt in asked]
        await asyncio.gather(*map(go, leavers(random.Random(4))))
        over.set()
        await asyncio.gather(*staying)
    return seen, told, alone


def test_clients_that_vanish_leave_nothing_and_disturb_nobody(served: Served) -> None:
    seen, told, alone = asyncio.run(storm(served.url))
    # Every kind of leaving did happen: a storm of requests that all finished would prove nothing.
    assert min(seen["before any token"], seen["after the first token"], seen["while decoding"]) >= 50, seen
    assert served.metric("diptych:requests_cancelled_total") >= CLIENTS / 2
    assert told == set(alone.items())
    took_s = wait_for(lambda: served.held() == {})
    print(f"{dict(seen)}; all books at 0 after {took_s:.2f} s")
    assert served.metric("diptych:kv_slabs_used") == 0
    assert served.metric("diptych:leases") == 0
    assert served.metric("diptych:staging_bytes") == 0
    assert served.metric("diptych:integrity_failures") == 0
