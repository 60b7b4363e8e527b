"""What becomes of every request, one JSON object per line in a file: for whoever checks a run afterwards.

    {"t": 12.345678, "event": "begin", "request": "cmpl-…", "epoch": 1, "prefill": "prefill-0", "decode": "decode-1", …}

`t` is in seconds since the log was opened, on the monotonic clock. It holds ids, numbers and names of workers, never a
text or a token: which prompts begin alike is told by numbers that stand for their chunks, made with a key that is drawn
when the log is opened and kept nowhere, so that nobody can find out by them whether a text was among the prompts.

Lines are written by a thread of their own, so that a slow disk delays nothing; what it cannot keep up with is dropped
and counted, and after an error nothing more is written. docs/metrics.md lists the events.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from diptych.errors import ConfigError
from diptych.messages import Output
from diptych.request import Request
from router.effects import (
    Began,
    Cancelled,
    Deliver,
    Down,
    Effect,
    Entered,
    Fail,
    Finish,
    Local,
    Moved,
    Quarantined,
    Queued,
    Retried,
    Up,
)

MAX_WAITING_BYTES = 64 << 20
CLOSE_S = 5.0
GATHER_S = 0.05
NAME_BYTES = 6  # a chunk's number is exact in JSON's floats

log = logging.getLogger(__name__)


class LogFile:
    """Appends lines to a file from a thread. `outcomes` counts lines "written", "dropped" and "failed"."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be opened for writing."""
        try:
            self._file = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600
            )
        except OSError as error:
            fix = "give --request-log a file in a folder that can be written to"
            raise ConfigError("the request log cannot be opened", f"{path}: {error.strerror}", fix) from None
        os.set_blocking(self._file, True)
        self.outcomes = Counter({"written": 0, "dropped": 0, "failed": 0})
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._news = threading.Condition()
        self._ended = threading.Event()
        self._closing = self._broken = False
        self._thread = threading.Thread(target=self._work, name="request-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue a line; drops it if too much is waiting, or writing has failed. Never blocks for long, never raises."""
        with self._news:
            if self._broken or self._closing or self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                self.outcomes["dropped"] += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if len(self._lines) == 1:
                self._news.notify()

    def close(self) -> None:
        """Write what is waiting, as far as that takes no longer than `CLOSE_S`; idempotent."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._ended.set()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._closing)
            self._ended.wait(GATHER_S)  # they come by the token, and each waking costs more than a line
            with self._news:
                lines, self._lines, self._waiting_bytes = self._lines, [], 0
            if lines and not self._broken:
                self._append(lines)
            elif not lines:
                os.close(self._file)
                return

    def _append(self, lines: list[bytes]) -> None:
        try:
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            log.error("the request log ends here: %s", error)
            self._broken = True
            self.outcomes["failed"] += len(lines)
        else:
            self.outcomes["written"] += len(lines)


@dataclass(slots=True)
class _Told:
    """What the log knows of an open request."""

    epoch: int = 0
    tokens: int = 0
    begun: bool = False


class RequestLog:
    """Turns events and effects of the relay into lines."""

    def __init__(self, file: LogFile, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self._clock, self._began_s = file, clock, clock()
        self._key = secrets.token_bytes(32)
        self._open: dict[str, _Told] = {}

    def arrive(self, request: Request, canary: bool) -> None:
        """A request is about to reach the relay."""
        self._open[request.id] = _Told(request.epoch)
        self._request(
            "arrive",
            request.id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            priority=request.origin.priority,
            canary=canary,
        )

    def late(self, kind: str, count: int) -> None:
        """Messages of attempts that had ended came from workers."""
        self._line("late", kind=kind, count=count)

    def note(
        self, effect: Effect, speaker: str | None, pid: int | None, chunks: Sequence[bytes] = ()
    ) -> None:
        """`speaker` is the worker whose message led to `effect`, if one did; `pid` is that of a worker that came up.

        `chunks` are the names of the prompt's chunks, when an attempt begins.
        """
        match effect:
            case Queued(request):
                self._request("queued", request)
            case Began():
                self._begin(effect, chunks)
            case Entered(request, stage):
                self._request("stage", request, stage=stage.value)
            case Deliver(request, output):
                self._tokens(request, output, speaker)
            case Moved(request):
                self._moved(effect)
            case Retried(request, code, epoch, delivered):
                self._line("retried", request=request, epoch=epoch, code=code, delivered=delivered)
            case Local(request, reason):
                self._request("local", request, reason=reason)
            case Quarantined(request):
                self._request("quarantined", request)
            case Finish(request, reason):
                self._end(request, outcome="done", reason=reason, status=200)
            case Fail(request, status, code):
                self._end(request, outcome="failed", code=code, status=status)
            case Cancelled(request):
                self._end(request, outcome="cancelled", reason="client_gone", status=499)
            case Up(worker, role, incarnation):
                self._line("up", worker=worker, role=role, incarnation=incarnation, pid=pid)
            case Down(worker, incarnation, reason):
                self._line("down", worker=worker, incarnation=incarnation, reason=reason)

    def _begin(self, began: Began, chunks: Sequence[bytes]) -> None:
        told, choice = self._told(began.request), began.choice
        told.epoch = began.epoch
        names = {} if told.begun or not chunks else {"chunks": [self._number(name) for name in chunks]}
        told.begun = True
        fields = {"prefill": choice.prefill, "decode": choice.decode, "stage": began.staged}
        self._request("begin", began.request, **fields, **names)

    def _number(self, chunk: bytes) -> int:
        return int.from_bytes(blake2b(chunk, digest_size=NAME_BYTES, key=self._key).digest())

    def _tokens(self, request: str, output: Output, speaker: str | None) -> None:
        told, count = self._told(request), len(output.tokens)
        told.tokens += count
        self._request("tokens", request, count=count, total=told.tokens, worker=speaker)

    def _moved(self, moved: Moved) -> None:
        self._request(
            "moved",
            moved.request,
            source=moved.source,
            target=moved.target,
            num_bytes=moved.num_bytes,
            seconds=moved.seconds,
            hidden_s=moved.hidden_s,
            exposed_s=moved.exposed_s,
        )

    def _end(self, request: str, **fields: Any) -> None:
        self._request("end", request, **fields, output_tokens=self._told(request).tokens)
        self._open.pop(request, None)

    def _told(self, request: str) -> _Told:
        return self._open.setdefault(request, _Told())

    def _request(self, event: str, request: str, **fields: Any) -> None:
        self._line(event, request=request, epoch=self._told(request).epoch, **fields)

    def _line(self, event: str, **fields: Any) -> None:
        t = round(self._clock() - self._began_s, 6)
        self.file.write(msgspec.json.encode({"t": t, "event": event, **fields}) + b"\n")
