"""What is refused for load counts as missed, so that attainment is right in overload."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.slo import Slo
from tests.support.metric_values import values
from tests.system.scripted_gateway import Running, scripted

WAIT_S = 60.0
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def post(http: httpx.Client, **more: object) -> httpx.Response:
    return http.post("/v1/chat/completions", json={**CHAT, **more})


def attainment(running: Running) -> float:
    """As soon as there is one: an answer is judged a moment after its last byte was written."""
    name, until_s = "diptych:slo_attainment{objective=ttft}", time.monotonic() + WAIT_S
    while name not in (found := values(running.service.metrics)) and time.monotonic() < until_s:
        time.sleep(0.01)
    return found[name]


@pytest.mark.parametrize(("status", "code"), [(429, "too_many_requests"), (503, "overloaded")])
def test_refusals_at_the_door_count_as_missed(folder: Path, status: int, code: str) -> None:
    with (
        scripted(folder, objectives=Slo(ttft_s=60.0)) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        assert post(http).status_code == 200
        assert attainment(running) == 1.0
        running.script.refuses = RequestFailure(FailureReason(code), "later")
        for _ in range(3):
            assert post(http).status_code == status
        found = values(running.service.metrics)
        assert found["diptych:slo_attainment{objective=ttft}"] == 0.25
        assert found["diptych:slo_attainment{objective=all}"] == 0.25
        assert found["diptych:slo_requests_total{met=false,objective=ttft}"] == 3
        assert found[f"vllm:admission_rejections_total{{reason={code}}}"] == 3
        running.script.refuses = None
        assert post(http, temperature=-1).status_code == 400
        assert attainment(running) == 0.25, "a client's mistake is no missed SLO"


def test_what_is_refused_after_its_body_was_read_counts_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: too many bodies wait to be prepared."""

    async def full(job: object) -> None:
        raise RequestError(RequestFailure(FailureReason.PREPARATION_FULL, "too many bodies"))

    with (
        scripted(folder, objectives=Slo(ttft_s=60.0)) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        monkeypatch.setattr(running.service.preparers, "prepare_body", full)
        assert post(http).status_code == 503
        assert attainment(running) == 0.0
        running.service.draining = True
        assert post(http).json()["error"]["code"] == "server_shutting_down"
        found = values(running.service.metrics)
        assert found["diptych:slo_requests_total{met=false,objective=ttft}"] == 2
