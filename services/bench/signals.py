"""Ends a measurement early on a signal, together with the deployments that it has started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM is as if ^C had been pressed: KeyboardInterrupt where the program waits.

    An exception that a handler raises may come up in any task of an event loop, and end that one only. ^C is what
    `asyncio.Runner` takes care of: it cancels what it runs. A shell starts background jobs with ^C ignored, and then
    the runner would not listen to it.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _raise_sigint)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_sigint(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)
