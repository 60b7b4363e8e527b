"""Writes the request log: a file with one JSON object per line about everything that happens to each request.

    {"t": 12.345678, "event": "begin", "request": "cmpl-…", "request_id": "req_…", "epoch": 1, "prefill": "p-0", …}

`t` is in seconds since the log was opened, on the monotonic clock. The log has ids, numbers and worker names, never a
prompt text or a token. Prompts with a common prefix have common chunk numbers. These are hashed with a random key that
is not stored anywhere, so nobody can use them to test whether a text was among the prompts.

A thread writes the lines, so a slow disk delays nothing. Lines that it cannot keep up with are dropped and counted.
After an error nothing more is written. docs/metrics.md lists the events.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import msgspec

from diptych.errors import ConfigError
from diptych.logs.log_files import MAX_RECORD_BYTES, rotate_record
from diptych.logs.request_ids import RequestIds
from diptych.messages import Output
from diptych.request import Request
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    KvMoved,
    PrefilledLocally,
    RelayEffect,
    RequestCancelled,
    RequestQuarantined,
    RequestQueued,
    StageEntered,
    WorkerDown,
    WorkerUp,
)

OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
MAX_WAITING_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 5.0
GATHER_INTERVAL_S = 0.05
# 48 bits, which a JSON number (a float) represents exactly.
CHUNK_NUMBER_BYTES = 6

log = logging.getLogger(__name__)


class RequestLogFile:
    """Appends lines to a file from a thread. `outcomes` counts lines "written", "dropped" and "failed".

    A file of more than `max_bytes` is renamed to `NAME.old`, which replaces an older one, and a new file begins.
    """

    def __init__(self, path: str, max_bytes: int = MAX_RECORD_BYTES) -> None:
        """Raises ConfigError if the file cannot be opened for writing."""
        self._path, self._max_bytes = os.path.realpath(path), max_bytes
        try:
            self._file = os.open(self._path, OPEN_FLAGS | os.O_NONBLOCK, 0o600)
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
        self._thread = threading.Thread(target=self._write_lines, name="request-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue a line. It is dropped if too much is waiting or writing has failed. Never blocks for long."""
        with self._news:
            if self._broken or self._closing or self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                self.outcomes["dropped"] += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if len(self._lines) == 1:
                self._news.notify()

    def close(self) -> None:
        """Write the waiting lines, which may take up to `CLOSE_TIMEOUT_S`. Idempotent."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._ended.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _write_lines(self) -> None:
        """The thread's main function: append waiting lines to the file until the log is closed."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._closing)
            # Lines come with every token, and waking up costs more than writing one, so some are gathered first.
            self._ended.wait(GATHER_INTERVAL_S)
            with self._news:
                lines, self._lines, self._waiting_bytes = self._lines, [], 0
            if lines and not self._broken:
                self._append(lines)
            elif not lines:
                os.close(self._file)
                return

    def _append(self, lines: list[bytes]) -> None:
        """Write lines to the file, and rotate it if it is too large; after an error nothing more is written."""
        try:
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if rotate_record(self._path, self._file, self._max_bytes):
                os.close(self._file)
                self._file = os.open(self._path, OPEN_FLAGS, 0o600)
        except OSError as error:
            log.error("writing the request log failed, nothing more is written: %s", error)
            self._broken = True
            self.outcomes["failed"] += len(lines)
        else:
            self.outcomes["written"] += len(lines)


@dataclass(slots=True)
class _OpenRequest:
    """The state of a request that has not ended, as far as the log needs it."""

    epoch: int = 0
    tokens: int = 0
    begun: bool = False
    # The id of its HTTP request, and the one that the client gave it, under the names that logs have for them.
    ids: dict[str, str] = field(default_factory=dict)


