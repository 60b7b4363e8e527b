"""Requests that arrive together begin a few at a time, in order, and the event loop goes on between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http import request_pacing
from services.gateway.http.connection import CONNECTION_EXTENSION
from services.gateway.http.request_pacing import REQUESTS_PER_ITERATION, RequestPacingMiddleware


async def receive_nothing() -> Message:
    raise AssertionError("nothing is received")


async def send_nothing(message: Message) -> None:
    raise AssertionError("nothing is sent")


async def test_requests_begin_a_few_per_iteration_and_in_order() -> None:
    loop, iteration, begun = asyncio.get_running_loop(), 0, list[tuple[int, int]]()
    going = True

    def count_iteration() -> None:
        nonlocal iteration
        iteration += 1
        if going:
            loop.call_soon(count_iteration)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append((iteration, scope["number"]))

    pacing = RequestPacingMiddleware(app)
    loop.call_soon(count_iteration)
    for burst in range(2):
        numbers = range(100 * burst, 100 * burst + 100)
        await asyncio.gather(
            *(pacing({"type": "http", "number": number}, receive_nothing, send_nothing) for number in numbers)
        )
        # Alone, a request begins at once.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    going = False
    assert [number for _, number in begun] == list(range(200))
    assert max(Counter(at for at, _ in begun).values()) <= 2 * REQUESTS_PER_ITERATION
    assert len({at for at, _ in begun}) >= 200 / (2 * REQUESTS_PER_ITERATION)


async def test_a_request_alone_does_not_wait_and_a_cancelled_one_takes_no_place() -> None:
    begun = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["name"])

    pacing = RequestPacingMiddleware(app)
    alone = pacing({"type": "http", "name": "alone"}, receive_nothing, send_nothing)
    with contextlib.suppress(StopIteration):
        alone.send(None)
    assert begun == ["alone"]
    tasks = [
        asyncio.create_task(pacing({"type": "http", "name": str(number)}, receive_nothing, send_nothing))
        for number in range(30)
    ]
    await asyncio.sleep(0)
    for task in tasks[10:20]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [name for name in begun if name != "alone"] == [str(n) for n in (*range(10), *range(20, 30))]
    await pacing({"type": "lifespan", "name": "start"}, receive_nothing, send_nothing)
    assert begun[-1] == "start"


def asked(
    pacing: RequestPacingMiddleware, name: str, address: str = "a", *, known: bool = False
) -> tuple[asyncio.Task[None], SimpleNamespace]:
    """A request that comes now over a connection of its own, and this connection."""
    connection = SimpleNamespace(is_known=known, aborted=False, start=None)
    scope: Scope = {"type": "http", "name": name, "client": (address, 1)}
    scope["extensions"] = {CONNECTION_EXTENSION: connection}
    return asyncio.create_task(pacing(scope, receive_nothing, send_nothing)), connection


@pytest.fixture
def begun() -> list[str]:
    """The names of requests that have begun."""
    return []


@pytest.fixture
def pacing(begun: list[str]) -> RequestPacingMiddleware:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["name"])

    return RequestPacingMiddleware(app)


async def test_no_client_waits_for_strangers_who_begin_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, pacing: RequestPacingMiddleware, begun: list[str]
) -> None:
    monkeypatch.setattr(request_pacing, "STRANGER_INTERVAL_S", 60.0)
    crowd = [asked(pacing, f"stranger {number}") for number in range(20)]
    await asyncio.sleep(0)
    names = [f"client {number}" for number in range(REQUESTS_PER_ITERATION)]
    await asyncio.gather(*(asked(pacing, name, known=True)[0] for name in names))
    assert begun == ["stranger 0", *names]
    # Whose connection ends waits no longer, and does not begin.
    for _, connection in crowd[1:]:
        connection.aborted = True
        connection.start.set_result(None)
    await asyncio.gather(*(task for task, _ in crowd))
    assert len(begun) == 1 + len(names) and not pacing._strangers._waiting


async def test_strangers_of_other_addresses_take_turns_and_the_newest_begins_first(
    monkeypatch: pytest.MonkeyPatch, pacing: RequestPacingMiddleware, begun: list[str]
) -> None:
    monkeypatch.setattr(request_pacing, "STRANGER_INTERVAL_S", 0.01)
    tasks = [asked(pacing, name, name[0])[0] for name in ("a1", "a2", "a3", "a4", "a5", "b1", "b2")]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == ["a1", "a5", "b2", "a3", "b1", "a2"] and not pacing._strangers._waiting
