"""How the gateway and the workers write their logs: one record per line as text, or as a JSON object (`--log-format`).

    2026-01-31 12:00:00,000 WARNING gateway services.gateway.http.error_response: [req_1f… client=a7 cmpl-1f…] fails …
    {"time": "2026-01-31T12:00:00.000Z", "level": "warning", "part": "gateway", "request_id": "req_1f…", …}

A record about a request carries its ids: `log.warning("…", extra=about_request(ids))`.

A message may quote a client or a library, so it is cut and cleaned here, once: it is one line of bounded length. Only
tracebacks have several lines. In text each of those begins with `TRACEBACK_INDENT`, which no record does. So nobody can
write a text that looks like a record of its own.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

import msgspec

from diptych.logs.request_ids import RequestIds
from diptych.logs.shown_text import CUT_MARK, shorten_text

LOG_FORMATS = ("text", "json")
# The attribute of a log record with the ids of its request.
IDS_FIELD = "request_ids"
# The attribute with a short word for what happened, such as an error code. Rate limits count by it.
KIND_FIELD = "kind"
# Most characters of a record's message, and of one line of a traceback.
MAX_LINE_CHARS = 4 << 10
# Most characters that are kept of a traceback's begin, and as many of its end.
MAX_TRACEBACK_CHARS = 8 << 10
TRACEBACK_INDENT = "    "
LINE_END = re.compile(r"[\r\n]")
# Most characters that are kept of a line which has not ended.
MAX_REST_CHARS = 8 << 10

log = logging.getLogger(__name__)


def about_request(ids: RequestIds, kind: str = "") -> dict[str, object]:
    """The `extra` of a log record about a request; `kind` is a short word for what happened."""
    return {IDS_FIELD: ids} | ({KIND_FIELD: kind} if kind else {})


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, part, logger, the request's ids in brackets, and the message."""

    def __init__(self, part: str = "") -> None:
        """`part` is the process: "gateway", or the name of a worker."""
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, and the indented lines of its traceback, if it has one."""
        ids = getattr(record, IDS_FIELD, RequestIds())
        client = f"client={ids.client}" if ids.client else ""
        named = " ".join(word for word in (ids.request, client, ids.sequence) if word)
        words = [self.formatTime(record), record.levelname, self._part, f"{record.name}:"]
        words += [f"[{named}]" if named else "", clean_message(record)]
        lines = [" ".join(word for word in words if word)]
        if record.exc_info:
            trace = clean_traceback(self.formatException(record.exc_info))
            lines += [f"{TRACEBACK_INDENT}{line}" for line in trace]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One JSON object per record, on one line. Times are UTC."""

    def __init__(self, part: str = "") -> None:
        """`part` is the process: "gateway", or the name of a worker."""
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        made = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {
            "time": made.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            **getattr(record, IDS_FIELD, RequestIds()).as_fields(),
            "message": clean_message(record),
        }
        if kind := getattr(record, KIND_FIELD, ""):
            fields["code"] = kind
        if record.exc_info:
            fields["exception"] = "\n".join(clean_traceback(self.formatException(record.exc_info)))
        return msgspec.json.encode(fields).decode()


def clean_message(record: logging.LogRecord) -> str:
    """The message of a record as one line of at most `MAX_LINE_CHARS`."""
    return shorten_text(record.getMessage().rstrip(), MAX_LINE_CHARS)


def clean_traceback(text: str) -> list[str]:
    """The lines of a traceback. Of a long one the middle is left out: its end says what happened."""
    if len(text) > 2 * MAX_TRACEBACK_CHARS:
        text = f"{text[:MAX_TRACEBACK_CHARS]}\n{CUT_MARK}\n{text[-MAX_TRACEBACK_CHARS:]}"
    return [shorten_text(line, MAX_LINE_CHARS) for line in LINE_END.split(text)]


class LogWriter(io.TextIOBase):
    """A text stream that logs each line written to it: replaces standard error and output, so that lines of libraries
    are JSON too.
    """

    def __init__(self, name: str, original: TextIO) -> None:
        """`name` is the logger; `original` is the stream that is replaced."""
        self._log, self._original = logging.getLogger(name), original
        self._local = threading.local()

    def write(self, text: str) -> int:
        """Log every complete line of `text`, and keep the rest for the next call of the same thread.

        Progress bars end their lines with carriage returns. A rest that becomes too long is logged as a line.
        """
        if getattr(self._local, "busy", False):
            # The logging module itself complains.
            return self._original.write(text)
        *lines, rest = LINE_END.split(getattr(self._local, "rest", "") + text)
        if len(rest) > MAX_REST_CHARS:
            lines, rest = [*lines, rest], ""
        self._local.rest = rest
        self._local.busy = True
        try:
            for line in filter(str.strip, lines):
                self._log.warning("%s", line)
        finally:
            self._local.busy = False
        return len(text)

    def fileno(self) -> int:
        """The descriptor of the replaced stream, for C libraries and child processes."""
        return self._original.fileno()

    @property
    def buffer(self) -> Any:
        """The bytes of the replaced stream; what is written there is not logged."""
        return self._original.buffer

    def writable(self) -> bool:
        """Always true."""
        return True


def configure_logging(level: str, log_format: str, part: str) -> None:
    """Write the log records of this process to its standard error. To be called once, before any thread starts.

    `level` is a name such as "warning", `log_format` one of `LOG_FORMATS`. `part` names the process in each line.
    Warnings, and exceptions that nothing handles, are logged too. As JSON, so is every line that Python code prints.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(part) if log_format == "json" else TextFormatter(part))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    if log_format == "json":
        sys.excepthook, threading.excepthook = _log_exception, _log_thread_exception
        sys.stdout, sys.stderr = LogWriter("stdout", sys.stdout), LogWriter("stderr", sys.stderr)


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("an exception that nothing handles", exc_info=(kind, error, trace))


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        log.critical(
            "thread %s ends with an exception",
            args.thread.name if args.thread else "?",
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )
