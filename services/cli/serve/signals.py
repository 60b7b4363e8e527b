"""How `diptych serve` reacts to SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import asyncio
import signal
import time

# Signals within this many seconds count as one Ctrl-C, since the terminal and the guard both pass it on.
SAME_PRESS_S = 1.0


class StopSignals:
    """Set by the first SIGINT, SIGTERM or SIGHUP; a second press, a moment later, gives up the grace."""

    def __init__(self) -> None:
        self.stop_asked = asyncio.Event()
        self.hurry_asked = asyncio.Event()
        self._first_s = 0.0

    def listen_signals(self) -> None:
        """Handle the signals from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        now_s = time.monotonic()
        if not self.stop_asked.is_set():
            self._first_s = now_s
            self.stop_asked.set()
        elif now_s - self._first_s > SAME_PRESS_S:
            self.hurry_asked.set()
