"""A thread that runs many cooperative tasks side by side (`kvtransfer.cooperative`): none waits for another."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable

from kvtransfer.cooperative import CoopTask


class TaskThread:
    """The thread `name`.

    `died` is called in this thread with the exception that ended it. Tasks must handle their own exceptions.
    """

    def __init__(self, name: str, died: Callable[[BaseException], None]) -> None:
        self._died = died
        self._news: queue.SimpleQueue[CoopTask[None] | None] = queue.SimpleQueue()
        # The time at which each task runs next, in seconds on the monotonic clock.
        self._due_s: dict[CoopTask[None], float] = {}
        self._ending = False
        self._thread = threading.Thread(target=self._run_tasks, name=name, daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add_task(self, work: CoopTask[None]) -> None:
        """Run `work` beside the other tasks."""
        self._news.put(work)

    def wake_tasks(self) -> None:
        """Run waiting tasks now: the event that one of them waits for may have happened."""
        self._news.put(None)

    def close(self) -> None:
        """End the thread after all added tasks are done."""
        self._ending = True
        self.wake_tasks()
        self._thread.join()

    def _run_tasks(self) -> None:
        try:
            while self._wait_for_news():
                for work, due_s in list(self._due_s.items()):
                    if due_s <= time.monotonic():
                        self._resume_task(work)
        except BaseException as error:
            self._died(error)

    def _resume_task(self, work: CoopTask[None]) -> None:
        pause_s = next(work, None)
        if pause_s is None:
            del self._due_s[work]
        else:
            self._due_s[work] = time.monotonic() + pause_s

    def _wait_for_news(self) -> bool:
        """Wait for a new task, a wake-up or the next due time. Returns False when the thread shall end."""
        wait_s: float | None = min(self._due_s.values(), default=math.inf) - time.monotonic()
        if self._ending and not self._due_s and self._news.empty():
            return False
        if wait_s == math.inf:
            wait_s = None
        try:
            news = self._news.get(timeout=None if wait_s is None else max(0.0, wait_s))
            while True:
                if news is None:
                    self._due_s = dict.fromkeys(self._due_s, 0.0)
                else:
                    self._due_s[news] = 0.0
                news = self._news.get_nowait()
        except queue.Empty:
            return True
