"""Keeps the body of `/status` for clients that accept one which is a second old: many pages cost as much as one.

A client says so with the request's own header, `Cache-Control: max-age=1` (RFC 9111, section 5.2.1.1). Without it the
body is new. It holds nothing that differs between the clients that may see it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

MAX_AGE = re.compile(r"(?:^|,)\s*max-age\s*=\s*(\d{1,9})\s*(?=,|$)", re.IGNORECASE)
WANTS_NEW = re.compile(r"(?:^|,)\s*(?:no-cache|no-store)\s*(?=,|$)", re.IGNORECASE)
# A body is never older than this, whatever a client accepts.
MAX_AGE_S = 5.0


class StatusBody:
    """The body of `/status` as JSON, and when it was made. It owns the copy that is kept."""

    def __init__(
        self, build_report: Callable[[], Mapping[str, Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`build_report` makes the body's fields; `clock` returns seconds."""
        self._build_report, self._clock = build_report, clock
        self._kept = b""
        self._made_s = float("-inf")

    def read(self, max_age_s: float = 0.0) -> tuple[bytes, float]:
        """The body, and its age in seconds: the kept one if it is younger than `max_age_s`, else a new one."""
        now_s = self._clock()
        if now_s - self._made_s >= max_age_s:
            self._kept, self._made_s = msgspec.json.encode(self._build_report()), now_s
        return self._kept, now_s - self._made_s


def accepted_age_s(cache_control: str) -> float:
    """How many seconds old an answer may be for a client with this `Cache-Control` header, at most `MAX_AGE_S`.

    0 if it says nothing, or if it wants a new answer (`no-cache`, `no-store`), whatever else it says.
    """
    found = MAX_AGE.search(cache_control)
    return min(float(found[1]), MAX_AGE_S) if found and not WANTS_NEW.search(cache_control) else 0.0
