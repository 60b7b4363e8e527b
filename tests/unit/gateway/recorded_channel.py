"""A channel that records what the gateway sends to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from diptych.messages import Hello, Linked, ToGateway, ToWorker

WAIT_S = 60.0


class Channel:
    """A hub without sockets: a prefill and a decode worker that hear and say nothing of themselves."""

    def __init__(self, **extra: Any) -> None:
        """`extra` fields of each worker's introduction."""
        self.inbox: asyncio.Queue[tuple[str, ToGateway]] = asyncio.Queue()
        self.sent: list[tuple[str, ToWorker]] = []
        self.closed: list[str] = []
        for name in ("prefill-0", "decode-0"):
            self.say(name, Hello(name, name[:-2], "life", "same", {}, "here", 1, 64, 4096, 256, {}, **extra))
        self.say("decode-0", Linked("prefill-0", "life", "shm", 9.0, 12.0))

    def say(self, worker: str, message: ToGateway) -> None:
        self.inbox.put_nowait((worker, message))

    async def receive_message(self) -> tuple[str, ToGateway]:
        return await self.inbox.get()

    def send(self, worker: str, message: ToWorker) -> bool:
        self.sent.append((worker, message))
        return True

    def accept_session(self, worker: str, link: str) -> bool:
        return True

    def take_ended(self) -> list[str]:
        ended, self.closed = self.closed, []
        return ended

    def end_session(self, worker: str) -> None: ...


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.01)
