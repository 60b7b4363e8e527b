"""Batches over real workers: answers are those of the HTTP routes; kill -9 loses, doubles and tears nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.support.deployment import Served, serve_parts, wait_for
from tests.system.batches.batch_lines import (
    CHAT,
    COMPLETION,
    ENDED,
    answers_of,
    finished,
    input_file,
    results,
    start,
)
from tests.system.batches.gateway_process import gateway_pid

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
}
Bodies = dict[str, dict[str, Any]]
PARTS = ("gateway", "decode-0", "prefill-0")
WORDS = ("list", "tuple", "file", "class", "module", "string", "thread", "socket")


def chat_lines(count: int) -> Bodies:
    """Bodies for chats by custom_id, of many kinds; names that begin with "bad" are malformed."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 11},
        {"temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 2},
        {"temperature": 0, "stop": ["e", "zz"]},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0, "response_format": SCHEMA, "max_tokens": 20},
        {"temperature": -1},
        {"max_tokens": 10**9},
    ]
    lines = {}
    for number in range(count):
        kind, word = kinds[number % len(kinds)], WORDS[number % 7]
        bad = "temperature" not in kind or kind["temperature"] < 0
        question = [{"role": "user", "content": f"What is a {word}? ({number % 13})"}]
        lines[f"{'bad' if bad else 'chat'}-{number}"] = {
            "model": "tiny",
            "messages": question,
            "max_tokens": 8,
        } | kind
    return lines


def completion_lines(count: int) -> Bodies:
    """Bodies for completions by custom_id."""
    return {
        f"text-{number}": {
            "model": "tiny",
            "prompt": f"def {WORDS[number % 8]}_{number % 11}(",
            "max_tokens": 6,
            "temperature": number % 2,
            "seed": number % 5,
            "logprobs": 1 if number % 3 else None,
            "echo": number % 5 == 0,
        }
        for number in range(count)
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def served(data: Path) -> Iterator[Served]:
    options = ("--data-dir", str(data / "batches"), "--request-log", str(data / "requests.jsonl"))
    with serve_parts("--prefill", "1", "--decode", "1", *options) as running:
        yield running


def pid_of(served: Served, part: str) -> int | None:
    """The process of a part; None while it is away."""
    if part == "gateway":
        return gateway_pid(served)
    with contextlib.suppress(httpx.HTTPError):
        workers = {one["worker"]: int(one["pid"]) for one in served.status()["workers"]}
        return workers.get(part)
    return None


def kill_part(served: Served, part: str) -> None:
    """End a part with kill -9, and wait until another one has taken its place."""
    wait_for(lambda: pid_of(served, part) is not None, explain=lambda: part)
    before = pid_of(served, part)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: pid_of(served, part) not in (None, before) and served.ready(), explain=lambda: part)


def check_all(client: openai.OpenAI, batch: str, bodies: Bodies) -> Bodies:
    """Each line has one result, in the right file; returns the answers of both files."""
    done = client.batches.retrieve(batch)
    assert done.status == "completed", done
    good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert set(good) | set(bad) == set(bodies) and len(good) + len(bad) == len(bodies)
    assert set(bad) == {name for name in bodies if name.startswith("bad")}, bad
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (len(bodies), len(good), len(bad))
    assert done.usage is not None
    used = sum(one["response"]["body"]["usage"]["completion_tokens"] for one in good.values())
    assert done.usage.output_tokens == used
    return {name: found["response"] for name, found in (good | bad).items()}


def check_like_http(served: Served, url: str, bodies: Bodies, found: Bodies) -> None:
    """Each answer is that of the HTTP route to the same body."""
    known: dict[str, tuple[int, Any]] = {}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for name, body in bodies.items():
            key = json.dumps(body)
            if key not in known:
                answer = http.post(url, json=body)
                known[key] = answer.status_code, comparable(answer.json())
            mine = found[name]["status_code"], comparable(found[name]["body"])
            assert mine == known[key], (name, body)


def comparable(body: Mapping[str, Any]) -> Any:
    """What must be equal in two answers. Log-probabilities depend on which requests were computed together."""
    if "error" in body:
        return body
    choices, usage = answers_of(dict(body))
    return [(one.get("text") or one["message"]["content"], one["finish_reason"]) for one in choices], usage


@pytest.mark.parametrize(("url", "lines"), [(CHAT, chat_lines(48)), (COMPLETION, completion_lines(30))])
def test_answers_are_those_of_the_http_routes(served: Served, url: str, lines: Bodies) -> None:
    with served.client() as client:
        batch = start(client, input_file(lines.items(), url), url)
        finished(client, batch.id)
        found = check_all(client, batch.id, lines)
    check_like_http(served, url, lines, found)
    scored = [name for name, body in lines.items() if body.get("logprobs")]
    assert scored and all(found[name]["body"]["choices"][0]["logprobs"] for name in scored)
    wait_for(lambda: served.held() == {})


