"""The priority of a thread, as a test and the process that it starts see it."""

from __future__ import annotations

import os
import threading


def niceness() -> int:
    """The nice level of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
