"""Reads traces of requests: when they came, how long they were, what prompts they shared.

Layouts are told apart by what the first row has: Azure's CSV, Mooncake's JSON lines with `hash_ids`, the request log
of `diptych serve`, the JSON list of DistServe's simulator, CSVs of its golden runs, bare lengths, and lines as
`write_trace` writes them. All may be gzipped (a name that ends in .gz).
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
from planner.terms import Job

LOG = "log"
BLOCK_TOKENS = 64  # of the request log, and of rows that name prefixes and do not say
MOST_TOKENS = 1 << 32
MOST_S = 1e10  # of a time: beyond that, microseconds are lost in it

DATE = re.compile(r"(?P<head>[^.Z+]+?)(?P<fraction>\.\d+)?(?P<zone>Z|[+-]\d\d:?\d\d)?", re.ASCII)

Row = tuple[int, Mapping[str, Any]]  # its number in the file, from 1, and its fields


def _date(value: Any) -> float:
    """Seconds of a date with any number of digits after the second; without a zone it is taken as UTC."""
    found = DATE.fullmatch(str(value).strip())
    if found is None:
        raise ValueError("no date")
    moment = datetime.fromisoformat(found["head"] + (found["zone"] or "+00:00")).timestamp()
    return moment + float(f"0{found['fraction'] or ''}")


def _milliseconds(value: Any) -> float:
    return float(value) / 1e3


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of a trace's fields; "" is a field that it does not have. `clock` gives seconds."""

    at: str
    prompt: str
    output: str
    clock: Callable[[Any], float] = float
    from_first: bool = False  # times are of the calendar: count from the first row
    kind: str = ""
    prefix: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(name for name in (self.at, self.prompt, self.output) if name)


LAYOUTS: Mapping[str, Layout] = {
    "azure": Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date, from_first=True),
    "mooncake": Layout("timestamp", "input_length", "output_length", _milliseconds, prefix="hash_ids"),
    "distserve": Layout("start_time", "prompt_len", "output_len"),
    "golden": Layout("arrival_s", "prompt_len", "output_len"),
    "jobs": Layout("at_s", "prompt", "output", kind="kind", prefix="prefix"),
    "lengths": Layout("", "prompt_len", "output_len"),
}
KNOWN = (*LAYOUTS, LOG)


def read_trace(path: str | Path, format: str = "auto", block_tokens: int | None = None) -> list[Job]:
    """The jobs of a trace, by time of arrival.

    Args:
        format: one of `KNOWN`, or "auto": told from the first row.
        block_tokens: the tokens that one name of a prefix stands for; by default what fits every row (the block size b
            for which a prompt of n tokens has ceil(n / b) names), and 64 in a request log.

    Raises:
        ConfigError: the file cannot be read, is empty, of no known layout, or a row is broken; it has the row's number.
    """
    if format != "auto" and format not in KNOWN:
        raise ConfigError(
            f"no trace format is called {format!r}", f"known: auto, {', '.join(KNOWN)}", "use one of them"
        )
    rows = list(_rows(Path(path)))
    if not rows:
        raise ConfigError(
            f"the trace {path} is empty", "not one row was found", "give a file with requests in it"
        )
    name = _guess(rows[0][1], path) if format == "auto" else format
    jobs = _from_log(rows, path) if name == LOG else _from_rows(rows, LAYOUTS[name], path, block_tokens)
    return sorted(jobs, key=lambda job: job.at_s)


def write_trace(path: str | Path, jobs: Iterable[Job]) -> None:
    """One JSON object per line, as `read_trace` reads it back exactly."""
    opened = gzip.open if Path(path).suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        for job in jobs:
            fields: dict[str, Any] = {"at_s": job.at_s, "prompt": job.prompt, "output": job.output}
            if job.kind:
                fields["kind"] = job.kind
            if job.prefix:
                fields |= {"prefix": job.prefix, "block_tokens": job.block_tokens}
            file.write(json.dumps(fields) + "\n")


# ---- rows


def _rows(path: Path) -> Iterator[Row]:
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
            return _list(text, path)
        case "{":
            return _lines(text, path)
        case _:
            return _table(text, path)


