"""What answers of the API have in common: events and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx

from services.gateway.generation.formats import SSE_DONE

HI: list[Any] = [{"role": "user", "content": "hi"}]


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, its grammar checked: frames of one data line, [DONE] at the end and only there."""
    answer = http.post(path, json={"model": "toy", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.content.endswith(SSE_DONE)
    frames = [frame for frame in answer.text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert [frame for frame in frames if frame == "data: [DONE]"] == frames[-1:]
    return [json.loads(frame[6:]) for frame in frames[:-1]]


def check_error(answer: httpx.Response, status: int, code: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["x-should-retry"] in ("true", "false")
