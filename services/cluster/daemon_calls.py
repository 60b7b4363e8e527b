"""Runs calls that may never return, since Ray waits for its head: in threads that keep no process alive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def start_daemon(call: Callable[[], object]) -> threading.Thread:
    """Run `call` in a thread that keeps no process alive; its errors are ignored."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def await_daemon(call: Callable[[], T]) -> T:
    """The result of `call`, which runs in a thread. If this is cancelled, the thread runs on and is not waited for."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not result.done():
            settled()

    def run() -> None:
        try:
            found = call()
            ended = partial(result.set_result, found)
        except Exception as error:
            ended = partial(result.set_exception, error)
        # The error means that the loop has ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, ended)

    start_daemon(run)
    return await result


async def call_in_time(call: Callable[[], object], timeout_s: float) -> None:
    """Run `call` in a thread, for at most `timeout_s` seconds: without its head Ray may wait for ever."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            call()
        # The error means that the loop has ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    start_daemon(run)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), timeout_s)
