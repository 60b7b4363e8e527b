"""When a start is given up: after a time in which no worker has packed any more of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.host.supervision.supervisor import ChildStatus


class StartDeadline:
    """Gives a start `timeout_s` seconds, and again as many whenever a worker has packed further than before.

    The first start of a model packs its weights, which may take long. A worker that packs the same again, after a
    crash, does not count.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._limit: asyncio.Timeout | None = None
        # How many sections each worker has packed, at most.
        self._packed: dict[str, float] = {}

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Limit the time of the body. Raises TimeoutError when it is over."""
        async with asyncio.timeout(self.timeout_s) as self._limit:
            yield

    @property
    def ends_s(self) -> float | None:
        """When the start is given up, on the clock of the event loop; None before it."""
        return None if self._limit is None else self._limit.when()

    def note_status(self, status: ChildStatus) -> None:
        """A worker has a new status."""
        if status.phase != "load" or status.done >= status.total:
            return
        if status.done > self._packed.get(status.name, 0):
            self._packed[status.name] = status.done
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

    def describe(self) -> str:
        """How long the start has waited in vain, in words."""
        since = " since weights were last packed" if self._packed else ""
        return f"waited {self.timeout_s:.0f} s{since} (start_timeout_s)"
