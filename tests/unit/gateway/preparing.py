"""How long preparers keep the event loop waiting, and a completion for them to prepare."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.openai.tenancy import Caller
from services.gateway.preparation.preparation_job import (
    PreparationJob,
)
from services.gateway.preparation.preparer_pool import MAX_INLINE_BYTES, PreparerPool

TICK_S = 0.01
PATIENCE_S = 60


class Gaps:
    """The most CPU time that this process, without its preparers, took before the loop came round, in seconds.

    Other processes of the machine do not change it.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0

    async def longest(self) -> float:
        """Up to now: what the caller has done without a pause is measured, too."""
        await asyncio.sleep(2 * TICK_S)
        return self._longest_s

    async def tick(self) -> None:
        last_s = time.process_time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.process_time()
            self._longest_s, last_s = max(self._longest_s, now_s - last_s), now_s


@asynccontextmanager
async def opened(pool: PreparerPool) -> AsyncIterator[Gaps]:
    pool.open()
    gaps = Gaps()
    ticking = asyncio.create_task(gaps.tick())
    await asyncio.sleep(TICK_S)  # it has begun
    try:
        yield gaps
    finally:
        ticking.cancel()
        pool.close()


def within(pool: PreparerPool, work: Callable[[Gaps], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on a loop with `pool`."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), opened(pool) as gaps:
            await work(gaps)

    try:
        asyncio.run(main())
    finally:
        pool.close()


def job(route: str, body: dict[str, Any], tenant: str = "", size: int = 0) -> PreparationJob:
    """`size` fills the body up with spaces, so that it is not prepared on the loop."""
    content = json.dumps(body).encode()
    return PreparationJob(route, content + b" " * max(0, size - len(content)), Caller(0.0, tenant))


def completion(prompt: str, tenant: str = "") -> PreparationJob:
    return job("completion", {"model": "toy", "prompt": prompt}, tenant, size=MAX_INLINE_BYTES + 1)
