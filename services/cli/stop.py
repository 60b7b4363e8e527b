"""How a run ends: by a signal, with an exit status."""

from __future__ import annotations

import asyncio
import signal
import time

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
ONE_PRESS_S = 1.0  # the terminal and the guard both pass on one Ctrl-C


class Stop:
    """Set by the first SIGINT, SIGTERM or SIGHUP; a second press, a moment later, gives up the grace."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self._first_s = 0.0

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._press)

    def _press(self) -> None:
        now_s = time.monotonic()
        if not self.asked.is_set():
            self._first_s = now_s
            self.asked.set()
        elif now_s - self._first_s > ONE_PRESS_S:
            self.hurry.set()
