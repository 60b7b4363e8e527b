"""One prefill and one decode worker: clients that leave at any moment, and prompts that a decode worker reads itself.

Clients that leave free everything, and nobody else notices. Decode workers read prompts themselves, and say so: when no
prefill worker is left, or when it is sooner; else 503. The only prefill worker is stopped, not killed: its supervisor
starts no other, so it stays away for as long as the test wants, and is back at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.deployment import Served, serve_parts, wait_for

pytestmark = pytest.mark.timeout(600)

AT_ONCE = 24
SOURCE = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n"
BODY = {"model": "tiny", "prompt": SOURCE * 4, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LOCAL = "diptych:local_prefills_total"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # Nothing is refused for its wait: on a slow machine this many clients would meet the limit.
    arguments = ("--prefill", "1", "--decode", "1", "--recovery-s", "2", "--max-queue-wait-s", "600")
    with serve_parts(*arguments) as deployment:
        yield deployment


@dataclass(frozen=True, slots=True)
class Leaver:
    """Leaves `after_s` seconds after it has seen `events` events; 0 events is before any answer."""

    events: int
    after_s: float
    body: dict[str, Any]


def leavers(rng: random.Random, clients: int) -> list[Leaver]:
    """A quarter leaves before the answer (queue, prefill), a half about the hand-off, a quarter while decoding."""
    chosen = []
    for _ in range(clients):
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


async def storm(url: str, clients: int) -> tuple[Counter[str], set[tuple[str, str]], dict[str, str]]:
    """All leavers, among clients that stay; and what those get when they are alone."""
    seen: Counter[str] = Counter()
    asked = [SOURCE * n + f"class Reader{n}:\n" for n in (1, 7, 20)]
    answers: set[tuple[str, str]] = set()
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
                answers.add((prompt, await stay(client, prompt)))

        staying = [asyncio.create_task(bystander(prompt)) for prompt in asked]
        await asyncio.gather(*map(go, leavers(random.Random(4), clients)))
        over.set()
        await asyncio.gather(*staying)
    return seen, answers, alone


@pytest.mark.parametrize("clients", [200, pytest.param(500, marks=pytest.mark.slow)])
def test_clients_that_vanish_leave_nothing_and_disturb_nobody(served: Served, clients: int) -> None:
    before = served.metric("diptych:requests_cancelled_total")
    seen, answers, alone = asyncio.run(storm(served.url, clients))
    # Every kind of leaving did happen: a storm of requests that all finished would prove nothing.
    assert (
        min(seen["before any token"], seen["after the first token"], seen["while decoding"]) >= clients / 10
    ), seen
    assert served.metric("diptych:requests_cancelled_total") - before >= clients / 2
    assert answers == set(alone.items())
    took_s = wait_for(lambda: served.held() == {})
    print(f"{dict(seen)}; all books at 0 after {took_s:.2f} s")
    # A canary may come between two looks.
    for book in ("kv_slabs_used", "leases", "staging_bytes"):
        wait_for(lambda name=f"diptych:{book}": served.metric(name) == 0)  # type: ignore[misc]
    assert served.metric("diptych:integrity_failures") == 0


# ---- prompts that a decode worker reads


def members(served: Served) -> set[str]:
    return {one["worker"] for one in served.status()["workers"]}


@contextmanager
def stopped(served: Served, worker: str) -> Iterator[None]:
    """The worker stands still until the block ends; it is lost meanwhile, and comes back."""
    process = served.worker(worker)
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: worker not in members(served))
        yield
    finally:
        process.send_signal(signal.SIGCONT)
    # Linked, too: while it is not, what is ready is the way that was left without it.
    wait_for(lambda: worker in members(served) and served.ready() and served.status()["links"])


def complete(served: Served) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/completions", json=BODY, timeout=300)


def test_decode_workers_read_prompts_while_no_prefill_worker_is_there(served: Served) -> None:
    count, before = served.metric(LOCAL), complete(served).raise_for_status().json()
    assert served.metric(LOCAL) == count
    with stopped(served, "prefill-0"):
        local = complete(served).raise_for_status().json()
        assert local["choices"] == before["choices"] and local["usage"] == {
            **before["usage"],
            "prompt_tokens_details": local["usage"]["prompt_tokens_details"],
        }
        assert served.metric(LOCAL) >= count + 1
        wait_for(served.ready)  # by the way that is left
    moved = served.metric("diptych:transfer_bytes_total")
    body = {**BODY, "prompt": "class Reader:\n" + SOURCE * 4}  # not known to the decode worker yet
    httpx.post(f"{served.url}/v1/completions", json=body, timeout=300).raise_for_status()
    assert served.metric("diptych:transfer_bytes_total") > moved, "the two pools work together again"
    wait_for(lambda: served.held() == {})


def test_prompts_are_read_by_decode_workers_when_that_is_sooner() -> None:
    """Many long prompts at once: the only prefill worker has a queue, and the decode worker nothing to do."""
    numbers = itertools.count()

    def ask(number: int) -> Any:
        prompt = [(41 * place + 103 * number) % 4000 + 16 for place in range(1000)]
        answer = httpx.post(
            f"{served.url}/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": 4}, timeout=300
        )
        return answer.raise_for_status().json()["choices"]

    def burst() -> list[int]:
        asked = list(itertools.islice(numbers, 8))
        answers.update(zip(asked, threads.map(ask, asked), strict=True))
        return asked

    answers: dict[int, Any] = {}
    options = ("--prefill", "1", "--decode", "1", "--local-prefill", "auto")
    with serve_parts(*options) as served, ThreadPoolExecutor(8) as threads:
        wait_for(lambda: bool(burst()) and served.metric(LOCAL, reason="sooner") >= 1)
        assert served.metric("diptych:transfer_bytes_total") > 0, "others went the usual way"
        assert ask(0) == answers[0] and ask(7) == answers[7], "one at a time, the answers are the same"
        wait_for(lambda: served.held() == {})


@pytest.mark.parametrize("stream", [False, True])
def test_timings_split_the_hand_off_too(served: Served, stream: bool) -> None:
    """The stages of a real request sum to its TTFT; its transfer is split into hidden and exposed."""
    before = served.metric("vllm:time_to_first_token_seconds_sum")
    answer = httpx.post(
        f"{served.url}/v1/completions",
        json={**BODY, "prompt": SOURCE * 40, "stream": stream},
        headers={"X-Diptych-Timings": "1"},
        timeout=600,
    )
    text = answer.text.split("data: ")[-2] if stream else answer.text
    (timings,) = json.loads(text)["diptych"]["timings"]
    after = served.metric("vllm:time_to_first_token_seconds_sum")
    assert sum(timings["ttft_stages_ms"].values()) == pytest.approx(timings["ttft_ms"], abs=0.002)
    assert timings["ttft_ms"] == pytest.approx(1e3 * (after - before), abs=0.01)
    assert timings["ttft_stages_ms"]["prefill"] > 0
    assert sum(timings["handoff_stages_ms"].values()) == pytest.approx(timings["handoff_ms"], abs=0.002)
    moved = timings["transfer"]
    assert moved["num_bytes"] > 0 and moved["hidden_ms"] + moved["exposed_ms"] > 0
    assert timings["attempts"] == 1
