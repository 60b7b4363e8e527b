"""Workers that cannot continue each other's answers, on the embedded model: whole deployments, over HTTP.

Decode workers draw the first tokens of what cannot be continued; the answers are those of one worker that does all. If
they are killed, what can be continued is, and every other answer that has begun gets one error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tests.support.deployment import Served, serve_parts, wait_for

pytestmark = pytest.mark.timeout(900)

WORKERS = "tests.support.limited_worker"
TEXT = "def read(self, size=-1):\n    return self.buffer.read(size)\n\n"
TOKENS = 120
BEGUN = 3
WARM = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
HEX = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": {
    "type": "string", "pattern": "^([a-f0-9]{4}-){60}[a-f0-9]{4}$"}}}  # fmt: skip


def long(**more: Any) -> dict[str, Any]:
    return {"prompt": TEXT * 5, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **more}


FREE = {
    "greedy": long(),
    "logprobs": long(logprobs=2),
    "repetition penalty": long(repetition_penalty=1.2),
    "min_tokens": long(min_tokens=TOKENS - 5, ignore_eos=False),
}
BOUND = {
    "seeded": long(**WARM),
    "n": long(**WARM, n=2),
    "penalties": long(presence_penalty=0.6, frequency_penalty=0.4),
    "regex": long(response_format=HEX, ignore_eos=False),
    "whole": long(**WARM, stream=False),
    "short prompt": long(**WARM, prompt="x"),
    "one token": long(**WARM, max_tokens=1),
    "two tokens": long(**WARM, max_tokens=2),
    "with logprobs": long(**WARM, logprobs=2, prompt=TEXT * 4),
    "stop": long(**WARM, stop=["no such text"]),
}
WAYS = FREE | BOUND
# Those that are long enough to be killed in the middle.
LONG = [*FREE, "seeded", "n", "penalties", "regex", "whole", "stop"]


@dataclass
class Answer:
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    retry_after: str | None = None
    timings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, body: dict[str, Any]) -> None:
        self.errors += [body["error"]] if "error" in body else []
        for choice in body.get("choices", []):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + (choice.get("text") or "")
            if choice.get("finish_reason"):
                self.finishes[index] = choice["finish_reason"]
        if usage := body.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        self.timings = body.get("diptych", {}).get("timings", self.timings)

    @property
    def content(self) -> tuple[dict[int, str], dict[int, str], dict[str, int]]:
        return self.texts, self.finishes, self.usage


async def ask(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> Answer:
    """One request to its end; `begun` is set when it is in the middle of its answer, or over."""
    answer, body, pieces = Answer(), {"model": "tiny", "stream": True, **body}, 0
    headers = {"X-Diptych-Timings": "1"}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        answer.status, answer.retry_after = reply.status_code, reply.headers.get("retry-after")
        if answer.status != 200 or not body["stream"]:
            answer.add(json.loads(await reply.aread()))
        else:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    answer.add(json.loads(line.removeprefix("data: ")))
                    pieces += 1
                    if pieces == BEGUN:
                        begun.set()
    begun.set()
    return answer


async def ask_all(
    served: Served, names: Sequence[str], victims: Sequence[psutil.Process] = ()
) -> dict[str, Answer]:
    """These ways of asking at once; when all streams are in the middle of their answers, `victims` are killed."""
    events = {name: asyncio.Event() for name in names}
    streams = [name for name in names if WAYS[name].get("stream", True)]
    async with httpx.AsyncClient(base_url=served.url, timeout=600, trust_env=False) as client:
        tasks = [asyncio.create_task(ask(client, WAYS[name], events[name])) for name in names]
        if victims:
            await asyncio.gather(*(events[name].wait() for name in streams))
            for one in victims:
                one.kill()
        return dict(zip(names, await asyncio.gather(*tasks), strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Answer]:
    """What one ordinary worker answers that does all."""
    with serve_parts("--colocated", "1") as served:
        return asyncio.run(ask_all(served, list(WAYS)))


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    pools = ("--prefill", "1", "--decode", "2")
    with serve_parts(*pools, "--recovery-s", "300", worker_module=WORKERS) as served:
        yield served


def rest(served: Served, dead: Sequence[psutil.Process] = ()) -> None:
    """All workers are back, and hold nothing."""
    gone = {process.pid for process in dead}

    def is_back() -> bool:
        pids = {worker["pid"] for worker in served.status()["workers"]}
        return served.ready() and len(pids) == 3 and pids.isdisjoint(gone)

    wait_for(is_back)
    wait_for(lambda: served.held() == {})


def test_answers_are_those_of_one_worker(limited: Served, undisturbed: dict[str, Answer]) -> None:
    rest(limited)
    answers = asyncio.run(ask_all(limited, list(WAYS)))
    for name, answer in answers.items():
        assert not answer.errors and answer.content == undisturbed[name].content, name
    rest(limited)


def test_the_stages_say_who_drew_the_first_token_and_sum_to_its_time(limited: Served) -> None:
    for name, answer in asyncio.run(ask_all(limited, list(WAYS))).items():
        deferred = name in BOUND and name != "one token"
        for timings in answer.timings:
            stages = timings["ttft_stages_ms"]
            assert ("transfer" in stages) == deferred, name
            assert sum(stages.values()) == pytest.approx(timings["ttft_ms"], abs=0.01)
            assert ("handoff_stages_ms" in timings) == (not deferred and name != "one token"), name
        assert answer.timings


def test_what_cannot_go_on_gets_one_error_and_all_else_its_answer(
    limited: Served, undisturbed: dict[str, Answer]
) -> None:
    cut, bound = list[str](), {name for name in LONG if name in BOUND}
    victims: list[psutil.Process] = []
    for _ in range(4):
        if set(cut) == bound:
            break
        rest(limited, victims)
        victims = [limited.worker(name) for name in ("decode-0", "decode-1")]
        answers = asyncio.run(ask_all(limited, LONG, victims))
        for name, answer in answers.items():
            if name in FREE or not answer.errors:
                assert answer.content == undisturbed[name].content and not answer.errors, name
                continue
            cut.append(name)
            (error,) = answer.errors
            assert error["code"] == "not_continuable" and error["type"] == "server_error"
            assert name != "whole" or (answer.status, answer.retry_after) == (503, "1")
            for index, text in answer.texts.items():
                assert undisturbed[name].texts[index].startswith(text), f"{name}: no other token"
    assert set(cut) == bound
    rest(limited, victims)
    assert limited.metric("diptych:request_failures_total", code="not_continuable") >= len(cut)
