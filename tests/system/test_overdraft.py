"""Prompts that begin before their decode room is free, on real workers with hardly any: every answer is whole.

Pools have room for one long request and a little more, so that all but one wait for room; workers are killed while
prompts are overdrawn, and at rest nothing is held.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.deployment import Served, call_at_once, serve_parts, wait_for

pytestmark = pytest.mark.timeout(600)
# The embedded model's chunk in float32, and how many a pool has: a request of its context of 2,048 tokens fits.
CHUNK_BYTES, SLABS = 393_216, 34
PROMPT, ANSWER, REQUESTS = 960, 48, 10


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    memory = str(CHUNK_BYTES * SLABS)
    flags = (
        "--prefill",
        "2",
        "--decode",
        "1",
        "--kv-cache-memory-bytes",
        memory,
        "--decode-overdraft",
        "auto",
    )
    # Requests wait for as long as a slow machine takes to start the only decode worker again.
    with serve_parts("--model", "tiny", *flags, "--recovery-s", "240") as served:
        assert {one["stats"]["slabs_total"] for one in served.status()["workers"]} == {SLABS}
        yield served


def ask(served: Served, salt: int) -> dict[str, Any]:
    """A greedy answer of `ANSWER` tokens to a prompt that shares no chunk with those of other salts."""
    prompt = [(41 * place + 103 * salt) % 4000 + 16 for place in range(PROMPT)]
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "model": "tiny"}
    reply = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    assert isinstance(reply, dict)
    return reply


def ask_many(served: Served, count: int = REQUESTS) -> list[str]:
    """The texts of so many answers that are asked for at once; each is whole."""
    calls: list[Callable[[], dict[str, Any]]] = [partial(ask, served, salt) for salt in range(count)]
    replies = call_at_once(calls)
    assert {reply["usage"]["completion_tokens"] for reply in replies} == {ANSWER}
    return [reply["choices"][0]["text"] for reply in replies]


def overdrafts(served: Served) -> int:
    """How many prompts that began early have been computed."""
    state = served.status()["decode_overdraft"]
    assert state["mode"] == "auto"
    return int(state["in_time"] + state["late"])


def test_answers_are_those_that_wait(served: Served) -> None:
    """Prompts begin early, and their answers are those of requests that come one after the other."""
    alone = [ask(served, salt)["choices"][0]["text"] for salt in range(REQUESTS)]
    wait_for(lambda: not served.held(), explain=served.held)
    before = overdrafts(served)
    assert ask_many(served) == alone
    assert overdrafts(served) > before
    assert served.metric("diptych:decode_overdrafts_total") == overdrafts(served)
    wait_for(lambda: not served.held(), explain=served.held)
    assert not served.status()["decode_overdraft"]["overdrawn"]


@pytest.mark.parametrize("victim", ["prefill-0"])
def test_a_worker_that_is_killed_while_prompts_are_overdrawn(served: Served, victim: str) -> None:
    alone = ask_many(served)
    process = served.worker(victim)

    def kill() -> list[str]:
        wait_for(lambda: served.status()["decode_overdraft"]["overdrawn"], pause_s=0.01)
        process.send_signal(signal.SIGKILL)
        return []

    calls: list[Callable[[], list[str]]] = [partial(ask_many, served), kill]
    answers, _ = call_at_once(calls)
    assert answers == alone
    wait_for(lambda: served.ready() and not served.held(), explain=served.held)
    assert not served.status()["decode_overdraft"]["overdrawn"]
