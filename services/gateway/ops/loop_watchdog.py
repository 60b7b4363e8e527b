"""Ends the gateway process when its event loop hangs, so that its supervisor starts another one.

A hanging loop answers no request, not even `/health`, while another thread keeps sending heartbeats to workers. So a
thread checks that the loop still runs. Each check counts for at most `CHECK_INTERVAL_S`: a process that was stopped
as a whole (SIGSTOP, a suspended machine) has not hung, and continues.

Code that never releases the interpreter's lock is not covered, because then no other thread runs either.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator

from diptych.errors import DiptychError

MAX_HANG_S = 60.0
CHECK_INTERVAL_S = 1.0


class LoopWatchdog:
    """Checks that an event loop makes progress.

    `loop_count` returns how often the loop has run; `fatal` is called once, with the reason, when it hangs.
    """

    def __init__(
        self,
        loop_count: Callable[[], int],
        fatal: Callable[[DiptychError], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop_count, self._fatal, self._clock = loop_count, fatal, clock
        self._seen_count, self._checked_s, self._still_s = loop_count(), clock(), 0.0

    def check_loop(self) -> bool:
        """Whether the loop still runs; must be called every `CHECK_INTERVAL_S`.

        If the loop made no progress for `MAX_HANG_S` while this thread ran, dumps all stacks and calls `fatal`.
        """
        now_s, count = self._clock(), self._loop_count()
        self._still_s = (
            self._still_s + min(now_s - self._checked_s, CHECK_INTERVAL_S)
            if count == self._seen_count
            else 0.0
        )
        self._seen_count, self._checked_s = count, now_s
        if self._still_s <= MAX_HANG_S:
            return True
        # It does not go through logging, since the event loop may hold logging's lock.
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        why = f"its event loop made no progress for {self._still_s:.0f} s"
        self._fatal(DiptychError("the gateway hangs", why, "see the stacks in its log; it is restarted"))
        return False


@contextlib.contextmanager
def watch_event_loop(
    loop_count: Callable[[], int], fatal: Callable[[DiptychError], object]
) -> Iterator[None]:
    """Check the loop from a thread as long as the context lasts. For the arguments see `LoopWatchdog`."""
    watch, over = LoopWatchdog(loop_count, fatal), threading.Event()

    def run() -> None:
        while not over.wait(CHECK_INTERVAL_S) and watch.check_loop():
            pass

    thread = threading.Thread(target=run, name="loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
