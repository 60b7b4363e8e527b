"""Watches Ray's head: whether the processes of a local one live, and whether that of a joined cluster answers.

Does not import Ray.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import NoReturn

# Seconds between two looks at the head of a joined cluster, and number of failures in a row after which it counts as
# lost.
HEAD_CHECK_S, HEAD_FAILURES = 5.0, 2


async def await_process_end(pid: int) -> None:
    """Return when the process `pid` has ended, at once if there is none."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def watch_answers(
    answers: Callable[[], bool], on_lost: Callable[[], None], on_back: Callable[[], None]
) -> NoReturn:
    """Report when a head is lost, and when it is back. `answers` blocks, and says whether it answers now."""
    failures = 0
    while True:
        await asyncio.sleep(HEAD_CHECK_S)
        if not await asyncio.to_thread(answers):
            failures += 1
            if failures == HEAD_FAILURES:
                on_lost()
            continue
        if failures >= HEAD_FAILURES:
            on_back()
        failures = 0
