"""Reads traces of requests from files: arrival times, lengths and shared prompt prefixes.

The first row decides the format: Azure's CSV, Mooncake's JSON lines with `hash_ids`, the request log of
`diptych serve`, the JSON list of DistServe's simulator, CSVs of DistServe's golden runs, bare lengths, or lines in the
format of `write_trace`. All may be gzipped (the file name then ends in .gz).
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from diptych.errors import ConfigError
from planner.types import Job

LOG_FORMAT = "log"
# Tokens per prefix name in the request log, and in other traces whose rows do not show their block size.
BLOCK_TOKENS = 64
MAX_TOKENS = 1 << 32
# Largest time in seconds: a float above it cannot represent microseconds.
MAX_SECONDS = 1e10

DATE_PATTERN = re.compile(r"(?P<head>[^.Z+]+?)(?P<fraction>\.\d+)?(?P<zone>Z|[+-]\d\d:?\d\d)?", re.ASCII)

# (number of the row in the file, from 1; its fields).
NumberedRow = tuple[int, Mapping[str, Any]]


def _parse_date(value: Any) -> float:
    """Seconds since 1970 of a date with any number of digits after the second; without a zone, UTC is assumed."""
    found = DATE_PATTERN.fullmatch(str(value).strip())
    if found is None:
        raise ValueError("not a date")
    moment = datetime.fromisoformat(found["head"] + (found["zone"] or "+00:00")).timestamp()
    return moment + float(f"0{found['fraction'] or ''}")


def _parse_milliseconds(value: Any) -> float:
    """Milliseconds as seconds."""
    return float(value) / 1e3


@dataclass(frozen=True, slots=True)
class TraceLayout:
    """The field names of a trace format; "" means that the format lacks the field. `clock` converts to seconds."""

    at: str
    prompt: str
    output: str
    clock: Callable[[Any], float] = float
    # Whether times are calendar dates, which are counted from the first row.
    from_first: bool = False
    kind: str = ""
    prefix: str = ""
    kv_class: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        """The fields that every row must have."""
        return tuple(name for name in (self.at, self.prompt, self.output) if name)


TRACE_LAYOUTS: Mapping[str, TraceLayout] = {
    "azure": TraceLayout("TIMESTAMP", "ContextTokens", "GeneratedTokens", _parse_date, from_first=True),
    "mooncake": TraceLayout(
        "timestamp", "input_length", "output_length", _parse_milliseconds, prefix="hash_ids"
    ),
    "distserve": TraceLayout("start_time", "prompt_len", "output_len"),
    "golden": TraceLayout("arrival_s", "prompt_len", "output_len"),
    "jobs": TraceLayout("at_s", "prompt", "output", kind="kind", prefix="prefix", kv_class="kv_class"),
    "lengths": TraceLayout("", "prompt_len", "output_len"),
}
KNOWN_FORMATS = (*TRACE_LAYOUTS, LOG_FORMAT)


def read_trace(path: str | Path, format: str = "auto", block_tokens: int | None = None) -> list[Job]:
    """Reads the jobs of a trace, and sorts them by time of arrival.

    Args:
        format: one of `KNOWN_FORMATS`, or "auto", which decides by the first row.
        block_tokens: the number of tokens that one prefix name stands for. The default is the size that fits every row
            (a prompt of n tokens has ceil(n / size) names), and 64 for a request log.

    Raises:
        ConfigError: the file is unreadable, empty or of an unknown format, or a row is malformed (with its number).
    """
    if format != "auto" and format not in KNOWN_FORMATS:
        raise ConfigError(
            f"no trace format is called {format!r}",
            f"known: auto, {', '.join(KNOWN_FORMATS)}",
            "use one of them",
        )
    rows = list(_read_rows(Path(path)))
    if not rows:
        raise ConfigError(f"the trace {path} is empty", "it has no row", "give a file with requests in it")
    name = _guess_layout(rows[0][1], path) if format == "auto" else format
    jobs = (
        _jobs_from_log(rows, path)
        if name == LOG_FORMAT
        else _jobs_from_rows(rows, TRACE_LAYOUTS[name], path, block_tokens)
    )
    return sorted(jobs, key=lambda job: job.at_s)


def write_trace(path: str | Path, jobs: Iterable[Job]) -> None:
    """Writes one JSON object per line; `read_trace` reads exactly the same jobs back."""
    opened = gzip.open if Path(path).suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        for job in jobs:
            fields: dict[str, Any] = {"at_s": job.at_s, "prompt": job.prompt, "output": job.output}
            if job.kind:
                fields["kind"] = job.kind
            if job.prefix:
                fields |= {"prefix": job.prefix, "block_tokens": job.block_tokens}
            if job.kv_class:
                fields["kv_class"] = job.kv_class
            file.write(json.dumps(fields) + "\n")


# ---- rows


def _read_rows(path: Path) -> Iterator[NumberedRow]:
    """The rows of a JSON list, of JSON lines or of a CSV file; the first character decides."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fix = "give a readable text file (CSV, JSON or JSON lines, also gzipped)"
        raise ConfigError(f"the trace {path} cannot be read", why[:200], fix) from None
    match text.lstrip()[:1]:
        case "[":
            return _rows_of_list(text, path)
        case "{":
            return _rows_of_lines(text, path)
        case _:
            return _rows_of_csv(text, path)


