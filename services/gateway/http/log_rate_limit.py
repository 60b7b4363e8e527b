"""Limits how often log lines that clients can cause are written, and counts the lines left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_INTERVAL_S = 10.0
RecordKind = tuple[str, int, str]


class LogRateLimit(logging.Filter):
    """A logging filter that lets `burst` records of each kind pass in every `every_s` seconds.

    Records are of one kind if they come from the same statement and have the same `kind` (`extra={"kind": …}`), if any.
    There must be few values of `kind`. Errors with a traceback always pass.
    """

    def __init__(
        self, every_s: float = LOG_INTERVAL_S, burst: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._every_s, self._burst, self._clock = every_s, burst, clock
        # The begin of the current interval of each kind.
        self._begun_s: dict[RecordKind, float] = {}
        # Number of records of each kind that were written in the current interval.
        self._passed: dict[RecordKind, int] = {}
        # Number of records of each kind that were left out since the last one that was written.
        self._left_out: dict[RecordKind, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write `record`. Appends the number of similar records left out before it."""
        if record.exc_info:
            return True
        kind, now_s = (record.pathname, record.lineno, getattr(record, "kind", "")), self._clock()
        if now_s - self._begun_s.get(kind, float("-inf")) >= self._every_s:
            self._begun_s[kind], self._passed[kind] = now_s, 0
        self._passed[kind] += 1
        if self._passed[kind] > self._burst:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        if left_out := self._left_out.pop(kind, 0):
            record.msg = f"{record.msg} (and {left_out} more like this since the last line)"
        return True
