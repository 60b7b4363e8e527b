"""What each step of a worker's engine cost, written to a file: what `diptych profile` fits costs to.

One JSON list per line, times in seconds on the machine's monotonic clock:

    ["role", t, worker, role, saturation_tokens]                a life begins; its steps read so many tokens
    ["come", t, request]                                        a request to read, or one whose KV has arrived
    ["step", begun, ended, tokens, squares, rows, context]      see `planner.terms.Batch`
    ["first", t, request]                                       its first token from this worker

Numbers and ids only. A step costs some microseconds more; lines are written about once a second, and at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from diptych.errors import ConfigError
from diptych.messages import Output
from engine import scheduler
from engine.loop import Emission, Engine

FLUSH_S = 1.0

log = logging.getLogger(__name__)


class StepLog:
    """Lines for a file in `folder` that nobody else writes to. After an error nothing more is written."""

    def __init__(self, folder: str, worker: str) -> None:
        """Raises ConfigError if it cannot be opened."""
        path = Path(folder) / f"{worker}.{os.getpid()}.steps"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            fix = "give --step-log a folder that can be written to"
            raise ConfigError("the log of steps cannot be opened", f"{path}: {error.strerror}", fix) from None
        self._lines: list[tuple[Any, ...]] = []
        self._flushed_s = time.monotonic()

    def write(self, *line: Any) -> None:
        self._lines.append(line)

    def tend(self, now_s: float) -> None:
        """Write what has gathered, now and then."""
        if now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._file.closed:
            return
        try:
            self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            self._file.flush()
        except OSError as error:
            log.error("the log of steps ends here: %s", error)
            self._shut()

    def close(self) -> None:
        self.flush()
        self._shut()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # what is buffered cannot be written either
            self._file.close()


class Recorded(Engine):
    """An engine that notes what its steps cost; what it does is the same."""

    log: StepLog
    _batches: list[tuple[int, ...]]

    @classmethod
    def of(cls, engine: Engine, log: StepLog) -> Self:
        """The same engine, in which nothing has run yet."""
        made = cls(engine.runner, engine.scheduler, engine.holdings, engine.sampler, engine.host)
        made.log, made._batches = log, []
        return made

    def suit(self, worker: str, role: str) -> None:
        """A life in a role begins."""
        self.log.write("role", time.monotonic(), worker, role, self.scheduler.limits.saturation_tokens)
        self.log.flush()

    def add(self, seq: scheduler.Sequence, now_s: float) -> None:
        super().add(seq, now_s)
        self.log.write("come", now_s, seq.id)

    def adopt(self, seq: scheduler.Sequence, now_s: float) -> None:
        super().adopt(seq, now_s)
        self.log.write("come", now_s, seq.id)

    def step(self, clock: Callable[[], float]) -> list[Emission]:
        begun_s = clock()
        told = super().step(clock)
        ended_s = clock()
        for batch in self._batches:
            self.log.write("step", begun_s, ended_s, *batch)
        self._batches.clear()
        for message in (one.message for one in told):
            if isinstance(message, Output) and message.seconds:
                self.log.write("first", ended_s, message.request)
        self.log.tend(ended_s)
        return told

    def _note(self, jobs: Sequence[Any], rows: int, seconds: float) -> None:
        super()._note(list(jobs), rows, seconds)
        tokens = squares = written = context = 0
        for job in jobs:
            start, count = job.work.start, len(job.work.tokens)
            if count == 1 and start >= len(job.live.seq.prompt):
                written, context = written + 1, context + start
            else:
                tokens, squares = tokens + count, squares + (start + count) ** 2 - start**2
        self._batches.append((tokens, squares, written, context))
