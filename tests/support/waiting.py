"""Waiting for what other processes do, which no event here tells of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def comes_true(condition: Callable[[], Any], timeout_s: float, pause_s: float = 0.05) -> float | None:
    """Seconds until `condition` held, which is asked again and again; None if it did not in time."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > timeout_s:
            return None
        time.sleep(pause_s)
    return time.monotonic() - began_s


def wait_for(
    condition: Callable[[], Any],
    timeout_s: float,
    pause_s: float = 0.05,
    explain: Callable[[], Any] = lambda: "",
) -> float:
    """Seconds until `condition` held.

    Raises:
        AssertionError: it did not hold in time; with what `explain` returns.
    """
    seconds = comes_true(condition, timeout_s, pause_s)
    assert seconds is not None, f"not within {timeout_s} s {explain()}"
    return seconds