def _rows_of_list(text: str, path: Path) -> Iterator[NumberedRow]:
    """The rows of a JSON list."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the trace {path} is not JSON", str(error), "write a list of objects") from None
    for number, row in enumerate(rows, 1):
        yield number, _row_object(row, number, path)


def _rows_of_lines(text: str, path: Path) -> Iterator[NumberedRow]:
    """The rows of a file with one JSON object per line; empty lines are skipped."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _bad_row_error(path, number, f"it is not JSON: {error}") from None
            yield number, _row_object(row, number, path)


def _row_object(row: Any, number: int, path: Path) -> Mapping[str, Any]:
    """The row itself; raises ConfigError unless it is a JSON object."""
    if not isinstance(row, dict):
        raise _bad_row_error(path, number, f"it is {type(row).__name__}, not an object with fields")
    return row


def _rows_of_csv(text: str, path: Path) -> Iterator[NumberedRow]:
    """The rows of a CSV file with a header line, as mappings from header to cell."""
    reader = csv.reader(text.splitlines())
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                continue
            if len(cells) != len(header):
                raise _bad_row_error(
                    path, reader.line_num, f"it has {len(cells)} fields, and the header {len(header)}"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise _bad_row_error(path, reader.line_num, str(error)) from None


def _guess_layout(row: Mapping[str, Any], path: str | Path) -> str:
    """The format whose fields the row has; raises ConfigError if there is none."""
    if "event" in row and "t" in row:
        return LOG_FORMAT
    for name, layout in TRACE_LAYOUTS.items():
        if all(field in row for field in layout.needed):
            return name
    wanted = "; ".join(f"{name}: {', '.join(layout.needed)}" for name, layout in TRACE_LAYOUTS.items())
    found = ", ".join(map(str, row))[:160] or "nothing"
    raise ConfigError(
        f"the trace {path} has an unknown layout", f"it has {found}", f"name fields as in {wanted}"
    )


# ---- jobs


def _jobs_from_rows(
    rows: Sequence[NumberedRow], layout: TraceLayout, path: str | Path, block_tokens: int | None
) -> list[Job]:
    """The jobs of all rows, with times from 0 and one block size for rows that do not give theirs."""
    jobs, with_size = [], []
    for number, row in rows:
        job = _job_from_row(number, row, layout, path)
        with_size.append("block_tokens" in row)
        jobs.append(job)
    first = min(job.at_s for job in jobs) if layout.from_first else 0.0
    given = block_tokens or (BLOCK_TOKENS if all(with_size) else _guess_block_tokens(jobs))
    return [
        replace(
            job,
            at_s=job.at_s - first,
            prefix=job.prefix[: job.prompt // (job.block_tokens if own else given)],
            block_tokens=job.block_tokens if own else given,
        )
        for job, own in zip(jobs, with_size, strict=True)
    ]


def _job_from_row(number: int, row: Mapping[str, Any], layout: TraceLayout, path: str | Path) -> Job:
    """One row as a job; raises ConfigError, with the row's number, if a field is missing or malformed."""
    if missing := [name for name in layout.needed if row.get(name) is None]:
        raise _bad_row_error(path, number, f"it has no {missing[0]}")
    at_s = _read_number(row, layout.at, layout.clock, path, number) if layout.at else 0.0
    prefix = row.get(layout.prefix) or [] if layout.prefix else []
    if not isinstance(prefix, list) or not all(isinstance(name, int) for name in prefix):
        raise _bad_row_error(path, number, f"{layout.prefix} is not a list of whole numbers")
    return Job(
        at_s,
        _read_tokens(row, layout.prompt, path, number),
        _read_tokens(row, layout.output, path, number),
        str(row.get(layout.kind) or "") if layout.kind else "",
        tuple(prefix),
        _read_tokens(row, "block_tokens", path, number) if "block_tokens" in row else BLOCK_TOKENS,
        str(row.get(layout.kv_class) or "") if layout.kv_class else "",
    )


def _guess_block_tokens(jobs: Sequence[Job]) -> int:
    """The block size for which every prompt of n tokens has ceil(n / size) names; the default if there is none."""
    named = [job for job in jobs if job.prefix]
    for size in (16 << shift for shift in range(9)):
        if all(len(job.prefix) == -(-job.prompt // size) for job in named):
            return size if named else BLOCK_TOKENS
    return BLOCK_TOKENS


def _read_number(
    row: Mapping[str, Any], name: str, clock: Callable[[Any], float], path: str | Path, number: int
) -> float:
    """A time field in seconds; raises ConfigError unless it is a finite number from 0 to `MAX_SECONDS`."""
    try:
        value = clock(row[name])
    except (TypeError, ValueError, OverflowError):
        raise _bad_row_error(
            path, number, f"{name} is {str(row[name])[:40]!r}, which is not a time"
        ) from None
    if not math.isfinite(value) or value < 0:
        raise _bad_row_error(
            path, number, f"{name} is {str(row[name])[:40]}, but a time must be finite and not negative"
        )
    if value > MAX_SECONDS:
        raise _bad_row_error(
            path, number, f"{name} is {str(row[name])[:40]}: times are at most {MAX_SECONDS:.0e} seconds"
        )
    return value


def _read_tokens(row: Mapping[str, Any], name: str, path: str | Path, number: int) -> int:
    """A field with a number of tokens; raises ConfigError unless it is a whole number from 1 to `MAX_TOKENS`."""
    value = row[name]
    try:
        tokens = int(value) if isinstance(value, str) else value
    except ValueError:
        tokens = None
    if isinstance(tokens, float) and tokens.is_integer():
        tokens = int(tokens)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_TOKENS:
        raise _bad_row_error(path, number, f"{name} is {str(value)[:40]!r}, not a whole number of at least 1")
    return tokens


def _bad_row_error(path: str | Path, number: int, why: str) -> ConfigError:
    """The error for a row that cannot be used."""
    return ConfigError(f"row {number} of {path} cannot be used", why, "correct or remove this row")


# ---- the request log


@dataclass(slots=True)
class _LoggedRequest:
    """A request in the request log. `most` is its max_tokens; `done` is true if it ended with success."""

    at_s: float
    prompt: int
    most: int
    kind: str
    prefix: tuple[int, ...] = field(default=())
    output: int = 0
    done: bool = False
    kv_class: str = ""


def _jobs_from_log(rows: Sequence[NumberedRow], path: str | Path) -> list[Job]:
    """The requests of a request log without canaries. A request without an answer is given the mean answer length."""
    requests: dict[str, _LoggedRequest] = {}
    base_s = last_s = 0.0
    for number, row in rows:
        try:
            t = float(row["t"])
            if not 0.0 <= t <= MAX_SECONDS:
                raise ValueError(f"its time is {t}")
            # If the time goes back, the file holds the log of a later gateway from here on.
            if t + base_s < last_s - 1.0:
                base_s = last_s
            last_s = max(last_s, base_s + t)
            _apply_log_line(requests, row, base_s + t)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _bad_row_error(path, number, f"it is not a line of a request log: {error}") from None
    if not requests:
        raise ConfigError(
            f"the request log {path} has no request", "no request arrived", "record traffic first"
        )
    done = [one.output for one in requests.values() if one.done and one.output]
    mean = round(statistics.fmean(done)) if done else 0
    return [
        Job(
            one.at_s,
            one.prompt,
            one.output or min(mean or one.most, one.most) or 1,
            one.kind,
            one.prefix,
            kv_class=one.kv_class,
        )
        for one in requests.values()
    ]


def _apply_log_line(requests: dict[str, _LoggedRequest], row: Mapping[str, Any], now_s: float) -> None:
    """Updates the requests by one line of the log: an arrival, the begin of an attempt, or an end."""
    match row["event"]:
        case "arrive" if not row["canary"]:
            priority = row.get("priority") or 0
            kind = f"priority {priority}" if priority else ""
            requests[row["request"]] = _LoggedRequest(
                now_s, max(1, _count_tokens(row, "prompt_tokens")), _count_tokens(row, "max_tokens"), kind
            )
        case "begin" if row["request"] in requests:
            one = requests[row["request"]]
            one.kv_class = str(row.get("kv_class") or one.kv_class)
            if row.get("chunks"):
                one.prefix = tuple(int(name) for name in row["chunks"])[: one.prompt // BLOCK_TOKENS]
        case "end" if row["request"] in requests:
            one = requests[row["request"]]
            one.output, one.done = _count_tokens(row, "output_tokens"), row["outcome"] == "done"


def _count_tokens(row: Mapping[str, Any], name: str) -> int:
    """A token count in a line of the log; raises ValueError if it is out of range."""
    tokens = int(row[name])
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{name} is {tokens}")
    return tokens
