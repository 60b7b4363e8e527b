"""Decode workers read prompts themselves, and say so: when no prefill worker is left, or when it is sooner; else 503.

The only prefill worker is stopped, not killed: its supervisor starts no other, so it stays away for as long as the test
wants, and is back at once.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.system.served import Served, serve, wait_for

pytestmark = pytest.mark.timeout(600)

TEXT = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n"
BODY = {"model": "tiny", "prompt": TEXT * 4, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LOCAL = "diptych:local_prefills_total"


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
    wait_for(lambda: worker in members(served) and served.ready())


def complete(served: Served) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/completions", json=BODY, timeout=300)


def test_decode_workers_read_prompts_while_no_prefill_worker_is_there() -> None:
    with serve("--prefill", "1", "--decode", "1", "--recovery-s", "2") as served:
        before = complete(served).raise_for_status().json()
        assert served.metric(LOCAL) == 0
        with stopped(served, "prefill-0"):
            local = complete(served).raise_for_status().json()
            assert local["choices"] == before["choices"] and local["usage"] == {
                **before["usage"],
                "prompt_tokens_details": local["usage"]["prompt_tokens_details"],
            }
            assert served.metric(LOCAL) >= 1
            wait_for(served.ready)  # by the way that is left
        moved = served.metric("diptych:transfer_bytes_total")
        body = {**BODY, "prompt": "class Reader:\n" + TEXT * 4}  # not known to the decode worker yet
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
    with serve(*options) as served, ThreadPoolExecutor(8) as threads:
        wait_for(lambda: bool(burst()) and served.metric(LOCAL, reason="sooner") >= 1)
        assert served.metric("diptych:transfer_bytes_total") > 0, "others went the usual way"
        assert ask(0) == answers[0] and ask(7) == answers[7], "one at a time, the answers are the same"
        wait_for(lambda: served.held() == {})