def _list(text: str, path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the trace {path} is not JSON", str(error), "write a list of objects") from None
    for number, row in enumerate(rows, 1):
        yield number, _object(row, number, path)


def _lines(text: str, path: Path) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _broken(path, number, f"it is not JSON: {error}") from None
            yield number, _object(row, number, path)


def _object(row: Any, number: int, path: Path) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise _broken(path, number, f"it is {type(row).__name__}, not an object with fields")
    return row


def _table(text: str, path: Path) -> Iterator[Row]:
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
                raise _broken(
                    path, reader.line_num, f"it has {len(cells)} fields, and the header {len(header)}"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise _broken(path, reader.line_num, str(error)) from None


def _guess(row: Mapping[str, Any], path: str | Path) -> str:
    if "event" in row and "t" in row:
        return LOG
    for name, layout in LAYOUTS.items():
        if all(field in row for field in layout.needed):
            return name
    wanted = "; ".join(f"{name}: {', '.join(layout.needed)}" for name, layout in LAYOUTS.items())
    found = ", ".join(map(str, row))[:160] or "nothing"
    raise ConfigError(
        f"the trace {path} has a layout that is not known", f"it has {found}", f"name fields as in {wanted}"
    )


# ---- jobs


def _from_rows(rows: Sequence[Row], layout: Layout, path: str | Path, block_tokens: int | None) -> list[Job]:
    jobs, said = [], []
    for number, row in rows:
        job = _job(number, row, layout, path)
        said.append("block_tokens" in row)
        jobs.append(job)
    first = min(job.at_s for job in jobs) if layout.from_first else 0.0
    given = block_tokens or (BLOCK_TOKENS if all(said) else _block_tokens(jobs))
    return [
        replace(
            job,
            at_s=job.at_s - first,
            prefix=job.prefix[: job.prompt // (job.block_tokens if told else given)],
            block_tokens=job.block_tokens if told else given,
        )
        for job, told in zip(jobs, said, strict=True)
    ]


def _job(number: int, row: Mapping[str, Any], layout: Layout, path: str | Path) -> Job:
    if missing := [name for name in layout.needed if row.get(name) is None]:
        raise _broken(path, number, f"it has no {missing[0]}")
    at_s = _number(row, layout.at, layout.clock, path, number) if layout.at else 0.0
    prefix = row.get(layout.prefix) or [] if layout.prefix else []
    if not isinstance(prefix, list) or not all(isinstance(name, int) for name in prefix):
        raise _broken(path, number, f"{layout.prefix} is not a list of whole numbers")
    return Job(
        at_s,
        _tokens(row, layout.prompt, path, number),
        _tokens(row, layout.output, path, number),
        str(row.get(layout.kind) or "") if layout.kind else "",
        tuple(prefix),
        _tokens(row, "block_tokens", path, number) if "block_tokens" in row else BLOCK_TOKENS,
    )


def _block_tokens(jobs: Sequence[Job]) -> int:
    """The size of blocks for which a prompt of n tokens has ceil(n / size) names, for every row, if there is one."""
    named = [job for job in jobs if job.prefix]
    for size in (16 << shift for shift in range(9)):
        if all(len(job.prefix) == -(-job.prompt // size) for job in named):
            return size if named else BLOCK_TOKENS
    return BLOCK_TOKENS


def _number(
    row: Mapping[str, Any], name: str, clock: Callable[[Any], float], path: str | Path, number: int
) -> float:
    try:
        value = clock(row[name])
    except (TypeError, ValueError, OverflowError):
        raise _broken(path, number, f"{name} is {str(row[name])[:40]!r}, which is no time") from None
    if not math.isfinite(value) or value < 0:
        raise _broken(path, number, f"{name} is {str(row[name])[:40]}, and a time is finite and not negative")
    if value > MOST_S:
        raise _broken(
            path, number, f"{name} is {str(row[name])[:40]}: times are at most {MOST_S:.0e} seconds"
        )
    return value


def _tokens(row: Mapping[str, Any], name: str, path: str | Path, number: int) -> int:
    value = row[name]
    try:
        tokens = int(value) if isinstance(value, str) else value
    except ValueError:
        tokens = None
    if isinstance(tokens, float) and tokens.is_integer():
        tokens = int(tokens)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MOST_TOKENS:
        raise _broken(path, number, f"{name} is {str(value)[:40]!r}, not a whole number of at least 1")
    return tokens


def _broken(path: str | Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"row {number} of {path} cannot be used", why, "mend or remove that row")


# ---- the request log


@dataclass(slots=True)
class _Told:
    at_s: float
    prompt: int
    most: int
    kind: str
    prefix: tuple[int, ...] = field(default=())
    output: int = 0
    done: bool = False


def _from_log(rows: Sequence[Row], path: str | Path) -> list[Job]:
    """Every request that came, canaries aside. One that got no answer is taken to have wanted an average one."""
    told: dict[str, _Told] = {}
    base_s = last_s = 0.0
    for number, row in rows:
        try:
            t = float(row["t"])
            if not 0.0 <= t <= MOST_S:
                raise ValueError(f"its time is {t}")
            if t + base_s < last_s - 1.0:  # the file goes on with the log of a later gateway
                base_s = last_s
            last_s = max(last_s, base_s + t)
            _hear(told, row, base_s + t)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _broken(path, number, f"it is no line of a request log: {error}") from None
    if not told:
        raise ConfigError(f"the request log {path} has no request", "not one arrived", "record traffic first")
    done = [one.output for one in told.values() if one.done and one.output]
    mean = round(statistics.fmean(done)) if done else 0
    return [
        Job(one.at_s, one.prompt, one.output or min(mean or one.most, one.most) or 1, one.kind, one.prefix)
        for one in told.values()
    ]


def _hear(told: dict[str, _Told], row: Mapping[str, Any], now_s: float) -> None:
    match row["event"]:
        case "arrive" if not row["canary"]:
            priority = row.get("priority") or 0
            kind = f"priority {priority}" if priority else ""
            told[row["request"]] = _Told(
                now_s, max(1, _count(row, "prompt_tokens")), _count(row, "max_tokens"), kind
            )
        case "begin" if row["request"] in told and row.get("chunks"):
            one = told[row["request"]]
            one.prefix = tuple(int(name) for name in row["chunks"])[: one.prompt // BLOCK_TOKENS]
        case "end" if row["request"] in told:
            one = told[row["request"]]
            one.output, one.done = _count(row, "output_tokens"), row["outcome"] == "done"


def _count(row: Mapping[str, Any], name: str) -> int:
    """Tokens of a line of the log. Raises ValueError for a number that is none."""
    tokens = int(row[name])
    if not 0 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{name} is {tokens}")
    return tokens
