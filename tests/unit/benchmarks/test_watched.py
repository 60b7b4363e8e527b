"""Those who watch while goodput is measured."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from benchmarks import watched
from benchmarks.watched import Watchers


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError])
async def test_who_watches_goes_on_after_an_error(
    error: type[httpx.HTTPError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "INTERVAL_S", 0.01)
    paths: list[str] = []
    enough = asyncio.Event()

    async def answer(client: httpx.AsyncClient, path: str, headers: dict[str, str]) -> httpx.Response:
        paths.append(path)
        if paths.count("/metrics") > 3 and paths.count("/status") > 3:
            enough.set()
        if paths.count(path) == 1:
            raise error("gone")
        return httpx.Response(200)

    monkeypatch.setattr(httpx.AsyncClient, "get", answer)
    watchers = Watchers("http://gateway.invalid", pages=1)
    async with asyncio.timeout(60), watchers.watching():
        await enough.wait()
    for path in ("/metrics", "/status"):
        assert watchers.asked[path] == paths.count(path) == watchers.answered[path] + 1