def test_lines_have_the_fields_of_vllm(served: Served) -> None:
    plain = {"model": "tiny", "prompt": "def add(a, b):", "max_tokens": 6, "temperature": 0}
    text = {"prompt": "a", "add_special_tokens": False}
    (letter,) = httpx.post(f"{served.url}/tokenize", json=text).json()["tokens"]
    lines = {
        "named": plain | {"allowed_token_ids": list(range(300, 340)), "return_token_ids": True},
        "without": plain | {"bad_words": ["return", "self"], "min_tokens": 6},
        "scored": plain | {"prompt_logprobs": 2, "truncate_prompt_tokens": 5},
        "chosen": plain | {"structured_outputs": {"choice": ["yes", "no"]}},
        "bad-named": plain | {"allowed_token_ids": [letter], "bad_words": ["a"]},
        "bad-grammar": plain | {"structured_outputs": {"regex": "a"}, "bad_words": ["a"]},
    }
    with served.client() as client:
        batch = start(client, input_file(lines.items(), COMPLETION), COMPLETION)
        finished(client, batch.id)
        found = check_all(client, batch.id, lines)
    check_like_http(served, COMPLETION, lines, found)
    choices = {name: found[name]["body"]["choices"][0] for name in lines if not name.startswith("bad")}
    assert set(choices["named"]["token_ids"]) <= set(range(300, 340))
    assert "return" not in choices["without"]["text"] and choices["chosen"]["text"] in ("yes", "no")
    assert [one is None for one in choices["scored"]["prompt_logprobs"]] == [True] + [False] * 4
    errors = {name: found[name]["body"]["error"] for name in lines if name.startswith("bad")}
    assert (errors["bad-named"]["code"], errors["bad-named"]["param"]) == (
        "invalid_value",
        "allowed_token_ids",
    )
    assert errors["bad-grammar"]["code"] == "no_token_left"


def test_lines_are_bulk_work_and_no_requests(served: Served, data: Path) -> None:
    ended = served.metric("diptych:bulk_sequences_total")
    answered = served.metric("vllm:request_success_total")
    with served.client() as client:
        finished(client, start(client, input_file(completion_lines(3).items(), COMPLETION), COMPLETION).id)
    wait_for(lambda: served.metric("diptych:bulk_sequences_total") == ended + 3)
    assert served.metric("vllm:request_success_total") == answered
    rows = [json.loads(row) for row in (data / "requests.jsonl").read_text().splitlines() if row[-1:] == "}"]
    assert not [row for row in rows if "batch_" in row.get("client_request_id", "")]


@pytest.mark.parametrize(
    ("count", "kills"),
    [(160, 3), pytest.param(10_000, 20, marks=[pytest.mark.slow, pytest.mark.timeout(5400)])],
)
def test_killed_parts_lose_double_and_tear_no_line(served: Served, count: int, kills: int) -> None:
    """The gateway and the workers in turns, with kill -9, at random moments of two batches."""
    rng = random.Random(count)
    chats, texts = chat_lines(count * 3 // 4), completion_lines(count // 4)
    with served.client(timeout=60) as client:
        first = start(client, input_file(chats.items()))
        second = start(client, input_file(texts.items(), COMPLETION), COMPLETION)

        def counted(what: Callable[[Batch], int]) -> int:
            """The sum over both batches; -1 while the gateway is away."""
            try:
                return sum(what(client.batches.retrieve(one.id)) for one in (first, second))
            except (openai.APIConnectionError, openai.InternalServerError):
                return -1

        def num_done() -> int:
            return counted(lambda one: one.request_counts.completed if one.request_counts else 0)

        def is_over() -> bool:
            return counted(lambda one: one.status in ENDED) == 2

        # The moments are numbers of lines that have ended; between two of them is room for lines to end.
        step = count // (2 * kills)
        for number in range(kills):
            moment = number * step + rng.randrange(1, step)
            wait_for(lambda moment=moment: num_done() >= moment or is_over(), 900)  # type: ignore[misc]
            kill_part(served, PARTS[number % len(PARTS)])
        wait_for(is_over, 3600)
        found = check_all(client, first.id, chats), check_all(client, second.id, texts)
    check_like_http(served, CHAT, chats, found[0])
    check_like_http(served, COMPLETION, texts, found[1])
    wait_for(lambda: served.ready() and served.held() == {}, explain=served.held)
    state = served.status()["batches"]
    assert (state["lines"]["waiting"], state["lines"]["running"], state["open"]) == (0, 0, [])
    assert served.logs is not None
    assert "Traceback" not in (served.logs / "gateway.log").read_text()
