"""Cooperative tasks: one thread runs many transfers side by side, and none blocks another.

A task is a generator that never blocks. Each `yield` gives the number of seconds after which the task must run again at
the latest: `RUN_NOW` if it can continue at once, `UNTIL_WOKEN` if only an outside event can help. The generator's
return value is the task's result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
CoopTask = Generator[float, None, T]

RUN_NOW = 0.0
UNTIL_WOKEN = math.inf
# The longest sleep of `run_to_end` in seconds. No event can wake it.
MAX_REST_S = 1e-3


class CoopPuller(Protocol):
    """The decode side of a transport, as cooperative tasks.

    `kvtransfer.transports.shm.ShmPuller` documents each method.
    """

    def link_task(self, worker: str, incarnation: str, endpoint: bytes) -> CoopTask[None]:
        """Link to the life `incarnation` of `worker`. `endpoint` is what its `KvSource` returned.

        Raises TransferError if the worker cannot be reached.
        """

    def pull_task(
        self,
        worker: str,
        incarnation: str,
        pairs: Sequence[tuple[int, int]],
        stop: Callable[[], bool] | None = None,
    ) -> CoopTask[list[bytes]]:
        """Copy slabs of a linked worker into the own pool; `pairs` are (source slab, own slab).

        Returns the payload hash of each copy, in the order of `pairs`. `stop` is called between copies. After any error
        nothing writes to the own slabs any more.

        Raises:
            StaleTicket: there is no link to this life of the worker.
            HandoffAborted: `stop` returned True.
            TransferError: the transfer failed.
        """

    def measure_task(self, worker: str) -> CoopTask[tuple[float, float]]:
        """Measure copies from `worker`; returns (GB/s, µs for one page)."""


def run_to_end(task: CoopTask[T], rest: Callable[[float], object] = time.sleep) -> T:
    """Run a task to its end on the calling thread, and return its result. `rest` sleeps between its steps."""
    try:
        while True:
            if pause_s := next(task):
                rest(min(pause_s, MAX_REST_S))
    except StopIteration as end:
        result: T = end.value
        return result
