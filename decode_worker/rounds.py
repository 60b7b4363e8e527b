"""A thread that does many pieces of work side by side, in turns (`kvtransfer.turns`): none waits for another."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable

from kvtransfer.turns import Turns


class Rounds:
    """The thread `name`. `died` is called in it with what it dies of: no piece of work may let an exception out."""

    def __init__(self, name: str, died: Callable[[BaseException], None]) -> None:
        self._died = died
        self._news: queue.SimpleQueue[Turns[None] | None] = queue.SimpleQueue()
        self._due_s: dict[Turns[None], float] = {}  # when each is to have its next turn
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self) -> None:
        self._thread.start()

    def add(self, work: Turns[None]) -> None:
        """Begin another piece of work."""
        self._news.put(work)

    def stir(self) -> None:
        """Something has happened that one of them may be waiting for."""
        self._news.put(None)

    def close(self) -> None:
        """End the thread when all that was added is done."""
        self._ending = True
        self.stir()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._listen():
                for work, due_s in list(self._due_s.items()):
                    if due_s <= time.monotonic():
                        self._turn(work)
        except BaseException as error:
            self._died(error)

    def _turn(self, work: Turns[None]) -> None:
        pause_s = next(work, None)
        if pause_s is None:
            del self._due_s[work]
        else:
            self._due_s[work] = time.monotonic() + pause_s

    def _listen(self) -> bool:
        """Wait for news, or until something is due; False at the end."""
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
