"""Who asks for timings gets them, and they sum to the TTFT; official clients read such answers like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from services.gateway.metrics.prometheus import TTFT_STAGES
from tests.support.model_folder import make_folder
from tests.system.scripted_gateway import STAGES, Running, scripted

WAIT_S = 90.0
ASKED = {"X-Diptych-Timings": "1"}
BODY = {"model": "toy", "prompt": "x", "max_tokens": 5}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with scripted(make_folder(tmp_path_factory.mktemp("toy"))) as running:
        yield running


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=WAIT_S) as opened:
        yield opened


def check_sums(timings: dict[str, Any]) -> None:
    stages = timings["ttft_stages_ms"]
    assert tuple(stages) == TTFT_STAGES
    assert sum(stages.values()) == pytest.approx(timings["ttft_ms"], abs=0.002)
    assert {name: stages[name] for name in STAGES} == {name: 1e3 * s for name, s in STAGES.items()}
    assert timings["total_ms"] >= timings["ttft_ms"] > 0


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("n", [1, 3])
def test_a_whole_answer(http: httpx.Client, n: int) -> None:
    answer = http.post("/v1/completions", json={**BODY, "n": n}, headers=ASKED)
    timings = answer.json()["diptych"]["timings"]
    assert [one["index"] for one in timings] == list(range(n))
    for one in timings:
        check_sums(one)
        assert one["ttft_stages_ms"]["write"] == pytest.approx(
            one["ttft_ms"] - 1e3 * sum(STAGES.values()), abs=0.002
        )
    entries = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert float(entries.pop("ttft")) == pytest.approx(
        sum(float(entries[name]) for name in TTFT_STAGES), abs=0.01
    )
    assert float(entries["total"]) == timings[0]["total_ms"]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_the_last_event_of_a_stream(http: httpx.Client, usage: bool, max_tokens: int) -> None:
    body = {**BODY, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": usage}}
    *others, last = events(http.post("/v1/completions", json=body, headers=ASKED))
    assert last["choices"] == [] and ("usage" in last) == usage
    check_sums(last["diptych"]["timings"][0])
    assert not any("diptych" in event for event in others)


def test_nothing_is_said_unasked(http: httpx.Client) -> None:
    for headers in ({}, {"X-Diptych-Timings": "0"}):
        answer = http.post("/v1/completions", json=BODY, headers=headers)
        assert "diptych" not in answer.json() and "server-timing" not in answer.headers
        stream = events(http.post("/v1/completions", json={**BODY, "stream": True}, headers=headers))
        assert stream[-1]["choices"][0]["finish_reason"] == "length"
    refused = http.post("/v1/completions", json=BODY, headers={"X-Diptych-Timings": "yes"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-diptych-timings"


def test_a_stream_that_fails_has_no_timings(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**BODY, "prompt": "FAIL-LATE", "stream": True}, headers=ASKED)
    assert "error" in events(answer)[-1] and '"timings"' not in answer.text


def test_the_official_client_reads_them(gateway: Running) -> None:
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, default_headers=ASKED) as client:
        messages: Any = [{"role": "user", "content": "x"}]
        whole = client.chat.completions.create(model="toy", messages=messages, max_tokens=5)
        assert whole.model_extra is not None and whole.choices[0].message.content
        check_sums(whole.model_extra["diptych"]["timings"][0])
        with client.chat.completions.create(
            model="toy", messages=messages, max_tokens=5, stream=True
        ) as stream:
            chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].model_extra is not None
    check_sums(chunks[-1].model_extra["diptych"]["timings"][0])