class RequestLog:
    """Writes events and effects of the relay as lines of the log."""

    def __init__(self, file: RequestLogFile, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self._clock, self._began_s = file, clock, clock()
        self._key = secrets.token_bytes(32)
        self._open: dict[str, _OpenRequest] = {}

    def log_arrival(self, request: Request, ids: RequestIds, canary: bool) -> None:
        """Write the arrival of a request; called just before the relay handles it."""
        fields = replace(ids, sequence="").as_fields()
        self._open[request.id] = _OpenRequest(request.epoch, ids=fields)
        self._log_request(
            "arrive",
            request.id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            priority=request.tenancy.priority,
            canary=canary,
        )

    def log_late_messages(self, kind: str, count: int) -> None:
        """Write that workers sent `count` messages about attempts that had ended."""
        self._log_line("late", kind=kind, count=count)

    def on_effect(
        self, effect: RelayEffect, speaker: str | None, pid: int | None, chunks: Sequence[bytes] = ()
    ) -> None:
        """Write the line of an effect of the relay, if it has one.

        `speaker` is the worker whose message caused the effect, if any. `pid` is the process id of a worker that came
        up. `chunks` are the hashes of the prompt's chunks when an attempt begins.
        """
        match effect:
            case RequestQueued(request):
                self._log_request("queued", request)
            case AttemptBegan():
                self._log_attempt(effect, chunks)
            case StageEntered(request, stage):
                self._log_request("stage", request, stage=stage.value)
            case DeliverTokens(request, output):
                self._log_tokens(request, output, speaker)
            case KvMoved(request):
                self._log_transfer(effect)
            case AttemptRetried(request, code, epoch, delivered):
                ids = self._open_request(request).ids
                fields = {"epoch": epoch, "code": code, "delivered": delivered}
                self._log_line("retried", request=request, **ids, **fields)
            case PrefilledLocally(request, reason):
                self._log_request("local", request, reason=reason)
            case RequestQuarantined(request):
                self._log_request("quarantined", request)
            case FinishRequest(request, reason):
                self._log_end(request, outcome="done", reason=reason, status=200)
            case FailRequest(request, failure):
                self._log_end(request, outcome="failed", code=failure.code, status=failure.status)
            case RequestCancelled(request):
                self._log_end(request, outcome="cancelled", reason="client_gone", status=499)
            case WorkerUp(worker, role, incarnation):
                self._log_line("up", worker=worker, role=role, incarnation=incarnation, pid=pid)
            case WorkerDown(worker, incarnation, reason):
                self._log_line("down", worker=worker, incarnation=incarnation, reason=reason)

    def _log_attempt(self, began: AttemptBegan, chunks: Sequence[bytes]) -> None:
        """Write the begin of an attempt; the chunk numbers of the prompt come only with the first one."""
        state, choice = self._open_request(began.request), began.pair
        state.epoch = began.epoch
        names = {} if state.begun or not chunks else {"chunks": [self._chunk_number(name) for name in chunks]}
        state.begun = True
        fields: dict[str, Any] = {"prefill": choice.prefill, "decode": choice.decode, "stage": began.staged}
        fields |= {"kv_class": began.kv_class, "keep": began.keep}
        self._log_request("begin", began.request, **fields, **names)

    def _chunk_number(self, chunk: bytes) -> int:
        """The number under which the log shows a chunk: a keyed hash."""
        return int.from_bytes(blake2b(chunk, digest_size=CHUNK_NUMBER_BYTES, key=self._key).digest())

    def _log_tokens(self, request: str, output: Output, speaker: str | None) -> None:
        """Write how many tokens were delivered, now and in all; and what a decision before them kept."""
        state, count = self._open_request(request), len(output.tokens)
        state.tokens += count
        kept = output.kept
        more = {} if kept is None else {"kept_rows": kept.kept_rows, "all_rows": kept.all_rows}
        self._log_request("tokens", request, count=count, total=state.tokens, worker=speaker, **more)

    def _log_transfer(self, moved: KvMoved) -> None:
        """Write a completed transfer of KV."""
        self._log_request(
            "moved",
            moved.request,
            source=moved.source,
            target=moved.target,
            num_bytes=moved.num_bytes,
            seconds=moved.seconds,
            hidden_s=moved.hidden_s,
            exposed_s=moved.exposed_s,
        )

    def _log_end(self, request: str, **fields: Any) -> None:
        """Write the end of a request, and forget it."""
        self._log_request("end", request, **fields, output_tokens=self._open_request(request).tokens)
        self._open.pop(request, None)

    def _open_request(self, request: str) -> _OpenRequest:
        return self._open.setdefault(request, _OpenRequest())

    def _log_request(self, event: str, request: str, **fields: Any) -> None:
        """Write an event of one request, with its current epoch."""
        state = self._open_request(request)
        self._log_line(event, request=request, **state.ids, epoch=state.epoch, **fields)

    def _log_line(self, event: str, **fields: Any) -> None:
        """Write one line with the time since the log was opened."""
        t = round(self._clock() - self._began_s, 6)
        self.file.write(msgspec.json.encode({"t": t, "event": event, **fields}) + b"\n")
