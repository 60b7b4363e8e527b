"""What each step of a worker's engine cost, written to a file: what `diptych profile` fits costs to.

One JSON list per line, times in seconds on the machine's monotonic clock:

    ["role", t, worker, role, saturation_tokens]                a life begins; saturation_tokens fill a step
    ["come", t, request]                                        a prompt to prefill, or a request whose KV has arrived
    ["evict", seconds, prompts, answers]                        decisions in the next step about what to keep: tokens of
                                                                prompts that ended, and of answers at later points
    ["step", begun, ended, tokens, squares, rows, context]      see `planner.types.StepBatch`
    ["first", t, request]                                       its first token from this worker

Numbers and ids only. A step costs some microseconds more; lines are written about once a second, and at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from diptych.errors import ConfigError
from diptych.logs.log_files import MAX_RECORD_BYTES, OLD_SUFFIX, rotate_record
from diptych.messages import Failed, Output
from engine import sequence
from engine.step_work import StepWork

# A step log is written to its file at most this often, in seconds.
FLUSH_S = 1.0
# Most logs that are kept of processes of the same name.
MAX_LOGS_KEPT = 8

log = logging.getLogger(__name__)


class StepLog:
    """Lines for a file in `folder` that nobody else writes to. After an error nothing more is written.

    A file of more than `max_bytes` is renamed to `NAME.old`, which replaces an older one, and a new one begun. Of the
    files that processes of this name have left, the newest `MAX_LOGS_KEPT` stay, this one among them.
    """

    def __init__(self, folder: str, worker: str, max_bytes: int = MAX_RECORD_BYTES) -> None:
        """Raises ConfigError if it cannot be opened."""
        self._path = path = Path(folder) / f"{worker}.{os.getpid()}.steps"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            _remove_oldest(path.parent, worker)
        except OSError as error:
            fix = "give --step-log a folder that can be written to"
            raise ConfigError("the log of steps cannot be opened", f"{path}: {error.strerror}", fix) from None
        self._max_bytes = max_bytes
        self._lines: list[tuple[Any, ...]] = []
        self._flushed_s = time.monotonic()

    def write_line(self, *line: Any) -> None:
        """Add a line, a JSON list of `line`. It reaches the file with the next `flush`."""
        self._lines.append(line)

    def flush_if_due(self, now_s: float) -> None:
        """Write the gathered lines if the last write was `FLUSH_S` ago."""
        if now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            self.flush()

    def flush(self) -> None:
        """Write out all lines. After an OSError nothing more is written; it is logged, not raised."""
        lines, self._lines = self._lines, []
        if self._file.closed:
            return
        try:
            self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            self._file.flush()
            if rotate_record(str(self._path), self._file.fileno(), self._max_bytes):
                self._file.close()
                self._file = self._path.open("ab")
        except OSError as error:
            log.error("the log of steps ends here: %s", error)
            self._close_file()

    def close(self) -> None:
        """Write out all lines and close the file."""
        self.flush()
        self._close_file()

    def _close_file(self) -> None:
        # If this fails, the buffered lines cannot be written either.
        with contextlib.suppress(OSError):
            self._file.close()


def _remove_oldest(folder: Path, worker: str) -> None:
    """Remove the logs of the oldest processes of this name: one that ends again and again leaves one each time."""
    name = re.compile(re.escape(worker) + r"\.\d+\.steps")
    logs = [path for path in folder.iterdir() if name.fullmatch(path.name)]
    for path in sorted(logs, key=lambda path: path.stat().st_mtime)[:-MAX_LOGS_KEPT]:
        for file in (path, path.with_name(path.name + OLD_SUFFIX)):
            file.unlink(missing_ok=True)


class StepRecorder:
    """Writes to a log what the steps of an engine cost (`engine.protocols.StepObserver`)."""

    def __init__(self, log: StepLog) -> None:
        self.log = log

    def log_role(self, worker: str, role: str, saturation_tokens: int) -> None:
        """A life in a role begins; `saturation_tokens` fill a step of it."""
        self.log.write_line("role", time.monotonic(), worker, role, saturation_tokens)
        self.log.flush()

    def on_sequence_arrived(self, seq: sequence.Sequence, now_s: float) -> None:
        """Record the arrival of a prompt, or of a request whose KV is here."""
        self.log.write_line("come", now_s, seq.id)

    def on_decisions(self, prompts: int, answers: int, seconds: float) -> None:
        """Record how long it took to decide what sequences keep."""
        self.log.write_line("evict", seconds, prompts, answers)

    def on_step_end(
        self,
        begun_s: float,
        ended_s: float,
        works: Sequence[tuple[sequence.Sequence, StepWork]],
        messages: Sequence[Output | Failed],
    ) -> None:
        """Record the batch of a step, and the first tokens that it made."""
        if works:
            self.log.write_line("step", begun_s, ended_s, *_sum_batch(works))
        for message in messages:
            if isinstance(message, Output) and message.seconds:
                self.log.write_line("first", ended_s, message.request)
        self.log.flush_if_due(ended_s)


def _sum_batch(works: Sequence[tuple[sequence.Sequence, StepWork]]) -> tuple[int, int, int, int]:
    """Tokens, squares, rows and context of a step (`planner.types.StepBatch`)."""
    tokens = squares = rows = context = 0
    for seq, work in works:
        start, count = work.start, len(work.tokens)
        if count == 1 and start >= len(seq.prompt):
            rows, context = rows + 1, context + start
        else:
            tokens, squares = tokens + count, squares + (start + count) ** 2 - start**2
    return tokens, squares, rows, context
