"""Plays scripted conversations of routes in other shapes than chats, whole and as streams."""

from __future__ import annotations

from typing import Any

import httpx

from tests.system.scripted_gateway import Running


def play_conversation(
    gateway: Running, http: httpx.Client, path: str, said: str, body: dict[str, Any]
) -> httpx.Response:
    """The answer to `body`, of which the model says `said`. What ends at once says its end token first."""
    gateway.script.text = said or "<|end|>"
    answer = http.post(path, json={"model": "toy", **body})
    assert answer.status_code == 200, answer.text
    return answer


def check_alike(streamed: list[dict[str, Any]], whole: list[dict[str, Any]], kinds: str) -> None:
    """Items or blocks are of these types, and the same but for their ids, however the answer was sent."""

    def without_ids(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: part[key] for key in part if key not in ("id", "call_id")} for part in parts]

    assert " ".join(part["type"] for part in streamed) == " ".join(part["type"] for part in whole) == kinds
    assert without_ids(streamed) == without_ids(whole)
