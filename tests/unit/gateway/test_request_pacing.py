"""Requests that arrive together begin a few at a time, in order, and the event loop goes on between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

from starlette.types import Message, Receive, Scope, Send

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


async def test_a_request_whose_connection_has_ended_does_not_begin() -> None:
    begun = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["name"])

    pacing = RequestPacingMiddleware(app)
    for name, aborted in (("left", True), ("here", False)):
        scope: Scope = {"type": "http", "name": name}
        scope["extensions"] = {CONNECTION_EXTENSION: SimpleNamespace(aborted=aborted)}
        await pacing(scope, receive_nothing, send_nothing)
    assert begun == ["here"]
