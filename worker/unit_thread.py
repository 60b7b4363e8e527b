"""The thread of a lower priority that computes units of bulk work while no online request is near.

Without privileges a thread that was lowered can never be raised again (RLIMIT_NICE). So the main thread keeps its
priority, and waits here while units are computed: an online step always has the usual one, at once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Nice levels of the thread below the process. Each level is a weight 1.25 times smaller, so beside a program of the
# usual level, on the same core, units get a quarter of it. At the lowest level there is, or under SCHED_IDLE, they
# would get 1.5 or 0.3 percent (docs/scheduling.md has what was measured).
UNIT_NICE = 5
MAX_NICE = 19

T = TypeVar("T")

log = logging.getLogger(__name__)


class UnitThread:
    """Runs functions in its thread, one at a time. The thread is started by the first one, on the caller's cores."""

    def __init__(self, levels: int = UNIT_NICE) -> None:
        """`levels` is by how many nice levels the thread is below the one that calls `run` first."""
        self._levels = levels
        self._pool = ThreadPoolExecutor(1, "bulk-units", initializer=self._lower_priority)

    def run(self, unit: Callable[[], T]) -> T:
        """The result of `unit`, which is called in the thread; raises what it raises."""
        return self._pool.submit(unit).result()

    def _lower_priority(self) -> None:
        thread = threading.get_native_id()
        try:
            # Concerns this thread alone, not the process (`setpriority(2)`, NOTES).
            usual = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(MAX_NICE, usual + self._levels))
        except OSError as error:
            log.warning(
                "bulk work has the priority of requests, since the system refuses a lower one: %s", error
            )
